"""What every script of the project does alike: bad input, interruption, progress."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from kvjax.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def main_of(run: Callable[[list[str] | None], int], arguments: list[str] | None = None) -> int:
    """Run a script and return its exit code: 2 with one line for bad input, 130 for Ctrl-C."""
    try:
        return run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_script(run: Callable[[list[str] | None], int]) -> NoReturn:
    """Run a script as the process's last act."""
    code = main_of(run)
    # All is said: a Ctrl-C while the interpreter shuts down would only print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


class Progress:
    """One status line on stderr: rewritten on a terminal, a line per stage elsewhere.

    A context manager: leave it, or call `clear`, before anything else is printed.
    """

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Show a stage; `done` of `total` bytes, tokens or whatever it counts."""
        if self._live:
            share = f" {100 * done // total} %" if total > 1 else ""
            print(f"\r\033[K{stage}{share} …", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(f"{stage} …", file=sys.stderr, flush=True)
        self._stage = stage

    def clear(self) -> None:
        """Take the line away."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
