"""What the choice is trained on: contexts in a user's turn, and what is said behind them.

Facts are planted in the calibration texts. Behind a context come questions about them and their
answers, and a passage of the text that is quoted, or with which it goes on. In a third of the
exercises a question stands in the compressed context itself, and the answer follows. Where sheets
are asked for, some contexts are rows of tables, records or code (`kvjax.engine.calibrate.sheets`).
No wording and no name is the evaluation's.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.engine.calibrate.generated import (
    COLOUR,
    FIRST,
    PLACE,
    QUALITY,
    THING,
    VERB,
    Draw,
)
from kvjax.engine.calibrate.sheets import question, sheet
from kvjax.errors import UserError
from kvjax.models.chat import ANY_DAY
from kvjax.models.tokenizer import Tokenizer

SHEETS = 4
"""Every so manyth context is a sheet, where they are asked for."""
ASKED = 2
"""Facts that are asked about behind one context."""
SAID, SAID_INSIDE = 64, 24
"""Tokens said behind a context at most: with the question, and where that is in the context."""
SAID_MOSTLY = 56
"""Tokens said there that are mostly enough."""
QUOTED = 32
"""Tokens of a passage that is quoted."""
GOING_ON = 48
"""Tokens of the text that follow a context."""
OPENING = 8
"""Tokens of it that the request gives."""
REQUESTS = (
    '\n\nQuote the passage that begins with "{}".',
    '\n\nHow does the text go on after "{}"?',
    '\n\nContinue: "{}"',
)


@dataclasses.dataclass(frozen=True)
class Exercise:
    """A context that is compressed, and what is said behind it."""

    context: list[int]
    """Token ids."""
    said: list[list[int]]
    """Token ids behind the context, each of these by itself."""
    first: list[int]
    """The first token of each behind which the next one counts."""

    def padded(
        self, tokens: int
    ) -> tuple[np.ndarray, np.int32, np.ndarray, np.ndarray, np.ndarray]:
        """Context [T], its length, what is said [N, C], which of it count [M], and how much [M].

        Each size is of a few, as all of them are compiled for. T is `tokens` or three quarters of
        them. N is 1 and C `SAID_INSIDE` where the question is in the context, else `ASKED` + 1 and
        `SAID` or `SAID_MOSTLY`. Which count are indices into N · C, padded with 0 that count
        nothing; M is half of N · C or all of it. Tokens of a row count alike, and so do rows: 1
        together.
        """
        room = _first_of(len(self.context), 3 * tokens // 4, tokens)
        context = np.pad(self.context, (0, room - len(self.context))).astype(np.int32)
        longest = max(map(len, self.said))
        shape = (ASKED + 1, _first_of(longest, SAID_MOSTLY, SAID))
        if len(self.said) == 1:
            shape = (1, SAID_INSIDE)
        said, share = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, (ids, first) in enumerate(zip(self.said, self.first)):
            ids = ids[: shape[1]]
            said[row, : len(ids)] = ids
            # Behind the last token, too: there the model says whether it is done.
            share[row, first : len(ids)] = 1 / (shape[0] * max(1, len(ids) - first))
        (which,) = np.nonzero(share.ravel())
        room = _first_of(len(which), said.size // 2, said.size)
        at = np.pad(which, (0, room - len(which))).astype(np.int32)
        counts = np.pad(share.ravel()[which], (0, room - len(which)))
        return context, np.int32(len(self.context)), said, at, counts


def _first_of(count: int, *rooms: int) -> int:
    """The first that holds so many, or the last."""
    return next((room for room in rooms if room >= count), rooms[-1])


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence, what may be asked of it, and the answer."""

    statement: str
    question: str
    answer: str
    told: str
    """What of the statement answers the question."""

    @property
    def parts(self) -> tuple[str, str, str]:
        """The statement: what comes before that, it, and what follows; words with the space before
        them."""
        at = self.statement.index(f" {self.told}")
        end = at + 1 + len(self.told)
        return f" {self.statement[:at]}", self.statement[at:end], f"{self.statement[end:]} "


def drawn_fact(draw: Draw) -> Fact:
    """A made-up fact of one of ten forms."""
    thing, quality, value = draw.of(THING), draw.of(QUALITY), draw.value()
    name, place, number = draw.name(), draw.of(PLACE), draw.digits()
    colour, other = draw.of(COLOUR), draw.of(COLOUR)
    done, day, first = draw.of(VERB), draw.date(), draw.of(FIRST)
    forms = (
        (f"The {quality} of the {thing} is {value}.",
         f"What is the {quality} of the {thing}?",
         f"The {quality} of the {thing} is {value}.", value),
        (f"{name} wrote down {number} as the {quality} of the {thing}.",
         f"What did {name} write down as the {quality} of the {thing}?",
         f"{name} wrote down {number}.", number),
        (f"The {thing} belongs to {name}, who lives in {place}.",
         f"Who owns the {thing}?",
         f"The {thing} belongs to {name}.", name),
        (f"The {thing} belongs to {name}, who lives in {place}.",
         f"Where does {name} live?",
         f"{name} lives in {place}.", place),
        (f"For questions about the {thing}, call {number} and ask for {name}.",
         f"Which number should be called for questions about the {thing}?",
         f"For questions about the {thing}, call {number}.", number),
        (f"In {place}, the {thing} was {done} by {name}.",
         f"Who dealt with the {thing} in {place}?",
         f"It was {name}.", name),
        (f"{first} hid {value} in the {thing}.",
         f"What was hidden in the {thing}?",
         f"In the {thing}, {value} was hidden.", value),
        (f"Remember that the {quality} is {number}; once more, the {quality} is {number}.",
         f"Tell me the {quality}.",
         f"The {quality} is {number}.", number),
        (f"{quality} {colour}: {number}\n{quality} {other}: {draw.digits()}.",
         f"What is the {quality} {colour}?",
         f"The {quality} {colour} is {number}.", number),
        (f"The {thing} in {place} was painted {colour} on {day}.",
         f"Which colour was the {thing} in {place} painted?",
         f"The {thing} was painted {colour}.", colour),
    )  # fmt: skip
    return Fact(*forms[draw.number(0, len(forms))])


@dataclasses.dataclass(frozen=True)
class Setting:
    """A context in a user's turn, before anything is asked."""

    context: list[int]
    """Token ids."""
    begins: int
    """How many of them are the template's."""
    suffix: str
    """What the template puts behind what the user says."""
    facts: list[Fact]
    """What was planted in it."""
    inside: bool
    """Whether the question is to stand in it."""
    behind: list[int]
    """How its text goes on."""
    draw: Draw
    """For what follows."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        number: int,
        tokens: int,
        sheets: bool = False,
    ) -> "Setting":
        """That of exercise `number`; arguments and errors as of `exercise`."""
        draw = Draw(50_000 + number)
        head, suffix = turn_of(tokenizer)
        text = texts[number % len(texts)]
        if number >= len(texts):
            # The second time a text begins elsewhere.
            text = text[draw.number(0, max(1, len(text) // 2)) :]
        if sheets and draw.number(0, SHEETS) == 0:
            return cls._of_sheet(tokenizer, text, draw, tokens)
        facts = [drawn_fact(draw) for _ in range(draw.number(2, 6))]
        inside = draw.number(0, 3) == 0
        room = tokens - sum(len(tokenizer.encode(fact.statement)) + 2 for fact in facts) - 60
        size = max(16, draw.number(room // 3, max(room, room // 3 + 1)))
        ids = tokenizer.encode(text[: 16 * (size + GOING_ON)])
        sentences = tokenizer.decode(ids[:size]).split(". ")
        behind = ids[size : size + GOING_ON]
        for fact in facts:
            sentences.insert(draw.number(0, len(sentences) + 1), fact.statement.rstrip("."))
        context = tokenizer.encode(head + ". ".join(sentences))
        begins = len(tokenizer.encode(head))
        return cls(context[:tokens], begins, suffix, facts, inside, behind, draw)

    @classmethod
    def _of_sheet(cls, tokenizer: Tokenizer, text: str, draw: Draw, tokens: int) -> "Setting":
        """That of a sheet, which in a third of them stands behind the beginning of a text."""
        head, suffix = turn_of(tokenizer)
        inside = draw.number(0, 3) == 0
        room = draw.number(tokens // 3, tokens - 60)
        above, rows = sheet(draw)
        if draw.number(0, 3) == 0:
            ids = tokenizer.encode(text[: 16 * room])[: draw.number(16, room // 2)]
            above = f"{tokenizer.decode(ids)}\n\n{above}"
        lines, cells = [head + above], []
        used = len(tokenizer.encode(lines[0]))
        for line, said in rows:
            used += len(tokenizer.encode(line)) + 1
            if used > room and cells:
                break
            lines.append(line)
            cells += said
        asked = [cells[at] for at in draw.rng.permutation(len(cells))[:ASKED]]
        facts = [Fact(cell.value, *question(draw, cell, cells), cell.value) for cell in asked]
        context, begins = tokenizer.encode("\n".join(lines)), len(tokenizer.encode(head))
        return cls(context[:tokens], begins, suffix, facts, inside, [], draw)

    def asked(self, tokenizer: Tokenizer, question: str) -> list[int]:
        """A question behind the context, and the end of the user's turn."""
        return tokenizer.encode(f"\n\n{question}{self.suffix}", goes_on=True)

    def answered(
        self, tokenizer: Tokenizer, tokens: int, asked: list[list[int]], answers: list[list[int]]
    ) -> Exercise:
        """The exercise of these questions and answers: of the first alone where that is to stand
        in the context, else of all, and a passage of the text beside them."""
        if self.inside:
            question, answer = asked[0], answers[0]
            return Exercise(self.context[: tokens - len(question)] + question, [answer], [0])
        said = [question + answer for question, answer in zip(asked, answers)]
        first = [len(question) - 1 for question in asked]
        passage, begins = self._passage(tokenizer)
        return Exercise(self.context, [*said, passage], [*first, begins])

    def _passage(self, tokenizer: Tokenizer) -> tuple[list[int], int]:
        """How the text goes on, or the request to quote some of it and that; and the token of it
        behind which the next one counts."""
        draw, context = self.draw, self.context
        if len(self.behind) == GOING_ON and draw.number(0, 2) == 0:
            return self.behind, 0
        at = draw.number(self.begins, max(self.begins + 1, len(context) - OPENING - QUOTED))
        opening, passage = np.split(np.asarray(context[at : at + OPENING + QUOTED]), [OPENING])
        request = REQUESTS[draw.number(0, len(REQUESTS))].format(tokenizer.decode(opening.tolist()))
        question = tokenizer.encode(request + self.suffix, goes_on=True)
        # All of it is what counts: a long request loses its beginning.
        question = question[-(SAID - len(passage)) :]
        return question + passage.tolist(), len(question) - 1


def exercise(
    tokenizer: Tokenizer, texts: Sequence[str], number: int, tokens: int, sheets: bool = False
) -> Exercise:
    """Exercise `number` (0, 1, …), which follows from it and the texts alone.

    Args:
        tokenizer: the model's.
        texts: what contexts are made of, in turn.
        number: which.
        tokens: of a context at most, template and question included.
        sheets: whether every `SHEETS`th context is a sheet.

    Raises:
        UserError: the chat template does not show what the user says.
    """
    at = Setting.of(tokenizer, texts, number, tokens, sheets)
    facts = at.facts[:ASKED]
    asked = [at.asked(tokenizer, fact.question) for fact in facts]
    answers = [tokenizer.encode(fact.answer) for fact in facts]
    return at.answered(tokenizer, tokens, asked, answers)


def turn_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """What a chat template puts before and after what the user says.

    Raises:
        UserError: it does not show what the user says.
    """
    # No blank space in it, which templates may trim.
    mark = "\u2045text\u2046"
    text = tokenizer.render_chat([{"role": "user", "content": mark}], as_of=ANY_DAY)
    head, found, suffix = text.partition(mark)
    if not found:
        raise UserError("the chat template does not show what the user says")
    return head, suffix
