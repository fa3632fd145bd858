"""The options that `--paper` stands for, of `kvjax evaluate`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.rows import choose_methods, find_data
from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.eval.papers import PaperTable

SAID = {
    "quick": ("--quick", False),
    "prompts": ("--prompts", []),
    "tasks": ("--tasks", None),
    "rates": ("--rates", None),
    "length": ("--length", None),
    "protocols": ("--protocols", "chat"),
    "floor": ("--floor", 0),
    "block_size": ("--block-size", 16),
    "max_new_tokens": ("--max-new-tokens", None),
    "no_answers": ("--no-answers", False),
    "cache_dtypes": ("--kv-dtype", ""),
}
"""Options that a table says itself, and what they are where they were not given."""
ALL_ROWS = 2**31 - 1


def chosen_table(options: argparse.Namespace) -> "PaperTable":
    """The table of a paper that was asked for; the other options become what it says.

    Subsets that there are no rows of are named and left out.

    Raises:
        UserError: there is no such table, an option was given that it says itself, or there are
            no rows of any of its columns.
    """
    from kvjax.eval.papers import TASK, get_table
    from kvjax.eval.tasks.longbench import subset_files

    table = get_table(options.paper)
    for name, (option, usual) in SAID.items():
        if getattr(options, name) != usual:
            raise UserError(f"--paper {table.name} says that itself: leave out {option}")
    if options.methods is not None:
        table = table.beside(choose_methods(options.methods))
    folder = find_data(options, [TASK]).get("longbench")
    if folder is None:
        raise UserError("LongBench needs its rows: give --longbench or --data")
    files = subset_files(folder)
    lacking = [column for column in table.columns if column not in files]
    if len(lacking) == len(table.columns):
        raise UserError(f"{folder} has no rows of {', '.join(table.columns)}")
    if lacking:
        print(f"no rows in {folder}, so not in the table: {', '.join(lacking)}", file=sys.stderr)
    options.tasks = ",".join(TASK + column for column in table.columns if column in files)
    options.rows = ALL_ROWS if options.rows is None else options.rows
    options.free_tokens = 0
    if options.out == Path("results.jsonl"):
        options.out = Path(f"{table.name}.jsonl")
    return table
