"""The peer: a process of another Python, with torch and kvpress."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import UserError

PEER = Path(__file__).with_name("peer.py")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def peer_versions(python: str) -> dict[str, str]:
    """Versions of kvpress, transformers and torch in that Python.

    Raises:
        UserError: it does not run, or lacks one of them; says what to install.
    """
    command = [python, str(PEER), "--versions"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise UserError(
            f"--peer-python {python}: {error.strerror}; give a Python with torch and kvpress"
        ) from error
    except subprocess.CalledProcessError as error:
        why = last_line(error.stderr)
        if why.startswith(("ModuleNotFoundError", "ImportError")):
            why += f"; install it there: {python} -m pip install kvpress torch"
        raise UserError(f"--peer-python {python}: {why}") from error
    return json.loads(last_line(done.stdout))


class PeerProcess:
    """The peer with a model loaded: one job in, one answer out. A context manager."""

    def __init__(self, python: str, folder: Path, script: Path = PEER):
        self._python = python
        self._errors = open(folder / "peer.log", "w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a job.

        Raises:
            UserError: the peer ended; names its last words.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise UserError(
                f"--peer-python {self._python} failed: {last_line(self._errors.read())}"
            )
        return json.loads(line)

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            print("the peer had ended already", file=sys.stderr)
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
