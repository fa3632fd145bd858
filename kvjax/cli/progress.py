"""Progress on stderr: callbacks that the layers below call and never import."""

import sys
import time

SAY_EVERY = 30.0
"""Seconds between two lines of progress where no terminal shows them in place."""


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


class TimeLeft:
    """Progress of a long run: what is done of it, and how long the rest will take."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._start, self._said = time.perf_counter(), -SAY_EVERY
        self._first, self._total = 0, -1
        self._live = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say what is being done, after `done` of `total` results."""
        now = time.perf_counter()
        if total != self._total:
            # Another stage, or one that goes on where it was.
            self._start, self._first, self._total = now, done, total
        if not self._live and now - self._said < SAY_EVERY:
            return
        self._said = now
        left = ""
        if done > self._first:
            each = (now - self._start) / (done - self._first)
            left = f", {spell(each * (total - done))} left"
        self._progress(f"{done}/{total}{left}: {what}")


def spell(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
