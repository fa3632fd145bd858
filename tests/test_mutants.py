"""The lists of mutations, and the tool that tries them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvjax.cli import main_of
from kvjax.errors import UserError
from tests.scripts.conftest import SCRIPTS, load_script

MUTANTS, FORKS = load_script("mutants"), load_script("forks")
REPOSITORY = SCRIPTS.parent
AREAS = {"cache", "cli", "engine", "eval", "kernels", "models", "prefix", "rounds"}
LEAST = 350
"""Mutations in all."""


def test_every_listed_mutation_can_be_tried():
    mutants = MUTANTS.read_mutants(REPOSITORY)
    assert {mutant.area for mutant in mutants} >= AREAS
    assert len(mutants) >= LEAST
    faults = [
        f"{mutant.title}: {fault}"
        for mutant in mutants
        if (fault := MUTANTS.fault(mutant, REPOSITORY))
    ]
    assert faults == []


def test_slices_cover_each_mutant_once():
    mutants = MUTANTS.read_mutants(REPOSITORY)
    for n in (1, 3, len(mutants), len(mutants) + 2):
        parts = [MUTANTS.slice_of(mutants, f"{i}/{n}") for i in range(1, n + 1)]
        assert [mutant for part in parts for mutant in part] == mutants
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


SOURCE = """
def clipped(x, most):
    while x < 0:
        x = x + most
    return min(x, most)
"""
TESTS = """
import pytest
from toy.sums import clipped

def test_most():
    assert clipped(9, 5) == 5

def test_negative():
    assert clipped(-3, 5) == 2

def test_broken():
    assert clipped(1, 5) == 7

@pytest.mark.skip(reason="never")
def test_skipped():
    pass
"""
MOST, NEGATIVE = "tests/test_sums.py::test_most", "tests/test_sums.py::test_negative"
TOY = {
    # A mutant of equal size: stale bytecode would hide it.
    "no-limit": ("min(x", "max(x", [MOST], None),
    "never-ends": ("x = x + most", "x = x - most", [NEGATIVE], None),
    "does-not-import": ("def clipped", "raise ValueError\ndef clipped", [MOST], None),
    "unseen": ("x < 0", "x < -1", [MOST, NEGATIVE], None),
    "same-thing": ("x + most", "most + x", [NEGATIVE], "sums commute"),
    "not-the-same": ("x + most", "x + 1", [NEGATIVE], "so it was thought"),
    "no-such-line": ("x > 0", "x >= 0", [MOST], None),
    "two-such-lines": ("most", "least", [MOST], None),
    "not-python": ("return", "retrun 1 if", [MOST], None),
    "no-such-test": ("min(x", "max(x", [f"{MOST}_of_all"], None),
    "broken-test": ("min(x", "max(x", ["tests/test_sums.py::test_broken"], None),
    "nothing-runs": ("min(x", "max(x", ["tests/test_sums.py::test_skipped"], None),
}


@pytest.fixture
def bare_pytest(monkeypatch):
    """No plugins in the toy project's runs: they would take most of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def toy_project(folder: Path, names: list[str]) -> Path:
    root = folder / "project"
    for path, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "toy/__init__.py": "",
        "toy/sums.py": SOURCE,
        "tests/test_sums.py": TESTS,
        "tests/mutants/toy.toml": "".join(
            "[[mutant]]\n"
            + "".join(
                f"{key} = {json.dumps(value)}\n"
                for key, value in zip(
                    ("name", "file", "old", "new", "tests", "equivalent"),
                    (name, "toy/sums.py", *TOY[name]),
                )
                if value is not None
            )
            for name in names
        ),
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def run_tool(capsys, *arguments) -> tuple[int, str, dict]:
    code = main_of(MUTANTS.main, [str(a) for a in arguments])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("needs", ["amx", "chromium"])
@pytest.mark.parametrize("there", [False, True])
def test_what_needs_more_is_left_out_where_it_is_absent(
    capsys, tmp_path, monkeypatch, there, needs
):
    root = toy_project(tmp_path, ["no-limit", "unseen"])
    listed = root / "tests" / "mutants" / "toy.toml"
    listed.write_text(listed.read_text() + f'needs = "{needs}"\n')
    monkeypatch.setitem(MUTANTS.PRESENT, needs, lambda: there)
    assert main_of(MUTANTS.main, ["--root", str(root), "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["toy/no-limit", "toy/unseen"][: 1 + there]
    listed.write_text(listed.read_text().replace(f'"{needs}"', '"luck"'))
    with pytest.raises(UserError, match=r"entry 2 \(unseen\): it needs luck: give .*amx"):
        MUTANTS.read_mutants(root)


@pytest.mark.usefixtures("bare_pytest")
def test_each_outcome_is_told_apart(capsys, tmp_path, monkeypatch):
    root = toy_project(tmp_path, list(TOY))
    # Neither the project itself nor an installation of it may stand in for the copy.
    monkeypatch.setenv("PYTHONPATH", str(root))
    code, out, result = run_tool(capsys, "--root", root, "--timeout", 4, "--jobs", 2)
    assert code == 1
    assert result["mutants"] == len(TOY)
    assert result["killed"] == 3
    assert result["survived"] == ["toy/unseen"]
    assert result["equivalent"] == ["toy/same-thing"]
    wrong = ["broken-test", "no-such-line", "no-such-test", "not-python", "not-the-same"]
    wrong += ["nothing-runs", "two-such-lines"]
    assert result["errors"] == [f"toy/{name}" for name in wrong]
    assert re.search(rf"killed +toy/no-limit .*{re.escape(MOST)}$", out, re.MULTILINE)
    assert re.search(r"killed +toy/never-ends .*by timeout", out)
    assert (root / "toy" / "sums.py").read_text() == SOURCE


@pytest.mark.usefixtures("bare_pytest")
def test_survivors_and_errors_decide_the_exit_code(capsys, tmp_path):
    for name, names, code in (
        ("fine", ["no-limit", "same-thing"], 0),
        ("survivor", ["unseen"], 1),
        ("error", ["no-such-line"], 1),
    ):
        root = toy_project(tmp_path / name, names)
        assert run_tool(capsys, "--root", root, "--fresh")[0] == code


def test_mutants_are_chosen_by_name_area_and_slice(capsys, tmp_path):
    root = toy_project(tmp_path, ["no-limit", "unseen", "same-thing"])

    def listed(*arguments: str) -> list[str]:
        assert main_of(MUTANTS.main, ["--root", str(root), "--list", *arguments]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert listed() == ["toy/no-limit", "toy/unseen", "toy/same-thing"]
    assert listed("--only", "un*", "--only", "same-thing") == ["toy/unseen", "toy/same-thing"]
    assert listed("--area", "toy", "--slice", "2/3") == ["toy/unseen"]
    for wrong in (("--area", "none"), ("--slice", "4/3"), ("--slice", "x"), ("--jobs", "0")):
        assert main_of(MUTANTS.main, ["--root", str(root), *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "entry",
    [
        "not toml",
        'mutant = "x"',
        '[[mutant]]\nname = "a"',
        '[[mutant]]\nname="a b"\nfile="f"\nold="x"\nnew="y"\ntests=["t"]',
        '[[mutant]]\nname="a"\nfile="f"\nold="x"\nnew="x"\ntests=["t"]',
        '[[mutant]]\nname="a"\nfile="f"\nold="x"\nnew="y"\ntests=[]',
        '[[mutant]]\nname="a"\nfile="f"\nold="x"\nnew="y"\ntests="t"',
        '[[mutant]]\nname="a"\nfile="f"\nold="x"\nnew="y"\ntests=["t"]\nnote="z"',
        '[[mutant]]\nname="a"\nfile="f"\nold=1\nnew="y"\ntests=["t"]',
        2 * '[[mutant]]\nname="a"\nfile="f"\nold="x"\nnew="y"\ntests=["t"]\n',
    ],
)
def test_a_list_that_is_wrong_is_named(capsys, tmp_path, entry):
    root = toy_project(tmp_path, [])
    (root / "tests" / "mutants" / "wrong.toml").write_text(entry)
    assert main_of(MUTANTS.main, ["--root", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wrong.toml" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_leaves_nothing_behind(tmp_path, number):
    root = toy_project(tmp_path, ["never-ends"])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / "mutants.py", "--root", root, "--timeout", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=temporary,
    )
    source = None
    while process.poll() is None:
        source = next(temporary.glob("mutants-*/*/project/toy/sums.py"), source)
        if source is not None and source.exists() and "x - most" in source.read_text():
            break
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if number == signal.SIGKILL:  # what it has started notices by itself
        deadline = time.monotonic() + 60
        while working_in(temporary) and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        assert process.returncode == 128 + number, err
        assert list(temporary.iterdir()) == []
    assert working_in(temporary) == []


def working_in(folder: Path) -> list[str]:
    """The processes whose working directory is a folder or within it."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        where = process.info["cwd"]
        if where and Path(where).is_relative_to(folder):
            found.append(f"{where}: {process.info['cmdline']}")
    return found


CONFTEST = """
import os

os.environ["JAXTYPING_DISABLE"] = "1"
"""
TELL = """
import json, os, signal, subprocess, sys
import jaxtyping, toy

child = [sys.executable, "-c", "import toy; print(toy.__file__)"]
print(json.dumps({
    "toys": [toy.__file__, subprocess.check_output(child, text=True).strip()],
    "variable, as seen when jaxtyping was imported": jaxtyping.config.jaxtyping_disable,
    "cwd": os.getcwd(),
    "PYTHONPATH": os.environ["PYTHONPATH"],
    "first folder": os.path.abspath(sys.path[0]),
    "other folders": [path for path in sys.path if path not in ("", os.getcwd())],
    "argv": sys.argv,
    "stdin": sys.stdin.read(),
    "own": [os.getpid() == number for number in (os.getsid(0), os.getpgrp())],
    "interruption": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": sorted(os.listdir("/dev/fd")),
}))
print("Ende", file=sys.stderr)
sys.exit(7)
"""


@contextmanager
def toy_forks(root: Path, preload: str = "") -> Iterator:
    """The process whose forks run the toy's tests, with other settings and a conftest.py."""
    (root / "pyproject.toml").write_text(f"[tool.mutants]\npreload = [{preload}]\n")
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    forks = FORKS.Forks(root, dict(os.environ))
    try:
        yield forks
    finally:
        forks.end()


def test_a_fork_is_like_a_process_of_its_own(tmp_path):
    root = toy_project(tmp_path, [])
    output = tmp_path / "output"
    for arguments in (["-c", TELL, "one", "two"], ["-m", "toy.tell", "three"]):
        (root / "toy" / "tell.py").write_text(TELL)
        variables = {"PYTHONPATH": str(root), "JAXTYPING_DISABLE": "1"}
        whole = subprocess.run(
            [sys.executable, *arguments],
            cwd=root,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output.touch()
        with toy_forks(root, '"jaxtyping"') as forks:
            forks.wait_until_ready()
            fork = forks.start(root, arguments, str(output))
            fork.wait()
            assert fork.poll() == whole.returncode == 7
        told, end = output.read_text().splitlines()
        assert json.loads(told) == json.loads(whole.stdout.splitlines()[0])
        assert end == "Ende"


def test_forks_have_what_is_imported_once_and_nothing_of_the_project(tmp_path, capfd):
    root = toy_project(tmp_path, [])
    output = tmp_path / "output"
    output.touch()
    with toy_forks(root, '"jaxtyping", "this"') as forks:  # the latter prints
        forks.wait_until_ready()
        forks.start(
            root, ["-c", "import sys; print('jaxtyping' in sys.modules)"], str(output)
        ).wait()
        assert output.read_text() == "True\n"
        killed = forks.start(root, ["-c", "import os; os.kill(os.getpid(), 9)"], str(output))
        killed.wait()
        assert killed.poll() == -signal.SIGKILL
    (root / "this.py").touch()
    for preload, complaint in (('"toy"', "No module named 'toy'"), ('"this"', "not import this")):
        with toy_forks(root, preload) as forks, pytest.raises(UserError, match="--fresh"):
            forks.wait_until_ready()
        assert complaint in capfd.readouterr().err
