"""The third stage: decode steps, one or several at a time without the host.

Pure functions; `config` and `rule` (what steps do to the numbers of each KV) are static. Each step
takes the slots that take part by index and leaves the others alone, so its cost follows them, not
the number of slots.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedCache, begin_append, blocks_for, free_blocks
from kvjax.cache.policy import DecodeRule, StepView
from kvjax.cache.policy.observe import of_layer
from kvjax.cache.store import put_slots, take_slots, unshare_slots
from kvjax.engine.sampling import SamplingState, init_sampling, sample
from kvjax.kernels import plan_paged_attention
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, logits
from kvjax.models.parallel import own_share


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
    """Whether decode steps change the numbers of its KVs, if its method has a rule for it."""
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
class LogProbs:
    """Natural logarithms of probabilities, before temperature and filters."""

    chosen: Float[Array, "*n G"]
    top: Float[Array, "*n G K"]
    """Of the K likeliest tokens, descending."""
    top_ids: Int32[Array, "*n G K"]


def log_probs(logits: Float[Array, "G V"], token: Int32[Array, " G"], num_top: int) -> LogProbs:
    """Those of the chosen tokens and of the `num_top` (static) likeliest ones."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    top, top_ids = lax.top_k(log_p, num_top)
    chosen = jnp.take_along_axis(log_p, token[:, None], axis=-1)[:, 0]
    return LogProbs(chosen, top, top_ids.astype(jnp.int32))


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeReport:
    """All that the host is told of a decode loop: a few numbers per sequence."""

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
    """Blocks it will need for the next loop."""
    free: Int32[Array, ""]
    ok: Bool[Array, ""]
    """False where the loop ended early because blocks ran out."""
    log_probs: LogProbs | None


def needed(reports: Sequence[DecodeReport]) -> list[DecodeReport]:
    """What `joined` reads of them: each array that the host asks for takes it a while."""
    none: Any = None
    *before, last = reports
    state = dict.fromkeys(("active", "owned", "kvs", "longest", "growth", "free"), none)
    return [*(dataclasses.replace(report, **state) for report in before), last]


def joined(reports: Sequence[DecodeReport]) -> DecodeReport:
    """What is told of steps that ran one after the other, on the host."""
    last = reports[-1]
    told = [report.log_probs for report in reports]
    return dataclasses.replace(
        last,
        tokens=np.concatenate([report.tokens for report in reports]),
        ok=all(report.ok for report in reports),
        log_probs=None if told[0] is None else jax.tree.map(lambda *x: np.concatenate(x), *told),
    )


def decode_step(
    config: ModelConfig,
    rule: DecodeRule | None,
    params: nnx.State,
    cache: PagedCache,
    tokens: Int32[Array, " S"],
    active: Bool[Array, " S"],
    *,
    observed: Bool[Array, " S"] | None = None,
    artefacts: Mapping[str, Array] | None = None,
) -> tuple[PagedCache, Float[Array, "S V"], Bool[Array, ""]]:
    """One token of every active slot: its KVs are written, then attended to with the rest.

    Args:
        config: the model (static).
        rule: what the step does to the numbers of each KV (static); None for nothing.
        params: the model's parameters.
        cache: the cache (donate it).
        tokens: the last token of each sequence.
        active: which slots run.
        observed: which of them have their numbers changed; all by default.
        artefacts: calibrated arrays by name, for rules that read them.

    Returns:
        The cache, the logits of the next tokens, and ``ok``: False, and the cache unchanged, when
        the blocks do not suffice; the logits then mean nothing.
    """
    cache, ok = begin_append(cache, active)
    active = active & ok
    # Slots that do not run hold nothing as far as attention goes: no work, no change of numbers.
    context_len = jnp.where(active[:, None, None], cache.context_len, 0)
    touched = active if observed is None else active & observed
    position = jnp.maximum(cache.seq_len - 1, 0)
    # By layer, so that a layer's part lies in one piece.
    tables, lengths_of = (jnp.moveaxis(x, 1, 0) for x in (cache.block_table, context_len))
    power = None if rule is None else rule.power
    works = plan_paged_attention(
        lengths_of,
        cache.kv.operands[0],
        num_query_heads=config.num_heads,
        max_blocks=cache.max_blocks,
        return_metric=power is not None,
    )

    def attend(carry, layer, q, k, v, hidden):
        kv, planes, window = carry
        table, lengths, work = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False),
            (tables, lengths_of, works),
        )
        asked, stored = cache.asked(layer, q[:, 0]), cache.stored_keys(layer, k[:, 0])
        if window is not None:
            window = window.write_newest(layer, lengths, stored, v[:, 0])
        call = functools.partial(
            kv.append_and_attend, asked, stored, v[:, 0], table, lengths, work=work,
            exact=None if window is None else window.of_layer(layer),
        )  # fmt: skip
        step = StepView(
            layer, k[:, 0], v[:, 0], hidden[:, 0], position, table, lengths, touched,
            group=config.group_size,
        )  # fmt: skip
        if rule is not None:
            planes = rule.before(planes, step)
        if rule is not None and power is not None:
            into = planes[rule.into]
            kv, (out, added) = call(
                metric=into.reshape(into.shape[:2]),
                return_metric=True,
                power=power,
                observed=observed,
            )
            planes = {**planes, rule.into: added.reshape(into.shape)}
        else:
            kv, out = call()
        if rule is not None:
            planes = rule.after(planes, step, of_layer(rule.artefacts, artefacts or {}, layer))
        # Attention takes as long for all queries of a head as for a replica's share: it reads the
        # same KVs, and all replicas have to measure the same.
        return (kv, planes, window), own_share(config, out[:, None].astype(q.dtype)), None

    positions = position[:, None]
    carry = (cache.kv, {"metric": cache.metric, **cache.state}, cache.window)
    hidden, (kv, planes, window), _ = forward(
        config, params, tokens[:, None], positions, attend, carry
    )
    metric, state = planes["metric"], {name: planes[name] for name in cache.state}
    cache = dataclasses.replace(cache, kv=kv, metric=metric, state=state, window=window)
    return cache, logits(config, params, hidden[:, 0]), ok


def decode(
    config: ModelConfig,
    rule: DecodeRule | None,
    num_steps: int,
    num_top: int | None,
    columns: int | None,
    params: nnx.State,
    cache: PagedCache,
    state: SlotState,
    slots: Int32[Array, " G"],
    limit: Int32[Array, ""],
    eos_ids: Int32[Array, " E"],
    artefacts: Mapping[str, Array] | None = None,
) -> tuple[PagedCache, SlotState, DecodeReport]:
    """Up to `limit` tokens for every active one of `slots` without the host.

    A sequence ends at an end-of-sequence token or when nothing remains. The loop ends early when
    every sequence has ended or when blocks run out; nothing is lost then: make room and go on.

    Args:
        config: the model (static).
        rule: what steps do to the numbers of each KV (static).
        num_steps: most tokens of a loop (static).
        num_top: likeliest tokens to report (static); None for no probabilities.
        columns: blocks that a head of these sequences may own, before and afterwards (static); None
            for as many as the cache allows. Rows of block tables are copied so wide.
        params: the model's parameters.
        cache: the cache (donate it).
        state: the slots' states (donate them).
        slots: sequence slots, each at most once; those out of range are padding.
        limit: tokens of this loop.
        eos_ids: tokens that end a sequence.
        artefacts: calibrated arrays by name, for rules that read them.
    """
    loop = _Loop(config, rule, num_top, columns, None, params, eos_ids, artefacts)

    def go_on(run: _Run) -> Bool[Array, ""]:
        return (run.step < limit) & run.ok & jnp.any(run.rows.active)

    run = lax.while_loop(go_on, loop.step, loop.begin(cache, state, slots, num_steps))
    return loop.ended(cache, state, slots, num_steps, run)


def decode_once(
    config: ModelConfig,
    rule: DecodeRule | None,
    num_steps: int,
    num_top: int | None,
    columns: int | None,
    effort: int,
    params: nnx.State,
    cache: PagedCache,
    state: SlotState,
    slots: Int32[Array, " G"],
    eos_ids: Int32[Array, " E"],
    artefacts: Mapping[str, Array] | None = None,
) -> tuple[PagedCache, SlotState, DecodeReport]:
    """One token for every active one of `slots`, without a loop and without branches.

    At each turn of a loop and at each branch a GPU's host waits for the device; behind this step it
    can dispatch the next one at once.

    Args:
        num_steps: most tokens of the loop that comes next, which the report counts blocks for
            (static).
        effort: what choosing a token takes of every row, from `sampling.effort_of` (static).

    The others are those of `decode`.
    """
    loop = _Loop(config, rule, num_top, columns, effort, params, eos_ids, artefacts)
    first = loop.begin(cache, state, slots, 1)
    # Where what is shared finds no room nothing runs.
    waiting = dataclasses.replace(first.rows, active=first.rows.active & first.ok)
    run = loop.step(first._replace(rows=waiting))
    active = jnp.where(first.ok, run.rows.active, first.rows.active)
    run = run._replace(ok=run.ok & first.ok, rows=dataclasses.replace(run.rows, active=active))
    return loop.ended(cache, state, slots, num_steps, run)


class _Run(NamedTuple):
    """What decode steps carry from one to the next."""

    step: Int32[Array, ""]
    ok: Bool[Array, ""]
    part: PagedCache
    """The rows of the cache that take part."""
    rows: SlotState
    tokens: Int32[Array, "n G"]
    told: LogProbs | None


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What decode steps have in common."""

    config: ModelConfig
    rule: DecodeRule | None
    num_top: int | None
    columns: int | None
    effort: int | None
    params: nnx.State
    eos_ids: Int32[Array, " E"]
    artefacts: Mapping[str, Array] | None

    def unshares(self, cache: PagedCache) -> bool:
        """Whether sequences get copies of all their blocks that others own, too."""
        return cache.shared is not None and self.rule is not None and self.rule.held

    def begin(self, cache: PagedCache, state: SlotState, slots: Array, most: int) -> _Run:
        """Before the first of at most so many steps."""
        part = take_slots(cache, slots, self.columns)
        rows = jax.tree.map(lambda x: x.at[slots].get(mode="fill", fill_value=0), state)
        size, told = (most, slots.shape[0]), None
        if self.num_top is not None:
            top = (*size, self.num_top)
            told = LogProbs(
                jnp.zeros(size, jnp.float32), jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32)
            )
        room = jnp.bool_(True)
        if self.unshares(cache):
            part, room = unshare_slots(part, rows.active & rows.observed)
        return _Run(jnp.int32(0), room, part, rows, jnp.full(size, -1, jnp.int32), told)

    def step(self, run: _Run) -> _Run:
        """One token for every active row."""
        rows = run.rows
        part, out, ok = decode_step(
            self.config, self.rule, self.params, run.part, rows.token, rows.active,
            observed=rows.observed, artefacts=self.artefacts,
        )  # fmt: skip
        ran = rows.active & ok
        new = sample(out, rows.sampling, part.seq_len, self.effort)
        token = jnp.where(ran, new, rows.token)
        remaining = rows.remaining - ran
        ended = (jnp.isin(token, self.eos_ids) & rows.stop_at_eos) | (remaining <= 0)
        # A step without room writes −1 to its row; the loop is over then.
        tokens, told = run.tokens.at[run.step].set(jnp.where(ran, token, -1)), run.told
        if told is not None:
            step_told = log_probs(out, token, told.top.shape[-1])
            told = jax.tree.map(lambda all_, one_: all_.at[run.step].set(one_), told, step_told)
        rows = dataclasses.replace(
            rows, token=token, remaining=remaining, active=rows.active & ~(ran & ended)
        )
        return _Run(run.step + 1, ok, part, rows, tokens, told)

    def ended(
        self, cache: PagedCache, state: SlotState, slots: Array, num_steps: int, run: _Run
    ) -> tuple[PagedCache, SlotState, DecodeReport]:
        """What steps have done, put where it belongs, and what the host is told of it."""
        b, part, rows = cache.block_size, run.part, run.rows
        context_len = part.context_len
        coming = jnp.where(rows.active, jnp.minimum(rows.remaining, num_steps), 0)
        grown = blocks_for(context_len + coming[:, None, None], b)
        owned = blocks_for(context_len, b)
        report = DecodeReport(
            run.tokens,
            rows.active,
            jnp.sum(owned, axis=(1, 2)),
            jnp.sum(context_len, axis=(1, 2)),
            jnp.max(context_len, axis=(1, 2)),
            jnp.sum(grown - owned, axis=(1, 2)),
            free_blocks(part),
            run.ok,
            run.told,
        )
        state = jax.tree.map(lambda all_, some: all_.at[slots].set(some, mode="drop"), state, rows)
        most_new = None if self.unshares(cache) else run.tokens.shape[0]
        return put_slots(cache, slots, part, most_new), state, report
