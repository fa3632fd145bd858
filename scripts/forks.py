"""Runs of Python that begin with third-party packages imported: forks of one process.

Why: importing pytest, JAX and the rest takes longer than most tests of one mutant. The packages are
those of [tool.mutants] in pyproject.toml. No module of the project is among them, so every run
imports these anew from the folder that it is given. Nothing has used JAX yet: no thread of its
own runs, and no device is chosen.

The process that is forked is this file, run as a script: it reads requests from stdin, a line of
JSON each, and answers with a line on stdout.
    {"folder": …, "arguments": ["-m", "pytest", …], "output": …}   starts a run: its process id
    {"poll": process id}                                           its exit code, null while it runs
When stdin ends, so do the runs.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Forks:
    """The process that is forked, from outside. It is started at once and ready after a while."""

    def __init__(self, root: Path, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, __file__, root],
            env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ready = False

    def wait_until_ready(self) -> None:
        """May be interrupted, unlike what follows.

        Raises:
            UserError: it has ended instead.
        """
        self._ready = self._ready or self._answer()

    def start(self, folder: Path, arguments: Sequence[str], output: str) -> "Fork":
        """Start `python ARGUMENTS` in a folder, which is what it imports from; -m and -c alone."""
        request = {"folder": str(folder), "arguments": list(arguments), "output": output}
        return Fork(self, self.ask(request))

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request; an interruption between the two would lose it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading says more
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            from kvjax.errors import UserError  # the forked process must not know of kvjax

            self._process.wait()  # it may have to say why
            raise UserError("the process whose forks run the tests has ended; try --fresh")
        return json.loads(line)

    def end(self) -> None:
        """End it; its runs have to be ended before."""
        self._process.kill()
        self._process.communicate()


class Fork:
    """A run in the manner of subprocess.Popen."""

    def __init__(self, forks: Forks, pid: int):
        self.pid = pid
        self._forks = forks
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self._forks.ask({"poll": self.pid})
        return self._code

    def wait(self) -> None:
        """Return once it has ended."""
        while self.poll() is None:
            time.sleep(0.002)


def serve(root: Path) -> list[str]:
    """What the process that is forked does. Returns in the forks: their arguments."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    preload(root)
    running: set[int] = set()
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
        _say(answers, True)
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            if pid := request.get("poll"):
                ended, status = os.waitpid(pid, os.WNOHANG)
                running -= {ended}
                _say(answers, os.waitstatus_to_exitcode(status) if ended else None)
            elif pid := os.fork():
                running.add(pid)
            else:
                become(request["folder"], request["output"])
                _say(answers, os.getpid())  # not sooner: its group is there to be ended from now on
                os.close(answers)
                return request["arguments"]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    sys.exit()


def _say(answers: int, answer: Any) -> None:
    os.write(answers, f"{json.dumps(answer)}\n".encode())


def preload(root: Path) -> None:
    """Import what the project names, as its tests would find it."""
    conftest = root / "tests" / "conftest.py"
    if conftest.is_file():
        runpy.run_path(str(conftest))  # sets variables that packages read when they are imported
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    for package in settings.get("tool", {}).get("mutants", {}).get("preload", []):
        importlib.import_module(package)
    own = {path.stem for path in root.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    if own := sorted(own & set(sys.modules)):
        sys.exit(f"error: what is imported before forks must not import {', '.join(own)}")
    if threading.active_count() > 1:
        sys.exit(f"error: forks would lack the threads {threading.enumerate()[1:]}")
    gc.freeze()  # a collection in a fork need not look at all this, and copy it


def become(folder: str, output: str) -> None:
    """Make of a fork what a process started for the folder would be."""
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    for path, mode, number in ((os.devnull, os.O_RDONLY, 0), (output, os.O_WRONLY, 1)):
        opened = os.open(path, mode)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)


def execute(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` runs."""
    kind, what, *rest = arguments
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    execute(serve(Path(sys.argv[1])))
