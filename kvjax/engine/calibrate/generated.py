"""Calibration texts that are made up: numbers, names, tables, code, letters, turns of a chat.

What a long prompt is asked about later is often such a detail, and books have few of them. Every
text follows from its number alone. None of the wordings and none of the names stand in the
evaluation's own prompts.
"""

from collections.abc import Callable, Sequence

import numpy as np

_FIRST = (
    "Aaron Bianca Chen Dalia Emeka Farida Gunnar Hana Ilya Jorge Keiko Lamar Mirela Nuno Oksana"
)
_FIRST += " Pavel Quentin Rosa Selim Tova Umar Vesna Wanjiru Xavier Yusuf Zofia"
_LAST = (
    "Abbott Brandt Castillo Dubois Eriksen Fischer Gallo Haddad Ivanov Jansen Kowalski Lindqvist"
)
_LAST += " Moreau Nakamura Okafor Petrov Quispe Rossi Schmidt Tran Ueda Vargas Weber Yilmaz Zhang"
_THING = "generator turbine warehouse tractor projector aquarium printing-press greenhouse elevator"
_THING += " compressor satellite reservoir kiln loom seismograph weather-balloon"
_PLACE = (
    "Aarhus Bergamo Cusco Dakar Esfahan Fukuoka Gdansk Halifax Izmir Jaipur Kigali Lviv Mombasa"
)
_PLACE += " Nantes Oaxaca Porto Quito Riga Split Tbilisi Uppsala Valdivia Windhoek Yerevan Zagreb"
_QUALITY = "budget capacity deadline supplier inspector registration colour weight owner warranty"
_QUALITY += " temperature pressure address contact password permit height voltage channel reference"
_COLOUR = "crimson turquoise ivory olive maroon pink silver orange charcoal beige"
_VERB = "repaired inspected sold painted borrowed insured moved catalogued photographed dismantled"
FIRST, LAST, THING, PLACE, QUALITY, COLOUR, VERB = (
    words.split() for words in (_FIRST, _LAST, _THING, _PLACE, _QUALITY, _COLOUR, _VERB)
)


class Draw:
    """Words and numbers of one text."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng((11, seed))

    def of(self, words: Sequence[str]) -> str:
        return words[int(self.rng.integers(len(words)))]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def digits(self) -> str:
        """An identifier of 3 to 16 digits or letters."""
        kind, size = self.number(0, 4), self.number(3, 17)
        if kind == 0:
            size = self.number(4, 9)
            return f"{self.of(LAST)[:2].upper()}-{self.rng.integers(10**size)}"
        if kind == 1:
            return "".join(f"{self.number(0, 16):x}" for _ in range(min(size, 12)))
        first = self.number(1, 10)
        return str(first) + "".join(str(self.number(0, 10)) for _ in range(size - 1))

    def name(self) -> str:
        return f"{self.of(FIRST)} {self.of(LAST)}"

    def date(self) -> str:
        month = self.of(["January", "February", "March", "April", "May", "June", "July", "August"])
        return f"{self.number(1, 29)} {month} {self.number(1900, 2031)}"

    def value(self) -> str:
        kinds: list[Callable[[], str]] = [
            self.digits, self.digits, self.name, self.date,
            lambda: self.of(PLACE), lambda: self.of(COLOUR),
            lambda: f"{self.number(2, 9000)} {self.of(['kg', 'litres', 'euros', 'metres'])}",
            lambda: f"{self.number(1, 100)}.{self.number(0, 100):02d} %",
        ]  # fmt: skip
        return kinds[self.number(0, len(kinds))]()

    def fact(self) -> str:
        """A sentence that says one thing."""
        thing, quality, value = self.of(THING), self.of(QUALITY), self.value()
        forms = (
            f"According to the file, the {quality} for the {thing} in {self.of(PLACE)} is {value}.",
            f"{self.name()} wrote down {value} as the {quality} of the {thing}.",
            f"On {self.date()}, {self.name()} {self.of(VERB)} the {self.of(COLOUR)} {thing}.",
            f"The {thing} belongs to {self.name()}, who lives in {self.of(PLACE)}.",
            f"For questions about the {thing}, call {self.digits()} and ask for {self.of(FIRST)}.",
            f"{quality.capitalize()}: {value} ({self.of(PLACE)}, {self.date()}).",
            f"It was {self.name()} who {self.of(VERB)} the {thing} near {self.of(PLACE)}.",
            f"{value}: this is what the {quality} of every {thing} was set to that year.",
            f"Nobody in {self.of(PLACE)} knew that {self.of(FIRST)} hid {value} in the {thing}.",
        )
        return forms[self.number(0, len(forms))]


def _report(draw: Draw, lines: int) -> str:
    sections = (draw.fact() for _ in range(lines))
    head = f"Report of {draw.name()} on the {draw.of(THING)}, {draw.date()}\n\n"
    return head + " ".join(s + ("\n\n" if draw.number(0, 5) == 0 else "") for s in sections)


def _table(draw: Draw, lines: int) -> str:
    columns = [draw.of(QUALITY) for _ in range(draw.number(2, 5))]
    rows = [f"| item | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for _ in range(lines):
        cells = " | ".join(draw.value() for _ in columns)
        rows.append(f"| {draw.of(THING)} {draw.number(1, 99)} | {cells} |")
    return f"## Inventory of {draw.of(PLACE)}\n\n" + "\n".join(rows)


def _records(draw: Draw, lines: int) -> str:
    rows = []
    for _ in range(lines):
        rows.append(
            f'  {{"id": "{draw.digits()}", "{draw.of(QUALITY)}": "{draw.value()}", '
            f'"person": "{draw.name()}"}}'
        )
    return "[\n" + ",\n".join(rows) + "\n]"


def _code(draw: Draw, lines: int) -> str:
    rows = ["import math", "", ""]
    for _ in range(lines // 3 + 1):
        thing, quality = draw.of(THING).replace("-", "_"), draw.of(QUALITY)
        limit, factor = draw.number(2, 99999), draw.number(2, 99)
        rows += [
            f"def {quality}_of_{thing}(count, limit={limit}):",
            f'    """The {quality} of a {thing}; {draw.name()} asked for it."""',
            f"    if count > limit: raise ValueError('more than {limit}: {draw.digits()}')",
            f"    return math.{draw.of(['sqrt', 'log', 'exp', 'sin'])}(count) * {factor}",
            "", "",
        ]  # fmt: skip
    return "\n".join(rows)


def _talk(draw: Draw, lines: int) -> str:
    first, second = draw.of(FIRST), draw.of(FIRST)
    rows = []
    for number in range(lines):
        who = (first, second)[number % 2]
        opening = draw.of(["Yes.", "Well,", "I see.", "Listen:", "By the way,", "Right.", "No,"])
        rows.append(f"{who}: {opening} {draw.fact()}")
    return "\n".join(rows)


def _questions(draw: Draw, lines: int) -> str:
    rows = []
    for _ in range(lines // 2 + 1):
        thing, quality, value = draw.of(THING), draw.of(QUALITY), draw.value()
        rows.append(f"{draw.fact()} The {quality} of the {thing} is {value}.")
        rows.append(f"Q: What is the {quality} of the {thing}?\nA: {value}")
    return "\n\n".join(rows)


def _letter(draw: Draw, lines: int) -> str:
    body = " ".join(draw.fact() for _ in range(lines))
    return (
        f"{draw.of(PLACE)}, {draw.date()}\n\nDear {draw.name()},\n\n{body}\n\nYours, {draw.name()}"
    )


def _log(draw: Draw, lines: int) -> str:
    rows = []
    for _ in range(lines):
        level = draw.of(["INFO", "WARN", "ERROR", "DEBUG"])
        clock = f"{draw.number(0, 24):02d}:{draw.number(0, 60):02d}:{draw.number(0, 60):02d}"
        rows.append(f"{clock} {level} {draw.of(THING)}[{draw.number(1, 9999)}] {draw.of(QUALITY)}="
                    f"{draw.value()}")  # fmt: skip
    return "\n".join(rows)


PLANTED = 4
"""Facts that are put into a text."""
KINDS = (_report, _table, _records, _code, _talk, _questions, _letter, _log)


def generated_text(number: int, lines: int = 40) -> str:
    """Text `number` (0, 1, …), of a kind in turn; about 30 tokens a line."""
    return KINDS[number % len(KINDS)](Draw(number), lines)


def planted(text: str, number: int) -> str:
    """The text with `PLANTED` made-up facts between its sentences."""
    draw = Draw(10_000 + number)
    sentences = text.split(". ")
    for _ in range(PLANTED):
        sentences.insert(draw.number(0, len(sentences) + 1), draw.fact().rstrip("."))
    return ". ".join(sentences)
