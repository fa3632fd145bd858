"""Processes of the parts: each fails, hangs or ends alone, and shares what it found."""

import argparse
import subprocess
import sys
import time

import pytest

from benchmarks.card import peaks, process
from benchmarks.card.parts import AT_ONCE, Group, Machine
from benchmarks.card.results import Results, gather, results_of, results_of_shares
from tests.benchmarks.rehearsal import part, rehearsal, stand_in


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    return rehearsal(tmp_path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "the process ended after 5 s, of at most 30"),
        ("sleep 60", "the process ended after 5 s, of at most 4"),
    ],
    ids=["crash", "hang"],
)
def test_a_part_that_ends_its_process_is_noted(
    script: str, said: str, options, tmp_path, monkeypatch
) -> None:
    since = time.monotonic() - 5
    limit = 4 if "sleep" in script else 30
    marked = f"echo '[\"bad\", {since}, {limit}]' > $OUT/running-0.json\n{script}"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, marked))
    group = Group("kernels", (part("bad"),))
    pending, deadline = list(group.parts), time.monotonic() + 600
    process.run_children("A", group, 1, options, deadline, tmp_path)
    process.note_failure("A", pending, options, 0, "now", deadline)
    results = results_of("A", options)
    assert results.parts["bad"]["error"] == said
    assert not process.running_file(options, 0).exists()


def test_processes_that_share_parts_lose_nothing_with_one_of_them(
    options, tmp_path, monkeypatch
) -> None:
    """One measures, another one dies in the middle of its own."""
    share = Results(tmp_path / "rehearsal-kernels.0.json")
    share.note(part("x"), "now", {"us": 1})
    share.content["machine"] = {"device": "a card"}
    share.write()
    script = '[ "${@: -1}" = 0 ] && exit 0\n'
    script += f"echo '[\"y\", {time.monotonic()}, 30]' > $OUT/running-1.json\nkill -9 $$"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nOUT={tmp_path}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    earlier = results_of("A", options)
    earlier.note(part("z"), "now", {"us": 3})
    group = Group("kernels", (part("x"), part("y")), call="A", processes=2)
    monkeypatch.setattr(process, "groups_of", lambda call, small: (group,))
    monkeypatch.setattr(process, "source", lambda call: "now")
    assert process.run_call("A", options, time.monotonic() + 600) == 1
    results = results_of("A", options)
    assert results.content["machine"] == {"device": "a card"}
    assert [results.parts[name]["us"] for name in "xz"] == [1, 3]
    assert "the process ended" in results.parts["y"]["error"]
    assert results.parts["y"]["attempts"] == process.ATTEMPTS
    assert not results_of_shares("A", options)


def test_a_process_that_no_signal_ends_is_waited_for_no_longer(
    options, tmp_path, monkeypatch
) -> None:
    """The device may hold it; its part has failed all the same."""
    mark = f"echo '[\"x\", {time.monotonic() - 60}, 30]' > $OUT/running-0.json"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, f"{mark}\nsleep 3"))
    left: list[subprocess.Popen] = []
    monkeypatch.setattr(process, "end", left.append)
    group = Group("kernels", (part("x"),))
    assert process.run_children("A", group, 1, options, time.monotonic() + 600, tmp_path) == [None]
    left[0].wait(30)


def test_each_process_has_parts_of_its_own(options, monkeypatch) -> None:
    parts = tuple(part(name) for name in "abcde")
    group = Group("kernels", parts, call="A", processes=2, on_device=False)
    monkeypatch.setattr(process, "groups_of", lambda call, small: (group,))
    options.child, options.calls = "kernels", ["A"]
    results_of("A", options).note(parts[0], process.source("A"), {"error": "no"})
    for share in (0, 1):
        options.share = share
        assert process.child(options) == 0
    files = results_of_shares("A", options)
    measured = [list(Results(file).parts) for file in files]
    # What failed before comes last, and all know of it.
    assert measured == [["b", "d", "a"], ["a", "c", "e"]]
    gather("A", options)
    found = results_of("A", options).parts
    assert sorted(found) == sorted("abcde")
    assert not [name for name, row in found.items() if "error" in row]


def test_a_process_between_two_parts_does_not_hang(options, tmp_path, monkeypatch) -> None:
    """However long ago it began."""
    monkeypatch.setattr(process, "COMPILE_LIMIT", 2)
    mark = f"echo '[\"x\", {time.monotonic()}, 60]' > $OUT/running-0.json"
    script = f"{mark}\nsleep 2.5\nrm $OUT/running-0.json\nsleep 0.7\ntouch $OUT/went_on"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, script))
    group = Group("kernels", (part("x"),))
    process.run_children("A", group, 1, options, time.monotonic() + 600, tmp_path)
    assert (tmp_path / "went_on").exists()


@pytest.mark.parametrize(("given", "said"), [({}, "false 0.92"), (AT_ONCE, "true 0.92")])
def test_a_group_says_how_its_process_takes_memory(
    given, said: str, options, tmp_path, monkeypatch
) -> None:
    """In pieces, or all that it may at once."""
    for name in ("PREALLOCATE", "MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    script = "echo $XLA_PYTHON_CLIENT_PREALLOCATE $XLA_PYTHON_CLIENT_MEM_FRACTION > $OUT/said"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, script))
    group = Group("kernels", (part("x"),), given)
    process.run_children("A", group, 1, options, time.monotonic() + 60, tmp_path)
    assert (tmp_path / "said").read_text().strip() == said


def test_a_killed_process_that_stays_is_left_behind() -> None:
    class Stuck:
        killed = False

        def poll(self):
            return None

        def kill(self) -> None:
            self.killed = True

        def wait(self, seconds: float) -> None:
            raise subprocess.TimeoutExpired("python", seconds)

    process.end(stuck := Stuck())  # type: ignore[arg-type]
    assert stuck.killed


def test_processes_of_a_command_share_the_peaks(tmp_path, monkeypatch) -> None:
    measured = []

    def measure(small: bool) -> dict[str, float]:
        measured.append(small)
        return {"copy_bytes_per_s": 1e12}

    monkeypatch.setattr(peaks, "measure_peaks", measure)
    for _ in range(2):
        machine = Machine(small=True, peaks_file=tmp_path / "peaks.json")
        assert machine.peaks() == {"copy_bytes_per_s": 1e12}
    assert measured == [True]
