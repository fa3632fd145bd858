"""RULER's own 13 tasks (Hsieh et al. 2024), from the files that its scripts write.

The folder holds, at any depth, LENGTH/…/TASK/NAME.jsonl (or .jsonl.gz) with the fields `input`,
`outputs` and perhaps `answer_prefix`: what its prepare.py saves. Prompts are as they are there, a
chat template included; most new tokens and metrics are those of the paper's scripts.
"""

import zlib
from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.eval.rows import Row, read_jsonl
from kvjax.eval.tasks.base import Context, MakeRows, TaskOptions, beginning, pick_rows

NEW_TOKENS = {
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), 128),
    **dict.fromkeys(("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), 128),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery"), 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
"""Most tokens of an answer to every task."""
LENGTHS = tuple(4096 * 2**n for n in range(6))
"""Of the paper's prompts, their answers included."""
NAME = "ruler13"


def ruler_files(folder: Path) -> dict[int, dict[str, list[Path]]]:
    """The files of every length and task below a folder.

    Raises:
        UserError: there is none.
    """
    found: dict[int, dict[str, list[Path]]] = {}
    for path in sorted(folder.rglob("*.jsonl*")):
        *above, task = path.relative_to(folder).parts[:-1] or ("",)
        lengths = [int(part) for part in above if part.isdecimal()]
        if task in NEW_TOKENS and lengths and path.name.endswith((".jsonl", ".jsonl.gz")):
            found.setdefault(lengths[-1], {}).setdefault(task, []).append(path)
    if not found:
        raise UserError(
            f"{folder} holds no task of RULER: files such as 4096/niah_single_1/validation.jsonl"
        )
    return dict(sorted(found.items()))


def _row(context: Context, length: int, task: str, values: Any) -> Row:
    """One sample as a prompt. Raises ValueError where a field is missing or wrong."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    text, prefix = values.get("input"), values.get("answer_prefix", "")
    if not isinstance(text, str) or not isinstance(prefix, str):
        raise ValueError("input or answer_prefix is missing or no text")
    outputs = values.get("outputs")
    if not isinstance(outputs, list) or not outputs or not all(outputs):
        raise ValueError("outputs is missing or empty")
    answers = tuple(map(str, outputs))
    first = beginning(context.tokenizer)
    asks = task.startswith("qa")
    return Row(
        id=f"{NAME}/{length}/{task}/{zlib.crc32(text.encode()):08x}",
        task=f"{NAME}/{length}/{task}",
        length=length,
        head="" if text.startswith(first) else first,
        context=text,
        question="",
        suffix="",
        answer_prefix=prefix,
        target=" " + (answers[0] if asks else ", ".join(answers)),
        metric="contains" if asks else "contains-all",
        answers=answers,
        max_new_tokens=NEW_TOKENS[task],
    )


def sources(options: TaskOptions, wanted: int | None) -> dict[int, dict[str, list[Path]]]:
    """The files of every task of one length, or of all that there are; no row is read.

    Raises:
        UserError: the folder was not given or lacks what is needed.
    """
    folder = options.ruler13
    if folder is None:
        raise UserError(f"{NAME} needs RULER's files: give --ruler13 or --data")
    files = ruler_files(folder)
    if wanted is not None and wanted not in files:
        there = ", ".join(map(str, files))
        raise UserError(f"{folder} has no prompts of {wanted} tokens; it has those of {there}")
    return files if wanted is None else {wanted: files[wanted]}


def rows_of_length(context: Context, wanted: int | None) -> list[Row]:
    """Rows of one length, or of all that there are.

    Raises:
        UserError: as `sources`.
    """
    rows = []
    for length, tasks in sources(context.options, wanted).items():
        for task, paths in tasks.items():
            ready: dict[str, Row] = {}
            for path in paths:
                for number, values in read_jsonl(path, context.skipped):
                    try:
                        row = _row(context, length, task, values)
                    except ValueError as error:
                        context.skipped.add(f"{task}/{path.name}", number, str(error))
                    else:
                        ready.setdefault(row.id, row)
            rows += pick_rows(context.options, f"{length}/{task}", list(ready.values()))
    return rows


def all_lengths(context: Context) -> list[Row]:
    """Every length that the folder has."""
    return rows_of_length(context, None)


def one_length(length: int) -> MakeRows:
    """The task of one length."""
    return lambda context: rows_of_length(context, length)
