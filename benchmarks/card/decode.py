"""Call B: decode attention and whole decode steps against the bytes that they must read."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.card.attention import EXPECTED, attention_part, shares
from benchmarks.card.parts import AT_ONCE, NO_TUNING, Group, Machine, Part, Program
from benchmarks.card.peaks import hashed, peaks_group
from benchmarks.card.trace import traced
from benchmarks.kernels.cases import Case, decode_cases, dense_cache
from kvjax.cache import allocate, as_codec, get_method, init_cache
from kvjax.cache.store import KVWindow
from kvjax.cli.throughput.limits import loop_seconds, median_seconds
from kvjax.engine.decode import decode, decode_once, init_slots
from kvjax.engine.sampling import DRAWN
from kvjax.models import stacks_layers
from kvjax.models.config import ModelConfig, get_model_entry
from kvjax.models.decoder import abstract_params, init_params

STEPS = 8
"""Tokens that the host does not wait for, as the engine's: of a loop, or of single steps that are
dispatched one after the other, which is what GPUs run."""
LOOPS = 5
HELD = 1024
"""KVs of each head before the first step."""
LARGE_POOL, ASKING_POOL = 70 * 10**9, 45 * 10**9
"""Bytes of a pool that all the memory is given to, and from which on XLA may misjudge it."""
BESIDE_POOL = 6 * 10**9
"""Bytes for what steps need beside weights and pool."""


def groups(small: bool) -> tuple[Group, ...]:
    """The call's parts, in order."""
    cases = sorted(decode_cases(small), key=lambda case: -case.kv_bytes)
    cases = [case for case in cases if case.model == "8B"] + [
        case for case in cases if case.model != "8B"
    ]
    attention = [attention_part(case, statistic) for case in cases for statistic in (False, True)]
    sizes = (2,) if small else (64, 256, 32, 128)
    methods = ("full", "kv-compress-continual")
    steps = [(size, method) for size in sizes for method in methods]
    first = [(sizes[0], methods[0]), (sizes[-1 if small else 1], methods[1])]
    more = [step_part(*step) for step in steps if step not in first]
    more.append(step_part(sizes[0], methods[0], stored="int4w16"))
    large = (
        step_part(256, methods[1], large=True),
        step_part(64, methods[1], model="llama3.1-70b", layers=16),
    )
    rivals = (
        [] if small else [part for case in decode_cases(False)[2:8:2] for part in rival_parts(case)]
    )
    return (
        peaks_group(),
        Group("attention", tuple(attention), {"XLA_FLAGS": NO_TUNING}),
        # XLA times candidates for the products on the device: nothing else may run then. So nothing
        # is measured before all of a group is compiled.
        Group("steps", tuple(step_part(*step) for step in first), AT_ONCE, overlap=False),
        Group("more steps", tuple(more), AT_ONCE, overlap=False),
        # What the allocator keeps of smaller pools would leave no room.
        *(Group(part.name, (part,), AT_ONCE, overlap=False) for part in large if not small),
        Group("beside", (section_part("window"), section_part("move"))),
        Group("others", tuple(rivals)),
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """Decode loops of some sequences."""

    model: ModelConfig
    seqs: int
    held: int
    method: str
    pool_bytes: int | None
    stored: str | None
    """Codec of the pool; None for the model's dtype."""

    @property
    def dtype(self) -> Any:
        return jnp.float32 if self.seqs < 32 else jnp.bfloat16

    @property
    def heads(self) -> tuple[int, int, int]:
        return (self.seqs, self.model.num_layers, self.model.num_kv_heads)

    @property
    def steps(self) -> int:
        """All that are run: to warm up, for the time, and for the trace."""
        return STEPS * (LOOPS + 2)

    def cache(self) -> Any:
        """A cache in which every head holds `held` KVs, all unlike."""
        per_head = -(-(self.held + self.steps) // 16)
        blocks = math.prod(self.heads) * per_head
        codec = as_codec(self.stored, self.dtype)
        if self.pool_bytes is not None:
            block = 16 * (2 * self.model.head_dim * jnp.dtype(self.dtype).itemsize + 8)
            blocks = self.pool_bytes // block
        cache = init_cache(
            num_slots=self.seqs,
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            num_blocks=blocks,
            max_blocks_per_head=per_head,
            block_size=16,
            codec=codec,
        )
        cache, _ = allocate(cache, jnp.full(self.heads, self.held, jnp.int32))
        salts = itertools.count(1)

        def filled(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.integer):
                return hashed(x.shape, x.dtype, next(salts))
            return (70 * jnp.abs(hashed(x.shape, jnp.float32, next(salts)))).astype(x.dtype)

        stored_k, stored_v = jax.tree.map(filled, (cache.kv.stored_k, cache.kv.stored_v))
        window = cache.window
        if window is not None:
            newest = self.held - 1 - jnp.arange(window.size, dtype=jnp.int32)
            held = jnp.broadcast_to(newest, window.index.shape)
            k, v = filled(window.rows_k), filled(window.rows_v)
            window = KVWindow(rows_k=k, rows_v=v, position=held, index=held)
        return dataclasses.replace(
            cache,
            kv=dataclasses.replace(cache.kv, stored_k=stored_k, stored_v=stored_v),
            window=window,
            seq_len=cache.seq_len + self.held,
        )

    def state(self) -> Any:
        """All sequences run, and none ends."""
        rows = init_slots(self.seqs)
        return dataclasses.replace(
            rows,
            active=jnp.ones_like(rows.active),
            observed=jnp.ones_like(rows.observed),
            stop_at_eos=jnp.zeros_like(rows.stop_at_eos),
            remaining=jnp.full_like(rows.remaining, 1 << 20),
        )

    def moved(self, params: Any, kv_bytes: int) -> int:
        """Bytes that a step must read: the weights, and half of what the loops add to the KVs."""
        leaves = jax.tree.leaves(params)
        weights = sum(x.size * x.dtype.itemsize for x in leaves)
        if not self.model.tie_word_embeddings:
            # A row of the table is read per token.
            size = leaves[0].dtype.itemsize
            weights -= self.model.vocab_size * self.model.hidden_size * size
        return weights + math.prod(self.heads) * (self.held + self.steps // 2) * kv_bytes


def step_part(
    seqs: int,
    method: str,
    *,
    large: bool = False,
    model: str = "llama3.1-8b",
    layers: int | None = None,
    stored: str | None = None,
) -> Part:
    """The engine's decode loop for so many sequences, if so over a pool that takes all memory."""
    pool = ", large pool" if large else ""
    some = f", {layers} layers" if layers else ""
    name = f"step: {model}{some}, {seqs} × {HELD}{pool}, {method}{f', {stored}' if stored else ''}"

    def sized(machine: Machine) -> Step:
        entry = get_model_entry("smollm2-135m" if machine.small else model).config
        few = 2 if machine.small else layers
        config = entry if few is None else dataclasses.replace(entry, num_layers=few)
        step = Step(config, seqs, 64 if machine.small else HELD, method, None, stored)
        if large:
            params = jax.tree.leaves(abstract_params(step.model, step.dtype, stacked=False))
            weights = sum(x.size * x.dtype.itemsize for x in params)
            left = (machine.memory or 0) - weights - BESIDE_POOL
            step = dataclasses.replace(step, pool_bytes=min(LARGE_POOL, left))
        return step

    def programs(machine: Machine) -> dict[str, Program]:
        step = sized(machine)
        if step.pool_bytes is not None and step.pool_bytes < ASKING_POOL:
            return {}
        platform = "gpu" if machine.target is not None else jax.default_backend()
        params = abstract_params(step.model, step.dtype, stacks_layers(platform))
        with machine.device_of_calls():
            cache, state = jax.eval_shape(lambda: (step.cache(), step.state()))
        slots = jax.ShapeDtypeStruct((seqs,), jnp.int32)
        eos = jax.ShapeDtypeStruct((1,), jnp.int32)
        rule = get_method(method).decode
        if platform == "gpu":
            run = functools.partial(decode_once, step.model, rule, STEPS, None, None, DRAWN)
            limit = ()
        else:
            run = functools.partial(decode, step.model, rule, STEPS, None, None)
            limit = (jax.ShapeDtypeStruct((), jnp.int32),)
        return {
            "fill": Program(step.cache, ()),
            "steps": Program(run, (params, cache, state, slots, *limit, eos), (1, 2), platform),
        }

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        step = sized(machine)
        if step.pool_bytes is not None and step.pool_bytes < ASKING_POOL:
            return {"skipped": f"there is room for a pool of {step.pool_bytes / 1e9:.0f} GB only"}
        params = machine.kept.get(step.model)
        if params is None:
            stacked = stacks_layers(jax.default_backend())
            params = machine.kept[step.model] = init_params(step.model, step.dtype, stacked=stacked)
        cache, state = compiled["fill"](), step.state()
        slots, eos = jnp.arange(seqs, dtype=jnp.int32), jnp.full(1, -1, jnp.int32)
        once = jax.default_backend() == "gpu"
        limit = () if once else (jnp.int32(STEPS),)
        carry = (cache, state)
        kv_bytes = cache.spec.kv_bytes
        del cache, state

        def loop() -> Any:
            nonlocal carry
            cache, state = carry
            carry, reports = (), []
            for _ in range(STEPS if once else 1):
                cache, state, report = compiled["steps"](params, cache, state, slots, *limit, eos)
                reports.append((report.ok, report.tokens))
            carry = (cache, state)
            return reports

        seconds = median_seconds(loop) / STEPS
        moved = step.moved(params, kv_bytes)
        found = shares(machine, seconds, moved, tokens_per_second=round(seqs / seconds))
        if step.pool_bytes is not None:
            found["pool_bytes"] = step.pool_bytes
        found["trace"] = traced(loop)
        return found | {"good": bool(jnp.all(carry[0].seq_len == step.held + step.steps))}

    return Part(name, run, programs, seconds=12, limit=60)


def section_part(section: str) -> Part:
    """A section of `python -m benchmarks.kernels`."""

    def run(machine: Machine, _: Any) -> dict[str, Any]:
        from benchmarks.kernels import __main__ as kernels

        bench = kernels.Bench(machine.small, False, machine.peaks()["copy_bytes_per_s"])
        getattr(kernels, section)(bench)
        return {"rows": bench.results}

    return Part(f"beside: {section}", run, seconds=40, limit=150)


def rival_parts(case: Case) -> list[Part]:
    """What others take for the same bytes; not every machine has them."""

    def cudnn(machine: Machine, _: Any) -> dict[str, Any]:
        def attend(_: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")[:, 0]

        q = jnp.ones((case.seqs, case.heads * case.group, case.head_dim), case.dtype)
        seconds = loop_seconds(attend, q, case.kv_bytes / EXPECTED, *dense_cache(case))
        return shares(machine, seconds, case.kv_bytes)

    def in_torch(which: str, machine: Machine, _: Any) -> dict[str, Any]:
        from benchmarks.kernels import torch_rivals

        turns = max(8, math.ceil(0.05 / (case.kv_bytes / EXPECTED)))
        return shares(machine, getattr(torch_rivals, which)(case, turns), case.kv_bytes)

    names = {
        "cuDNN, dense": cudnn,
        "FlashInfer, paged": functools.partial(in_torch, "flashinfer_seconds"),
        "torch SDPA, dense": functools.partial(in_torch, "sdpa_seconds"),
    }
    return [
        Part(f"rival: {case.name}: {name}", run, seconds=15, limit=60, optional=True)
        for name, run in names.items()
    ]
