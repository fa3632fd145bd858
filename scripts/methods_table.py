"""Write the table of all methods in docs/methods.md from the code, so that it says what runs.

python scripts/methods_table.py             # rewrite the table in docs/methods.md
python scripts/methods_table.py --check     # say whether it is as the code has it
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from kvjax.cache.methods import METHODS, Method
from kvjax.cache.policy.allocate import MANY_KVS
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"
HEAD = ("method", "scorer", "allocator", "selector", "protects", "question", "runs", "rule")
NOTHING = "–"


def stated(part: Any) -> str:
    """A part of a method with all its settings, as one would write it."""
    if not dataclasses.is_dataclass(part):
        return part if isinstance(part, str) else f"{part}"
    values = [(f.name, getattr(part, f.name)) for f in dataclasses.fields(part)]
    settings = ", ".join(f"{name}={stated(value)}" for name, value in values)
    return f"{type(part).__name__}({settings})"


def protects(method: Method) -> str:
    """Positions that are never evicted."""
    parts = [f"newest {method.protected}"] if method.protected else []
    if method.protected_share:
        more = f" and {method.protected_more:g} of it above {MANY_KVS}"
        share = f"newest {method.protected_share:g} of the cap"
        parts.append(share + more * bool(method.protected_more))
    if method.sinks:
        parts.append(f"first {method.sinks}")
    return ", ".join(parts) or NOTHING


def row(method: Method) -> tuple[str, ...]:
    """A method's cells, in the order of `HEAD`."""
    over = "; **more than the cap**" if method.allocator.overruns else ""
    then = "" if method.merger is None else f", then {stated(method.merger)}"
    does = (stated(method.scorer), stated(method.allocator) + over, stated(method.selector) + then)
    return (
        f"`{method.name}`",
        *(does if method.compresses else (NOTHING,) * 3),
        protects(method),
        "yes" if method.query_aware else "no",
        method.runs,
        method.evidence,
    )


def table() -> str:
    """The table of every method in `METHODS`, in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *map(row, METHODS.values())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def replaced(page: str) -> str:
    """The page with its table as the code has it.

    Raises:
        UserError: the page has no such table.
    """
    lines = page.split("\n")
    first = next((n for n, line in enumerate(lines) if line.startswith("| method | scorer")), None)
    if first is None:
        raise UserError(f"{PAGE} has no table that begins with '| method | scorer'")
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    return "\n".join([*lines[:first], *table().split("\n"), *lines[last:]])


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    options = parser.parse_args(arguments)
    held = PAGE.read_text(encoding="utf-8")
    page = replaced(held)
    if options.check:
        print("as the code has it" if page == held else "differs: run scripts/methods_table.py")
        return int(page != held)
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: {len(METHODS)} methods")
    return 0


if __name__ == "__main__":
    run_script(main)
