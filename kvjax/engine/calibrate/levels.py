"""Levels and ranges that keys and values are coded on, found once per model, for `kvquant4c` and
the like.

Source: KVQuant (Hooper et al. 2024), sections 3.1 to 3.3 and 3.6, and the authors' code. Texts run
through the model, and the squared gradient of the loss of the next token with respect to a number
of a key before RoPE, or of a value, is its weight (the diagonal of the Fisher information). A
channel of keys has a range, without half a per cent of its numbers at either end; a value has one
of its own, without as much. Numbers within it, which then lie between −1 and 1, share levels by
weighted k-means, all keys of a layer and all its values. Q-Norm, for 2 bits: levels are read times
a scale plus an offset that give what is read the mean and the standard deviation of what was coded.

As in the code, weights are those of the gradients with respect to the numbers themselves, also for
what is divided by ranges, and Q-Norm weighs all numbers alike. Lloyd's iteration begins at
quantiles of the weights, where the code draws. The first token, which is not coded, does not count.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.rotary import turned_back
from kvjax.checks import check_whole
from kvjax.engine.calibrate.semantic import attention, outputs
from kvjax.engine.calibrate.texts import padded_room
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, is_stacked, logits
from kvjax.models.rope import rope_frequencies

KEY_RANGE = "kvquant_key_range"
"""[L, 2, H · d]: middle and half width of a key's channels before RoPE."""
LEVELS = {bits: f"kvquant_levels{bits}" for bits in (4, 3, 2)}
"""[L, 2, 2^bits] each: ascending levels of keys, and of values, between −1 and 1."""
NORM = "kvquant_norm2"
"""[L, 2, 2]: by which scale and offset keys in 2 bits are read, and values."""
EXACT = 1
"""First tokens that are not coded."""
OUTLIERS = 5
"""Thousandths of a vector that lie beyond its range at either end, rounded up."""
STEPS = 50
TEXTS = 16
"""Texts at most, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Weighed:
    """Numbers of texts and their weights, tokens of all texts side by side."""

    k: Float[np.ndarray, "L N c"]
    """Keys before RoPE, all heads of a layer side by side."""
    v: Float[np.ndarray, "L N c"]
    k_weight: Float[np.ndarray, "L N c"]
    v_weight: Float[np.ndarray, "L N c"]


def levels_of(
    model: LoadedModel,
    prompts: Sequence[np.ndarray],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, np.ndarray]:
    """The calibrated arrays `KEY_RANGE`, those of `LEVELS`, and `NORM`.

    Numbers and weights of all texts are held at once: 16 bytes for each number of a key.

    Args:
        model: on one device.
        prompts: the tokens [T] of some texts.
        progress: called before each text, and before each layer.

    Raises:
        UserError: the model lies on several devices.
    """
    if model.split is not None:
        raise UserError(
            f"{model.config.name} lies on several devices, and levels are found on one: give "
            "--tensor-parallel 1"
        )
    check_whole("texts", len(prompts), 1)
    room = padded_room(max(map(len, prompts)))
    params = stacked(model.params)
    step = jax.jit(functools.partial(gradients, model.config))
    parts = []
    for number, ids in enumerate(prompts):
        progress("gradients", number, len(prompts))
        padded = np.pad(ids, (0, room - len(ids))).astype(np.int32)
        found = step(params, padded, np.int32(len(ids)))
        parts.append([np.asarray(x)[:, EXACT : len(ids)] for x in found])
    k, v, k_gradient, v_gradient = (np.concatenate(each, axis=1) for each in zip(*parts))
    del parts
    return fitted(Weighed(k, v, k_gradient**2, v_gradient**2), progress)


def stacked(params: nnx.State) -> nnx.State:
    """Parameters whose layers are stacked: a loop over others keeps too much for its way back."""
    if is_stacked(params):
        return params
    layers: Any = params["layers"]
    each = [dict(layers[i].items()) for i in range(len(layers))]
    own = {name: leaf for name, leaf in params.items() if name != "layers"}
    return nnx.State({**own, "layers": jax.tree.map(lambda *x: jnp.stack(x), *each)})


def gradients(
    config: ModelConfig,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[Float[Array, "L T c"], ...]:
    """Keys before RoPE and values of a text, and the gradients of its loss with respect to both.

    The loss is −log p of the next token, in the mean over the text.

    Args:
        config: the model (static).
        params: its parameters, stacked.
        tokens: the text, padded at the end.
        length: its tokens.
    """
    shape = (config.num_layers, tokens.shape[0], config.num_kv_heads, config.head_dim)
    nothing = jnp.zeros(shape, jnp.float32)
    (_, (k, v)), (k_gradient, v_gradient) = jax.value_and_grad(
        functools.partial(loss, config, params, tokens, length), argnums=(0, 1), has_aux=True
    )(nothing, nothing)
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    frequency = jnp.asarray(rope_frequencies(config))
    back = jax.vmap(lambda x: turned_back(x, position, frequency))
    # RoPE turns: a gradient before it is the one behind it, turned back.
    found = back(k), v, back(k_gradient), v_gradient
    return tuple(x.reshape(*shape[:2], -1) for x in found)


def loss(
    config: ModelConfig,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
    k_change: Float[Array, "L T H d"],
    v_change: Float[Array, "L T H d"],
) -> tuple[Float[Array, ""], tuple[Float[Array, "L T H d"], Float[Array, "L T H d"]]]:
    """The loss of `gradients` where something is added to keys, rotated, and values, and these."""
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    @jax.checkpoint
    def attended(q, k, v):
        return outputs(attention(q, k, position), v)

    def attend(carry, layer, q, k, v, hidden):
        k, v = (x[0].astype(jnp.float32) for x in (k, v))
        k, v = k + k_change[layer], v + v_change[layer]
        out = attended(q[0], k, v)
        return carry, out.astype(q.dtype)[None], (k, v)

    hidden, _, rows = forward(config, params, tokens[None], position[None], attend, ())
    said = jax.nn.log_softmax(logits(config, params, hidden[0, :-1]))
    each = jnp.take_along_axis(said, tokens[1:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(position[1:] < length, each, 0)) / (length - 1), rows


def fitted(
    weighed: Weighed, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> dict[str, np.ndarray]:
    """The arrays of `levels_of` from numbers and weights."""
    num_layers = len(weighed.k)
    ranges, norms = [], []
    levels: dict[int, list[np.ndarray]] = {bits: [] for bits in LEVELS}
    for layer in range(num_layers):
        progress("levels", layer, num_layers)
        k, v = weighed.k[layer].astype(np.float64), weighed.v[layer].astype(np.float64)
        middle, half = key_range(k)
        ranges.append(np.stack([middle, half]))
        scaled = (k - middle) / half
        value, counts = value_scaled(v)
        inner = np.abs(scaled) <= 1
        kinds = (
            ordered(scaled[inner], weighed.k_weight[layer][inner]),
            ordered(value[counts], weighed.v_weight[layer][counts]),
        )
        for bits, found in levels.items():
            found.append(np.stack([k_means(x, weight, 1 << bits) for x, weight in kinds]))
        norms.append([q_norm(x, own) for (x, _), own in zip(kinds, levels[2][-1])])
    arrays = {KEY_RANGE: ranges, NORM: norms, **{LEVELS[bits]: levels[bits] for bits in LEVELS}}
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def ordered(
    x: Float[np.ndarray, " n"], weight: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Numbers in ascending order, and their weights; fast where they are in order already."""
    order = np.argsort(x, kind="stable")
    return x[order], weight[order].astype(np.float64)


def key_range(k: Float[np.ndarray, "N c"]) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half width of each channel without its outliers, by quantiles."""
    low, high = np.quantile(k, [OUTLIERS / 1000, 1 - OUTLIERS / 1000], axis=0)
    half = (high - low) / 2
    return (low + high) / 2, np.where(half > 0, half, 1)


def value_scaled(
    v: Float[np.ndarray, "N c"],
) -> tuple[Float[np.ndarray, "N c"], Bool[np.ndarray, "N c"]]:
    """Each row between the ends of what is no outlier of it, and which of its numbers are none."""
    size = v.shape[1]
    ends = -(-size * OUTLIERS // 1000)
    place = np.argsort(np.argsort(v, axis=1, kind="stable"), axis=1)
    inner = (place >= ends) & (place < size - ends)
    low = np.min(v, axis=1, where=inner, initial=np.inf, keepdims=True)
    high = np.max(v, axis=1, where=inner, initial=-np.inf, keepdims=True)
    half = (high - low) / 2
    return (v - (low + high) / 2) / np.where(half > 0, half, 1), inner


def k_means(
    x: Float[np.ndarray, " n"], weight: Float[np.ndarray, " n"], levels: int, steps: int = STEPS
) -> Float[np.ndarray, " levels"]:
    """Ascending levels of least squared error by weight, by Lloyd's iteration.

    A level that is nearest to none, or to what has no weight, stays where it is. Where nothing has
    any, all weigh alike.
    """
    x, weights = ordered(x, weight)
    if not weights.sum() > 0:
        weights = np.ones_like(weights)
    mass = np.concatenate([[0], np.cumsum(weights)])
    moment = np.concatenate([[0], np.cumsum(weights * x)])
    shares = (2 * np.arange(levels) + 1) / (2 * levels) * mass[-1]
    centres = x[np.minimum(np.searchsorted(mass[1:], shares), len(x) - 1)]
    for _ in range(steps):
        middles = (centres[1:] + centres[:-1]) / 2
        ends = np.concatenate([[0], np.searchsorted(x, middles, "right"), [len(x)]])
        own = np.diff(mass[ends])
        mean = np.diff(moment[ends]) / np.where(own > 0, own, 1)
        # Rounded sums could put equal levels in the wrong order.
        centres = np.maximum.accumulate(np.where(own > 0, mean, centres))
    return centres


def q_norm(x: Float[np.ndarray, " n"], levels: Float[np.ndarray, " levels"]) -> tuple[float, float]:
    """Scale and offset that give numbers on levels the mean and the deviation they had."""
    coded = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    scale = float(x.std() / coded.std()) if coded.std() > 0 else 1.0
    return scale, float(x.mean() - coded.mean() * scale)


def digest_of(prompts: Sequence[np.ndarray]) -> str:
    """What a recipe says of the texts."""
    found = hashlib.sha256()
    for ids in prompts:
        found.update(np.asarray(ids, np.int32).tobytes() + b"/")
    return found.hexdigest()[:16]
