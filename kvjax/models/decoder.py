"""Parameters, forward pass and logits of a model of any family.

It knows neither a cache nor a kernel: attention is a callback that gets rotated queries and keys
and threads a carry (for instance the KV pool) through the layers.
"""

import functools
from collections.abc import Callable, Sequence
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
from kvjax.models.family import Attend, AttendSome, Layer, Model, stored
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


Half = Callable[..., Any]
"""`half(f, *xs)` is f of the model, a layer's weights and xs; f is one of the two halves below."""


def _before(
    config: ModelConfig, layer: nnx.State, x: Array, cos: Array, sin: Array
) -> tuple[Array, ...]:
    """What enters a layer's attention block; its queries, keys and values."""
    module: Layer = nnx.merge(_graphdefs(config)[1], layer)
    hidden = module.enter(config, x)
    return hidden, *module.project(config, hidden, cos, sin)


def _after(config: ModelConfig, layer: nnx.State, x: Array, attended: Array) -> Array:
    """The residual stream behind a layer."""
    return nnx.merge(_graphdefs(config)[1], layer).finish(config, x, attended)


def _added(config: ModelConfig, layer: nnx.State, attended: Array) -> Array:
    """What a layer adds to the residual stream where this is what its attention gave."""
    return nnx.merge(_graphdefs(config)[1], layer).added(config, attended)


def _through[State](
    config: ModelConfig,
    params: nnx.State,
    span: tuple[int, int],
    step: Callable[[Half, Array, State], tuple[State, Any]],
    state: State,
) -> tuple[State, Any]:
    """The state behind layers first … last − 1, and what `step` returned beside it, stacked."""
    layers, (first, last) = cast(nnx.State, params["layers"]), span
    numbers = jnp.arange(first, last, dtype=jnp.int32)
    if is_stacked(params):
        whole = span == (0, config.num_layers)

        def body(state: State, inputs: tuple[Array, Any]) -> Any:
            index, layer = inputs
            if not whole:  # a slice of all weights would be a copy of them
                layer = jax.tree.map(lambda w: w[index], layers)
            return step(lambda f, *xs: f(config, layer, *xs), index, state)

        return jax.lax.scan(body, state, (numbers, layers if whole else None))
    each = [cast(nnx.State, layers[i]) for i in range(first, last)]
    if chooses_layers(device.of().platform):

        def choosing(state: State, index: Array) -> Any:
            def half(f: Callable, *xs: Array) -> Any:
                once = jax.jit(functools.partial(f, config))  # one trace serves every layer
                branches = [functools.partial(once, one) for one in each]
                return jax.lax.switch(index - first if first else index, branches, *xs)

            return step(half, index, state)

        return jax.lax.scan(choosing, state, numbers)

    def split(layer: nnx.State, index: Array, state: State) -> Any:
        return step(lambda f, *xs: f(config, layer, *xs), index, state)

    run_split, collected = jax.jit(split), []
    for i, one in enumerate(each, first):
        state, aux = run_split(one, jnp.int32(i), state)
        collected.append(aux)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)


def forward[Carry](
    config: ModelConfig,
    params: nnx.State,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend[Carry],
    carry: Carry,
    peaks: bool = False,
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
        peaks: whether the largest absolute entry of what enters each layer is told, of each token
            (static).

    Returns:
        The hidden states after the final norm, the last carry, and every leaf of ``aux`` stacked
        along a leading layer axis; with ``peaks`` a pair of that and of them [L, B, T], f32.

    Raises:
        ValueError: tokens and positions differ in shape or are not of rank 2.
    """
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            "tokens and positions must have one shape [B, T], got "
            f"{tokens.shape} and {positions.shape}"
        )
    model = _around_layers(config, params)
    cos, sin = rope_angles(config, positions)

    def layer(half: Half, index: Array, state: tuple[Array, Carry]) -> Any:
        x, carry = state
        hidden, q, k, v = half(_before, x, cos, sin)
        carry, attended, aux = attend(carry, index, q, k, v, hidden)
        if peaks:
            aux = aux, jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
        return (half(_after, x, attended), carry), aux

    state = model.embed_tokens(config, tokens), carry
    (x, carry), aux = _through(config, params, (0, config.num_layers), layer, state)
    return model.last_hidden(config, x), carry, aux


def added(
    config: ModelConfig, params: nnx.State, attended: Float[Array, "L B T Q d"]
) -> Float[Array, "L B T D"]:
    """What each layer adds to the residual stream where this is what its attention gave: of all
    query heads, or this replica's share of them."""
    attended = attended.astype(activation_dtype(params))

    def layer(half: Half, index: Array, state: tuple[()]) -> Any:
        return state, half(_added, attended[index])

    return _through(config, params, (0, config.num_layers), layer, ())[1]


def embedded(
    config: ModelConfig, params: nnx.State, tokens: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Tokens as they enter the first layer."""
    return _around_layers(config, params).embed_tokens(config, tokens[None])[0]


def forward_narrowing[Carry](
    config: ModelConfig,
    params: nnx.State,
    tokens: Int[Array, "1 T"],
    stages: Sequence[tuple[int, int]],
    attend: AttendSome[Carry],
    carry: Carry,
) -> tuple[Float[Array, "1 t D"], Carry]:
    """Runs all layers on the tokens of one sequence from position 0, of which some leave on the
    way.

    Args:
        config: the model (static).
        params: as of `forward`.
        tokens: token ids.
        stages: the first layer of each stage and how many rows it has: T, then fewer and fewer.
            Layers of one stage are compiled for as many rows, however few of them count.
        attend: attention of one layer, see `AttendSome`.
        carry: threaded through the layers in order.

    Returns:
        The hidden states after the final norm of the rows that are left, and the last carry.
    """
    model = _around_layers(config, params)

    def layer(half: Half, index: Array, state: tuple[Array, Array, Carry]) -> Any:
        x, positions, carry = state
        cos, sin = rope_angles(config, positions[None])
        hidden, q, k, v = half(_before, x, cos, sin)
        carry, attended, stay = attend(carry, index, positions, q, k, v, hidden)
        x = half(_after, x, attended)
        return (x[:, stay], positions[stay], carry), None

    x, positions = model.embed_tokens(config, tokens), jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ends = [first for first, _ in stages[1:]] + [config.num_layers]
    for (first, width), end in zip(stages, ends, strict=True):
        state = x[:, :width], positions[:width], carry
        (x, positions, carry), _ = _through(config, params, (first, end), layer, state)
    return model.last_hidden(config, x), carry


def logits(
    config: ModelConfig, params: nnx.State, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Vocabulary logits in f32 of hidden states as ``forward`` returns them."""
    return _around_layers(config, params).logits(config, hidden)
