"""What tests of the card's calls share: options, parts and programs that measure nothing."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.card import process
from benchmarks.card.parts import Part


def rehearsal(folder: Path) -> argparse.Namespace:
    """The options of a rehearsal whose results go to a folder."""
    return argparse.Namespace(
        rehearse=True, out=folder, resume=None, only="", seconds=60, attempts=process.ATTEMPTS,
        card="rehearsal", share=0,
    )  # fmt: skip


def part(name: str, **more: Any) -> Part:
    """One that finds nothing out."""
    return Part(name, lambda machine, compiled: {}, **more)


def stand_in(folder: Path, script: str) -> str:
    """A program in Python's place that does this, with OUT as the folder of the results."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\nOUT={folder}\n{script}\n")
    file.chmod(0o755)
    return str(file)
