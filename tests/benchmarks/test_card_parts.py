"""What a machine with a GPU is asked: which parts there are, their order, what they call right."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks.card import attention, check, decode, process
from benchmarks.card.parts import AT_ONCE, Group, Machine, Part
from benchmarks.kernels import checks
from benchmarks.kernels.cases import CODES, Case, paged_problem


def large_step(memory: int) -> tuple[Part, Machine]:
    """The step over a pool that takes all memory, and a machine that has so much."""

    class Sized(Machine):
        @property
        def memory(self) -> int:
            return memory

    parts = [p for g in decode.groups(small=False) for p in g.parts if "large pool" in p.name]
    (one,) = parts
    return one, Sized()


@pytest.mark.parametrize(("memory", "pool"), [(77 * 10**9, 55.0e9), (138 * 10**9, 70.0e9)])
def test_the_large_pool_is_what_the_card_has_room_for(memory: int, pool: float) -> None:
    """Beside 16 GB of weights and 6 for all else; an H200 is asked what it always was."""
    one, machine = large_step(memory)
    cache = one.programs(machine)["steps"].arguments[1]
    held = (cache.kv.stored_k, cache.kv.stored_v)
    assert sum(x.size * x.dtype.itemsize for x in held) == pytest.approx(pool, rel=0.03)


def test_where_there_is_no_room_for_a_large_pool_that_is_said() -> None:
    one, machine = large_step(60 * 10**9)
    assert one.programs(machine) == {}
    assert one.run(machine, {}) == {"skipped": "there is room for a pool of 38 GB only"}


def test_the_steps_that_tell_most_are_a_group_of_their_own() -> None:
    """All of a group is compiled before any of it is measured."""
    groups = {g.name: g for g in decode.groups(small=False)}
    assert [p.name for p in groups["steps"].parts] == [
        "step: llama3.1-8b, 64 × 1024, full",
        "step: llama3.1-8b, 256 × 1024, kv-compress-continual",
    ]
    steps = [g for g in groups.values() if any(p.name.startswith("step: ") for p in g.parts)]
    assert sum(len(g.parts) for g in steps) == 11
    assert all(g.environment == AT_ONCE and not g.overlap for g in steps)


def names(groups: tuple[Group, ...]) -> list[str]:
    return [p.name for g in groups for p in g.parts]


def test_what_tells_most_comes_first() -> None:
    groups = process.groups_of("first", small=False)
    right = next(g for g in process.groups_of("A", small=False) if g.name == "kernels")
    assert names(groups) == [
        "peaks",
        *names((right,)),
        "attention: 8B 256 × 1024 uniform b=16",
        "attention: 8B 256 × 1024 uniform b=16 + statistic",
        "attention: 8B 32 × 8192 uniform b=16",
        "attention: 8B 32 × 8192 uniform b=16 + statistic",
        "throughput: rate 64",
        "throughput: no compression",
        "step: llama3.1-8b, 64 × 1024, full",
    ]
    # Whatever the others take, the last part is begun.
    *capped, last = groups
    taken = sum(g.seconds or 1000 for g in capped)
    assert taken + last.parts[0].seconds + 30 <= process.SECONDS["first"] <= 570
    assert all((g.seconds or 0) * g.processes >= sum(p.seconds for p in g.parts) for g in capped)
    assert all(g.parts for g in process.groups_of("first", small=True))


def test_the_rest_is_all_there_is() -> None:
    """What may fail and be none of ours comes last."""
    rest = process.groups_of("rest", small=False)
    every = [g for call in "ABC" for g in process.groups_of(call, small=False)]
    assert sorted((g.call, p.name) for g in rest for p in g.parts) == sorted(
        (g.call, p.name) for g in every for p in g.parts
    )
    assert [g.name for g in rest][:3] == ["kernels", "steps", "throughput"]
    assert [g.name for g in rest][-2:] == ["memory checker", "others"]
    assert names(rest[2:3])[-1] == "throughput: rate 1"


NOT_OURS = tuple(f"{name}: mosaic_gpu does not serve device cpu" for name in ("numba", "xla"))


def right_parts() -> dict[str, Part]:
    return {p.name: p for g in check.groups(small=False) for p in g.parts}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("right: b=64", marks=pytest.mark.slow),
        pytest.param("right: int8 int4 b=16 d=128", marks=pytest.mark.slow),
        pytest.param("attention: 8B 256 × 1024 uniform b=64", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_right_that_is_not_by_a_kernel_of_ours(name: str, monkeypatch) -> None:
    """Here what CPUs have is chosen, which is right, and takes its time."""
    from benchmarks.card.peaks import measure_peaks

    drawn = checks.decode_problem
    monkeypatch.setattr(checks, "decode_problem", lambda shape, longest: drawn(shape, 40))
    monkeypatch.setattr(attention, "paged_problem", lambda case: paged_problem(FEW))
    monkeypatch.setattr(attention, "_turns", lambda case: 2)
    machine = Machine()
    machine.kept["peaks"] = measure_peaks(small=True)
    one = right_parts()[name]
    compiled = {key: machine.lowered(p)() for key, p in one.programs(machine).items()}
    found = one.run(machine, compiled)
    assert found["chosen"].startswith(NOT_OURS)
    assert all(error <= found["limit"] for error in found.get("errors", {}).values())
    assert not found["good"]


FEW = Case("8B", 4, 2, 40, "uniform", "float32")


@pytest.mark.parametrize(
    ("name", "check_name", "good"),
    [
        ("move", "move_check", False),
        ("append llama-3.1-8b", "append_check", False),
        ("received d=64", "received_check", False),
        ("prefill d=64", "prefill_check", True),
    ],
)
def test_what_a_library_does_is_right_for_prompts_alone(
    name: str, check_name: str, good: bool, monkeypatch
) -> None:
    monkeypatch.setattr(checks, check_name, lambda *_: (name, NOT_OURS[0], {"out": 0.0}, 1.0))
    one = right_parts()[f"right: {name}"]
    assert one.run(Machine(), {})["good"] is good
    assert one.run(Machine(small=True), {})["good"]


def test_every_pair_of_codecs_and_the_append_are_checked() -> None:
    parts = right_parts()
    pairs = {shape.forms for shape in CODES.values()}
    assert len(pairs) == 8
    assert {shape.forms for name, shape in CODES.items() if f"right: {name}" in parts} == pairs
    assert "ring: append bfloat16 d=128 r=4 b=16 uniform" in parts


def test_memory_is_checked_array_by_array(monkeypatch) -> None:
    """In a region that JAX allocates as a whole nothing would be out of bounds."""
    given: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        given.update(options, command=command)
        return subprocess.CompletedProcess(command, 9, stdout="========= Invalid write\nx\n")

    monkeypatch.setattr(check.shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(check.subprocess, "run", run)
    found = check.memory_check(Machine(), {})
    assert found == {"good": False, "exit_code": 9, "said": ["========= Invalid write"]}
    assert given["env"]["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert check.SMALL_CALL in given["command"]
