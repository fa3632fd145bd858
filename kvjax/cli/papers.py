"""The options that `--paper` stands for, of `kvjax evaluate`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.checks import INT32_MAX
from kvjax.cli.rows import choose_methods, find_data, rates_of
from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.eval.papers import PaperTable

SAID = {
    "quick": ("--quick", False),
    "prompts": ("--prompts", []),
    "tasks": ("--tasks", None),
    "length": ("--length", None),
    "protocols": ("--protocols", "chat"),
    "free_tokens": ("--free-tokens", 32),
    "split": ("--split", "test"),
    "floor": ("--floor", 0),
    "block_size": ("--block-size", None),
    "max_new_tokens": ("--max-new-tokens", None),
    "no_answers": ("--no-answers", False),
    "cache_dtypes": ("--kv-dtype", ""),
}
"""Options that a table says itself, and what they are where they were not given."""
ALL_ROWS = INT32_MAX


def chosen_table(options: argparse.Namespace) -> "PaperTable":
    """The table of a paper that was asked for; the other options become what it says.

    Columns that there are no rows of are named and left out.

    Raises:
        UserError: there is no such table, an option was given that it says itself, or there are
            no rows of any of its columns.
    """
    from kvjax.eval.papers import get_table

    table = get_table(options.paper)
    for name, (option, usual) in SAID.items():
        if getattr(options, name) != usual:
            raise UserError(f"--paper {table.name} says that itself: leave out {option}")
    if options.rates is not None and (table.kept or options.methods is None):
        why = "says that itself" if table.kept else "has no rates unless --methods has some"
        raise UserError(f"--paper {table.name} {why}: leave out --rates")
    if options.methods is not None:
        if not table.kept and options.rates is None:
            raise UserError(f"--paper {table.name} has the full cache alone: give --rates, too")
        rates = [] if options.rates is None else rates_of(options.rates)
        table = table.beside(choose_methods(options.methods, calibrated=True), rates)
    folder = find_data(options, [table.task]).get(table.task)
    if folder is None:
        raise UserError(f"--paper {table.name} needs prompts: give --{table.task} or --data")
    there = _columns(table.task, folder)
    lacking = [column for column in table.columns if column not in there]
    if len(lacking) == len(table.columns):
        raise UserError(f"{folder} has no rows of {', '.join(table.columns)}")
    if lacking:
        print(f"no rows in {folder}, so not in the table: {', '.join(lacking)}", file=sys.stderr)
    options.tasks = ",".join(f"{table.task}/{one}" for one in table.columns if one in there)
    options.rows = ALL_ROWS if options.rows is None else options.rows
    options.free_tokens = 0
    return table


def _columns(task: str, folder: Path) -> set[str]:
    """What columns a folder has rows of."""
    from kvjax.eval.tasks.longbench import subset_files
    from kvjax.eval.tasks.ruler_files import ruler_files

    return set(subset_files(folder)) if task == "longbench" else set(map(str, ruler_files(folder)))
