"""Every task of the evaluation, by name."""

import difflib
from collections.abc import Sequence

from kvjax.errors import UserError
from kvjax.eval.files import text_files
from kvjax.eval.rows import Row
from kvjax.eval.tasks import continuation, datasets, longbench, needles, news, ruler, ruler_files
from kvjax.eval.tasks.base import Context, MakeRows, TaskOptions

TASKS: dict[str, MakeRows] = {
    "needle": needles.needle,
    "passkey": needles.passkey,
    "fact": needles.fact,
    "kv": needles.key_value,
    "list": needles.series,
    "digits16": needles.long_number,
    "phrase9": needles.phrase,
    "five": needles.five,
    "news": news.news,
    "summary": news.summary,
    "ruler-single": ruler.single,
    "ruler-multikey": ruler.multikey,
    "ruler-multivalue": ruler.multivalue,
    "ruler-multiquery": ruler.multiquery,
    "ruler-vt": ruler.variables,
    "ruler-cwe": ruler.common_words,
    "ruler-kv": ruler.long_keys,
    "continuation": continuation.continuation,
    "gsm8k": datasets.gsm8k,
    "xsum": datasets.xsum,
    "longbench": longbench.all_subsets,
    **{
        f"longbench/{subset}{kind}": longbench.one_subset(subset + kind)
        for subset in longbench.METRICS
        for kind in ("", "_e")
    },
    ruler_files.NAME: ruler_files.all_lengths,
    **{
        f"{ruler_files.NAME}/{length}": ruler_files.one_length(length)
        for length in ruler_files.LENGTHS
    },
}
"""What a task is called and what makes its rows."""
GROUPS = {"ruler": [name for name in TASKS if name.startswith("ruler-")]}
"""Names that stand for several tasks."""


def get_task(name: str) -> MakeRows:
    """The task of that name.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, [*TASKS, *GROUPS], n=3, cutoff=0.3) or list(TASKS)
        raise UserError(f"no task {name!r}; did you mean {' or '.join(near)}?")
    return TASKS[name]


def expand_tasks(names: Sequence[str]) -> list[str]:
    """The names with groups such as "ruler" spelled out, each once."""
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, [name])))


def check_data(names: Sequence[str], options: TaskOptions) -> None:
    """Refuse, before there is a model, tasks whose data are not there; no row is read.

    Raises:
        UserError: says which, and what is looked for.
    """
    if options.haystack is not None:
        text_files(options.haystack)
    for name in expand_tasks(names):
        kind, _, part = name.partition("/")
        if kind == "continuation":
            text_files(continuation.source(options))
        elif kind in ("gsm8k", "xsum"):
            datasets.sources(getattr(options, kind), kind)
        elif kind == "longbench":
            longbench.sources(options, part or None)
        elif kind == ruler_files.NAME:
            ruler_files.sources(options, int(part) if part else None)


def make_rows(names: Sequence[str], context: Context) -> list[Row]:
    """The rows of some tasks, in their order.

    Raises:
        UserError: a task is unknown, or lacks the data it needs.
    """
    tasks = [get_task(name) for name in expand_tasks(names)]
    return [row for task in tasks for row in task(context)]


__all__ = [
    "GROUPS",
    "TASKS",
    "Context",
    "TaskOptions",
    "check_data",
    "expand_tasks",
    "get_task",
    "make_rows",
]
