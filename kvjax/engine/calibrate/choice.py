"""The choice: predictions trained on what the model then says.

A fit of scores asks of each KV alone how much it is read. What a budget leaves has to be enough
together, and most of what is read can be missed. So the fit is moved along the gradient of
KL(full cache ‖ compressed cache) of what is said behind a compressed context.

KVs are chosen as the engine chooses them; the gradient goes through the weight of each KV in the
attention that follows, which also tells what a KV that went would have changed (straight-through
estimator: Bengio et al. 2013). As a budget is fixed, what all predictions share changes nothing.
"""

import dataclasses
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.evict import NOTHING, decide, eviction_scores
from kvjax.cache.methods.predicted_reads import EXTRA, METHODS, WEIGHT, predicted
from kvjax.cache.policy.allocate import BlockCosts, Budget
from kvjax.cache.policy.block_cost import block_costs, smallest
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.cache.store import HeadShard, blocks_for, summed
from kvjax.engine.calibrate.fit import EXTRAS, Sums
from kvjax.engine.dense import dense_pass
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import by_heads
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, logits
from kvjax.models.parallel import deal, own_share

BLOCK_SIZE = 16
"""Of the cache that is trained for: the engine's default."""
AT_ONCE = 32
"""Tokens whose distributions over the vocabulary are in memory at a time."""
SOFTNESS = 1.0
"""Logarithmic units around the price of a block within which KVs could have stayed or gone."""
BLIND = next(method for method in METHODS if method.scorer and not method.query_aware)
"""The prediction alone."""
METHOD = dataclasses.replace(BLIND, protected=8, protected_share=0, protected_more=0, sinks=4)
"""What chooses in training: what ships was trained so. Less protected, and blocks of 8, came out
level (docs/methods.md, "What training the choice gains")."""


class Change(NamedTuple):
    """What is added to a fit, for regressors of mean 0 and variance 1 where they are hidden."""

    weight: Float[Array, "L D H"]
    extra: Float[Array, "L H E"]

    @classmethod
    def none(cls, config: ModelConfig) -> "Change":
        """Nothing."""
        num_layers, num_heads = config.num_layers, config.num_kv_heads
        return cls(
            jnp.zeros((num_layers, config.hidden_size, num_heads)),
            jnp.zeros((num_layers, num_heads, EXTRAS)),
        )


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fitted:
    """What is trained from: the fit, and the scale of each hidden regressor."""

    weight: Float[Array, "L D H"]
    extra: Float[Array, "L H E"]
    mean: Float[Array, "L D"]
    deviation: Float[Array, "L D"]
    last: Float[Array, ""]
    """Positions behind this one count as this one."""

    @classmethod
    def of(
        cls,
        sums: Sums,
        weight: Float[np.ndarray, "L D H"],
        extra: Float[np.ndarray, "L H E"],
        last: int,
    ) -> "Fitted":
        """From what `solve` found; the last regressor of every head is 1."""
        mean = sums.cross[:, 0, :, -1] / sums.count
        squares = np.diagonal(sums.hidden, axis1=1, axis2=2) / sums.count
        deviation = np.sqrt(np.maximum(squares - mean**2, 0)) + 1e-4
        parts = (weight, extra, mean, deviation, last)
        return cls(*(jnp.asarray(part, jnp.float32) for part in parts))

    def arrays(self, change: Change) -> Artefacts:
        """The calibrated arrays of `predicted`, the change in them."""
        weight, extra = self.changed(change)
        last = jnp.broadcast_to(self.last, extra[..., :1].shape)
        return {WEIGHT: weight, EXTRA: jnp.concatenate([extra, last], axis=-1)}

    def changed(self, change: Change) -> tuple[Float[Array, "L D H"], Float[Array, "L H E"]]:
        """Weights of hidden state and extras, the change in them."""
        scaled = change.weight / self.deviation[..., None]
        shift = jnp.einsum("ld,ldh->lh", self.mean, scaled)
        extra = (self.extra + change.extra).at[..., -1].add(-shift)
        return self.weight + scaled, extra


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Studied:
    """A context of T tokens as the model saw it, and what it says behind it with all of it."""

    hidden: Float[Array, "L T D"]
    """What enters each layer's attention block."""
    k: Float[Array, "L T H d"]
    v: Float[Array, "L T H d"]
    length: Int32[Array, ""]
    said: Int32[Array, "N C"]
    at: Int32[Array, " M"]
    """The tokens of these, of N · C, behind which the next one counts."""
    share: Float[Array, " M"]
    """How much each of these counts; 1 together."""
    log_p: Float[Array, "M V"]
    """Of each next token, with the full cache."""


STUDIED = Studied(SAME, by_heads(2), by_heads(2), *(SAME,) * 5)  # type: ignore[arg-type]
"""How it lies on several devices."""


def study(
    config: ModelConfig,
    params: nnx.State,
    context: Int32[Array, " T"],
    length: Int32[Array, ""],
    said: Int32[Array, "N C"],
    at: Int32[Array, " M"],
    share: Float[Array, " M"],
) -> Studied:
    """Run a context and what is said behind it, each of N by itself, with the full cache.

    Args:
        config: the model (static).
        params: its parameters.
        context: token ids, padded at the end to a multiple of `BLOCK_SIZE`.
        length: those that count.
        said: token ids, padded at the end.
        at: after which of them, of N · C, the next token counts.
        share: and how much.
    """
    dense = dense_pass(config, params, context, jnp.zeros(1, jnp.int32))
    k, v = dense.k, dense.v
    there = jnp.arange(context.shape[0]) < length
    every = jnp.broadcast_to(there, (*k.shape[:1], k.shape[2], k.shape[1])).astype(jnp.float32)
    last = _counted(behind(config, params, k, v, every, length, said), at)
    log_p = lax.map(lambda x: _log_p(config, params, x), last, batch_size=AT_ONCE)
    return Studied(dense.hidden, k, v, length, said, at, share, log_p)


def loss(
    config: ModelConfig,
    change: Change,
    fitted: Fitted,
    params: nnx.State,
    of: Studied,
    blocks: Int32[Array, ""],
    shard: HeadShard | None = None,
) -> Float[Array, ""]:
    """KL(full ‖ compressed) of the tokens that count, by their shares, with so many blocks left.

    Its gradient by `change` is that of the choice; see above. With a shard, of all devices' heads:
    what is trained has all of them on each device, which takes its own.
    """
    arrays = fitted.arrays(change)
    if shard is not None:
        axes = BLIND.head_axes
        arrays = {name: deal(x, axes[name].axis, shard.number) for name, x in arrays.items()}
    scores = predictions(arrays, of.hidden, of.k, of.v)
    stays, price = kept(lax.stop_gradient(scores), of.length, blocks, shard=shard)
    position = jnp.arange(scores.shape[-1])
    free = (position >= METHOD.sinks) & (position < of.length - METHOD.protected)
    if shard is not None:
        free = free & shard.present[..., None]
    away = (scores - price) / SOFTNESS
    # Nothing can be gained by all of them together: the price goes with them.
    slope = lax.stop_gradient(jax.nn.sigmoid(away) * jax.nn.sigmoid(-away) * free)
    common, slopes = (summed(shard, jnp.sum(x)) for x in (slope * scores, slope))
    common = common / jnp.maximum(slopes, 1e-12)
    soft = free * jax.nn.sigmoid(away - (common - lax.stop_gradient(common)) / SOFTNESS)
    weight = stays + soft - lax.stop_gradient(soft)
    last = _counted(behind(config, params, of.k, of.v, weight, of.length, of.said), of.at)

    @jax.checkpoint
    def divergence(part):
        last, full = part
        return jnp.sum(jnp.exp(full) * (full - _log_p(config, params, last)))

    found = lax.map(divergence, (last, of.log_p), batch_size=AT_ONCE)
    return jnp.sum(found * of.share)


def _counted(last: Float[Array, "N C D"], at: Int32[Array, " M"]) -> Float[Array, "M D"]:
    return last.reshape(-1, last.shape[-1])[at]


def predictions(
    arrays: Artefacts,
    hidden: Float[Array, "L T D"],
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
) -> Float[Array, "L H T"]:
    """`predicted` of all layers, for the tokens 0 … T−1."""
    position = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    of_layer = {name: arrays[name] for name in (WEIGHT, EXTRA)}
    found = jax.vmap(predicted, (0, 0, 0, 0, None))(of_layer, hidden, k, v, position)
    return jnp.swapaxes(found, 1, 2)


def kept(
    scores: Float[Array, "L H T"],
    length: Int32[Array, ""],
    blocks: Int32[Array, ""],
    method: Method = METHOD,
    shard: HeadShard | None = None,
) -> tuple[Float[Array, "L H T"], Float[Array, ""]]:
    """1 for the KVs of a prompt that stay with so many blocks, else 0; and the price of a block.

    The price is the largest score that goes. With a shard, of the blocks of all devices' heads.
    """
    num_layers, num_heads, num_tokens = scores.shape
    heads = (num_layers, num_heads)
    position = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), scores.shape)
    held, seen = jnp.full(heads, length, jnp.int32), jnp.full(heads, length, jnp.int32)
    shape = (num_layers, num_heads if shard is None else shard.total, BLOCK_SIZE)
    if shard is not None:
        held = jnp.where(shard.present, held, 0)
    budget = Budget.of(blocks, length, method.protected, method.shares, shape)
    ranks, _ = eviction_scores(method, scores, {}, position, held, seen, budget.protected)
    cost = block_costs(ranks, held, BLOCK_SIZE)
    costs = BlockCosts(cost, blocks_for(held, BLOCK_SIZE), jnp.zeros(heads), same_in_layer=False)
    given = decide(method, costs, held, budget, NOTHING, shard)
    gone = smallest(ranks, given.count, given.threshold)
    stays, price = ~gone & (position < held[..., None]), jnp.max(given.threshold)
    return stays.astype(jnp.float32), price if shard is None else shard.max(price)


def _log_p(
    config: ModelConfig, params: nnx.State, hidden: Float[Array, " D"]
) -> Float[Array, " V"]:
    return jax.nn.log_softmax(logits(config, params, hidden).astype(jnp.float32))


def behind(
    config: ModelConfig,
    params: nnx.State,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    weight: Float[Array, "L H T"],
    start: Int32[Array, ""],
    said: Int32[Array, "N C"],
) -> Float[Array, "N C D"]:
    """Run tokens behind a context whose KVs count by a weight, N of them beside each other.

    Args:
        config: the model (static).
        params: its parameters.
        k: keys of the context, rotated.
        v: its values.
        weight: what each KV counts in the attention of what follows: 1, 0 for those that are gone.
        start: position of the first of the tokens.
        said: token ids, padded at the end.

    Returns:
        The last hidden state of each of the tokens.
    """
    num_said, num_tokens = said.shape
    within = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))

    def attend(carry, layer, q, own_k, own_v, _):
        heads = own_k.shape[2]
        q = q.reshape(num_said, num_tokens, heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5
        held_k, held_v, counts = k[layer], v[layer], weight[layer][None, :, None, None]
        held = jnp.einsum("nqhrd,phd->nhrqp", q, held_k).astype(jnp.float32)
        own = jnp.einsum("nqhrd,nphd->nhrqp", q, own_k).astype(jnp.float32)
        own = jnp.where(within, own, -1e30)
        top = jnp.maximum(jnp.max(jnp.where(counts > 0, held, -1e30), axis=-1), own.max(axis=-1))
        top = lax.stop_gradient(top)[..., None]
        # What went may have read more than all that stayed: as a slope, no more than e⁸ of it.
        held = counts * jnp.exp(jnp.minimum(held - top, 8.0))
        own = jnp.exp(own - top)
        total = jnp.sum(held, axis=-1) + jnp.sum(own, axis=-1)
        out = jnp.einsum("nhrqp,phd->nqhrd", held, held_v.astype(jnp.float32))
        out = out + jnp.einsum("nhrqp,nphd->nqhrd", own, own_v.astype(jnp.float32))
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        out = out.reshape(num_said, num_tokens, -1, q.shape[-1]).astype(own_v.dtype)
        return carry, own_share(config, out), ()

    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, said.shape)
    return forward(config, params, said, positions, attend, ())[0]
