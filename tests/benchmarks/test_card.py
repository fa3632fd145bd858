"""What a machine with a GPU is asked: calls that go on where they were, and the page about them."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from benchmarks.card import __main__ as card
from benchmarks.card import process, report
from benchmarks.card.parts import Group, Machine, Part
from benchmarks.card.results import Results, gather, results_of
from kvjax.cli import main_of
from tests.benchmarks.rehearsal import part, rehearsal, stand_in
from tests.conftest import REPOSITORY


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    return rehearsal(tmp_path)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (card, ["D"], "invalid choice: 'D'"),
        (card, ["A", "--out", "/no/such"], "--out /no/such: there is no such folder"),
        (card, ["A", "--seconds", "0"], "--seconds 0"),
        (report, ["--results", "/no/such"], "--results /no/such: there is no such folder"),
    ],
)
def test_bad_input_is_one_line(command, arguments: list[str], message: str, capsys) -> None:
    assert main_of(command.main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_call_goes_on_where_it_was(tmp_path) -> None:
    """Measured parts stay, what was measured with other source does not, failed ones come last."""
    parts = tuple(map(part, ("done", "failed", "old", "new")))
    file = tmp_path / "x.json"
    results = Results(file)
    results.note(parts[0], "now", {"us": 1})
    results.note(parts[1], "now", {"error": "no"})
    results.note(parts[2], "before", {"us": 1})

    def left() -> list[str]:
        return [p.name for p in Results(file).pending(parts, "now")]

    assert left() == ["old", "new", "failed"]
    for _ in range(process.ATTEMPTS - 1):
        assert "failed" in left()
        Results(file).note(parts[1], "now", {"error": "no"})
    assert left() == ["old", "new"]
    # What another attempt would say, too.
    Results(file).note(parts[3], "now", {"error": "XlaRuntimeError: RESOURCE_EXHAUSTED: 9"})
    assert left() == ["old"]
    # Elsewhere, with the files of before.
    earlier = Results(tmp_path / "y.json", file)
    assert [p.name for p in earlier.pending(parts, "now")] == ["old"]
    assert file.exists()
    assert not (tmp_path / "y.json").exists()


def test_what_is_not_ours_is_tried_once(tmp_path) -> None:
    rival, results = part("rival", optional=True), Results(tmp_path / "x.json")
    results.note(rival, "now", {"error": "not installed"})
    assert results.pending((rival,), "now") == []


def test_what_failed_is_tried_again_after_all_else(options, monkeypatch) -> None:
    groups = (Group("a", (part("x"), part("y")), call="A"), Group("b", (part("z"),), call="A"))
    tried = []

    def run_children(call, group, attempts, options, deadline, cache) -> list[int]:
        results = results_of(call, options)
        one = results.pending(group.parts, process.source(call), attempts)[0]
        tried.append(one.name)
        found = {} if one.name == "y" or tried.count(one.name) > 1 else {"error": "no"}
        results.note(one, process.source(call), found)
        return [0]

    monkeypatch.setattr(process, "groups_of", lambda call, small: groups)
    monkeypatch.setattr(process, "run_children", run_children)
    assert process.run_call("A", options, time.monotonic() + 600) == 0
    assert tried == ["x", "y", "z", "x", "z"]


def test_a_part_that_the_time_ran_out_for_is_not_a_failure(options, tmp_path) -> None:
    process.write_running(process.running_file(options, 0), "late", 30)
    process.note_failure("A", [part("late")], options, 0, "now", time.monotonic() - 1)
    assert results_of("A", options).parts == {}


def test_parts_are_compiled_ahead_and_one_at_a_time_measured(tmp_path) -> None:
    """The programs of each part are those it gets; what marks it runs from then on."""
    import jax
    import jax.numpy as jnp

    from benchmarks.card.parts import Program

    number = jax.ShapeDtypeStruct((), jnp.int32)

    def adds(n: int) -> Part:
        return Part(
            f"adds {n}",
            lambda machine, compiled: {"sum": int(compiled["add"](jnp.int32(1)))},
            lambda machine: {"add": Program(lambda x: x + n, (number,))},
        )

    group = Group("sums", (adds(1), adds(10)))
    running, found = tmp_path / "running.json", []
    pending = process.compiled_parts(
        Machine(), group, list(group.parts), running, time.monotonic() + 60
    )
    for one, compiled in pending:
        marked = process.read_running(running)
        assert marked is not None
        assert (marked.part, marked.limit) == (one.name, process.COMPILE_LIMIT)
        found.append(one.run(Machine(), compiled())["sum"])
    assert found == [2, 11]


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_traced_beside_what_is_measured(overlap: bool, tmp_path) -> None:
    """One thread traces and measures; what has nothing to compile is measured before all else, and
    where compiling takes the device, when all is compiled."""
    threads, events, done = set(), [], []

    def of(name: str, programs: int) -> Part:
        def traced(machine: Machine) -> dict[str, Any]:
            return {str(n): name for n in range(programs)}

        return Part(name, lambda machine, compiled: {}, traced)

    class Recorded(Machine):
        def lowered(self, program):  # type: ignore[override]
            threads.add(threading.current_thread())
            events.append(f"trace {program}")
            compiled = threading.Event() if program == "slow" else None

            def compile_() -> None:
                if compiled is not None:
                    compiled.wait(1)
                done.append(program)

            return compile_

    parts = [of("peaks", 0), of("slow", 1), of("later", 2)]
    group = Group("g", tuple(parts), overlap=overlap)
    for one, compiled in process.compiled_parts(
        Recorded(), group, parts, tmp_path / "running.json", time.monotonic() + 60
    ):
        compiled()
        assert overlap or len(done) == 3
        events.append(f"run {one.name}")
    assert threads == {threading.current_thread()}
    traces = ["trace slow", "trace later", "trace later"]
    first = ["run peaks", *traces] if overlap else [*traces, "run peaks"]
    assert events == [*first, "run slow", "run later"]


def test_what_cannot_be_traced_fails_alone(tmp_path) -> None:
    def broken(machine: Machine) -> dict[str, Any]:
        raise ValueError("no such shape")

    parts = [part("broken", programs=broken), part("sound")]
    found = process.compiled_parts(
        Machine(), Group("g", tuple(parts)), parts, tmp_path / "r.json", time.monotonic() + 60
    )
    (one, compiled), (other, nothing) = found
    with pytest.raises(ValueError, match="no such shape"):
        compiled()
    assert (one.name, other.name, nothing()) == ("broken", "sound", {})


def test_compiled_programs_travel_in_a_few_archives(options, tmp_path, monkeypatch) -> None:
    """The newest first, as many as fit; what is too large stays where it is."""
    cache, out, later = (tmp_path / name for name in ("cache", "out", "later"))
    for folder in (cache, out):
        folder.mkdir()
    monkeypatch.setattr(process, "ARCHIVE_BYTES", 30_000)
    monkeypatch.setattr(process, "ARCHIVES", 2)
    for n in range(8):
        file = cache / f"program{n}"
        file.write_bytes(bytes([n]) * 8_000)
        os.utime(file, (n, n))
    (cache / "huge").write_bytes(bytes(40_000))
    process.pack_programs(cache, out)
    assert all(f.stat().st_size < 40_000 for f in out.iterdir())
    options.out = out
    process.unpack_programs(later, options)
    assert {f.name for f in later.iterdir()} == {f"program{n}" for n in range(2, 8)}
    assert (later / "program5").read_bytes() == bytes([5]) * 8_000
    # One that was cut off is as good as none.
    whole = (out / "programs-0.tar").read_bytes()
    (out / "programs-0.tar").write_bytes(whole[:9_000])
    (out / "programs-1.tar").write_bytes(b"nothing" * 100)
    process.unpack_programs(tmp_path / "last", options)


@pytest.mark.parametrize("call", ["A", "rest"])
def test_the_cheapest_part_runs(call: str, options, capsys) -> None:
    """In this process: MoveCache against its reference, written as soon as it is measured, and
    where call A has it whoever asks."""
    options.only, options.child, options.calls = "right: move", "kernels", [call]
    assert process.child(options) == 0
    gather("A", options)
    content = json.loads((options.out / "rehearsal-kernels.json").read_text())
    row = content["parts"]["right: move"]
    assert row["good"]
    assert row["errors"] == {"k": 0.0, "v": 0.0}
    assert row["source"] == process.source("A")
    assert content["machine"]["versions"]["jax"]
    assert results_of("A", options).pending((part("right: move"),), row["source"]) == []
    assert "right: move: errors" in capsys.readouterr().out


def test_a_group_leaves_time_to_those_behind_it(options, monkeypatch) -> None:
    given = {}

    def run_children(call, group, attempts, options, until, cache) -> list[int]:
        given.setdefault(group.name, until - time.monotonic())
        return [0]

    groups = (
        Group("a", (part("x"),), call="A", seconds=50),
        Group("b", (part("y"),), call="B", seconds=900),
        Group("c", (part("z", seconds=700),), call="C"),
    )
    monkeypatch.setattr(process, "groups_of", lambda call, small: groups)
    monkeypatch.setattr(process, "run_children", run_children)
    assert process.run_call("first", options, time.monotonic() + 600) == 1
    assert given == {"a": pytest.approx(50, abs=5), "b": pytest.approx(600, abs=5)}


@pytest.mark.parametrize(("found", "children"), [(False, 1), (True, 6)])
def test_where_there_is_no_card_one_process_finds_out(
    found: bool, children: int, options, monkeypatch
) -> None:
    """One that is lost on the way may be back for the next."""
    codes = []

    def run_children(*_) -> list[int]:
        codes.append(0 if found and not codes else process.NO_DEVICE)
        return [codes[-1]]

    groups = (Group("a", (part("x"),), call="A"), Group("b", (part("y"),), call="A"))
    monkeypatch.setattr(process, "groups_of", lambda call, small: groups)
    monkeypatch.setattr(process, "run_children", run_children)
    assert process.run_call("A", options, time.monotonic() + 600) == 1
    assert len(codes) == children


def test_a_missing_package_is_found_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(process, "IMPORTED", ("kvjax.engine", "no_such_package"))
    monkeypatch.setattr(process, "run_call", lambda *_: pytest.fail("begun"))
    assert main_of(card.main, ["first", "--out", str(tmp_path)]) == 2
    assert "no_such_package cannot be imported: No module named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [(["first"], 560), (["rest"], 200), (["A", "B"], 540), (["first", "--seconds", "99"], 99)],
)
def test_commands_end_within_their_time(
    arguments: list[str], seconds: float, tmp_path, monkeypatch
) -> None:
    deadlines = []

    def run_call(call: str, options: argparse.Namespace, deadline: float) -> int:
        deadlines.append(deadline)
        return 0

    monkeypatch.setattr(process, "run_call", run_call)
    start = time.monotonic()
    assert main_of(card.main, [*arguments, "--out", str(tmp_path)]) == 0
    assert max(deadlines) == min(deadlines) == pytest.approx(start + seconds, abs=1)


@pytest.mark.parametrize(
    ("ptxas", "given", "said"), [(True, "", "cuda"), (True, "/mine", "/mine"), (False, "", "")]
)
def test_the_script_says_where_ptxas_is(ptxas: bool, given: str, said: str, tmp_path) -> None:
    """Where NVIDIA's packages lack it JAX looks in a folder "None"."""
    python, cuda = stand_in(tmp_path, 'echo "root=$CUDA_ROOT" "$@"'), tmp_path / "cuda"
    if ptxas:
        (cuda / "bin").mkdir(parents=True)
        (cuda / "bin" / "ptxas").touch(mode=0o755)
    environment = {**os.environ, "PYTHON": python, "CUDA_HOME": str(cuda), "CUDA_ROOT": given}
    command = ["bash", "scripts/gpu_check.sh", "first", str(tmp_path / "out"), "--only", "x"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    root, *arguments = done.stdout.split()
    assert root == f"root={cuda if said == 'cuda' else said}"
    assert arguments[:4] == ["-m", "benchmarks.card", "first", "--out"]
    assert arguments[-2:] == ["--only", "x"]


@pytest.mark.slow
def test_all_three_calls_at_tiny_sizes(tmp_path) -> None:
    """Everything is measured, right, and said of; a second run measures nothing anew."""
    command = [sys.executable, "-m", "benchmarks.card", "A", "B", "C", "--rehearse"]
    command += ["--out", str(tmp_path), "--seconds", "1500"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [tmp_path / f"rehearsal-{name}.json" for name in report.FILES]
    before = [file.read_text() for file in files]
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert [file.read_text() for file in files] == before
    _, parts = report.read(tmp_path, "rehearsal")
    expected = [
        p.name for call in process.CALLS for g in process.groups_of(call, True) for p in g.parts
    ]
    assert {name.split()[-1] if "peaks" in name else name for name in parts} == set(expected)
    assert not [name for name, row in parts.items() if "error" in row]
    ring = next(row for name, row in parts.items() if name.startswith("ring: "))
    assert ring["wraps"] >= 10
    assert ring["chosen"] == "mosaic_gpu, interpreted"
    text = report.page("rehearsal", *report.read(tmp_path, "rehearsal"))
    assert "## Tokens per second" in text
    assert "Whole decode steps" in text


@pytest.mark.parametrize(
    ("card", "prefix"),
    [
        ("NVIDIA H100 80GB HBM3, 580.1, 81559 MiB", "h100"),
        ("NVIDIA H200, 580.1, 143771 MiB", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        (None, "gpu"),
    ],
)
def test_results_of_cards_are_kept_apart(card: str | None, prefix: str, options) -> None:
    options.card = process.prefix_of(card)
    assert results_of("B", options).file == options.out / f"{prefix}-decode.json"


def test_what_is_not_measured_changes_nothing(tmp_path, monkeypatch) -> None:
    """A line of the server's leaves what was measured as it is, one of a kernel's does not."""
    for name in ("kernels", "serve", "cli/throughput"):
        (tmp_path / "kvjax" / name).mkdir(parents=True)
    monkeypatch.setattr(process, "__file__", str(tmp_path / "benchmarks" / "card" / "process.py"))

    def changed_by(name: str) -> str:
        before = {call: process.source(call) for call in "ABC"}
        (tmp_path / "kvjax" / name / "x.py").write_text("x = 1\n")
        return "".join(call for call in "ABC" if process.source(call) != before[call])

    assert [changed_by(x) for x in ("kernels", "serve", "cli/throughput")] == ["ABC", "", "C"]
