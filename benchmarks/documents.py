"""What a model says about documents, with its whole cache and with compressed ones, side by side.

Three documents of this repository with three questions each (examples/documents/), and summaries of
real texts: a chapter of the Python documentation, a licence, the documentation of the server.
Answers are free, greedy ones to a chat request; a question's is right if it holds what
questions.toml says. For reading: the page shows every answer.

    python -m benchmarks.documents                  # SmolLM2, 4x, 8x, 16x; writes docs/answers.md
    python -m benchmarks.documents --summaries report.txt --out mine.md
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax.cache.config import CALIBRATED
from kvjax.checks import check_whole
from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    check_output_file,
    load_chosen_model,
    run_script,
)
from kvjax.cli.models import add_calibration_option, check_model_options, chosen_calibration
from kvjax.cli.progress import TimeLeft
from kvjax.cli.rows import choose_methods, rates_of
from kvjax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ROOT / "examples" / "documents"
PAGE = ROOT / "docs" / "answers.md"
FLOOR = 16
"""Tokens' worth of KVs that stay at least: with more, or with blocks of 16, short documents reach
other rates than they are asked to."""
CHAPTER = "exceptions"
"""Of the Python documentation, as pydoc has it."""
REAL = (ROOT / "LICENSE", ROOT / "docs" / "serving.md")
SUMMARISE = "Summarise this text in three sentences."
MOST_TOKENS = 1600
"""Of a text that is summarised, from its beginning."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request about a document."""

    document: str
    text: str
    asks: str
    says: tuple[str, ...] = ()
    """What a right answer holds one of; none where nobody can say."""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def questions() -> list[Ask]:
    """Those of examples/documents/questions.toml."""
    rows = tomllib.loads(_read(DOCUMENTS / "questions.toml"))["question"]
    return [
        Ask(row["document"], _read(DOCUMENTS / row["document"]), row["asks"], tuple(row["says"]))
        for row in rows
    ]


def summaries(paths: Sequence[Path] | None) -> list[Ask]:
    """Requests for summaries of these files, or of the texts that are everywhere."""
    found = []
    if paths is None:
        from pydoc_data.topics import topics

        found.append(Ask(f"Python documentation: {CHAPTER}", topics[CHAPTER], SUMMARISE))
        paths = REAL
    found += [Ask(path.name, _read(path), SUMMARISE) for path in paths]
    return found


def prompt_of(ask: Ask, tokenizer: Any) -> list[int]:
    """The chat request; of a longer text its first MOST_TOKENS tokens."""
    text = ask.text
    if len(tokens := tokenizer.encode(text)) > MOST_TOKENS:
        text = tokenizer.decode(tokens[:MOST_TOKENS])
    return tokenizer.chat([{"role": "user", "content": f"{text}\n\n{ask.asks}"}])


def right(ask: Ask, answer: str) -> bool | None:
    """Whether an answer holds what it should; None where that is not said."""
    if not ask.says:
        return None
    return any(one.casefold() in answer.casefold() for one in ask.says)


def page(rows: Sequence[dict[str, Any]], options: argparse.Namespace, model: str) -> str:
    """A Markdown page of all answers."""
    asked = [row for row in rows if row["right"] is not None]
    rates = (1.0, *options.rates)
    titles = ["full cache" if rate == 1 else f"{rate:g}×" for rate in rates]
    right_ones = [sum(row["right"] for row in asked if row["rate"] == rate) for rate in rates]
    count = len(asked) // len(rates)
    lines = [
        "# Answers to read",
        "",
        f"Written by `python -m benchmarks.documents`. {model}, `{options.method}`,",
        f"greedy answers of at most {options.tokens} tokens to chat requests, blocks of",
        f"{options.block_size}; text and request are compressed together. ✓ and ✗: whether an",
        "answer holds what the document says. What the full cache gets wrong, too, is the model's",
        "fault.",
        "",
        f"| of {count} questions, right | " + " | ".join(titles) + " |",
        "| --- |" + " --- |" * len(titles),
        "| | " + " | ".join(map(str, right_ones)) + " |",
    ]
    last, marks = None, {True: "✓", False: "✗", None: ""}
    for row in rows:
        if (row["document"], row["asks"]) != last:
            last = (row["document"], row["asks"])
            lines += ["", f"## {row['document']} ({row['tokens']} tokens)", "", f"*{row['asks']}*"]
            lines += ["", "| | reached | answer |", "| --- | --- | --- |"]
        answer = " ".join(row["answer"].split()).replace("|", "\\|").replace("<", "&lt;")
        name, mark = titles[rates.index(row["rate"])], marks[row["right"]]
        lines.append(f"| {name} | {row['reached_rate']:.1f}× | {mark} {answer} |")
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    add = parser.add_argument
    add_model_options(parser)
    add_calibration_option(parser)
    add("--method", default=CALIBRATED, help="(%(default)s)")
    add("--rates", default="4,8,16", help="(%(default)s)")
    add("--block-size", type=int, default=8, help="KVs of a block (%(default)s)")
    add("--tokens", type=int, default=96, help="of an answer at most (%(default)s)")
    add("--summaries", nargs="*", type=Path, metavar="FILE", help="texts instead of the usual ones")
    add("--out", type=Path, default=PAGE, help="the page (docs/answers.md)")
    add("--rows", type=Path, help="a JSONL file for the answers, too")
    options = parser.parse_args(arguments)
    check_model_options(options)
    check_whole("--tokens", options.tokens, 1, 4096)
    (options.method,) = choose_methods(options.method)
    options.rates = rates_of(options.rates)
    for name, path in (("--out", options.out), ("--rows", options.rows)):
        if path is not None:
            check_output_file(name, path)
    return options


def answers(
    llm: Any, asks: Sequence[Ask], options: argparse.Namespace, progress: Progress
) -> Iterator[dict[str, Any]]:
    """A row per request and rate, 1 for the full cache."""
    from kvjax import CompressionConfig, SamplingParams

    sampling, left = SamplingParams(max_tokens=options.tokens), TimeLeft(progress)
    pairs = [(ask, rate) for ask in asks for rate in (1.0, *options.rates)]
    for done, (ask, rate) in enumerate(pairs):
        left(f"{ask.document} at {rate:g}×", done, len(pairs))
        method = options.method if rate > 1 else "full"
        asked = CompressionConfig(method=method, rate=rate, floor=FLOOR)
        (output,) = llm.generate([prompt_of(ask, llm.model.tokenizer)], sampling, asked)
        if output.error is not None:
            raise UserError(f"{ask.document} at {rate:g}×: {output.error}")
        yield {
            "document": ask.document,
            "asks": ask.asks,
            "tokens": len(output.prompt_token_ids),
            "rate": rate,
            "reached_rate": round(output.stats.rate, 2),
            "answer": output.text.strip(),
            "right": right(ask, output.text),
        }


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    asks = questions() + summaries(options.summaries)

    from kvjax import LLM, EngineConfig
    from kvjax.cache import get_method

    with Progress() as progress:
        model, _ = load_chosen_model(options, progress)
        calibration = chosen_calibration(options, model, [get_method(options.method)], progress)
        longest = max(len(prompt_of(ask, model.tokenizer)) for ask in asks) + options.tokens
        sizes = EngineConfig(
            max_batch=1,
            max_len=longest,
            pool_tokens=longest + 64,
            block_size=options.block_size,
        )
        llm = LLM(model, config=sizes, calibration=calibration or "none")
        rows = list(answers(llm, asks, options, progress))
    options.out.write_text(page(rows, options, model.config.name), encoding="utf-8")
    if options.rows is not None:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} answers: {options.out}")
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
