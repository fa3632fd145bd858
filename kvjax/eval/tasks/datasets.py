"""GSM8K and XSUM from local JSONL files."""

from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.eval.rows import Row, read_jsonl
from kvjax.eval.tasks.base import Context, count_tokens, pick_rows

XSUM_TEXTS, XSUM_SUMMARIES = ("article", "document"), ("summary_gt", "summary")
XSUM_QUESTION = "\n\nSummarize the above article in 1 sentence.\n"


def sources(path: Path | None, name: str) -> list[Path]:
    """A file, or all JSONL files of a folder; none is read.

    Raises:
        UserError: none was given, or the folder has none.
    """
    if path is None:
        raise UserError(f"{name} needs its rows: give --{name} or --data")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if ".jsonl" in file.name)
        if not files:
            raise UserError(f"{path} holds no .jsonl or .jsonl.gz file with rows of {name}")
    return files


def _samples(context: Context, path: Path | None, name: str) -> list[tuple[str, int, Any]]:
    """Every row of a file, or of all JSONL files of a folder, with file name and number."""
    return [
        (file.name, number, values)
        for file in sources(path, name)
        for number, values in read_jsonl(file, context.skipped)
    ]


def _text(values: Any, *names: str) -> str:
    """The first of some fields. Raises ValueError if there is none."""
    found = [values[name] for name in names if isinstance(values, dict) and name in values]
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise ValueError(f"{' or '.join(names)} is missing or no text")
    return found[0]


def gsm8k(context: Context) -> list[Row]:
    """Solved problems as examples up to the prompt's length, then one to solve.

    The answer counts if the number after "####" is right. Examples are other rows of the file.
    """
    options, tokenizer = context.options, context.tokenizer
    solved: dict[str, str] = {}
    for name, number, values in _samples(context, options.gsm8k, "gsm8k"):
        try:
            solved[_text(values, "question")] = _text(values, "answer")
        except ValueError as error:
            context.skipped.add(name, number, str(error))
    problems = list(solved)
    rows = []
    for length in options.lengths:
        for index, asked in enumerate(pick_rows(options, "gsm8k", problems)):
            rng = options.rng("gsm8k", length, index)
            question, prefix = f"Question: {asked}\n", "Answer:"
            room = length - count_tokens(tokenizer, question + prefix)
            examples = ""
            for other in rng.permutation(len(problems)):
                problem = problems[other]
                example = f"Question: {problem}\nAnswer: {solved[problem]}\n\n"
                room -= count_tokens(tokenizer, example)
                if room < 0:
                    break
                if problem != asked:
                    examples += example
            rows.append(
                Row(
                    id=options.id_of("gsm8k", length, index),
                    task="gsm8k",
                    length=length,
                    head="",
                    context=examples or "Problems and their answers.\n\n",
                    question=question,
                    suffix="",
                    answer_prefix=prefix,
                    target=" " + solved[asked],
                    metric="gsm8k",
                    answers=(solved[asked],),
                    max_new_tokens=256,
                    stop=("\n\n", "Question:"),
                )
            )
    return rows


def xsum(context: Context) -> list[Row]:
    """An article and its summary in one sentence, scored by ROUGE-L."""
    options = context.options
    rows = []
    for name, number, values in _samples(context, options.xsum, "xsum"):
        try:
            article, summary = _text(values, *XSUM_TEXTS), _text(values, *XSUM_SUMMARIES)
        except ValueError as error:
            context.skipped.add(name, number, str(error))
            continue
        # Rows of some sources end in the instruction already.
        body, _, after = article.rpartition("\n\n")
        instructed = bool(body) and "summar" in after.lower()
        rows.append(
            Row(
                id=f"xsum/{name}/{number}",
                task="xsum",
                length=0,
                head="",
                context=body if instructed else article,
                question=f"\n\n{after}" if instructed else XSUM_QUESTION,
                suffix="",
                answer_prefix="",
                target=summary,
                metric="rouge-l",
                max_new_tokens=64,
                stop=("###", "\n\n"),
            )
        )
    return pick_rows(options, "xsum", rows)
