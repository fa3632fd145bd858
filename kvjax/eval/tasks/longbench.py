"""LongBench (Bai et al. 2024) and LongBench-E from a local folder, by its official rules.

The folder holds `dataset2prompt.json` and `dataset2maxlen.json`, itself or below `config/`, and
anywhere below it the subsets as .jsonl or .jsonl.gz with the official fields. Prompts, most new
tokens and metrics are the official ones; the chat template is left out for the few-shot and code
subsets, which begin as the checkpoint's texts do (and for passage_count where a paper's turn stands
in its place, as in KV-Compress's script).
"""

import json
import zlib
from pathlib import Path
from typing import Any

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.eval.files import open_text
from kvjax.eval.rows import Row, read_jsonl
from kvjax.eval.tasks.base import (
    Context,
    MakeRows,
    TaskOptions,
    beginning,
    chat_segments,
    pick_rows,
)

METRICS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa"), "f1"),
    **dict.fromkeys(("2wikimqa", "musique", "triviaqa"), "f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge-l"),
    **dict.fromkeys(("lcc", "repobench-p"), "edit"),
    "trec": "classification",
    "passage_count": "count",
    "passage_retrieval_en": "retrieval",
}
"""Metric of every subset in English and of code."""
FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Subsets of whose answers the first line counts."""
NO_CHAT = (*FIRST_LINE, "lcc", "repobench-p")
CONFIG = ("dataset2prompt.json", "dataset2maxlen.json")


def _config[T](folder: Path, name: str, kind: type[T]) -> dict[str, T]:
    for path in (folder / "config" / name, folder / name):
        if path.is_file():
            try:
                with open_text(path) as file:
                    found = json.load(file)
            except ValueError as error:
                raise UserError(f"{path} is no JSON: {error}") from error
            fits = isinstance(found, dict) and all(type(x) is kind for x in found.values())
            if not fits or (kind is int and min(found.values(), default=1) < 1):
                wanted = "positive whole number" if kind is int else "text"
                raise UserError(f"{path}: wanted an object with a {wanted} for each subset")
            return found
    raise UserError(f"{folder} lacks {name}, LongBench's configuration (also looked in config/)")


def _base(subset: str) -> str:
    """The subset whose prompt and metric a LongBench-E subset shares."""
    return subset.removesuffix("_e")


def subset_files(folder: Path) -> dict[str, list[Path]]:
    """The files of every known subset below a folder.

    Raises:
        UserError: there is none.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.jsonl*")):
        subset = path.name.removesuffix(".gz").removesuffix(".jsonl")
        if _base(subset) in METRICS:
            found.setdefault(subset, []).append(path)
    if not found:
        raise UserError(
            f"{folder} holds no subset of LongBench: files named as {next(iter(METRICS))}.jsonl"
        )
    return found


def _around(context: Context, base: str) -> tuple[str, str]:
    """What stands before and after a prompt: a turn of a chat, or what every text begins with."""
    tokenizer, turn = context.tokenizer, context.options.turn
    plain = base in NO_CHAT or (base == "passage_count" and turn is not None)
    if turn is not None and any(turn):
        known = tokenizer.special_ids.intersection(tokenizer.encode(turn[0]))
        turn = turn if known else None
    if plain or turn == ("", ""):
        return beginning(tokenizer), ""
    return chat_segments(tokenizer) if turn is None else turn


def _most_tokens(options: TaskOptions, max_new: int) -> int | None:
    """Most tokens of a prompt whose answer may have `max_new`; None for no limit."""
    limits = [options.prompt_tokens] if options.prompt_tokens is not None else []
    if options.prompt_and_answer is not None:
        limits.append(options.prompt_and_answer - max_new)
    return min(limits, default=None)


def _row(context: Context, subset: str, values: Any, prompt: str, max_new: int) -> Row:
    """One row of a subset as a prompt. Raises ValueError where a field is missing or wrong."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    for name in ("context", "input"):
        if not isinstance(values.get(name), str):
            raise ValueError(f"{name} is missing or no text")
    answers, classes = values.get("answers"), values.get("all_classes") or []
    if not isinstance(answers, list) or not answers:
        raise ValueError("answers is missing or empty")
    for name, texts in (("answers", answers), ("all_classes", classes)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} {shown(texts)} is no list of texts")
    base = _base(subset)
    before, found, after = prompt.partition("{context}")
    if not found:
        raise ValueError(f"the prompt of {base} has no {{context}}")
    body = before + values["context"]
    question = after.replace("{input}", values["input"])
    head, suffix = _around(context, base)
    # A text that goes on after the prompt begins with a blank, an answer of its own does not.
    space = "" if suffix or question[-1:].isspace() else " "
    digest = zlib.crc32((values["context"] + "\0" + values["input"]).encode())
    return Row(
        id=f"longbench/{subset}/{digest:08x}",
        task=f"longbench/{subset}",
        length=0,
        head=head,
        context=body,
        question=question,
        suffix=suffix,
        answer_prefix="",
        target=space + answers[0],
        metric=METRICS[base],
        answers=tuple(answers),
        classes=tuple(classes),
        max_new_tokens=max_new,
        stop=("\n",) if base in FIRST_LINE else (),
        most_tokens=_most_tokens(context.options, max_new),
    )


def sources(options: TaskOptions, wanted: str | None) -> dict[str, tuple[str, int, list[Path]]]:
    """Prompt, most new tokens and files of one subset, or of all that there are; no row is read.

    Raises:
        UserError: the folder was not given or lacks what is needed.
    """
    folder = options.longbench
    if folder is None:
        raise UserError("LongBench needs its rows: give --longbench or --data")
    prompts, lengths = _config(folder, CONFIG[0], str), _config(folder, CONFIG[1], int)
    files = subset_files(folder)
    if wanted is not None and wanted not in files:
        raise UserError(f"{folder} lacks {wanted}.jsonl; it has {', '.join(files)}")
    found = {}
    for subset in files if wanted is None else (wanted,):
        base = _base(subset)
        if base not in prompts or base not in lengths:
            raise UserError(f"{folder}: {' or '.join(CONFIG)} says nothing of {base}")
        found[subset] = (prompts[base], lengths[base], files[subset])
    return found


def subset_rows(context: Context, wanted: str | None) -> list[Row]:
    """Rows of one subset, or of all that there are.

    Raises:
        UserError: as `sources`.
    """
    rows = []
    for subset, (prompt, max_new, paths) in sources(context.options, wanted).items():
        ready: dict[str, Row] = {}
        for path in paths:
            for number, values in read_jsonl(path, context.skipped):
                try:
                    row = _row(context, subset, values, prompt, max_new)
                except ValueError as error:
                    context.skipped.add(path.name, number, str(error))
                else:
                    # The same sample may be in several files.
                    ready.setdefault(row.id, row)
        rows += pick_rows(context.options, subset, list(ready.values()))
    return rows


def all_subsets(context: Context) -> list[Row]:
    """Every subset that the folder has."""
    return subset_rows(context, None)


def one_subset(subset: str) -> MakeRows:
    """The task of one subset."""
    return lambda context: subset_rows(context, subset)
