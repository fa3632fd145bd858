"""The options that choose prompts, methods and rates, for every command that compares methods."""

import argparse
from pathlib import Path
from typing import Any

from kvjax.checks import check_number, shown
from kvjax.cli.command import check_apart, check_output_file
from kvjax.errors import UserError

OURS = (b"\n## Every line\n", b"\n## Every cell\n", b"# kvjax beside kvpress\n")
"""What pages of these commands hold, one of them each."""


def add_row_options(
    parser: argparse.ArgumentParser,
    what: argparse._ArgumentGroup,
    usual: dict[str, Any],
    target_tokens: int,
) -> None:
    """Add what `collect_rows` reads.

    Args:
        parser: gets a group of places of data.
        what: the group of tasks and rows.
        usual: what tasks, length and rows are if they are not given, for --help alone.
        target_tokens: the usual length of a continuation.
    """
    what.add_argument("--tasks", help=f"tasks; none with --prompts, else {usual['tasks']}")
    what.add_argument(
        "--prompts", action="append", default=[], metavar="FILE", help="prompt file; repeatable"
    )
    what.add_argument(
        "--protocols", default="chat", help="of chat, agnostic, question, prompt (%(default)s)"
    )
    what.add_argument(
        "--free-tokens",
        type=int,
        default=32,
        metavar="N",
        help="most tokens of the answer that is given no beginning; 0 for none (%(default)s)",
    )
    what.add_argument("--split", choices=("dev", "test"), default="test", help="(%(default)s)")
    what.add_argument("--length", help=f"prompt lengths in tokens ({usual['length']})")
    what.add_argument("--rows", type=int, help=f"rows of each task and length ({usual['rows']})")
    what.add_argument(
        "--depths", type=int, default=5, help="places of needles in the text (%(default)s)"
    )
    what.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    what.add_argument(
        "--target-tokens", type=int, default=target_tokens, help="of a continuation (%(default)s)"
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, metavar="FOLDER", help="where the others are looked for")
    data.add_argument("--haystack", type=Path, help="background text: file or folder")
    data.add_argument("--texts", type=Path, help="long texts to continue: file or folder")
    data.add_argument(
        "--longbench", type=Path, metavar="FOLDER", help="LongBench's rows and config"
    )
    data.add_argument(
        "--ruler13", type=Path, metavar="FOLDER", help="files of RULER's own tasks, by length"
    )
    data.add_argument("--gsm8k", type=Path, metavar="FILE", help="GSM8K's rows")
    data.add_argument("--xsum", type=Path, metavar="FILE", help="XSUM's rows")


def fill_in(options: argparse.Namespace, usual: dict[str, Any]) -> None:
    """Give options that were not given their usual values; no tasks where prompts are given."""
    for name, value in usual.items():
        if getattr(options, name) is None and not (name == "tasks" and options.prompts):
            setattr(options, name, value)


def split_list(option: str, text: str) -> list[str]:
    """The entries of a list separated by commas."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--{option} {text!r}: give at least one")
    return list(dict.fromkeys(entries))


def numbers[T](option: str, text: str, kind: type[T]) -> list[T]:
    """The numbers of such a list."""
    try:
        return [kind(entry) for entry in split_list(option, text)]  # type: ignore[call-arg]
    except ValueError as error:
        raise UserError(f"--{option} {text!r}: give numbers separated by commas") from error


def rates_of(text: str) -> list[float]:
    """Compression rates, checked."""
    return [check_number("rate", rate, 1) for rate in numbers("rates", text, float)]


def choose_methods(text: str, *, calibrated: bool = False) -> list[str]:
    """Names of methods, checked; "all" stands for those that need no calibration, or for every
    one if `calibrated`."""
    from kvjax.cache.methods import METHODS, get_method

    if text == "all":
        return [name for name, method in METHODS.items() if calibrated or not method.calibrated]
    return [get_method(name).name for name in split_list("methods", text)]


def choose_protocols(text: str) -> list[str]:
    """Names of protocols, checked, in the order of `PROTOCOLS`."""
    from kvjax.eval.rows import PROTOCOLS

    names = split_list("protocols", text)
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"no protocol {name!r}: there are {', '.join(PROTOCOLS)}")
    return [name for name in PROTOCOLS if name in names]


HAYSTACK_TASKS = (
    *("needle", "passkey", "fact", "kv", "list", "digits16", "phrase9", "five", "summary"),
    "ruler-",
)
PLACES = {
    "haystack": ("needle", HAYSTACK_TASKS),
    "texts": ("books", ("continuation",)),
    "longbench": ("longbench", ("longbench",)),
    "ruler13": ("ruler", ("ruler13",)),
    "gsm8k": ("gsm8k", ("gsm8k",)),
    "xsum": ("xsum", ("xsum",)),
}
"""Where each option's data lie below --data, and the beginnings of the tasks that need them."""


def find_data(options: argparse.Namespace, tasks: list[str]) -> dict[str, Path]:
    """What was given of `PLACES`, or stands below the data folder.

    Raises:
        UserError: a path is not there, or the data folder lacks what a task needs.
    """
    data = options.data
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: there is no such folder")
    paths = {}
    for option, (place, needed_by) in PLACES.items():
        given = getattr(options, option)
        path = given if given is not None else data and data / place
        needed = [task for task in tasks if task.startswith(needed_by)]
        if path is None or (given is None and not needed):
            continue
        if not path.exists():
            why = "" if given is not None else f", which the task {needed[0]} needs (or --{option})"
            raise UserError(f"there is no {path}{why}")
        paths[option] = path
    return paths


def task_options(options: argparse.Namespace, **more: Any) -> Any:
    """What the tasks are asked for, as `TaskOptions`, of which `more` are further fields."""
    from kvjax.eval.tasks import TaskOptions, expand_tasks

    return TaskOptions(
        lengths=tuple(numbers("length", options.length, int)),
        rows=options.rows,
        depths=options.depths,
        split=options.split,
        seed=options.seed,
        target_tokens=options.target_tokens,
        **find_data(options, expand_tasks(split_list("tasks", options.tasks))),
        **more,
    )


def check_rows(options: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, what `collect_rows` could not use.

    Raises:
        UserError: no such task, no such file, or a number out of range.
    """
    from kvjax.eval.tasks import check_data, expand_tasks, get_task

    if options.tasks is not None:
        names = split_list("tasks", options.tasks)
        for name in expand_tasks(names):
            get_task(name)
        check_data(names, task_options(options))
    _prompt_rows(options)


def _prompt_rows(options: argparse.Namespace) -> list[tuple[list[Any], list[str]]]:
    """The rows of each prompt file, and why others are skipped; read once, as a pipe has nothing
    to say the second time."""
    from kvjax.eval.rows import Skipped, read_prompts

    if not hasattr(options, "rows_of_prompts"):
        found = []
        for name in options.prompts:
            skipped = Skipped()
            found.append((read_prompts(Path(name), skipped), skipped.reasons))
        options.rows_of_prompts = found
    return options.rows_of_prompts


def collect_rows(
    options: argparse.Namespace, tokenizer: Any, skipped: Any, **more: Any
) -> list[Any]:
    """The rows of all tasks and prompt files; `more` as of `task_options`."""
    from kvjax.eval.tasks import Context, make_rows

    rows = []
    if options.tasks is not None:
        context = Context(tokenizer, task_options(options, **more), skipped)
        rows += make_rows(split_list("tasks", options.tasks), context)
    for found, reasons in _prompt_rows(options):
        rows += found
        skipped.reasons += reasons
    return rows


def table_beside(options: argparse.Namespace) -> Path:
    """Where the Markdown page goes: --table, or a name like that of --out.

    Raises:
        UserError: one of the two cannot be written, or is another file of the command, or a file
            that was not named is somebody else's; --out is no file.
    """
    check_output_file("--out", options.out)
    if options.out.exists() and not options.out.is_file():
        raise UserError(f"--out {shown(str(options.out))}: give a file: results are read again")
    table = options.table or options.out.with_suffix(".md")
    check_output_file("--table", table)
    check_apart("--out", options.out, "the Markdown page (--table)", table)
    read = [("--prompts", Path(name)) for name in options.prompts]
    read += [(f"--{name}", path) for name in PLACES if (path := getattr(options, name))]
    for option, path in read:
        check_apart("--out", options.out, option, path)
        check_apart("--table", table, option, path)
    if options.table is None and table.exists():
        held = table.read_bytes()
        if held and not any(mark in held for mark in OURS):
            raise UserError(
                f"--out {shown(str(options.out))}: the page goes to {table}, which holds something "
                "else: give --table"
            )
    return table
