"""The jitted passes of the evaluation.

One dense pass over a prompt and its target serves every protocol, method and rate: attention is
causal, so its keys, values and queries before any cut are those of the prefill up to that cut, and
its logits are the full cache's. What a method keeps of it is written to a paged cache, and the rest
of the prompt and the target run behind that, all variants of a prompt side by side.
"""

import dataclasses
from collections.abc import Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import Method, PagedCache, write_prompt, write_survivors
from kvjax.cache.policy import LayerView, Observer, Scores
from kvjax.cache.store import refined_blocks, summed
from kvjax.engine.decode import SlotState, decode
from kvjax.engine.dense import DensePass
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import by_heads
from kvjax.eval.prompt_codecs import PromptCodec
from kvjax.kernels import (
    Prefix,
    prefill_attention,
    window_metrics,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, logits
from kvjax.models.parallel import own_share


def observe(
    observer: Observer,
    dense: DensePass,
    length: Int32[Array, ""],
    artefacts: Mapping[str, Array],
) -> Scores:
    """The scores of every KV of a prompt of `length` tokens; `observer` is static."""

    def of_layer(part):
        layer, q, k, v, log_sum, hidden = part
        view = LayerView(layer, q, k, length, jnp.int32(0), log_sum=log_sum, v=v, hidden=hidden)
        return observer.observe(view, artefacts)

    num_layers, num_tokens = dense.k.shape[:2]
    layers = jnp.arange(num_layers, dtype=jnp.int32)
    scores = lax.map(of_layer, (layers, dense.q, dense.k, dense.v, dense.log_sum, dense.hidden))
    return observer.finish(scores, None, length, num_tokens)


def through_codec(
    codec: PromptCodec,
    dense: DensePass,
    length: Int32[Array, ""],
    artefacts: Mapping[str, Array],
) -> tuple[Float[Array, "L T H d"], Float[Array, "L T H d"]]:
    """Keys and values of a prompt of `length` tokens as they come back from what is stored of it;
    `codec` is static."""
    # Products in fewer bits, as of some devices, would cost more than the codes do.
    with jax.default_matmul_precision("highest"):
        k, v = codec.restore(dense, length, artefacts)
    return k.astype(dense.k.dtype), v.astype(dense.v.dtype)


def attention_mass(
    num_queries: int,
    q: Float[Array, "L T Hr d"],
    k: Float[Array, "L T H d"],
    cut: Int32[Array, ""],
    count: Int32[Array, ""],
) -> Float[Array, "L H T"]:
    """Attention that the tokens after a cut pay to each KV before it, with the full cache.

    Args:
        num_queries: most tokens after the cut (static).
        q: rotated queries of the dense pass.
        k: rotated keys.
        cut: tokens before the cut.
        count: tokens after it that count.

    Returns:
        Σ over these queries and the query heads of a KV head of the softmax weights; 0 for keys
        from the cut on. PyramidKV's attention recall is the share of it that the kept KVs carry.
    """
    num_heads, num_tokens = k.shape[2], k.shape[1]
    index = cut + jnp.arange(num_queries, dtype=jnp.int32)
    position = jnp.where(jnp.arange(num_queries) < count, index, -1)
    before = jnp.arange(num_tokens) < cut

    def one_layer(part):
        queries = part[0].at[index].get(mode="clip")
        received = window_metrics(queries, part[1], query_position=position, power=1)
        received = jnp.sum(received.reshape(num_heads, -1, num_tokens), axis=1)
        return jnp.where(before, received, 0)

    return lax.map(one_layer, (q, k))


def attention_recall(
    cache: PagedCache, mass: Float[Array, "L H T"]
) -> tuple[Float[Array, "S L"], tuple[Int32[Array, "L S H"], Int32[Array, "L S H"]]]:
    """Share of the attention mass that the KVs of each slot carry, by layer; KVs of each head, and
    its blocks that have finer codes."""
    if cache.shard is not None:
        mass = jnp.where(cache.shard.present[..., None], mass, 0)
    b, num_tokens = cache.block_size, mass.shape[-1]
    slot_of = jnp.arange(cache.max_blocks * b)
    layer, head = jnp.arange(cache.num_layers)[:, None, None], jnp.arange(cache.num_kv_heads)
    total = summed(cache.shard, jnp.sum(mass, axis=(1, 2)))

    def one_slot(part):
        table, held = part
        page = jnp.minimum(table, cache.num_blocks - 1)
        position = cache.position[page].reshape(*held.shape, -1)
        valid = (slot_of < held[..., None]) & (position >= 0) & (position < num_tokens)
        carried = mass[layer, head[None, :, None], jnp.maximum(position, 0) % num_tokens]
        return jnp.sum(jnp.where(valid, carried, 0), axis=(1, 2))

    carried = summed(cache.shard, lax.map(one_slot, (cache.block_table, cache.context_len)))
    recall = carried / jnp.where(total > 0, total, 1)
    held = cache.context_len, refined_blocks(cache)
    return recall, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), held)


def write_kept(
    cache: PagedCache,
    slot: Int32[Array, ""],
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    scores: Scores,
    length: Int32[Array, ""],
    keep_blocks: Int32[Array, ""],
    method: Method,
    artefacts: Mapping[str, Array],
) -> tuple[PagedCache, Int32[Array, ""], Bool[Array, ""]]:
    """`write_survivors`; returns the cache, the shortfall, and whether there was room."""
    args = (cache, slot, k, v, scores, length, keep_blocks, method)
    cache, report, ok = write_survivors(*args, artefacts=artefacts)
    return cache, report.shortfall[0], ok


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """How each slot predicts the target tokens when it is fed the true ones."""

    top: Int32[Array, "S N"]
    """The likeliest token."""
    nll: Float[Array, "S N"]
    """−log p of the true token."""
    kl: Float[Array, "S N"]
    """KL(full cache ‖ this slot) of the next token's distribution."""
    k: Float[Array, "L S C H d"]
    v: Float[Array, "L S C H d"]


TEACHER = Teacher(SAME, SAME, SAME, by_heads(3), by_heads(3))  # type: ignore[arg-type]
"""How it lies on several devices."""


def teacher_force(
    config: ModelConfig,
    params: nnx.State,
    cache: PagedCache,
    tokens: Int32[Array, " C"],
    start: Int32[Array, ""],
    at: Int32[Array, " N"],
    target: Int32[Array, " N"],
    reference: Float[Array, "N V"],
) -> Teacher:
    """Run the same tokens behind what every slot holds; the cache stays as it is.

    Args:
        config: the model (static).
        params: its parameters.
        cache: what each slot holds of the prompt.
        tokens: the tokens after the cut, padded at the end.
        start: position of the first of them.
        at: indices in `tokens` of the predictions wanted.
        target: the true token after each.
        reference: logits of the full cache there.
    """
    num_slots, num_tokens = cache.num_slots, tokens.shape[0]
    rows = (cache.num_kv_heads, cache.max_blocks * cache.block_size, -1)

    def attend(carry, layer, q, k, v, _):
        table = lax.dynamic_index_in_dim(cache.block_table, layer, axis=1, keepdims=False)
        held = lax.dynamic_index_in_dim(cache.context_len, layer, axis=1, keepdims=False)

        def one_slot(part):
            q, k, v, table, held, slot = part
            page = jnp.minimum(table, cache.num_blocks - 1)
            held_k, held_v = (pool[page].reshape(rows) for pool in cache.kv.operands)
            if cache.window is not None:
                held_k, held_v = cache.window.over(slot, layer, held_k, held_v)
            held_k = cache.read_keys(layer, held_k)
            own = own_share(config, q)
            return prefill_attention(own, k, v, prefix=Prefix(held_k, held_v, held))

        slots = jnp.arange(num_slots, dtype=jnp.int32)
        out = lax.map(one_slot, (q, k, v, table, held, slots))
        return carry, out, (k, v)

    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)
    hidden, _, (k, v) = forward(
        config,
        params,
        jnp.broadcast_to(tokens, (num_slots, num_tokens)),
        jnp.broadcast_to(positions, (num_slots, num_tokens)),
        attend,
        (),
    )
    full = jax.nn.log_softmax(reference.astype(jnp.float32))

    def predict(hidden):
        scores = jax.nn.log_softmax(logits(config, params, hidden[at]).astype(jnp.float32))
        nll = -jnp.take_along_axis(scores, target[:, None], axis=-1)[:, 0]
        kl = jnp.sum(jnp.exp(full) * (full - scores), axis=-1)
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), nll, kl

    # One slot at a time: N × V logits of all slots at once would be gigabytes.
    top, nll, kl = lax.map(predict, hidden)
    return Teacher(top, nll, kl, k, v)


def decode_some(
    config: ModelConfig,
    num_steps: int,
    params: nnx.State,
    cache: PagedCache,
    state: SlotState,
    slots: Int32[Array, " G"],
    limit: Int32[Array, ""],
    eos_ids: Int32[Array, " E"],
) -> tuple[PagedCache, SlotState, Int32[Array, "n G"], Bool[Array, " G"], Bool[Array, ""]]:
    """`decode` by the model alone; returns cache and states, the new tokens, which slots go on,
    and whether there was room. `config` and `num_steps` are static."""
    cache, state, report = decode(
        config, None, num_steps, None, None, params, cache, state, slots, limit, eos_ids
    )
    return cache, state, report.tokens, report.active, report.ok


def write_fed(
    cache: PagedCache,
    k: Float[Array, "L S C H d"],
    v: Float[Array, "L S C H d"],
    length: Int32[Array, ""],
    active: Bool[Array, " S"],
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Append the first `length` tokens that `teacher_force` ran to every active slot.

    Returns:
        The cache and ``ok``: False when the blocks did not suffice for some slot.
    """
    num_layers, num_slots, num_tokens, num_heads, _ = k.shape
    metric = jnp.zeros((num_layers, num_heads, num_tokens), jnp.float32)

    def write(slot, carry):
        cache, ok = carry
        cache, written = write_prompt(
            cache, slot, k[:, slot], v[:, slot], metric, jnp.where(active[slot], length, 0)
        )
        return cache, ok & written

    return lax.fori_loop(0, num_slots, write, (cache, jnp.bool_(True)))
