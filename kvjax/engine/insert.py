"""The second stage: what a prompt keeps goes to a slot, and its first token is chosen."""

import dataclasses
from collections.abc import Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedCache, blocks_for, free_blocks, write_prompt, write_survivors
from kvjax.cache.policy import Method
from kvjax.engine.decode import LogProbs, SlotState, log_probs
from kvjax.engine.prefill import PromptKV
from kvjax.engine.sampling import SamplingState, sample


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Start:
    """How a sequence begins to decode: where its first token is from, and a row of `SlotState`."""

    slot: Int32[Array, ""]
    logits: Float[Array, " V"]
    """After the prompt."""
    remaining: Int32[Array, ""]
    """Tokens that it may generate, the first included."""
    stop_at_eos: Bool[Array, ""]
    observed: Bool[Array, ""]
    sampling: SamplingState


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InsertReport:
    """What the host is told of a prompt that was inserted."""

    ok: Bool[Array, ""]
    """False where the blocks did not suffice; the slot is as before then."""
    token: Int32[Array, ""]
    """The first token."""
    active: Bool[Array, ""]
    freed: Int32[Array, ""]
    """Blocks that the prompt would have taken whole and does not. `place` knows; `start` says 0."""
    shortfall: Int32[Array, ""]
    """Blocks over the budget that could not be evicted."""
    kept: Int32[Array, "L H"]
    """KVs that each head holds."""
    free: Int32[Array, ""]
    log_probs: LogProbs | None


def start(
    num_top: int | None,
    effort: int | None,
    cache: PagedCache,
    state: SlotState,
    new: Start,
    eos_ids: Int32[Array, " E"],
    ok: Bool[Array, ""],
) -> tuple[SlotState, InsertReport]:
    """Choose the first token of a prompt that a slot holds, and let it decode.

    Args:
        num_top: likeliest tokens to report (static); None reports no probabilities at all.
        effort: what choosing the token takes (`sampling.effort_of`), if the host says so (static).
        cache: the cache, with the prompt in it.
        state: the slots' states (donate them).
        new: the sequence's settings.
        eos_ids: tokens that end a sequence.
        ok: whether the prompt is really there; if not, the slot stays as it was.
    """
    position = cache.seq_len[new.slot][None]
    token = sample(new.logits[None], new.sampling, position, effort)
    ended = jnp.isin(token[0], eos_ids) & new.stop_at_eos
    active = ok & ~ended & (new.remaining > 1)
    row = SlotState(
        token=token,
        active=active[None],
        remaining=(new.remaining - 1)[None],
        stop_at_eos=new.stop_at_eos[None],
        observed=new.observed[None],
        sampling=new.sampling,
    )
    at = jnp.where(ok, new.slot, state.token.shape[0])
    state = jax.tree.map(lambda all_, one: all_.at[at].set(one[0], mode="drop"), state, row)
    told = None if num_top is None else log_probs(new.logits[None], token, num_top)
    zero = jnp.int32(0)
    kept = cache.context_len[new.slot]
    return state, InsertReport(ok, token[0], active, zero, zero, kept, free_blocks(cache), told)


def place(
    method: Method | None,
    artefacts: Mapping[str, Array],
    cache: PagedCache,
    prompt: PromptKV,
    keep_blocks: Int32[Array, ""],
    slot: Int32[Array, ""],
) -> tuple[PagedCache, Int32[Array, ""], Int32[Array, ""], Bool[Array, ""]]:
    """Write what a prompt keeps to an empty slot.

    Args:
        method: what is kept; None keeps everything.
        artefacts: calibrated arrays by name.
        cache: the cache (donate it).
        prompt: the prompt in its scratch.
        keep_blocks: its budget in blocks.
        slot: the slot.

    Returns:
        The cache, the blocks that were never taken, those over the budget that could not be
        evicted, and ``ok``: False, and the slot as before, when the blocks do not suffice.
    """
    k, v, scores = prompt.k, prompt.v, prompt.scores
    if method is None:
        cache, ok = write_prompt(
            cache, slot, k, v, scores.metric, prompt.length, state=scores.state, **prompt.all_rows
        )
        return cache, _never(cache, prompt), jnp.int32(0), ok
    cache, report, ok = write_survivors(
        cache, slot, k, v, scores, prompt.length, keep_blocks, method,
        artefacts=artefacts, token=prompt.token, rows=prompt.rows,
    )  # fmt: skip
    return cache, report.freed[0] + _never(cache, prompt), report.shortfall[0], ok


def _never(cache: PagedCache, prompt: PromptKV) -> Int32[Array, ""]:
    """Blocks that a prompt does not take because some of its KVs were never computed."""
    if prompt.rows is None:
        return jnp.int32(0)
    lacking = blocks_for(prompt.length, cache.block_size) - blocks_for(
        prompt.rows, cache.block_size
    )
    return jnp.sum(lacking) * cache.num_kv_heads
