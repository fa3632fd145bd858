"""Learn from a model's own repetitions which KVs will be read, for the method predicted-reads.

Each text runs through the model, which is then made to repeat it; what it reads while it does (the
scores of KVzip and KVzap) is predicted from its hidden states by ridge regression. Then the
prediction is trained on what the model says behind contexts that were compressed by it. The result
is a safetensors file for --calibration of the other commands; one that is there keeps what else it
has of the same model. A run that was stopped goes on where it was.

    kvjax calibrate                               # the small model, on the texts of this package
    kvjax calibrate --weights ./Llama-3.1-8B-Instruct --out llama.safetensors
    kvjax calibrate --data ./mine --tokens 2048   # a file or a folder of .txt, .md, .jsonl, .gz
    kvjax calibrate --weights ./Qwen3-8B --import ./KVzap-mlp-Qwen3-8B    # a published one
    kvjax calibrate --heads         # which heads look things up, for razor-attention and compresskv
    kvjax calibrate --trainings 3   # a choice that is the mean of three trainings
    kvjax calibrate --levels        # levels of keys and values by gradients, for kvquant4c, …
    kvjax calibrate --loads         # what heads keep, by which --tensor-parallel deals them
    kvjax calibrate --weights ./Llama-3.1-70B-Instruct --tensor-parallel 8
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from kvjax.cli.command import check_apart, check_output_file
from kvjax.cli.models import (
    add_devices_option,
    add_model_options,
    check_model_options,
    load_chosen_model,
)
from kvjax.cli.progress import Progress, TimeLeft, spell
from kvjax.errors import UserError

READS = {"data": None, "texts": None, "tokens": 700}
FITS = {"exercises": 160, "trainings": 1, "own_words": False, "sheets": False, "plot": None}
"""Options that say which texts are read, and how reads are fitted to them; what they are where they
were not given."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser.add_argument_group("model"))
    how = parser.add_argument_group("calibration")
    how.add_argument(
        "--data", type=Path, nargs="+", metavar="PATH", help="texts (those of this package)"
    )
    how.add_argument(
        "--import",
        type=Path,
        dest="published",
        metavar="PATH",
        help="NVIDIA's KVzap weights (a folder or .safetensors) for kvzap-linear or kvzap-mlp",
    )
    how.add_argument(
        "--heads",
        action="store_true",
        help="retrieval heads alone, for razor-attention and compresskv; the file keeps what else "
        "it has",
    )
    how.add_argument(
        "--loads",
        action="store_true",
        help="the load of heads alone, anew, by which they are dealt to several devices; the file "
        "has to be there, and keeps what else it has",
    )
    how.add_argument(
        "--levels",
        action="store_true",
        help="levels and ranges of keys and values alone, for kvjax evaluate --kv-dtype kvquant4c, "
        "kvquant3c, kvquant2c; the file keeps what else it has",
    )
    how.add_argument("--texts", type=int, help="texts at most (all)")
    how.add_argument(
        "--tokens",
        type=int,
        default=READS["tokens"],
        help="tokens of each text (default: %(default)s)",
    )
    how.add_argument(
        "--exercises",
        type=int,
        default=FITS["exercises"],
        help="contexts that the choice is trained on, 0 for none (default: %(default)s)",
    )
    how.add_argument(
        "--trainings",
        type=int,
        default=FITS["trainings"],
        help="trainings, each on so many contexts of its own, whose mean is taken: as many times "
        "longer, and on held-out contexts nearer to the full cache from 16x on (default: "
        "%(default)s)",
    )
    how.add_argument(
        "--own-words",
        action="store_true",
        help="behind half of these contexts the model answers questions of its own",
    )
    how.add_argument(
        "--sheets",
        action="store_true",
        help="a quarter of them are tables, records, logs, code, rules and the like",
    )
    add_devices_option(how)
    how.add_argument("--out", type=Path, help="file (MODEL.safetensors)")
    how.add_argument("--plot", type=Path, help="picture of the fit by layer")


def run(options: argparse.Namespace) -> int:
    from kvjax.checks import check_whole
    from kvjax.engine.calibrate import CalibrationSettings

    settings = CalibrationSettings(
        tokens=options.tokens,
        least_tokens=min(64, max(16, options.tokens)),
        exercises=options.exercises,
        trainings=options.trainings,
        own_words=options.own_words,
        sheets=options.sheets,
    )
    if options.texts is not None:
        check_whole("--texts", options.texts, 2)
    if options.plot is not None:
        from kvjax.eval.plots import check_picture

        check_picture("--plot", options.plot)
        check_output_file("--plot", options.plot)
    check_model_options(options)
    if options.out is not None:
        check_output_file("--out", options.out)
        if options.plot is not None:
            check_apart("--plot", options.plot, "--out", options.out)
    _check_alone(options)
    if options.published is not None:
        with Progress() as progress:
            return take(options, progress)
    if options.heads:
        with Progress() as progress:
            return find_heads(options, progress)
    texts = _texts(options)
    if options.loads:
        with Progress() as progress:
            return find_loads(options, settings, texts, progress)
    if options.levels:
        with Progress() as progress:
            return find_levels(options, settings, texts, progress)
    with Progress() as progress:
        return calibrate(options, settings, texts, progress)


def _check_alone(options: argparse.Namespace) -> None:
    """Refuse what a run does not read that writes some arrays alone.

    Raises:
        UserError: such an option was given, or two that write different arrays.
    """
    reasons = {
        "--import": "takes what is there",
        "--heads": "has prompts of its own",
        "--loads": "fits nothing",
        "--levels": "fits nothing",
    }
    asked = [options.published is not None, options.heads, options.loads, options.levels]
    alone = [option for option, given in zip(reasons, asked) if given]
    if len(alone) > 1:
        raise UserError(f"{alone[0]} and {alone[1]} write different arrays: give one of them")
    for option in alone:
        unread = FITS | READS if option in ("--import", "--heads") else FITS
        for name, usual in unread.items():
            if getattr(options, name) != usual:
                given = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} {reasons[option]}: give no {given} with it")


def _texts(options: argparse.Namespace) -> list[str]:
    """The texts that the options name, long ones in pieces."""
    if options.data is None:
        from kvjax.engine.calibrate.texts import default_texts

        return default_texts(options.texts)
    from kvjax.eval.files import read_texts

    texts = []
    # About four characters a token; what is too much of a piece is cut off later.
    size = 5 * options.tokens
    for path in options.data:
        for text in read_texts(path):
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            # The last piece is short: the one before it has more to say.
            texts += pieces if len(pieces) == 1 else pieces[:-1]
    if options.texts is not None and len(texts) > options.texts:
        # From all of them, evenly.
        texts = [texts[i * len(texts) // options.texts] for i in range(options.texts)]
    return texts


def take(options: argparse.Namespace, progress: Progress) -> int:
    """Load the model, and write what others published of it as a calibration."""
    from kvjax.engine.calibrate.published import load_published

    model, dtype = load_chosen_model(options, progress)
    out = _output(options, model)
    held = _held(out, model)
    found = load_published(options.published, model)
    kind, file = found.recipe["kind"], found.recipe["file"]
    made_of = {"published": f"KVzap, {kind}: {file}"}
    _beside(held, model, dtype, found.arrays, made_of).save(out)
    progress.clear()
    print(f"for the method kvzap-{kind}: {out}", file=sys.stderr)
    return 0


def find_heads(options: argparse.Namespace, progress: Progress) -> int:
    """Load the model, rank its heads, and write them beside what the file has already."""
    from kvjax.engine.calibrate.heads import retrieval_heads
    from kvjax.engine.calibrate.semantic import semantic_heads
    from kvjax.engine.calibrate.texts import default_texts

    model, dtype = load_chosen_model(options, progress)
    out = _output(options, model)
    held = _held(out, model)
    arrays = retrieval_heads(model)
    said = "for the methods razor-attention and compresskv"
    try:
        arrays |= semantic_heads(model, default_texts())
    except UserError as error:
        said = f"{error}\nfor the method razor-attention"
    made_of = {"heads": "repeated random tokens"}
    _beside(held, model, dtype, arrays, made_of).save(out)
    progress.clear()
    print(f"{said}: {out}", file=sys.stderr)
    return 0


def find_loads(options, settings, texts: list[str], progress: Progress) -> int:
    """Load the model, count what its heads keep by a calibration, and write it into its file."""
    from kvjax.cache.calibration import HEAD_LOAD, Calibration
    from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
    from kvjax.engine.calibrate.loads import head_load
    from kvjax.engine.calibrate.run import chosen_prompts

    model, _ = load_chosen_model(options, progress)
    out = _output(options, model)
    found = Calibration.load(out)
    found.check(model.fingerprint, model.config.num_layers)
    for name in (WEIGHT, EXTRA):
        if name not in found.arrays:
            raise UserError(
                f"{out} has no array {name}, which says what heads keep: calibrate anew"
            )
    prompts = chosen_prompts(model, texts, settings)
    loads = head_load(model, found.arrays, prompts, TimeLeft(progress))
    found.with_arrays({HEAD_LOAD: loads}, {"loads": _source(options)}).save(out)
    progress.clear()
    print(f"for --tensor-parallel: {out}", file=sys.stderr)
    return 0


def find_levels(options, settings, texts: list[str], progress: Progress) -> int:
    """Load the model, find its levels, and write them beside what the file has already."""
    from kvjax.engine.calibrate.levels import TEXTS, digest_of, levels_of
    from kvjax.engine.calibrate.run import chosen_prompts

    model, dtype = load_chosen_model(options, progress)
    out = _output(options, model)
    held = _held(out, model)
    prompts = chosen_prompts(model, texts, dataclasses.replace(settings, fitted=TEXTS))
    arrays = levels_of(model, prompts, TimeLeft(progress))
    made_of = {
        "levels": _source(options),
        "levels_data": digest_of(prompts),
        "levels_texts": str(len(prompts)),
        "levels_tokens": str(settings.tokens),
    }
    _beside(held, model, dtype, arrays, made_of).save(out)
    progress.clear()
    print(f"for kvquant4c, kvquant3c and kvquant2c: {out}", file=sys.stderr)
    return 0


def _output(options: argparse.Namespace, model) -> Path:
    """The file that is written: one that can be, before anything is computed."""
    if options.out is not None:
        return options.out
    # A checkpoint may call itself by a path.
    name = Path(model.config.name).name.lstrip(".") or "calibration"
    out = Path(f"{name}.safetensors")
    check_output_file("--out", out)
    return out


def _held(out: Path, model):
    """The calibration that a file has already, of this model; None where there is no file."""
    from kvjax.cache.calibration import Calibration

    if not out.exists():
        return None
    found = Calibration.load(out)
    found.check(model.fingerprint, model.config.num_layers)
    return found


def _beside(held, model, dtype: str, arrays, made_of: dict[str, str]):
    """A calibration of some arrays, and of those that `held` has of other names."""
    from kvjax.cache.calibration import Calibration

    if held is not None:
        return held.with_arrays(arrays, made_of)
    recipe = {"model": model.config.name, "dtype": dtype, **made_of}
    return Calibration(arrays, model.fingerprint, recipe)


def _source(options: argparse.Namespace) -> str:
    """What the texts are called in a recipe."""
    return "this package's" if options.data is None else ", ".join(p.name for p in options.data)


def calibrate(options, settings, texts: list[str], progress: Progress) -> int:
    """Load the model, calibrate it, write the file, say how good it is."""
    from kvjax.engine.calibrate import calibrate as run_all
    from kvjax.engine.calibrate.state import forget
    from kvjax.engine.compilation import enable_compilation_cache

    start = time.perf_counter()
    enable_compilation_cache()
    model, dtype = load_chosen_model(options, progress)
    out = _output(options, model)
    held = _held(out, model)
    recipe = {"model": model.config.name, "dtype": dtype, "source": _source(options)}
    state = out.with_name(f".{out.name}.state")
    fit = run_all(
        model,
        texts,
        settings,
        state=state,
        recipe=recipe,
        progress=TimeLeft(progress),
    )
    progress.clear()
    made = fit.calibration
    _beside(held, model, dtype, made.arrays, dict(made.recipe)).save(out)
    forget(state)
    print(f"{'layer':>5}  {'R2':>5}  {'rank correlation':>16}   (texts held out, mean over heads)")
    rows = zip(fit.explained.mean(axis=1), fit.rank_correlation.mean(axis=1))
    for layer, (good, rank) in enumerate(rows):
        print(f"{layer:5}  {good:5.2f}  {rank:16.2f}")
    print(f" mean  {fit.explained.mean():5.2f}  {fit.rank_correlation.mean():16.2f}")
    for rate, (before, after) in fit.divergence.items():
        kl = f"KL of answers behind held-out contexts at {rate:2}x: {before:.3f}"
        print(f"{kl}, trained {after:.3f}")
    if options.plot is not None:
        from kvjax.eval.plots import plot_fit

        plot_fit(fit.explained, fit.rank_correlation, options.plot)
        print(options.plot)
    seconds = time.perf_counter() - start
    print(
        f"{fit.texts} texts, {fit.tokens:,} tokens in {spell(seconds)}: {out}",
        file=sys.stderr,
    )
    return 0
