"""Which compiled steps a request needs from its first chunk to its last token.

One sequence at a time: larger batches are quicker, and none of them is needed.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.engine.calls import num_top
from kvjax.engine.compilation import StepCall, StepKey
from kvjax.engine.job import PromptJob
from kvjax.engine.prefixes import Plan, Prefix, Prefixes
from kvjax.engine.request import Request
from kvjax.engine.sampling import effort_of
from kvjax.engine.worker import Worker


class Need(NamedTuple):
    """A step that is needed."""

    key: StepKey
    call: Callable[[], StepCall]
    """A call to compile, of shapes alone; tracing it may take long."""


def _need(call: StepCall) -> Need:
    # With this call: by the time it is compiled, another size might do.
    return Need(call.key, lambda: of_shapes(call))


def needs_of(worker: Worker, request: Request) -> Iterator[Need]:
    """What a request needs that begins with the plan that it has."""
    worker, top, outside = without_state(worker), num_top([request]), worker.config.num_rows

    yield _need(worker.empty_call([]))
    if worker.config.sharing:
        yield _need(worker.share_call(0, outside))
    job = worker.begin(request)
    logits: Callable[[], Any] = lambda: job.logits  # noqa: E731
    if job.in_pool and job.chunks:
        yield _need(worker.chunk_call(job))
        yield from _compressed_on_its_way(worker, request, job)
        logits = functools.partial(_logits, worker, job)
    elif not job.in_pool:
        yield from _in_scratch(worker, request, job)
        logits = functools.partial(_logits, worker, job)
    if job.retains and len(job.tokens) < request.length:
        rest = worker.go_on(request, request.all_tokens, len(job.tokens), None)
        yield _need(worker.chunk_call(rest))
        yield from _compressed_on_its_way(worker, request, rest)
        logits = functools.partial(_logits, worker, rest)
    key = worker.start_call(request, outside, None, None, top).key
    fits = worker.fits
    yield Need(key, lambda: of_shapes(worker.start_call(request, outside, logits(), fits, top)))
    longest = request.length + request.remaining
    # Until it has grown so far there is time to compile what is wider (`Beside.decode_parts`).
    widths = (worker.grown(kvs) for kvs in (request.length, min(longest, 2 * request.length)))
    calls = [worker.decode_call([outside], kvs, 1, request.method.decode, top) for kvs in widths]
    yield from map(_need, {call.key: call for call in calls}.values())
    if request.budget is not None:
        most = request.compression.max_kvs_per_step
        yield _need(worker.compress_call([outside], [0], [0], request.method, most, longest))
    if request.report_kept:
        written = len(request.prompt) + worker.config.decode_steps_per_sync
        table = np.zeros(worker.cache.block_table.shape[1:], np.int32)
        yield _need(worker.kept_call(table, -(-written // worker.cache.block_size)))


def needs_ahead(worker: Worker, request: Request) -> Iterator[Need]:
    """What requests like this one may need, whatever runs beside them: `needs_of`, also where they
    share, and every size of decode steps and compressions."""
    drawn = however_drawn(worker, request)
    for one in (*drawn, *sharing(worker, request)):
        yield from needs_of(worker, one)
    worker, top, outside = without_state(worker), num_top([request]), worker.config.num_rows

    rule = request.method.decode
    for group, longest in decoded_ahead(worker, request):
        slots = [outside] * group
        yield _need(worker.decode_call(slots, longest, 1, rule, top, exact=True))
        for one in drawn if worker.decodes_once else ():
            effort = effort_of([one.sampling])
            yield _need(worker.once_call(slots, longest, rule, top, effort, exact=True))
    if request.budget is None:
        return
    most = request.compression.max_kvs_per_step
    for group, width in worker.compress_tables.holding(1, 1):
        slots, longest = [outside] * group, width * worker.cache.block_size
        yield _need(
            worker.compress_call(slots, slots, slots, request.method, most, longest, exact=True)
        )


def decoded_ahead(worker: Worker, request: Request) -> Iterator[tuple[int, int]]:
    """Sequences, and KVs of their longest heads, of every size of decode steps that such a request
    has use for: those of its prompt's width, and the widest, which does for all."""
    tables = worker.decode_tables
    widths = {tables.width_of(worker.grown(request.length)), tables.widths[-1]}
    for group, width in tables.holding(1, 1):
        if width in widths:
            yield group, width * tables.block_size


def however_drawn(worker: Worker, request: Request) -> list[Request]:
    """Such a request for each way of choosing tokens that has steps of its own: single decode
    steps, and the first token's choice beside them; a loop chooses in any way."""
    kinds = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5})
    samplings = [dataclasses.replace(request.sampling, **more) for more in kinds]
    own = [dataclasses.replace(request, sampling=sampling) for sampling in samplings]
    return own if worker.decodes_once else [request]


def sharing(worker: Worker, request: Request) -> Iterator[Request]:
    """Such a request where it is retained for others on its way, and one that goes on from it with
    a short text; nothing where it shares nothing."""
    if request.sharing is None:
        return
    grain, tokens = worker.config.share_grain, request.all_tokens
    retained = Prefixes(grain=grain).plan(request.sharing, tokens)
    match = Prefix(tokens[:-1], request.sharing, 0)
    for plan in (retained, Plan(match, len(tokens), retains=False)):
        if plan is not None and request.fits_at(plan.until):
            yield dataclasses.replace(request, plan=plan)


def needs_of_file(worker: Worker, held: Mapping[str, np.ndarray]) -> Iterator[Need]:
    """What puts a prefix into the cache that was saved, and makes room for it."""
    worker = without_state(worker)
    yield _need(worker.empty_call([]))
    yield _need(worker.restore_call(0, held))


def _in_scratch(worker: Worker, request: Request, job: PromptJob) -> Iterator[Need]:
    """What a prompt needs that runs outside of the pool, and what puts it there."""
    probing, room = worker.probing, worker.bucket(job.chunks) * len(job.chunks)
    sparse = job.sparse is not None and bool(job.probes)

    # Keys tell rooms apart; the rest of what they hold is known once the chunk is traced.
    def stand_in(room: int) -> Any:
        return SimpleNamespace(k=SimpleNamespace(shape=(0, room)))

    if not probing.drafts_first(job):
        yield Need(worker.chunk_call(job).key, lambda: of_shapes(_chunk(worker, job)))
    if job.probes:
        if probing.drafts_itself(job):
            key = probing.draft_call(job, stand_in(room)).key
            after = functools.partial(_after_chunks, worker, job)
            yield Need(key, lambda: of_shapes(probing.draft_call(job, after()[0])))
        key = probing.call(job, stand_in(room)).key
        yield Need(key, lambda: of_shapes(_probe(worker, job)))

    def place(prompt: Any) -> StepCall:
        return worker.place_call(request, prompt, worker.config.num_rows, None)

    key = place(stand_in(worker.bucket([len(job.tokens)]) if sparse else room)).key
    yield Need(key, lambda: of_shapes(place(_after(worker, job)[0])))


def _compressed_on_its_way(worker: Worker, request: Request, job: PromptJob) -> Iterator[Need]:
    """What compresses a prompt in the pool by queries of its own, where its method asks for any."""
    if request.budget is None or (sample := request.method.observer.queries) is None:
        return
    slots, longest = [worker.config.num_rows], request.length + request.remaining
    given = slots, [0], [0], request.method, request.compression.max_kvs_per_step, longest
    # Keys tell how many queries there are; what lies where is known once the chunk is traced.
    stand_in: Any = SimpleNamespace(shape=(0, 0, sample.newest + sample.spread, 0))
    key = worker.compress_call(*given, queries=stand_in).key
    yield Need(key, lambda: of_shapes(worker.compress_call(*given, queries=_after(worker, job)[3])))


def _chunk(worker: Worker, job: PromptJob) -> StepCall:
    """The call of a job's chunks, with the shapes of what is there of its prompt."""
    if not job.in_pool and len(job.chunks) > 1:
        job = dataclasses.replace(job, prompt=jax.eval_shape(worker.scratch_maker(job)))
    return worker.chunk_call(job)


def _probe(worker: Worker, job: PromptJob) -> StepCall:
    """The call of a job's probe, with the shapes of its prompt and of what is drafted."""
    if worker.probing.drafts_first(job):
        return worker.probing.call(job, None)
    return worker.probing.calls(job, _after_chunks(worker, job)[0])[-1]


def _after_chunks(worker: Worker, job: PromptJob) -> Any:
    """The shapes of what a job's last chunk gives."""
    call = _chunk(worker, job)
    return call.step.eval_shape(*call.args)  # type: ignore[attr-defined]


def _after(worker: Worker, job: PromptJob) -> Any:
    """The shapes of what a job's last chunk gives, or a sparse prefill behind it."""
    if job.sparse is None or not job.probes:
        return _after_chunks(worker, job)
    call = _probe(worker, job)
    return call.step.eval_shape(*call.args)  # type: ignore[attr-defined]


def _logits(worker: Worker, job: PromptJob) -> Any:
    return _after(worker, job)[1]


def of_shapes(call: StepCall) -> StepCall:
    """A call that holds no array."""
    return call._replace(args=tuple(jax.tree.map(_shape, arg) for arg in call.args))


def without_state(worker: Worker) -> Worker:
    """A worker whose calls can be built at any time, by any thread: it has the shapes of the cache
    and the slot states, which come and go with each step."""
    worker = copy.copy(worker)
    worker.kept = None
    worker.cache, worker.state = jax.tree.map(_shape, (worker.cache, worker.state))
    worker.probing = worker.probing.idle()
    return worker


def _shape(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    where = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=x.weak_type)
