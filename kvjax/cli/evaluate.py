"""Compare cache compression methods on the same prompts, with the memory they really hold.

Every prompt is prefilled once; every (method, rate) then keeps its KVs of it in a paged cache, and
is scored on the true answer and on an answer of its own, which is given no beginning. Results are
appended to a JSONL file, and a run that was stopped goes on where it was. A Markdown table with
95 % intervals stands beside it.

    kvjax evaluate --list                       # what --methods and --tasks may name
    kvjax evaluate --quick                      # a small model, minutes on a CPU
    kvjax evaluate --data ./data --tasks needle,kv --methods all --rates 2,8,32
    kvjax evaluate --prompts mine.jsonl --protocols chat,agnostic
    kvjax evaluate --quick --kv-dtype bfloat16,int8,int4
    kvjax evaluate --quick --methods full --kv-dtype affine4,gear4,zipcache
    kvjax evaluate --model llama3.1-8b --weights ./Llama-3.1-8B-Instruct \\
        --data ./data --tasks needle,ruler,longbench --length 4096,16384 --rows 20 --out llama.jsonl
    kvjax evaluate --paper kv-compress-1 --data ./data --weights ./Llama-3.1-8B-Instruct
    kvjax evaluate --weights ./Llama-3.1-70B-Instruct --tensor-parallel 8 --data ./data
    kvjax plot results.jsonl                    # pictures of it

--paper runs what a table of a paper has of LongBench or RULER, at its settings, and puts its
figures beside ours: kv-compress-1, kv-compress-2, kv-compress-figure-4, kv-compress-figure-6,
pyramidkv-11, pyramidkv-12, pyramidkv-13, ruler-llama-8b, ruler-llama-70b, ruler-mistral. --methods
adds further rows (to those of RULER at --rates); --rows takes fewer prompts.

The full cache always runs too, first. --data names a folder in which needle/, books/, longbench/,
ruler/, gsm8k/ and xsum/ are looked for; --haystack, --texts, --longbench, --ruler13, --gsm8k and
--xsum name them one by one. Without any, needles hide in topics of the Python documentation.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.models import (
    add_calibration_option,
    add_devices_option,
    add_draft_option,
    add_model_options,
    check_cache_dtypes,
    check_draft,
    check_model_options,
    chosen_calibration,
    chosen_draft,
    chosen_method,
    load_chosen_model,
    runnable,
)
from kvjax.cli.papers import chosen_table
from kvjax.cli.progress import Progress, TimeLeft, spell
from kvjax.cli.rows import (
    add_row_options,
    check_rows,
    choose_methods,
    choose_protocols,
    collect_rows,
    fill_in,
    rates_of,
    split_list,
    table_beside,
)
from kvjax.errors import unmasked

QUICK = {
    "tasks": "needle,passkey,fact,kv",
    "methods": "random,streaming-llm,h2o,snapkv,pyramidkv-exact,ada-snapkv,tova,kv-compress,"
    "shared-reads,kvcrush:snapkv,matched:predicted-reads-blind",
    "rates": "4,16,64",
    "length": "512",
    "rows": 2,
}
"""What --quick stands for: one method of each family, the usual one where it is calibrated."""
SEVERAL = ("all", QUICK["methods"])
"""What stands for methods of which some may be unable to run."""
USUAL = {
    "tasks": "needle,passkey,fact,kv",
    "methods": "auto",
    "rates": "2,4,8,16,32,64",
    "length": "1024",
    "rows": 10,
}


if TYPE_CHECKING:
    from kvjax.cache.calibration import Calibration
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.papers import PaperTable
    from kvjax.eval.rows import Row, Skipped, TokenRow


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser.add_argument_group("model"))

    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument("--list", action="store_true", help="methods and tasks by name, and no more")
    what.add_argument("--quick", action="store_true", help="a small run: minutes on a CPU")
    what.add_argument(
        "--paper",
        metavar="TABLE",
        help="get a paper's table again, at its settings",
    )
    what.add_argument(
        "--methods",
        help="compression methods, or all: those among them that read a calibration where the "
        "model has one (auto: the one of kvjax decode, which a calibration decides)",
    )
    add_calibration_option(what)
    add_draft_option(what)
    what.add_argument("--rates", help=f"compression rates ({USUAL['rates']})")
    what.add_argument(
        "--kv-dtype",
        dest="cache_dtypes",
        default="",
        metavar="TYPES",
        help="what keys and values are stored in, each type in turn: float32, bfloat16, float16, "
        "int8, k5v4, k5v3.6, int4 and what else kvjax decode --kv-dtype has; with --methods full "
        "what stores a prompt as a whole: kcvt4, kcvt3, kivi2, gear4, gear2, mikv8, mikv4, "
        "zipcache, kvquant4, kvquant3, kvquant2, kvquant4c, kvquant3c, kvquant2c (calibrated), "
        "rotatekv4, rotatekv2, minicache, xkv, "
        "xquant4, xquant3, xquant2, xquantcl4, xquantcl3, xquantcl2 (that of the weights)",
    )
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
    cache.add_argument(
        "--block-size",
        type=int,
        help="KVs per block (16; 8 where the highest rate leaves fewer than 48 of a head)",
    )
    cache.add_argument(
        "--floor", type=int, default=0, help="tokens that every rate keeps at least (%(default)s)"
    )
    add_devices_option(cache)
    cache.add_argument(
        "--batch", type=int, help="variants side by side (as memory allows; 16 on a CPU)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, help="results file (results.jsonl; with --paper the table's name)"
    )
    output.add_argument("--table", type=Path, help="Markdown page (beside --out)")
    output.add_argument(
        "--details",
        type=int,
        default=1,
        help="rows of each task that keep what each layer and head held (%(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    if options.list:
        return list_names()
    # What can be refused without a model is refused before one is loaded.
    from kvjax.cache.budget import USUAL_BLOCK
    from kvjax.cache.config import CALIBRATED
    from kvjax.cache.methods import get_method
    from kvjax.checks import check_whole
    from kvjax.engine.parallel import check_on_devices
    from kvjax.eval.prompt_codecs import PROMPT_CODECS
    from kvjax.eval.run import variants_of
    from kvjax.eval.sizes import EvaluatorConfig

    paper = chosen_table(options) if options.paper is not None else None
    if options.out is None:
        options.out = Path("results.jsonl" if paper is None else f"{paper.name}.jsonl")
    fill_in(options, QUICK if options.quick else USUAL)
    stored = split_list("kv-dtype", options.cache_dtypes) if options.cache_dtypes else []
    check_cache_dtypes(name for name in stored if name not in PROMPT_CODECS)
    check_model_options(options)
    auto = options.methods == "auto"
    methods, rates = [CALIBRATED] if auto else _methods(options), rates_of(options.rates)
    variants = variants_of(methods, rates, stored) if paper is None else paper.variants
    for name in dict.fromkeys(variant.method for variant in variants):
        check_on_devices(get_method(name), options.tensor_parallel)
    for variant in variants:
        variant.check(options.tensor_parallel)
    protocols = choose_protocols(options.protocols)
    check_rows(options)
    check_whole("--details", options.details, 0)
    if options.batch is not None:
        check_whole("--batch", options.batch, 1)
    check_draft(options, [get_method(variant.method) for variant in variants])
    config = EvaluatorConfig(
        block_size=USUAL_BLOCK if options.block_size is None else options.block_size,
        # More than there are variants would stay empty.
        num_slots=min(16 if options.batch is None else options.batch, len(variants)),
        floor=options.floor if paper is None else paper.floor,
        rates_as_caps=paper is not None,
        context_length=options.context_length,
        max_new_tokens=options.max_new_tokens,
        answers=not options.no_answers,
        free_tokens=options.free_tokens,
    )
    table = table_beside(options)
    with Progress() as progress:
        return evaluate(
            options, config, variants, protocols, table, progress, paper, auto and paper is None
        )


def list_names() -> int:
    """Print what methods and tasks there are, a line each."""
    from kvjax.cache.methods import METHODS
    from kvjax.eval.tasks import GROUPS, TASKS

    methods = {
        name: method.summary + " (reads a calibration)" * bool(method.calibrated)
        for name, method in METHODS.items()
    }
    # Parts of data sets have no words of their own.
    tasks = {
        name: (make.__doc__ or "").partition("\n")[0]
        for name, make in TASKS.items()
        if "/" not in name
    }
    tasks |= {name: f"all of {', '.join(parts)}" for name, parts in GROUPS.items()}
    for title, found in (("methods", methods), ("tasks", tasks)):
        width = max(map(len, found))
        print(f"{title}:", *(f"  {name:{width}}  {what}" for name, what in found.items()), sep="\n")
    return 0


def _methods(options: argparse.Namespace) -> list[str]:
    """Names of the methods asked for; of those that --quick and all stand for, the ones that can
    run on so many devices."""
    from kvjax.cache.methods import get_method
    from kvjax.engine.parallel import on_one_device

    names = choose_methods(options.methods, calibrated=True)
    if options.tensor_parallel == 1 or options.methods not in SEVERAL:
        return names
    alone = [name for name in names if on_one_device(get_method(name))]
    if alone:
        print(f"left out, as they need a single device: {', '.join(alone)}", file=sys.stderr)
    return [name for name in names if name not in alone]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A model and what is to be computed of it."""

    evaluator: "Evaluator"
    dtype: str
    calibration: "Calibration | None"
    variants: list[Any]
    rows: "list[tuple[Row, TokenRow]]"
    skipped: "Skipped"


def prepared(
    options: argparse.Namespace,
    config: Any,
    variants: list[Any],
    progress: Progress,
    paper: "PaperTable | None",
    auto: bool,
) -> Ready:
    """Load the model and make the rows; sizes that nobody asked for follow from these."""
    from kvjax.cache import get_method
    from kvjax.cache.budget import usual_block
    from kvjax.cache.config import CALIBRATED
    from kvjax.engine.calibrate.shelf import AUTO, find
    from kvjax.engine.draft import Draft
    from kvjax.engine.key_similarity import measured
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.results import held_settings
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import tokenised
    from kvjax.eval.scorers import check_library
    from kvjax.eval.sizes import least_kept, slots_for

    model, dtype = load_chosen_model(options, progress)
    if auto:
        usual = chosen_method(options, model, progress)
        variants = [
            dataclasses.replace(v, method=usual) if v.method == CALIBRATED else v for v in variants
        ]
    named = [get_method(name) for name in dict.fromkeys(v.method for v in variants)]
    if options.methods in SEVERAL:
        able = runnable(options, model, named, progress)
        named = [method for method in named if method.name in able]
        variants = [variant for variant in variants if variant.method in able]
    calibration = chosen_calibration(options, model, named, progress)
    if calibration is None and options.calibration == AUTO:
        # Making one is for methods: it has no levels.
        codecs = (v.prompt_codec for v in variants)
        calibration = find(model) if any(c and c.calibrated for c in codecs) else None
    artefacts = {} if calibration is None else calibration.on_device()
    artefacts |= measured(model, named, artefacts)
    evaluator = Evaluator(model, config, artefacts)
    skipped = Skipped()
    progress("prompts")
    fields = {} if paper is None else paper.task_options
    rows = collect_rows(options, model.tokenizer, skipped, **fields)
    rows = tokenised(evaluator, rows, skipped)
    if config.answers or config.free_tokens:
        for metric in {row.metric for row, _ in rows}:
            check_library(metric)
    longest = max((len(t.prompt) + len(t.target) for _, t in rows), default=1)
    engine = chosen_draft(options, longest, progress)
    draft = None if engine is None else Draft(engine, model.tokenizer)
    if options.batch is None:
        config = dataclasses.replace(config, num_slots=slots_for(model, longest))
    if options.block_size is None and paper is None and rows:
        lengths = [len(tokens.prompt) for _, tokens in rows]
        b = usual_block(least_kept(variants, lengths, config.floor))
        # What was begun goes on as it was.
        held = held_settings(options.out).get("block_size")
        config = dataclasses.replace(config, block_size=held if type(held) is int else b)
    if config != evaluator.config or draft is not None:
        evaluator = Evaluator(model, config, artefacts, draft)
    return Ready(evaluator, dtype, calibration, variants, rows, skipped)


def settings_read(
    options: argparse.Namespace, ready: Ready, paper: "PaperTable | None"
) -> tuple[dict[str, Any], Callable[[str], dict[str, Any]]]:
    """What all rows of a file follow from, and what those of one variant do, by its label."""
    from kvjax.eval.results import OF_WEIGHTS
    from kvjax.eval.run import settings_of

    model, config = ready.evaluator.model, ready.evaluator.config
    settings = {
        "model": model.config.name,
        "weights": Path(model.source).name,
        OF_WEIGHTS: model.fingerprint,
        "dtype": ready.dtype,
        "weight_dtype": model.config.weight_dtype,
        "block_size": config.block_size,
        "floor": config.floor,
        "answers": config.answers,
        "free_tokens": config.free_tokens,
        "max_new_tokens": config.max_new_tokens,
        "context_length": ready.evaluator.limit,
    }
    if paper is not None:
        settings["paper"] = paper.name
    of = functools.partial(settings_of, calibration=ready.calibration, draft=options.draft)
    # What no method of this run reads says nothing of rows that are there.
    read = {name for variant in ready.variants for name in of(variant.label)}

    def own(label: str) -> dict[str, Any]:
        return {name: value for name, value in of(label).items() if name in read}

    return settings, own


def write_page(
    table: Path,
    results: list[dict[str, Any]],
    settings: dict[str, Any],
    ready: Ready,
    paper: "PaperTable | None",
) -> None:
    """The Markdown page of all results, and its first table on stdout."""
    from kvjax.eval import papers
    from kvjax.eval.table import EVERY, report

    limit = f"{ready.evaluator.limit} tokens"
    if paper is not None:
        limit = f"the paper's, or than {limit} with their answer"
    kinds = ", ".join(filter(None, (settings["weight_dtype"], ready.dtype)))
    shortened = sum(tokens.removed > 0 for _, tokens in ready.rows)
    notes = [
        f"{settings['model']} ({settings['weights']}, {kinds}), blocks of {settings['block_size']}",
        f"{len(ready.rows)} prompts, {len(results)} results",
        f"rows skipped: {len(ready.skipped.reasons)}",
        f"prompts longer than {limit}, middle cut out: {shortened}",
    ]
    if paper is None:
        page, end = report(results, "Cache compression compared", notes), EVERY
    else:
        page, end = papers.page(paper, results, notes), papers.EVERY
    try:
        table.write_text(page, encoding="utf-8")
    finally:
        # Told even where it cannot be written any more.
        print(page.split(end)[0].rstrip())


def evaluate(
    options: argparse.Namespace,
    config: Any,
    variants: list[Any],
    protocols: list[str],
    table: Path,
    progress: Progress,
    paper: "PaperTable | None" = None,
    auto: bool = False,
) -> int:
    """Load the model, make the rows, run, write the table. `auto`: by what method the model is
    compressed is for its calibration to say, if it has one."""
    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.results import ResultsFile
    from kvjax.eval.run import run as run_all

    start = time.perf_counter()
    enable_compilation_cache()
    ready = prepared(options, config, variants, progress, paper, auto)
    progress.clear()
    skipped = ready.skipped.reasons
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    settings, own = settings_read(options, ready, paper)
    status = 0
    with ResultsFile(options.out, settings, own) as file:
        held = len(file.results)
        try:
            left = TimeLeft(progress)
            with unmasked():
                run_all(
                    ready.evaluator, ready.rows, protocols, ready.variants, file, left,
                    options.details,
                )  # fmt: skip
        except KeyboardInterrupt:
            status = 130
        progress.clear()
        if file.results:
            write_page(table, file.results, settings, ready, paper)
    seconds = time.perf_counter() - start
    print(
        f"\n{len(file.results) - held} results in {spell(seconds)} "
        f"({spell(ready.evaluator.compile_seconds)} compiling), {held} from before; "
        f"{len(skipped)} rows skipped; {options.out}, {table}",
        file=sys.stderr,
    )
    if status:
        print("interrupted: the same command goes on from here", file=sys.stderr)
    return status
