"""The jitted steps of continuous batching: parts of a prompt, admission, visits of decode steps.

Pure functions of (parameters, cache, slot states, …). Each takes the slots that take part by
index and leaves the others alone, so its cost follows them, not the number of slots.
"""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedCache, blocks_for, free_blocks, release
from kvjax.cache.methods import Method
from kvjax.cache.observe import chunk_decay, grows, keep_reads, observe_chunk, plain_metric
from kvjax.cache.slots import put_slots, take_slots
from kvjax.engine import steps
from kvjax.engine.sampling import SamplingState, init_sampling, sample
from kvjax.engine.steps import PromptKV
from kvjax.kernels import Prefix
from kvjax.models.config import LlamaConfig
from kvjax.models.llama import forward, logits


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What decoding carries from token to token in every slot, on the device."""

    token: Int32[Array, " S"]
    """Last token of each sequence; its KVs are not in the cache yet."""
    active: Bool[Array, " S"]
    remaining: Int32[Array, " S"]
    """Tokens each sequence may still generate."""
    stop_at_eos: Bool[Array, " S"]
    observed: Bool[Array, " S"]
    """Whether decode steps add to the sequence's metrics, if its method says so."""
    sampling: SamplingState


def init_slots(num_slots: int) -> SlotState:
    """Slots in which nothing runs."""
    return SlotState(
        token=jnp.zeros(num_slots, jnp.int32),
        active=jnp.zeros(num_slots, bool),
        remaining=jnp.zeros(num_slots, jnp.int32),
        stop_at_eos=jnp.ones(num_slots, bool),
        observed=jnp.zeros(num_slots, bool),
        sampling=init_sampling(num_slots),
    )


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Natural logarithms of probabilities, before temperature and filters."""

    chosen: Float[Array, "*n G"]
    top: Float[Array, "*n G K"]
    """Of the K likeliest tokens, descending."""
    top_ids: Int32[Array, "*n G K"]


def _token_scores(
    scores: Float[Array, "G V"], token: Int32[Array, " G"], num_top: int
) -> TokenScores:
    log_p = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
    top, top_ids = lax.top_k(log_p, num_top)
    chosen = jnp.take_along_axis(log_p, token[:, None], axis=-1)[:, 0]
    return TokenScores(chosen, top, top_ids.astype(jnp.int32))


def prefill_part(
    config: LlamaConfig,
    method: Method,
    params: nnx.State,
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run the next part of a prompt that stands in a contiguous scratch.

    Parts give the same KVs and metrics as the whole prompt at once, while other sequences can be
    decoded in between.

    Args:
        config: the model (static).
        method: what to observe (static). Windowed metrics are those of the last part's window.
        params: the model's parameters.
        prompt: the parts so far (donate it), with room for C more tokens.
        tokens: token ids; those from `length` on are padding.
        length: tokens of this part.

    Returns:
        The prompt with this part, and the logits of the token after it.
    """
    start = prompt.length
    _, room, num_heads, _ = prompt.k.shape
    num_tokens = tokens.shape[0]
    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)
    held_position = jnp.where(jnp.arange(room) < start, jnp.arange(room, dtype=jnp.int32), -1)
    held_position = jnp.broadcast_to(held_position, (num_heads, room))

    def attend(part, layer, q, k, v):
        q, k, v = q[0], k[0], v[0]

        def observe_and_attend():
            prefix = Prefix(
                jnp.swapaxes(prompt.k[layer], 0, 1),
                jnp.swapaxes(prompt.v[layer], 0, 1),
                jnp.broadcast_to(start, num_heads),
            )
            out, log_sum = steps.attend_observed(method, q, k, v, prefix)
            return out, observe_chunk(
                method, layer, q, k, length, start, prefix.k, held_position, log_sum
            )

        def neither():
            return jnp.zeros(q.shape, v.dtype), steps.nothing_observed(part[2])

        # One unit that ends before the next layer begins, as in `steps.prefill_chunk`.
        out, metric = lax.cond(length > 0, observe_and_attend, neither)
        return steps.fill_layer(part, layer, k, v, metric), out[None], None

    part = steps.prompt_scratch(config, params, method, num_tokens, room)
    hidden, (k, v, metric), _ = forward(config, params, tokens[None], positions[None], attend, part)
    metric = plain_metric(keep_reads(method, metric, start + length, room + num_tokens))
    held = jnp.where(held_position >= 0, metric[..., :room], 0)
    if grows(method):
        held = held + plain_metric(prompt.metric) * chunk_decay(method, length)
    prompt = PromptKV(
        lax.dynamic_update_slice_in_dim(prompt.k, k.astype(prompt.k.dtype), start, axis=1),
        lax.dynamic_update_slice_in_dim(prompt.v, v.astype(prompt.v.dtype), start, axis=1),
        lax.dynamic_update_slice_in_dim(held, metric[..., room:], start, axis=2),
        start + length,
    )
    last = lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
    return prompt, logits(config, params, last)


def empty_prompt(config: LlamaConfig, room: int, dtype: Any) -> PromptKV:
    """A scratch for a prompt of at most `room` tokens, with none of them in it."""
    kv = (config.num_layers, room, config.num_kv_heads, config.head_dim)
    return PromptKV(
        jnp.zeros(kv, dtype),
        jnp.zeros(kv, dtype),
        jnp.zeros((config.num_layers, config.num_kv_heads, room), jnp.float32),
        jnp.int32(0),
    )


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Start:
    """How a sequence begins to decode: one row of `SlotState`, without its token."""

    remaining: Int32[Array, ""]
    stop_at_eos: Bool[Array, ""]
    observed: Bool[Array, ""]
    sampling: SamplingState


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StartReport:
    """What the host is told of a prompt that was admitted."""

    ok: Bool[Array, ""]
    """False where the blocks did not suffice; the slot is as before then."""
    token: Int32[Array, ""]
    """The first token."""
    active: Bool[Array, ""]
    freed: Int32[Array, ""]
    """Blocks that the prompt would have taken whole and does not."""
    shortfall: Int32[Array, ""]
    """Blocks over the budget that could not be evicted."""
    kept: Int32[Array, "L H"]
    """KVs that each head holds."""
    free: Int32[Array, ""]
    scores: TokenScores | None


def start_slot(
    num_top: int | None,
    cache: PagedCache,
    state: SlotState,
    slot: Int32[Array, ""],
    scores: Float[Array, " V"],
    start: Start,
    eos_ids: Int32[Array, " E"],
    ok: Bool[Array, ""],
) -> tuple[SlotState, StartReport]:
    """Choose the first token of a prompt that a slot holds, and let it decode.

    Args:
        num_top: likeliest tokens to report (static); None reports no scores at all.
        cache: the cache, with the prompt in it.
        state: the slots' states (donate them).
        slot: index of the sequence slot.
        scores: logits after the prompt.
        start: the request's settings; `remaining` counts this token.
        eos_ids: tokens that end a sequence.
        ok: whether the prompt is really there; if not, the slot stays as it was.
    """
    position = cache.seq_len[slot][None]
    token = sample(scores[None], start.sampling, position)
    ended = jnp.isin(token[0], eos_ids) & start.stop_at_eos
    active = ok & ~ended & (start.remaining > 1)
    row = SlotState(
        token=token,
        active=active[None],
        remaining=(start.remaining - 1)[None],
        stop_at_eos=start.stop_at_eos[None],
        observed=start.observed[None],
        sampling=start.sampling,
    )
    at = jnp.where(ok, slot, state.token.shape[0])
    state = jax.tree.map(lambda all_, one: all_.at[at].set(one[0], mode="drop"), state, row)
    told = None if num_top is None else _token_scores(scores[None], token, num_top)
    zero = jnp.int32(0)
    return state, StartReport(
        ok, token[0], active, zero, zero, cache.context_len[slot], free_blocks(cache), told
    )


def admit(
    method: Method | None,
    num_top: int | None,
    cache: PagedCache,
    state: SlotState,
    slot: Int32[Array, ""],
    prompt: PromptKV,
    keep_blocks: Int32[Array, ""],
    scores: Float[Array, " V"],
    start: Start,
    eos_ids: Int32[Array, " E"],
) -> tuple[PagedCache, SlotState, StartReport]:
    """Write what a prompt keeps to an empty slot and let it decode; see `start_slot`.

    Args:
        method: what is kept (static); None keeps everything.
        num_top: likeliest tokens to report (static); None for no scores.
        cache: the cache (donate it).
        state: the slots' states (donate them).
        slot: an empty sequence slot.
        prompt: the prompt in its scratch.
        keep_blocks: its budget in blocks.
        scores: logits after the prompt.
        start: the request's settings.
        eos_ids: tokens that end a sequence.
    """
    if method is None:
        cache, ok = steps.admit_whole(cache, slot, prompt)
        freed = shortfall = jnp.int32(0)
    else:
        cache, report, ok = steps.admit(cache, slot, prompt, keep_blocks, method)
        freed, shortfall = report.freed[0], report.shortfall[0]
    state, started = start_slot(num_top, cache, state, slot, scores, start, eos_ids, ok)
    return cache, state, dataclasses.replace(started, freed=freed, shortfall=shortfall)


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisitReport:
    """All that the host is told of a visit: a few numbers per sequence."""

    tokens: Int32[Array, "n G"]
    """−1 where a sequence did not run."""
    active: Bool[Array, " G"]
    owned: Int32[Array, " G"]
    """Blocks of each sequence over all its heads."""
    kvs: Int32[Array, " G"]
    """KVs of each sequence over all its heads."""
    longest: Int32[Array, " G"]
    """KVs of its longest head."""
    growth: Int32[Array, " G"]
    """Blocks it will need for the next visit."""
    free: Int32[Array, ""]
    ok: Bool[Array, ""]
    """False where the visit ended early because blocks ran out."""
    scores: TokenScores | None


def decode_visit(
    config: LlamaConfig,
    method: Method,
    num_steps: int,
    num_top: int | None,
    params: nnx.State,
    cache: PagedCache,
    state: SlotState,
    slots: Int32[Array, " G"],
    limit: Int32[Array, ""],
    eos_ids: Int32[Array, " E"],
) -> tuple[PagedCache, SlotState, VisitReport]:
    """Up to `limit` tokens for every active one of `slots` without the host.

    A sequence ends at an end-of-sequence token or when nothing remains. The visit ends early when
    every sequence has ended or when blocks run out; nothing is lost then: make room and visit
    again.

    Args:
        config: the model (static).
        method: what decode steps observe (static).
        num_steps: most tokens of a visit (static).
        num_top: likeliest tokens to report (static); None for no scores.
        params: the model's parameters.
        cache: the cache (donate it).
        state: the slots' states (donate them).
        slots: sequence slots, each at most once; those out of range are padding.
        limit: tokens of this visit.
        eos_ids: tokens that end a sequence.
    """
    part = take_slots(cache, slots)
    rows = jax.tree.map(lambda x: x.at[slots].get(mode="fill", fill_value=0), state)
    group = slots.shape[0]
    told = None
    if num_top is not None:
        top = (num_steps, group, num_top)
        told = TokenScores(
            jnp.zeros(top[:2], jnp.float32), jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32)
        )

    def go_on(carry):
        step, ok, _, rows, _, _ = carry
        return (step < limit) & ok & jnp.any(rows.active)

    def one(carry):
        step, _, part, rows, tokens, told = carry
        part, scores, ok = steps.decode_step(
            config, method, params, part, rows.token, rows.active, observed=rows.observed
        )
        ran = rows.active & ok
        new = sample(scores, rows.sampling, part.seq_len)
        token = jnp.where(ran, new, rows.token)
        remaining = rows.remaining - ran
        ended = (jnp.isin(token, eos_ids) & rows.stop_at_eos) | (remaining <= 0)
        # A step without room writes −1 to its row; the visit is over then.
        tokens = tokens.at[step].set(jnp.where(ran, token, -1))
        if told is not None:
            step_told = _token_scores(scores, token, told.top.shape[-1])
            told = jax.tree.map(lambda all_, one_: all_.at[step].set(one_), told, step_told)
        rows = dataclasses.replace(
            rows, token=token, remaining=remaining, active=rows.active & ~(ran & ended)
        )
        return step + 1, ok, part, rows, tokens, told

    tokens = jnp.full((num_steps, group), -1, jnp.int32)
    first = (jnp.int32(0), jnp.bool_(True), part, rows, tokens, told)
    _, ok, part, rows, tokens, told = lax.while_loop(go_on, one, first)

    b = cache.block_size
    context_len = part.context_len
    coming = jnp.where(rows.active, jnp.minimum(rows.remaining, num_steps), 0)
    grown = blocks_for(context_len + coming[:, None, None], b)
    owned = blocks_for(context_len, b)
    report = VisitReport(
        tokens,
        rows.active,
        jnp.sum(owned, axis=(1, 2)),
        jnp.sum(context_len, axis=(1, 2)),
        jnp.max(context_len, axis=(1, 2)),
        jnp.sum(grown - owned, axis=(1, 2)),
        free_blocks(part),
        ok,
        told,
    )
    state = jax.tree.map(lambda all_, some: all_.at[slots].set(some, mode="drop"), state, rows)
    return put_slots(cache, slots, part), state, report


def compress_some(
    method: Method,
    max_kvs_per_step: int,
    max_blocks: int,
    cache: PagedCache,
    slots: Int32[Array, " G"],
    keep_blocks: Int32[Array, " G"],
    protected: Int32[Array, " G"],
) -> tuple[PagedCache, Int32[Array, " G"]]:
    """Compress some slots whose heads own at most `max_blocks` (static) blocks each.

    Their `protected` newest tokens stay, if that is more than what the method protects.

    Returns the cache and the blocks that each gave back.
    """
    part = take_slots(cache, slots, max_blocks)
    own = jnp.arange(slots.shape[0], dtype=jnp.int32)
    own = jnp.where(slots < cache.num_slots, own, slots.shape[0])
    part, report = steps.compress_slots(part, own, keep_blocks, method, max_kvs_per_step, protected)
    return put_slots(cache, slots, part), report.freed


def empty(
    cache: PagedCache, state: SlotState, marked: Bool[Array, " S"]
) -> tuple[PagedCache, SlotState]:
    """Free everything that the marked slots hold; nothing runs in them afterwards."""
    return release(cache, marked), dataclasses.replace(state, active=state.active & ~marked)
