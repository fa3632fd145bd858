"""Progress of downloads and loading on stderr, for command lines."""

import sys
from typing import TextIO


class ProgressLine:
    """A `Progress` callback: one line that is rewritten; in a log, one line per step.

    Leave it (as a context manager) before anything else is printed.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.rewrite = self.stream.isatty()
        self.step = ""
        self.text = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of the step `what` are there."""
        if not self.rewrite:
            if what != self.step:
                print(f"{what} …", file=self.stream, flush=True)
        else:
            text = f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            if text != self.text:
                print(f"\r{text:<{len(self.text)}}", end="", file=self.stream, flush=True)
                self.text = text
        self.step = what

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.text:
            print(file=self.stream, flush=True)
            self.text = ""
