"""The jitted steps of the engine: prefill, prefill of a chunk, admission, decode.

Pure functions of (parameters, cache, …), where `config` and `method` are static. `Worker` compiles
them with the cache donated.
"""

import dataclasses
import functools
from typing import Any, cast, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import (
    CompressReport,
    PagedCache,
    begin_append,
    compress,
    write_layer,
    write_newest,
    write_prompt,
    write_survivors,
)
from kvjax.cache.methods import Method
from kvjax.cache.observe import (
    Observed,
    chunk_decay,
    decay_metrics,
    grows,
    keep_reads,
    needs_log_sum,
    newest_metric,
    observe_chunk,
    observe_prompt,
    plain_metric,
    unobserved,
)
from kvjax.kernels import (
    Prefix,
    paged_attention,
    plan_paged_attention,
    prefill_attention,
    prefill_attention_with_log_sum,
)
from kvjax.models.config import LlamaConfig
from kvjax.models.llama import forward, logits


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptKV:
    """Keys, values and metrics of a prompt in a contiguous scratch, before they are written."""

    k: Float[Array, "L T H d"]
    v: Float[Array, "L T H d"]
    metric: Float[Array, "L H T"] | Observed
    length: Int32[Array, ""]


def prompt_scratch(
    config: LlamaConfig,
    params: nnx.State,
    method: Method,
    num_tokens: int,
    num_held: int | None = None,
) -> tuple[Array, Array, Array | Observed]:
    """Room for the keys, values and metrics of all layers, filled layer by layer in place.

    Args:
        config: the model.
        params: its parameters.
        method: what is observed.
        num_tokens: tokens that run.
        num_held: KVs that heads may hold before them; None for a whole prompt.
    """
    layers, heads = config.num_layers, config.num_kv_heads
    dtype = jax.tree.leaves(params)[0].dtype
    kv = jnp.zeros((layers, num_tokens, heads, config.head_dim), dtype)
    rows, num_kvs = (layers, heads, config.num_heads // heads), num_tokens + (num_held or 0)
    return kv, kv, unobserved(method, rows, num_kvs, chunk=num_held is not None)


def fill_layer(scratch: tuple[Any, ...], layer: Array, *parts: Any) -> tuple[Any, ...]:
    """The scratch with the parts of one layer filled in."""
    return jax.tree.map(lambda whole, part: whole.at[layer].set(part), scratch, parts)


def attend_observed(
    method: Method, q: Array, k: Array, v: Array, prefix: Prefix | None = None
) -> tuple[Array, Array | None]:
    """`prefill_attention`, and the log-sum-exp of its logits where that is observed from."""
    if not needs_log_sum(method):
        return prefill_attention(q, k, v, prefix=prefix), None
    return prefill_attention_with_log_sum(q, k, v, prefix=prefix)


def nothing_observed(room: Array | Observed) -> Array | Observed:
    """Zeros in place of what is observed of one layer; `room` is that of all."""
    return jax.tree.map(lambda whole: jnp.zeros(whole.shape[1:], whole.dtype), room)


def prefill(
    config: LlamaConfig,
    method: Method,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run a whole prompt.

    Args:
        config: the model (static).
        method: what to observe (static).
        params: the model's parameters.
        tokens: token ids; those from `length` on are padding.
        length: tokens of the prompt.

    Returns:
        What there is to cache, and the logits of the next token.
    """

    def attend(scratch, layer, q, k, v):
        q, k, v = q[0], k[0], v[0]
        out, log_sum = attend_observed(method, q, k, v)
        metric = observe_prompt(method, layer, q, k, length, log_sum)
        return fill_layer(scratch, layer, k, v, metric), out[None], None

    num_tokens = tokens.shape[0]
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    scratch = prompt_scratch(config, params, method, num_tokens)
    hidden, (k, v, metric), _ = forward(
        config, params, tokens[None], positions[None], attend, scratch
    )
    metric = keep_reads(method, metric, length, num_tokens)
    last = lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
    return PromptKV(k, v, metric, length), logits(config, params, last)


def admit(
    cache: PagedCache,
    slot: Int32[Array, ""],
    prompt: PromptKV,
    keep_blocks: Int32[Array, ""],
    method: Method,
) -> tuple[PagedCache, CompressReport, Bool[Array, ""]]:
    """Write the survivors of a prompt to an empty slot; see `write_survivors`."""
    return write_survivors(
        cache,
        slot,
        prompt.k,
        prompt.v,
        prompt.metric,
        prompt.length,
        keep_blocks,
        protected=method.protected,
        sinks=method.sinks,
        method=None if method.is_plain else method,
    )


def admit_whole(
    cache: PagedCache, slot: Int32[Array, ""], prompt: PromptKV
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Write every KV of a prompt to a slot."""
    return write_prompt(cache, slot, prompt.k, prompt.v, plain_metric(prompt.metric), prompt.length)


def prefill_chunk(
    config: LlamaConfig,
    method: Method,
    params: nnx.State,
    cache: PagedCache,
    slot: Int32[Array, ""],
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[PagedCache, Float[Array, " V"], Bool[Array, ""]]:
    """Run the next chunk of a prompt behind what its slot holds, and write it.

    The chunk attends to the KVs that the slot's heads still hold and to itself. Observing methods
    measure all of these again: a windowed metric is that of the last w queries so far, one over all
    queries grows. Compress the slot between chunks with `compress_slots`.

    Returns:
        The cache, the logits of the token after the chunk, and ``ok``: False, with the cache's
        tables and lengths unchanged, when the blocks do not suffice.
    """
    start = cache.seq_len[slot]
    observation = method.observation
    num_tokens = tokens.shape[0]
    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)
    num_heads, b = cache.num_kv_heads, cache.block_size
    num_held = cache.max_blocks * b

    def attend(scratch, layer, q, k, v):
        q, k, v = q[0], k[0], v[0]

        def observe_and_attend():
            page = jnp.minimum(cache.block_table[slot, layer], cache.num_blocks - 1)
            rows = (num_heads, num_held, -1)
            prefix = Prefix(
                cache.k[page].reshape(rows),
                cache.v[page].reshape(rows),
                cache.context_len[slot, layer],
            )
            held = jnp.arange(num_held) < prefix.length[:, None]
            position = cache.position[page].reshape(num_heads, num_held)
            position = jnp.where(held, position, -1)
            out, log_sum = attend_observed(method, q, k, v, prefix)
            return out, observe_chunk(
                method, layer, q, k, length, start, prefix.k, position, log_sum
            )

        def neither():
            return jnp.zeros(q.shape, v.dtype), nothing_observed(scratch[2])

        # Always the first. As a branch it is one unit that ends before the next layer begins:
        # unrolled layers would else hold what each of them gathered from the pool to the end, and
        # the pool would be copied because a read of it might come after the write below.
        out, metric = lax.cond(length > 0, observe_and_attend, neither)
        return fill_layer(scratch, layer, k, v, metric), out[None], None

    scratch = prompt_scratch(config, params, method, num_tokens, num_held)
    hidden, (k, v, metric), _ = forward(
        config, params, tokens[None], positions[None], attend, scratch
    )
    metric = plain_metric(
        keep_reads(method, metric, start + length, config.max_position_embeddings)
    )
    held_len = cache.context_len[slot]
    cache, ok = write_prompt(cache, slot, k, v, metric[..., num_held:], length)
    if observation is not None:
        before = chunk_decay(method, length) if grows(method) else None
        held_len = jnp.where(ok, held_len, 0)
        cache = _remeasured(cache, slot, held_len, metric[..., :num_held], before)
    last = lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
    return cache, logits(config, params, last), ok


def _remeasured(
    cache: PagedCache,
    slot: Int32[Array, ""],
    held_len: Int32[Array, "L H"],
    metric: Float[Array, "L H T"],
    before: Float[Array, ""] | None,
) -> PagedCache:
    """The cache with the metrics of a slot's first `held_len` KVs replaced.

    With `before`, that times the old metric is added.
    """
    table = cache.block_table[slot]
    held = (jnp.arange(metric.shape[-1]) < held_len[..., None]).reshape(*table.shape, -1)
    old = cache.metric.at[table].get(mode="fill", fill_value=0)
    new = metric.reshape(held.shape) + (0 if before is None else old * before)
    pool = cache.metric.at[table].set(jnp.where(held, new, old), mode="drop")
    return dataclasses.replace(cache, metric=pool)


def compress_slots(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    keep_blocks: Int32[Array, " G"],
    method: Method,
    max_kvs_per_step: int,
    protected: Int32[Array, " G"] | int = 0,
) -> tuple[PagedCache, CompressReport]:
    """`kvjax.cache.compress` with what a method protects, or `protected` newest tokens if more."""
    return compress(
        cache,
        slots,
        keep_blocks,
        protected=jnp.maximum(protected, method.protected),
        sinks=method.sinks,
        method=None if method.is_plain else method,
        max_kvs_per_step=max_kvs_per_step,
    )


def decode_step(
    config: LlamaConfig,
    method: Method,
    params: nnx.State,
    cache: PagedCache,
    tokens: Int32[Array, " S"],
    active: Bool[Array, " S"],
    *,
    observed: Bool[Array, " S"] | None = None,
) -> tuple[PagedCache, Float[Array, "S V"], Bool[Array, ""]]:
    """One token of every active slot: its KVs are written, then attended to with the rest.

    Args:
        config: the model (static).
        method: what the step adds to the metrics (static).
        params: the model's parameters.
        cache: the cache (donate it).
        tokens: the last token of each sequence.
        active: which slots run.
        observed: which of them have their metrics touched; all by default.

    Returns:
        The cache, the logits of the next tokens, and ``ok``: False, and the cache unchanged, when
        the blocks do not suffice; the logits then mean nothing.
    """
    cache, ok = begin_append(cache, active)
    active = active & ok
    observation = method.observation
    # Slots that do not run hold nothing as far as attention goes: no work, no change of metrics.
    context_len = jnp.where(active[:, None, None], cache.context_len, 0)
    accumulate = observation is not None and observation.accumulate
    touched = active if observed is None else active & observed
    position = jnp.maximum(cache.seq_len - 1, 0)
    # By layer, so that a layer's part lies in one piece.
    tables, lengths_of = (jnp.moveaxis(x, 1, 0) for x in (cache.block_table, context_len))
    works = plan_paged_attention(
        lengths_of,
        cache.k,
        num_query_heads=config.num_heads,
        max_blocks=cache.max_blocks,
        return_metric=accumulate,
    )

    def attend(carry, layer, q, k, v):
        k_pool, v_pool, metric = carry
        table, lengths, work = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False),
            (tables, lengths_of, works),
        )
        k_pool, v_pool = write_layer(k_pool, v_pool, table, lengths, k[:, 0], v[:, 0], active)
        call = functools.partial(
            paged_attention, q[:, 0], k_pool, v_pool, table, lengths, work=work
        )
        if observation is not None and observation.accumulate:
            if observation.decode_decay != 1:
                rows = jnp.where(touched[:, None, None], table, cache.num_blocks)
                metric = decay_metrics(metric, rows, observation.decode_decay)
            out, metric = call(
                metric=metric, return_metric=True, power=observation.power, observed=observed
            )
        else:
            out = cast(jax.Array, call())
        if observation is not None and observation.intrinsic:
            newest = newest_metric(method, layer, k[:, 0], position)
            metric = write_newest(metric, table, lengths, newest, touched)
        return (k_pool, v_pool, metric), out[:, None].astype(q.dtype), None

    positions = position[:, None]
    hidden, (k_pool, v_pool, metric), _ = forward(
        config, params, tokens[:, None], positions, attend, (cache.k, cache.v, cache.metric)
    )
    cache = dataclasses.replace(cache, k=k_pool, v=v_pool, metric=metric)
    return cache, logits(config, params, hidden[:, 0]), ok
