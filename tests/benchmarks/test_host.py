"""`python -m benchmarks.host`: what a round costs the host, by devices and processes."""

import itertools
import json
import time

import pytest

from benchmarks import host
from kvjax.cli import main_of

SMALL = ("--sequences", "2", "--rounds", "8")


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = main_of(host.main, [*SMALL, *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else None, err

    return run


@pytest.mark.slow
def test_a_part_measures_rounds_of_all_sequences_and_no_waiting(run, monkeypatch):
    """Of the second run, since the first one compiles; by a clock that stands while others
    compute."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * 1e-3)
    code, found, err = run("--profile", "2", "--part", "0", "1", "0")
    assert code == 0, err
    assert found.keys() == {"milliseconds", "rounds", "calls", "functions"}
    # Every second round is profiled.
    assert found["milliseconds"] == pytest.approx(1)
    assert 2 <= found["rounds"] <= 4
    assert found["calls"] > 100
    (_, most, whole), (_, second, _) = found["functions"]
    assert 0 < second <= most <= whole


@pytest.mark.slow
def test_rounds_of_the_first_run_do_not_count(run):
    code, found, err = run("--part", "0", "1", "0")
    assert code == 0, err
    assert 2 <= found["rounds"] <= 8


def test_rows_are_of_the_process_that_takes_most(run, capsys, monkeypatch):
    started = []

    class Part:
        returncode = 0

        def __init__(self, command, env, **options):
            self.index, self.count = (int(x) for x in command[-3:-1])
            self.profile = command[command.index("--profile") + 1] == "3"
            started.append((self.index, self.count, env["XLA_FLAGS"].split()[-1]))

        def communicate(self):
            found = {"milliseconds": 2.0 - self.index, "rounds": 7}
            if self.profile:
                found |= {"calls": 1234, "functions": [["a.py:1 f", 0.25, 0.5]]}
            return f"something\n{json.dumps(found)}\n", None

    monkeypatch.setattr(host.subprocess, "Popen", Part)
    code, found, err = run("--devices", "1,4", "--processes", "2")
    assert code == 0, err
    row = {"milliseconds": 2.0, "rounds": 7}
    assert found == {
        "sequences": 2,
        "rows": [
            {"processes": 1, "devices": 1, **row},
            {"processes": 1, "devices": 4, **row},
            {"processes": 2, "devices": 1, **row},
        ],
    }
    flag = "--xla_force_host_platform_device_count="
    assert started == [
        (0, 1, f"{flag}1"), (0, 1, f"{flag}4"), (0, 2, f"{flag}1"), (1, 2, f"{flag}1"),
    ]  # fmt: skip
    code = main_of(host.main, [*SMALL, "--devices", "1", "--processes", "1", "--profile", "3"])
    out = capsys.readouterr().out
    assert code == 0
    assert "0.250 ms, with what it calls  0.500: a.py:1 f" in out
    assert "1,234 calls" in out
    assert json.loads(out.splitlines()[-1])["rows"][0]["calls"] == 1234
    monkeypatch.setattr(Part, "returncode", 1)
    code, _, err = run("--devices", "1")
    assert code == 2
    assert "1 processes of 1 devices: one of them ended early" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--devices", "9"), "--devices 9"),
        (("--processes", "0"), "--processes 0"),
        (("--rounds", "1"), "--rounds 1"),
        (("--profile", "-1"), "--profile -1"),
        (("--devices", "x"), "--devices: 'x': give whole numbers separated by commas"),
    ],
)
def test_bad_input_gets_one_line(run, arguments, says):
    code, _, err = run(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
