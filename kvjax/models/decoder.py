"""Parameters, forward pass and logits of a model of any family.

It knows neither a cache nor a kernel: attention is a callback that gets rotated queries and keys
and threads a carry (for instance the KV pool) through the layers.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from kvjax.kernels import device
from kvjax.models.config import ModelConfig
from kvjax.models.families import family_of
from kvjax.models.family import Attend, Layer, Model, stored
from kvjax.models.rope import rope_angles


def _build(config: ModelConfig, dtype: DTypeLike, seed: Array | int, stacked: bool) -> nnx.State:
    family = family_of(config)
    model = family(config, dtype, seed)
    make = functools.partial(family.layer_class, config, dtype, seed)
    if stacked:
        model.layers = nnx.vmap(make)(jnp.arange(config.num_layers))
    else:
        model.layers = nnx.List([make(i) for i in range(config.num_layers)])
    return nnx.split(model, nnx.Param)[1]


def abstract_params(config: ModelConfig, dtype: DTypeLike, stacked: bool = True) -> nnx.State:
    """The parameters as ``jax.ShapeDtypeStruct`` leaves; nothing is allocated.

    They are of ``dtype``, but for matrices of `ModelConfig.weight_dtype`.
    """
    return jax.eval_shape(lambda: _build(config, dtype, 0, stacked))


def init_params(
    config: ModelConfig, dtype: DTypeLike, seed: int = 0, stacked: bool = True
) -> nnx.State:
    """Random weights of the true shapes, made on the default device without a second copy.

    The same seed gives the same values, stacked or not.
    """
    salt = np.uint32(seed & 0xFFFFFFFF)
    return jax.jit(_build, static_argnums=(0, 1, 3))(config, jnp.dtype(dtype), salt, stacked)


def logical_axes(config: ModelConfig, stacked: bool = True) -> dict[tuple[str | int, ...], tuple]:
    """Path of every parameter -> the names of its axes (``layers`` first when stacked)."""
    family = family_of(config)
    axes: dict[tuple[str | int, ...], tuple] = {
        (name,): spec.axes for name, spec in stored(family.table(config), config).items()
    }
    for name, spec in stored(family.layer_class.table(config), config).items():
        if stacked:
            axes[("layers", name)] = ("layers", *spec.axes)
        else:
            axes.update({("layers", i, name): spec.axes for i in range(config.num_layers)})
    return axes


def activation_dtype(params: nnx.State) -> np.dtype:
    """The dtype of the residual stream, of queries, keys and values."""
    return jax.tree.leaves(params["final_norm"])[0].dtype


def is_stacked(params: nnx.State) -> bool:
    """Whether the layers are stacked along a leading axis (else one sub-state per layer)."""
    return not any(isinstance(key, int) for key in cast(nnx.State, params["layers"]))


def chooses_layers(platform: str) -> bool:
    """Whether a platform ("cpu", "gpu" or "tpu") runs layers that are not stacked in one loop.

    Each half of a layer is a branch to its weights there, which copies none of them, and attention
    is compiled once instead of once per layer: a quarter of the time. GPUs would wait for the host
    at every branch; they get one layer after the other.
    """
    return platform == "cpu"


@functools.lru_cache(maxsize=64)
def _graphdefs(config: ModelConfig) -> tuple[Any, Any]:
    """Structure of the model without its layers, and of one layer; made without arrays."""
    family = family_of(config)
    model = nnx.eval_shape(lambda: family(config, jnp.float32, 0))
    layer = nnx.eval_shape(lambda: family.layer_class(config, jnp.float32, 0, 0))
    return nnx.split(model)[0], nnx.split(layer)[0]


def _around_layers(config: ModelConfig, params: nnx.State) -> Model:
    """The model without its layers."""
    own = {name: leaf for name, leaf in params.items() if name != "layers"}
    return nnx.merge(_graphdefs(config)[0], nnx.State(own))


def forward[Carry](
    config: ModelConfig,
    params: nnx.State,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend[Carry],
    carry: Carry,
) -> tuple[Float[Array, "B T D"], Carry, PyTree]:
    """Runs all layers on a batch of tokens.

    Args:
        config: the model (static).
        params: as ``abstract_params(config, dtype)`` describes them, stacked or not; that dtype
            is the dtype of the residual stream.
        tokens: token ids.
        positions: position of each token in its sequence; queries and keys are rotated by it.
        attend: attention of one layer, see ``Attend``.
        carry: threaded through the layers in order; updated in place by XLA when the caller
            donates it.

    Returns:
        The hidden states after the final norm, the last carry, and every leaf of ``aux`` stacked
        along a leading layer axis.

    Raises:
        ValueError: tokens and positions differ in shape or are not of rank 2.
    """
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            "tokens and positions must have one shape [B, T], got "
            f"{tokens.shape} and {positions.shape}"
        )
    model, graphdef = _around_layers(config, params), _graphdefs(config)[1]
    layers = cast(nnx.State, params["layers"])
    cos, sin = rope_angles(config, positions)
    x = model.embed_tokens(config, tokens)

    def before(layer: nnx.State, x: Array) -> tuple[Array, ...]:
        module: Layer = nnx.merge(graphdef, layer)
        hidden = module.enter(config, x)
        return hidden, *module.project(config, hidden, cos, sin)

    def after(layer: nnx.State, x: Array, attended: Array) -> Array:
        return nnx.merge(graphdef, layer).finish(config, x, attended)

    def run(half: Callable, index: Array, x: Array, carry: Carry) -> tuple[Array, Carry, Any]:
        """A layer, where `half(f, *xs)` is f of its weights and xs."""
        hidden, q, k, v = half(before, x)
        carry, attended, aux = attend(carry, index, q, k, v, hidden)
        return half(after, x, attended), carry, aux

    def run_with(layer: nnx.State, *rest: Any) -> tuple[Array, Carry, Any]:
        return run(lambda f, *xs: f(layer, *xs), *rest)

    numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
    if is_stacked(params):

        def body(state: tuple[Array, Carry], inputs: tuple[Array, nnx.State]) -> Any:
            x, carry, aux = run_with(inputs[1], inputs[0], *state)
            return (x, carry), aux

        (x, carry), aux = jax.lax.scan(body, (x, carry), (numbers, layers))
    elif chooses_layers(device.of().platform):
        each = [cast(nnx.State, layers[i]) for i in range(config.num_layers)]

        def choosing(state: tuple[Array, Carry], index: Array) -> Any:
            def half(f: Callable, *xs: Array) -> Any:
                once = jax.jit(f)  # one trace serves every layer
                return jax.lax.switch(index, [functools.partial(once, one) for one in each], *xs)

            x, carry, aux = run(half, index, *state)
            return (x, carry), aux

        (x, carry), aux = jax.lax.scan(choosing, (x, carry), numbers)
    else:
        run_split = jax.jit(run_with)
        collected = []
        for i in range(config.num_layers):
            x, carry, aux = run_split(cast(nnx.State, layers[i]), jnp.int32(i), x, carry)
            collected.append(aux)
        aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)
    return model.last_hidden(config, x), carry, aux


def embedded(
    config: ModelConfig, params: nnx.State, tokens: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Tokens as they enter the first layer."""
    return _around_layers(config, params).embed_tokens(config, tokens[None])[0]


def logits(
    config: ModelConfig, params: nnx.State, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Vocabulary logits in f32 of hidden states as ``forward`` returns them."""
    return _around_layers(config, params).logits(config, hidden)
