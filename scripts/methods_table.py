"""Write the table of all methods in docs/methods.md from the code, so that it says what runs.

python scripts/methods_table.py             # rewrite the table in docs/methods.md
python scripts/methods_table.py --check     # say whether it is as the code has it
"""

import argparse
from pathlib import Path

from kvjax.cache.methods import METHODS, Method
from kvjax.cache.methods.base import Observation, Representatives
from kvjax.cache.observe import BACKGROUND_QUERIES
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"
HEAD = ("method", "observes", "budget", "selects", "protects", "question", "runs", "rule")
NOTHING = "–"
SOURCES = {"random": "seeded hash", "position": "position", "key-norm": "key norm"}
STATISTICS = {"hits": "hits of an even share", "recency": "last hit and longest interval"}


def observes(observation: Observation | None) -> str:
    """What a method's metric is."""
    if observation is None:
        return NOTHING
    if observation.intrinsic:
        return SOURCES[observation.source]
    window = observation.window
    queries = (
        "all queries" if window is None else f"last {window} quer{'y' if window == 1 else 'ies'}"
    )
    if observation.statistic != "sum":
        return f"{queries}, {STATISTICS[observation.statistic]}"
    power = "p²" if observation.power == 2 else "p"
    decay = f" · {observation.query_decay:g}ⁿ" if observation.query_decay < 1 else ""
    parts = [queries, f"Σ {power}{decay}"]
    if observation.pool > 1:
        where = "" if observation.pool_window else " before the window"
        parts.append(f"{observation.pool_kind} {observation.pool}{where}")
    if observation.excluded_distance:
        parts.append(f"{observation.excluded_distance} apart")
    parts.append(f"heads: {observation.group}{' first' if observation.group_first else ''}")
    if observation.background:
        parts.append(f"+ {observation.background:g} · mean p² of {BACKGROUND_QUERIES}")
    text = ", ".join(parts)
    if observation.reads is not None:
        text += f"; {observation.reads.tokens} tokens read by any head"
    if observation.accumulate:
        decays = observation.decode_decay
        text += {1.0: "; decode adds", 0.0: "; decode replaces"}.get(
            decays, f"; decode decays {decays:g}, adds"
        )
    return text


def budget(method: Method) -> str:
    """How its blocks are split."""
    if not method.compresses:
        return NOTHING
    split = method.allocation
    if split.layers == "global":
        return "global"
    step = "exact" if split.exact else "floored: **more than the cap**"
    layers = {
        "uniform": "even layers",
        "weights": "given layers",
        "pyramid": f"pyramid β {split.beta}, {step}",
    }[split.layers]
    safe = f", {split.floor:g} of each head safe" if split.floor else ""
    heads = {
        "uniform": "even heads",
        "ada": f"Ada heads α {split.floor:g}",
        "cheapest": f"cheapest of layer{safe}",
    }[split.heads]
    return f"{layers}, {heads}"


def stands_in(chosen: Representatives) -> str:
    """Which KVs stand for dropped ones."""
    if chosen.kind == "k-means":
        return f"{100 * chosen.share:.0f} % k-means"
    unit = f" by {chosen.unit}" if chosen.unit > 1 else ""
    mode = ", OpenVINO" if chosen.mode == "openvino" else ""
    return f"{100 * chosen.share:.0f} % KVCrush {chosen.anchor}{unit}{mode}"


def selects(method: Method) -> str:
    """What goes or stays as one."""
    if not method.compresses:
        return NOTHING
    text = "KVs" if method.unit == 1 else f"pages of {method.unit}"
    text += ", same in a layer" if method.shared else ""
    text += ", per query" if method.per_age else ""
    return (
        text if method.representatives is None else f"{text}; {stands_in(method.representatives)}"
    )


def protects(method: Method) -> str:
    """Positions that are never evicted."""
    parts = [f"newest {method.protected}"] if method.protected else []
    if method.protected_share:
        parts.append(f"newest {method.protected_share:g} of the cap")
    if method.sinks:
        parts.append(f"first {method.sinks}")
    return ", ".join(parts) or NOTHING


def row(method: Method) -> tuple[str, ...]:
    """A method's cells, in the order of `HEAD`."""
    return (
        f"`{method.name}`",
        observes(method.observation),
        budget(method),
        selects(method),
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
    first = next(
        (n for n, line in enumerate(lines) if line.startswith("| method | observes")), None
    )
    if first is None:
        raise UserError(f"{PAGE} has no table that begins with '| method | observes'")
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
