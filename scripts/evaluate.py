"""Compare cache compression methods on the same prompts, with the memory they really hold.

Every prompt is prefilled once; every (method, rate) then keeps its KVs of it in a paged cache, and
is scored on the true answer and on an answer of its own, which is given no beginning. Results are
appended to a JSONL file, and a run that was stopped goes on where it was. A Markdown table with
95 % intervals stands beside it.

    python scripts/evaluate.py --quick                      # a small model, minutes on a CPU
    python scripts/evaluate.py --data ./data --tasks needle,kv --methods all --rates 2,8,32
    python scripts/evaluate.py --prompts mine.jsonl --protocols chat,agnostic
    python scripts/evaluate.py --model llama3.1-8b --weights ./Llama-3.1-8B-Instruct \\
        --data ./data --tasks needle,ruler,longbench --length 4096,16384 --rows 20 --out llama.jsonl
    python scripts/plot.py results.jsonl                    # pictures of it

The full cache always runs too, first. --data names a folder in which needle/, books/, longbench/,
gsm8k/ and xsum/ are looked for; --haystack, --texts, --longbench, --gsm8k and --xsum name them one
by one. Without any, needles hide in topics of the Python documentation.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    check_model_options,
    load_chosen_model,
    run_script,
)
from kvjax.errors import UserError

QUICK = {
    "tasks": "needle,passkey,fact,kv",
    "methods": "random,streaming-llm,h2o,snapkv,pyramidkv-exact,ada-snapkv,tova,kv-compress,"
    "shared-reads,kvcrush:snapkv",
    "rates": "4,16,64",
    "length": "512",
    "rows": 2,
}
"""What --quick stands for: one method of each family."""
USUAL = {
    "tasks": "needle,passkey,fact,kv",
    "methods": "shared-reads",
    "rates": "2,4,8,16,32,64",
    "length": "1024",
    "rows": 10,
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser.add_argument_group("model"))

    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument("--quick", action="store_true", help="a small run: minutes on a CPU")
    what.add_argument("--methods", help=f"compression methods, or all ({USUAL['methods']})")
    what.add_argument("--rates", help=f"compression rates ({USUAL['rates']})")
    add_row_options(parser, what, usual=USUAL, target_tokens=64)
    what.add_argument(
        "--max-new-tokens", type=int, help="of an answer, if less than the task's own number"
    )
    what.add_argument(
        "--no-answers",
        action="store_true",
        help="no answers for tasks whose metric needs some: score their true ones",
    )

    cache = parser.add_argument_group("cache")
    cache.add_argument("--block-size", type=int, default=16, help="KVs per block (%(default)s)")
    cache.add_argument(
        "--floor", type=int, default=0, help="tokens that every rate keeps at least (%(default)s)"
    )
    cache.add_argument(
        "--batch", type=int, help="variants side by side (as memory allows; 16 on a CPU)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, default=Path("results.jsonl"), help="results file (%(default)s)"
    )
    output.add_argument("--table", type=Path, help="Markdown page (beside --out)")
    output.add_argument(
        "--details",
        type=int,
        default=1,
        help="rows of each task that keep what each layer and head held (%(default)s)",
    )
    options = parser.parse_args(arguments)
    fill_in(options, QUICK if options.quick else USUAL)
    return options


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


def choose_methods(text: str) -> list[str]:
    """Names of methods, checked."""
    from kvjax.cache.methods import METHODS, get_method

    if text == "all":
        return list(METHODS)
    return [get_method(name).name for name in split_list("methods", text)]


def choose_protocols(text: str) -> list[str]:
    from kvjax.eval.rows import PROTOCOLS

    names = split_list("protocols", text)
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"no protocol {name!r}: there are {', '.join(PROTOCOLS)}")
    return [name for name in PROTOCOLS if name in names]


PLACES = {
    "haystack": ("needle", ("needle", "passkey", "fact", "kv", "ruler-")),
    "texts": ("books", ("continuation",)),
    "longbench": ("longbench", ("longbench",)),
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


def task_options(options: argparse.Namespace) -> Any:
    from kvjax.eval.tasks import TaskOptions, expand_tasks

    return TaskOptions(
        lengths=tuple(numbers("length", options.length, int)),
        rows=options.rows,
        depths=options.depths,
        split=options.split,
        seed=options.seed,
        target_tokens=options.target_tokens,
        **find_data(options, expand_tasks(split_list("tasks", options.tasks))),
    )


def collect_rows(options: argparse.Namespace, tokenizer: Any, skipped: Any) -> list[Any]:
    """The rows of all tasks and prompt files."""
    from kvjax.eval.rows import read_prompts
    from kvjax.eval.tasks import Context, make_rows

    rows = []
    if options.tasks is not None:
        context = Context(tokenizer, task_options(options), skipped)
        rows += make_rows(split_list("tasks", options.tasks), context)
    for name in options.prompts:
        rows += read_prompts(Path(name), skipped)
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    # What can be refused without a model is refused before one is loaded.
    from kvjax.eval.rows import Skipped, read_prompts
    from kvjax.eval.run import variants_of
    from kvjax.eval.sizes import EvaluatorConfig, rate_blocks
    from kvjax.eval.tasks import expand_tasks, get_task

    rates = numbers("rates", options.rates, float)
    for rate in rates:
        rate_blocks(1, rate, 1, 1)
    variants = variants_of(choose_methods(options.methods), rates)
    protocols = choose_protocols(options.protocols)
    if options.tasks is not None:
        for name in expand_tasks(split_list("tasks", options.tasks)):
            get_task(name)
        task_options(options)
    for name in options.prompts:
        read_prompts(Path(name), Skipped())
    config = EvaluatorConfig(
        block_size=options.block_size,
        num_slots=16 if options.batch is None else options.batch,
        floor=options.floor,
        context_length=options.context_length,
        max_new_tokens=options.max_new_tokens,
        answers=not options.no_answers,
        free_tokens=options.free_tokens,
    )
    check_model_options(options)
    table = options.table or options.out.with_suffix(".md")
    for path in (options.out, table):
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no such folder")
    with Progress() as progress:
        return evaluate(options, config, variants, protocols, table, progress)


def evaluate(
    options: argparse.Namespace,
    config: Any,
    variants: list[Any],
    protocols: list[str],
    table: Path,
    progress: Progress,
) -> int:
    """Load the model, make the rows, run, write the table."""
    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.results import ResultsFile
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import run, spell, tokenised
    from kvjax.eval.sizes import slots_for
    from kvjax.eval.table import report

    start = time.perf_counter()
    enable_compilation_cache()
    model, dtype = load_chosen_model(options, progress)
    evaluator = Evaluator(model, config)
    skipped = Skipped()
    progress("prompts")
    rows = tokenised(evaluator, collect_rows(options, model.tokenizer, skipped), skipped)
    if options.batch is None:
        longest = max(len(t.prompt) + len(t.target) for _, t in rows)
        config = dataclasses.replace(config, num_slots=slots_for(model, longest))
        evaluator = Evaluator(model, config)
    progress.clear()
    for reason in skipped.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    shortened = sum(tokens.removed > 0 for _, tokens in rows)
    settings = {
        "model": model.config.name,
        "weights": Path(model.source).name,
        "dtype": dtype,
        "block_size": config.block_size,
        "floor": config.floor,
        "answers": config.answers,
        "free_tokens": config.free_tokens,
        "max_new_tokens": config.max_new_tokens,
        "context_length": evaluator.limit,
    }
    status = 0
    with ResultsFile(options.out, settings) as file:
        held = len(file.results)
        try:
            run(evaluator, rows, protocols, variants, file, progress, options.details)
        except KeyboardInterrupt:
            status = 130
        progress.clear()
        notes = [
            f"{model.config.name} ({settings['weights']}, {dtype}), blocks of {config.block_size}",
            f"{len(rows)} prompts, {len(file.results)} results",
            f"rows skipped: {len(skipped.reasons)}",
            f"prompts longer than {evaluator.limit} tokens, middle cut out: {shortened}",
        ]
        if file.results:
            page = report(file.results, "Cache compression compared", notes)
            table.write_text(page, encoding="utf-8")
            print(page.split("## Every line")[0].rstrip())
    seconds = time.perf_counter() - start
    print(
        f"\n{len(file.results) - held} results in {spell(seconds)} "
        f"({spell(evaluator.compile_seconds)} compiling), {held} from before; "
        f"{len(skipped.reasons)} rows skipped; {options.out}, {table}",
        file=sys.stderr,
    )
    if status:
        print("interrupted: the same command goes on from here", file=sys.stderr)
    return status


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
