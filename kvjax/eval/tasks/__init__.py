"""Every task of the evaluation, by name."""

import difflib
from collections.abc import Sequence

from kvjax.errors import UserError
from kvjax.eval.rows import Row
from kvjax.eval.tasks import needles
from kvjax.eval.tasks.base import Context, MakeRows, TaskOptions

TASKS: dict[str, MakeRows] = {
    "needle": needles.needle,
    "passkey": needles.passkey,
    "fact": needles.fact,
    "kv": needles.key_value,
}


def get_task(name: str) -> MakeRows:
    """The task of that name.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.3) or list(TASKS)
        raise UserError(f"no task {name!r}; did you mean {' or '.join(near)}?")
    return TASKS[name]


def make_rows(names: Sequence[str], context: Context) -> list[Row]:
    """The rows of some tasks, in their order.

    Raises:
        UserError: a task is unknown, or lacks the data it needs.
    """
    tasks = [get_task(name) for name in names]
    return [row for task in tasks for row in task(context)]


__all__ = ["TASKS", "Context", "TaskOptions", "get_task", "make_rows"]
