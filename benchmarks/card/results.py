"""Files of results: what became of every part of a call, and which are left to measure."""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks.card.parts import Part

CALLS = {"A": ("check", "kernels"), "B": ("decode", "decode"), "C": ("serve", "throughput")}
"""Module of each call, and the end of its file's name."""
ATTEMPTS = 3
"""Times that a part is tried in all, each time after all others."""
FINAL = "RESOURCE_EXHAUSTED"
"""In an error that the next attempt would have, too."""


class Results:
    """The file of a call: its parts by name."""

    def __init__(self, file: Path, earlier: Path | None = None):
        self.file = file
        read = next((f for f in (file, earlier) if f is not None and f.exists()), None)
        self.content: dict[str, Any] = {"machine": {}, "parts": {}}
        if read is not None:
            self.content = json.loads(read.read_text(encoding="utf-8"))

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        return self.content["parts"]

    def pending(self, parts: tuple[Part, ...], now: str, attempts: int = ATTEMPTS) -> list[Part]:
        """Those to measure that were tried less often: never tried ones first, then those that
        failed."""

        def tried(part: Part) -> int:
            row = self.parts.get(part.name, {})
            return row.get("attempts", 1) if row.get("source") == now else 0

        def fails(part: Part) -> bool:
            error = self.parts[part.name].get("error")
            return error is not None and FINAL not in error and not part.optional

        open_ = [p for p in parts if tried(p) == 0 or (tried(p) < attempts and fails(p))]
        return sorted(open_, key=tried)

    def note(self, part: Part, now: str, found: dict[str, Any]) -> None:
        """Write what was found of a part."""
        before = self.parts.pop(part.name, {})
        attempts = before.get("attempts", 0) if before.get("source") == now else 0
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        more = {"source": now, "date": date, "attempts": attempts + 1}
        if part.optional:
            more["optional"] = True
        self.parts[part.name] = found | more
        self.write()

    def write(self) -> None:
        """Whole or not at all, whatever ends the process."""
        draft = self.file.with_suffix(".draft")
        draft.write_text(
            json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        draft.replace(self.file)


def file_of(call: str, options: argparse.Namespace, folder: Path) -> Path:
    """Where a call's results lie."""
    return folder / f"{options.card}-{CALLS[call][1]}.json"


def results_of(call: str, options: argparse.Namespace) -> Results:
    earlier = None if options.resume is None else file_of(call, options, options.resume)
    return Results(file_of(call, options, options.out), earlier)


def results_of_shares(call: str, options: argparse.Namespace) -> list[Path]:
    """Files of processes that share the parts of a group."""
    return sorted(options.out.glob(f"{file_of(call, options, options.out).stem}.*.json"))


def gather(call: str, options: argparse.Namespace) -> None:
    """Add what processes found that shared a group's parts."""
    results = results_of(call, options)
    before = dict(results.parts)
    for file in results_of_shares(call, options):
        share = Results(file)
        results.content["machine"] = share.content["machine"] or results.content["machine"]
        results.parts.update(
            {name: row for name, row in share.parts.items() if row != before.get(name)}
        )
        results.write()
        file.unlink()
