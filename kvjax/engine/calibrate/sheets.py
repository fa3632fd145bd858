"""Sheets that exercises of the choice are about: tables, records, settings, logs, code, rules.

Much of what is put before a model has rows that look alike, each with names and numbers of its own,
and any row may be asked about. Text with a few planted facts does not teach that.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from kvjax.engine.calibrate.generated import COLOUR, FIRST, LAST, PLACE, QUALITY, THING, VERB, Draw


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a sheet says: that the `column` of `row` is `value`."""

    row: str
    column: str
    value: str


Rows = Iterator[tuple[str, list[Cell]]]
"""Lines, and what each says."""


def _columns(draw: Draw, count: int) -> list[tuple[str, Callable[[], str]]]:
    """Names of columns, and what draws a value of each."""
    kinds: list[Callable[[], str]] = [
        draw.digits, draw.name, draw.date,
        lambda: draw.of(PLACE), lambda: draw.of(COLOUR), lambda: draw.of(VERB),
        lambda: str(draw.number(2, 10_000)), lambda: str(draw.number(2, 100)),
        lambda: f"{draw.number(1, 900)}.{draw.number(0, 100):02d}",
        lambda: f"{draw.number(0, 24):02d}:{draw.number(0, 60):02d}",
        lambda: f"172.{draw.number(16, 32)}.{draw.number(0, 256)}.{draw.number(1, 255)}",
        lambda: f"{draw.of(LAST).lower()}@{draw.of(PLACE).lower()}.example",
        lambda: f"{draw.of(LAST)[:2].upper()}-{draw.number(100, 10_000)}",
    ]  # fmt: skip
    names = draw.rng.permutation(len(QUALITY))[:count]
    return [(QUALITY[at], kinds[draw.number(0, len(kinds))]) for at in names]


def _keys(draw: Draw) -> Iterator[str]:
    """Names of rows, each once, as many as there are."""
    kinds: list[Callable[[], str]] = [
        draw.name,
        lambda: f"{draw.of(COLOUR)} {draw.of(THING)}",
        lambda: f"{draw.of(THING)} {draw.number(1, 100)}",
        lambda: f"{draw.of(PLACE)} {draw.of(THING)}",
    ]
    key, seen = kinds[draw.number(0, len(kinds))], set()
    for _ in range(4 * LINES):
        name = key()
        if name not in seen:
            seen.add(name)
            yield name


def _cells(draw: Draw, least: int, most: int) -> Iterator[list[Cell]]:
    columns = _columns(draw, draw.number(least, most + 1))
    for key in _keys(draw):
        yield [Cell(key, column, value()) for column, value in columns]


def _table(draw: Draw) -> tuple[str, Rows]:
    rows = list(_cells(draw, 2, 4))
    names = [cell.column for cell in rows[0]]
    head = f"| item | {' | '.join(names)} |\n" + "|---" * (len(names) + 1) + "|"
    lines = ((f"| {r[0].row} | {' | '.join(c.value for c in r)} |", r) for r in rows)
    return f"## {draw.of(PLACE)}, {draw.date()}\n\n{head}", lines


def _separated(draw: Draw) -> tuple[str, Rows]:
    rows, mark = list(_cells(draw, 2, 4)), draw.of([",", ";", "\t", ", "])
    head = mark.join(["name", *(cell.column for cell in rows[0])])
    return head, ((mark.join([r[0].row, *(c.value for c in r)]), r) for r in rows)


def _records(draw: Draw) -> tuple[str, Rows]:
    name = draw.of(["name", "id", "item", "key"])

    def line(row: list[Cell]) -> str:
        rest = "".join(f', "{c.column}": "{c.value}"' for c in row)
        return f'  {{"{name}": "{row[0].row}"{rest}}},'

    return "[", ((line(row), row) for row in _cells(draw, 1, 4))


def _nested(draw: Draw) -> tuple[str, Rows]:
    """Blocks of names and values: YAML, INI, cards."""
    head, start, mark = (
        (f"{draw.of(PLACE).lower()}:", "  {}:", "    {}: {}"),
        (f"# {draw.of(PLACE)}", "\n[{}]", "{} = {}"),
        (draw.date(), "\n{}", "{}: {}"),
        ("<list>", "\n<entry name='{}'>", "  <{0}>{1}</{0}>"),
        (f"# {draw.name()}", "\n### {}", "- {}: {}"),
    )[draw.number(0, 5)]

    def line(row: list[Cell]) -> str:
        inner = [mark.format(c.column, c.value) for c in row]
        return "\n".join([start.format(row[0].row), *inner])

    return head, ((line(row), row) for row in _cells(draw, 2, 5))


def _log(draw: Draw) -> tuple[str, Rows]:
    def lines() -> Rows:
        clock = draw.number(0, 30_000)
        for row in _cells(draw, 1, 3):
            clock += draw.number(1, 900)
            at = f"{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}"
            cells = [dataclasses.replace(c, value=c.value.replace(" ", "_")) for c in row]
            said = " ".join(f"{c.column}={c.value}" for c in cells)
            level = draw.of(["INFO", "WARN", "ERROR", "DEBUG"])
            yield f"{at} {level} {row[0].row}: {said}", cells

    return draw.date(), lines()


def _code(draw: Draw) -> tuple[str, Rows]:
    def lines() -> Rows:
        for key in _keys(draw):
            name = f"{draw.of(VERB)}_{key.lower().replace(' ', '_').replace('-', '_')}"
            limit, factor, other = draw.of(QUALITY), str(draw.number(2, 100)), draw.of(FIRST)
            value = str(draw.number(2, 100_000))
            cells = [
                Cell(f"the function {name}", f"default {limit}", value),
                Cell(f"the function {name}", "factor", factor),
                Cell(f"the function {name}", "author", other),
            ]
            body = (
                f"def {name}(items, {limit}={value}):\n"
                f'    """By {other}."""\n'
                f"    if len(items) > {limit}:\n        raise ValueError(items)\n"
                f"    return {factor} * sum(items)\n\n"
            )
            yield body, cells

    return "import math\n\n", lines()


def _settings(draw: Draw) -> tuple[str, Rows]:
    """A name and a value a line."""
    form, upper = (
        ("{} = {}", True), ("export {}={}", True), ("{}: {}", False), ("{} .... {}", False),
        ("const {} = {};", True), ("{} -> {}", False),
    )[draw.number(0, 6)]  # fmt: skip

    def lines() -> Rows:
        for (cell,) in _cells(draw, 1, 1):
            name = f"{cell.row} {cell.column}"
            if upper:
                name = name.upper().replace(" ", "_").replace("-", "_")
            yield form.format(name, cell.value), [Cell(name, "value", cell.value)]

    return f"# {draw.of(PLACE)}", lines()


def _rules(draw: Draw) -> tuple[str, Rows]:
    def lines() -> Rows:
        for number, key in enumerate(_keys(draw), 1):
            who, days, place = draw.name(), str(draw.number(2, 100)), draw.of(PLACE)
            done = draw.of(VERB)
            forms = (
                f"The {key} is {done} every {days} days; {who} sees to it.",
                f"No {key} may be {done} before {who} has waited {days} days.",
                f"In {place} the {key} costs {days} euros a day, and {who} collects them.",
                f"If you come from {place}, give {who} word of the {key} within {days} days.",
            )
            rule = f"rule {number} about the {key}"
            cells = [Cell(rule, "person", who), Cell(rule, "number", days)]
            yield f"{number}. {draw.of(forms)}", cells

    return f"Rules of {draw.of(PLACE)}", lines()


def _talk(draw: Draw) -> tuple[str, Rows]:
    speakers = [draw.of(FIRST) for _ in range(draw.number(2, 4))]

    def lines() -> Rows:
        for number, (cell,) in enumerate(_cells(draw, 1, 1)):
            who, row, column, value = speakers[number % len(speakers)], *dataclasses.astuple(cell)
            forms = (
                f"{who}: The {column} of {row}? That would be {value}.",
                f"{who}: Just a moment. {row} has {value} as its {column}.",
                f"{who}: For {row} write {value}, please; that is the {column}.",
                f"{who}: I thought so, too, but {row} was given another {column}, {value}.",
            )
            yield draw.of(forms), [cell]

    return f"Call of {draw.date()}", lines()


KINDS = (_table, _separated, _records, _nested, _nested, _log, _code, _settings, _rules, _talk)
LINES = 64
"""Lines of a sheet at most."""


def sheet(draw: Draw) -> tuple[str, list[tuple[str, list[Cell]]]]:
    """What stands above a sheet of some kind, its lines, and what each says."""
    head, rows = KINDS[draw.number(0, len(KINDS))](draw)
    return head, list(itertools.islice(rows, LINES))


def question(draw: Draw, cell: Cell, cells: Sequence[Cell]) -> tuple[str, str]:
    """What is asked about one of the cells of a sheet, and the answer."""
    row, column, value = dataclasses.astuple(cell)
    forms = [
        (f"What is the {column} of {row}?", f"The {column} of {row} is {value}."),
        (f"Which {column} does {row} have?", f"{row} has the {column} {value}."),
        (f"Look up the {column} of {row}.", value),
        (f"I need the {column} that is given for {row}.", f"For {row} it is {value}."),
        (f"{row}: what is the {column}?", value),
    ]
    if sum((column, value) == (other.column, other.value) for other in cells) == 1:
        forms.append((f"For which entry is the {column} {value}?", f"That is {row}."))
    return forms[draw.number(0, len(forms))]
