"""Call A: are the kernels right on the card, and what do pages of 16 cost beside pages of 64."""

import dataclasses
import functools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.card.attention import attention_part
from benchmarks.card.parts import NO_TUNING, Group, Machine, Part, Program
from benchmarks.card.peaks import hashed, peaks_group
from benchmarks.kernels import checks
from benchmarks.kernels.cases import CODES, Case, paged_problem
from kvjax.kernels import append_and_attend, explain, paged_attention
from kvjax.kernels.device import of as device_of
from kvjax.kernels.paged_attention import reference, spec

REPEATS = 20
"""Runs of one call that must agree in every bit: a race would show."""
WRAPS = 12
"""Times that every program's ring of tiles is filled anew."""
FAR = 4096
"""Blocks at either end of the large pool that its check reads."""
IN_A_HURRY = ("llama-3.1-8b", "llama-3.1-70b", "b=64", "bfloat16 d=64", "float32 d=128")
"""Families that come first."""


CODED = tuple({shape.forms: name for name, shape in reversed(CODES.items())}.values())[::-1]
"""A shape of each pair of codecs."""


def groups(small: bool) -> tuple[Group, ...]:
    """The call's parts, in order."""
    families = [f for f, shape in spec.FAMILIES.items() if shape.blocks < 1 << 20]
    families.sort(key=lambda f: IN_A_HURRY.index(f) if f in IN_A_HURRY else len(IN_A_HURRY))
    rings = [
        Case("8B", 4, 8, 0, "uniform"),
        Case("70B", 8, 8, 0, "zipf", block_size=64),
        Case("1B", 4, 8, 0, "uniform", head_dim=64),
        Case("8B", 4, 8, 0, "zipf", dtype="float32"),
    ]
    small_pages = [
        attention_part(Case("8B", 4, 4 if small else 256, 64 if small else 1024, "uniform",
                            "float32" if small else "bfloat16", block_size=b), statistic)
        for b in (16, 64) for statistic in (False, True)
    ]  # fmt: skip
    right = [
        *map(ring_part, rings[:1] if small else rings),
        ring_part(rings[0], append=True),
        far_part(),
        *map(family_part, families[: 1 if small else len(IN_A_HURRY)]),
        *(coded_part(name) for name in (CODED[:1] if small else CODED)),
        coded_part("int4 int4 b=16 d=128", beside=True),
        *other_parts(small),
        *map(family_part, families[1 if small else len(IN_A_HURRY) : 1 if small else None]),
    ]
    checker = Part("memory checker", memory_check, seconds=60, limit=120, optional=True)
    return (
        peaks_group(),
        Group("kernels", tuple(right), {"XLA_FLAGS": NO_TUNING}, processes=2 if small else 8),
        Group("pages", tuple(small_pages), {"XLA_FLAGS": NO_TUNING}),
        Group("memory checker", (checker,), on_device=False),
    )


def attend(
    machine: Machine, shape: spec.Shape, append: bool = False
) -> tuple[Callable[..., Any], Any]:
    """`paged_attention` or `append_and_attend` as it is run here, interpreted in a rehearsal, and
    its kernel's sizes."""
    scale = shape.head_dim**-0.5
    if machine.interpreted:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from kvjax.kernels.paged_attention import mosaic_gpu

        def interpreted(*call, metric=None, exact=None, **statistic):
            options = {"keep_logits": metric is not None, "exact": exact is not None, "cores": 1}
            c = mosaic_gpu.config(shape, scale=scale, **options)
            c = dataclasses.replace(c, stages=2, programs=1)
            statistic |= {"metric": metric, "c": c, "interpret": plgpu.InterpretGPUParams()}
            if append:
                pools, out, added = mosaic_gpu.append_and_attend(*call, **statistic)
                return pools, (out, added)
            return mosaic_gpu.paged_attention(*call, exact=exact, **statistic)

        sizes = mosaic_gpu.config(shape, scale=scale, keep_logits=True, cores=1)
        return interpreted, dataclasses.replace(sizes, stages=2, programs=1)

    with machine.device_of_calls():
        where = device_of()
    run = functools.partial(append_and_attend, return_metric=True) if append else checks.public
    if not where.hopper:
        return run, None
    from kvjax.kernels.paged_attention import mosaic_gpu

    return run, mosaic_gpu.config(shape, scale=scale, keep_logits=True, cores=where.cores)


def chosen(machine: Machine, *call: Any, **options: Any) -> str:
    """The implementation that runs."""
    if machine.interpreted:
        return "mosaic_gpu, interpreted"
    return explain(paged_attention, *call, **options)


def abstract(tree: Any) -> Any:
    """Shapes and types of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def verdict(errors: dict[str, float], limit: float, ours: bool, **more: Any) -> dict[str, Any]:
    """Errors by name, and whether none exceeds the limit (not a number never passes) and they are
    those of a kernel of ours."""
    good = ours and all(e <= limit for e in errors.values())
    return {"errors": errors, "limit": limit, "good": good, **more}


def family_part(family: str) -> Part:
    """One family of shapes against the reference: ragged, poisoned, both powers."""
    shape = spec.FAMILIES[family]

    def problem(machine: Machine):
        return checks.decode_problem(shape, 70 if machine.interpreted else 3000)

    def programs(machine: Machine) -> dict[str, Program]:
        call, metric, observed = abstract(problem(machine))
        run, _ = attend(machine, shape_of_call(call))
        ours = functools.partial(checks.all_statistics, run)
        arguments = (call, metric, observed)
        return {"ours": Program(ours, arguments), "exact": Program(checks.exactly, arguments)}

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        arguments = problem(machine)
        found = checks.errors_of(compiled["ours"](*arguments), compiled["exact"](*arguments))
        said = chosen(machine, *arguments[0])
        return verdict(found, checks.LIMITS[shape.dtype], machine.ours(said), chosen=said)

    return Part(f"right: {family}", run, programs)


def coded_part(name: str, beside: bool = False) -> Part:
    """A pool of codes, if so with the newest KVs of each head exact beside it, against the
    reference."""

    def problem(machine: Machine):
        found = checks.coded_problem(70 if machine.interpreted else 3000, CODES[name])
        return found if beside else (*found[:-1], None)

    def programs(machine: Machine) -> dict[str, Program]:
        call, rows, *rest = abstract(problem(machine))
        run, _ = attend(machine, shape_of_call(call))
        return {
            "ours": Program(functools.partial(checks.beside_exact, run), (call, *rest)),
            "exact": Program(checks.exactly, (rows, *rest)),
        }

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        call, rows, *rest = problem(machine)
        found = checks.errors_of(compiled["ours"](call, *rest), compiled["exact"](rows, *rest))
        said = chosen(machine, *call, exact=rest[-1])
        return verdict(found, checks.LIMITS["bfloat16"], machine.ours(said), chosen=said)

    return Part(f"right: {name}{' beside exact KVs' if beside else ''}", run, programs)


def other_parts(small: bool) -> Iterator[Part]:
    """All but decode attention, as `python -m benchmarks.kernels --only check` has it."""

    def part(name: str, check: Callable[[], checks.Check]) -> Part:
        def run(machine: Machine, _: Any) -> dict[str, Any]:
            _, said, errors, limit = check()
            # Prompts are a library's.
            ours = name.startswith("prefill") or machine.ours(said)
            return verdict(errors, limit, ours, chosen=said)

        return Part(f"right: {name}", run, limit=90)  # it compiles what it needs

    for d in (64,) if small else (64, 80, 128):
        for behind in (False, True):
            check = functools.partial(checks.prefill_check, 60 if small else 1500, d, behind)
            yield part(f"prefill d={d}{' + prefix' if behind else ''}", check)
    yield part("move", functools.partial(checks.move_check, 60 if small else 3000))
    for family in IN_A_HURRY[: 1 if small else 2]:
        check = functools.partial(checks.append_check, family, 70 if small else 3000)
        yield part(f"append {family}", check)
    for d in (64,) if small else (64, 80, 128):
        check = functools.partial(checks.received_check, 60 if small else 1500, d)
        yield part(f"received d={d}", check)


def ring_part(kind: Case, append: bool = False) -> Part:
    """Every program fills its ring of tiles more than ten times; repeats agree in every bit."""
    name = f"{kind.dtype} d={kind.head_dim} r={kind.group} b={kind.block_size} {kind.spread}"
    name = f"ring: {'append ' if append else ''}{name}"

    def sized(machine: Machine) -> tuple[Case, Callable[..., Any], float | None]:
        case = dataclasses.replace(kind, seqs=1, heads=1, mean=200) if machine.interpreted else kind
        rows = case.seqs * case.heads
        longer = dataclasses.replace(case, mean=case.mean or 8192)
        run, sizes = attend(machine, shape_of(longer), append)
        if sizes is None:
            return dataclasses.replace(case, mean=1024), run, None
        tiles = WRAPS * sizes.stages * sizes.programs
        case = dataclasses.replace(case, mean=math.ceil(tiles * 64 / rows) + 13)
        return case, run, tiles / (sizes.stages * sizes.programs)

    def both(run, problem):
        call = (problem.q, problem.k, problem.v, problem.tables[0], problem.lengths)
        out, metric = run(*call, metric=problem.metric)
        return {"out": out, "metric": metric, "out without metric": run(*call)[0]}

    def appended(run, problem):
        table, lengths = problem.tables[0], problem.lengths
        rows, without = checks.without_newest(problem.k, problem.v, table, lengths)
        call = (problem.q, *rows, *without, table, lengths)
        pools, (out, metric) = run(*call, metric=problem.metric)
        wrong = [jnp.sum(a != b) for a, b in zip(pools, (problem.k, problem.v), strict=True)]
        return {"out": out, "metric": metric, "wrong": jnp.stack(wrong)}

    def programs(machine: Machine) -> dict[str, Program]:
        case, run, _ = sized(machine)
        problem = (abstract_problem(case),)
        return {
            "ours": Program(functools.partial(appended if append else both, run), problem),
            "exact": Program(checks.reference_of, problem),
        }

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        case, _, wraps = sized(machine)
        problem = paged_problem(case)
        repeats = 2 if machine.interpreted else REPEATS
        first = compiled["ours"](problem)
        exact = compiled["exact"](problem)
        # Pages must be exact.
        errors = {"pools": math.inf if np.any(first.pop("wrong")) else 0.0} if append else {}
        for part, got in first.items():
            errors[part] = checks.relative(got, exact[part == "metric"])
        first = {name: np.asarray(x).view(np.uint8) for name, x in first.items()}
        differing = 0
        for _ in range(repeats - 1):
            again = compiled["ours"](problem)
            same = (np.array_equal(x, np.asarray(again[name]).view(np.uint8))
                    for name, x in first.items())  # fmt: skip
            differing += not all(same) or bool(np.any(again.get("wrong", 0)))
        said = chosen(machine, problem.q, problem.k, problem.v, problem.tables[0], problem.lengths)
        found = verdict(errors, checks.LIMITS[case.dtype], machine.ours(said), chosen=said,
                        wraps=wraps, repeats=repeats, differing=differing,
                        kvs_per_head=case.mean)  # fmt: skip
        found["good"] &= differing == 0
        return found

    return Part(name, run, programs, seconds=20)


def shape_of_call(call: tuple) -> spec.Shape:
    """Of q, k, v, block_table and context_len."""
    q, k, v, table, lengths = call
    return spec.checked(q, k, v, table, lengths, None)


def shape_of(case: Case) -> spec.Shape:
    """Of one call of a case."""
    p = abstract_problem(case)
    return shape_of_call((p.q, p.k, p.v, abstract_table(p), p.lengths))


def abstract_table(problem: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(problem.tables.shape[1:], problem.tables.dtype)


def abstract_problem(case: Case) -> Any:
    """`paged_problem` without its data."""
    return abstract(jax.eval_shape(lambda: paged_problem(case)))


def far_part() -> Part:
    """A pool of more than 2^31 elements, of which heads hold blocks at both ends."""
    shape = dataclasses.replace(spec.FAMILIES["llama-3.1-8b"], seqs=2, heads=8)

    def sizes(machine: Machine) -> tuple[int, int, int]:
        """Blocks of the pool, of an end, and of a head."""
        return (1024, 64, 2) if machine.small else (1_100_000, FAR, 125)

    def call_of(machine: Machine):
        blocks, end, each = sizes(machine)
        pool = (blocks, shape.block_size, shape.head_dim)
        rng = np.random.default_rng(0)
        pages = np.concatenate([np.arange(end), np.arange(blocks - end, blocks)])
        table = rng.permutation(pages)[: 16 * each].reshape(2, 8, each).astype(np.int32)
        lengths = rng.integers((each - 1) * 16, each * 16, (2, 8)).astype(np.int32)
        return pool, table, lengths

    def fill(pool: tuple[int, ...]):
        return tuple(hashed(pool, jnp.bfloat16, salt) for salt in (1, 2))

    def ours(run, *call):
        return run(*call, metric=jnp.zeros(call[1].shape[:2], jnp.float32))

    def exactly(*call):
        call = (*(x.astype(jnp.float32) for x in call[:3]), *call[3:])
        with jax.default_matmul_precision("highest"):
            scale = shape.head_dim**-0.5
            return ours(functools.partial(reference.paged_attention, scale=scale), *call)

    def programs(machine: Machine) -> dict[str, Program]:
        pool, table, lengths = call_of(machine)
        q = jax.ShapeDtypeStruct((2, 8 * shape.group, shape.head_dim), jnp.bfloat16)
        k = jax.ShapeDtypeStruct(pool, jnp.bfloat16)
        near = jax.ShapeDtypeStruct((2 * sizes(machine)[1], *pool[1:]), jnp.bfloat16)
        heads = abstract((table, lengths))
        run, _ = attend(machine, shape_of_call((q, k, k, *heads)))
        return {
            "fill": Program(functools.partial(fill, pool), ()),
            "ours": Program(functools.partial(ours, run), (q, k, k, *heads)),
            "exact": Program(exactly, (q, near, near, *heads)),
        }

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        blocks, end, _ = sizes(machine)
        pool, table, lengths = call_of(machine)
        q = hashed((2, 8 * shape.group, shape.head_dim), jnp.bfloat16, 3)
        k, v = compiled["fill"]()
        out, metric = compiled["ours"](q, k, v, jnp.asarray(table), jnp.asarray(lengths))

        def ends(x):
            return jnp.concatenate([x[:end], x[blocks - end :]])

        near = np.where(table < end, table, table - (blocks - 2 * end))
        wanted, exact = compiled["exact"](q, ends(k), ends(v), near, lengths)
        errors = {
            "out": checks.relative(out, wanted),
            "metric": checks.relative(ends(metric), exact),
            "metric elsewhere": float(jnp.max(jnp.abs(metric[end : blocks - end]))),
        }
        said = chosen(machine, q, k, v, table, lengths)
        return verdict(errors, checks.LIMITS["bfloat16"], machine.ours(said), chosen=said,
                       elements=math.prod(pool))  # fmt: skip

    return Part("pool of more than 2^31 elements", run, programs, seconds=20)


SMALL_CALL = "import benchmarks.card.check as c; c.small_call()"


def small_call() -> None:
    """A few heads with and without the statistic: for memory checkers, which take their time."""
    call, metric, observed = checks.decode_problem(spec.FAMILIES["llama-3.1-8b"], 300)
    got = checks.all_statistics(attend(Machine(), shape_of_call(call))[0], call, metric, observed)
    jax.block_until_ready(got)


def memory_check(machine: Machine, _: Any) -> dict[str, Any]:
    """The small call under compute-sanitizer, where there is one."""
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if machine.small or not os.path.exists(checker):
        return {"skipped": "no compute-sanitizer here"}
    command = [checker, "--tool", "memcheck", "--error-exitcode", "9"]
    command += [sys.executable, "-c", SMALL_CALL]
    # In a region that JAX allocates as a whole nothing is out of bounds.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return {"good": done.returncode == 0, "exit_code": done.returncode, "said": said[-5:]}
