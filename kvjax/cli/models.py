"""The options that choose a model, for every command that loads one."""

import argparse
import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvjax import startup
from kvjax.checks import check_whole, shown
from kvjax.cli.progress import Progress, TimeLeft
from kvjax.errors import NoWeights, UserError

if TYPE_CHECKING:
    from kvjax.cache import Method
    from kvjax.cache.calibration import Calibration
    from kvjax.engine import LLM
    from kvjax.models import LoadedModel, Tokenizer

CALIBRATES_ITSELF = (10**7, 10**9)
"""Parameters of models that are calibrated at first use: toys have nothing to predict, and with
larger ones a CPU takes long (others do not)."""
DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("int8", "float8_e4m3fn")


def add_model_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, files_only: bool = False
) -> None:
    """Add the options that say which model runs: what `load_chosen_model` reads.

    Args:
        parser: a parser or a group of one.
        files_only: leave out random weights, dtype and context length.
    """
    parser.add_argument(
        "--model", help="name of a model (what --weights holds; without both, smollm2-135m)"
    )
    parser.add_argument(
        "--weights", help="folder (safetensors), GGUF file, Orbax checkpoint, or hub id"
    )
    if files_only:
        parser.set_defaults(
            dummy_weights=False, dtype="float32", weight_dtype=None, context_length=None
        )
        return
    parser.add_argument(
        "--dummy-weights", action="store_true", help="random weights of the true shapes"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of weights and cache (float32 on CPU, else bfloat16)"
    )
    add_weight_dtype_option(parser)
    parser.add_argument(
        "--context-length", type=int, help="most tokens, instead of the model's own limit"
    )


def add_weight_dtype_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that says how many bits weights have."""
    parser.add_argument(
        "--weight-dtype",
        choices=WEIGHT_DTYPES,
        help="of matrices and embeddings, with a scale for each output (--dtype)",
    )


def add_devices_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, of_processes: bool = False
) -> None:
    """Add the options that say how many devices the model runs on.

    Args:
        parser: a parser or a group of one.
        of_processes: None by default, for a command that may be several processes.
    """
    usual = "1, or all that several processes have" if of_processes else "1"
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=None if of_processes else 1,
        metavar="N",
        help=f"devices that share the model and its KVs, by KV heads ({usual})",
    )
    parser.add_argument(
        "--kv-replicas",
        type=int,
        default=1,
        metavar="R",
        help="of these, devices that hold each KV head and share its query heads out (1)",
    )


def add_cache_dtype_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that says what keys and values are stored in: `cache_dtype`."""
    parser.add_argument(
        "--kv-dtype",
        dest="cache_dtype",
        metavar="TYPE",
        help="what keys and values are stored in: float32, bfloat16, float16, e4m3, e5m2, int8, "
        "int5, int4, int3.6, int2, or k8v4, k5v4, k5v3.6, keys and values of so many bits; "
        "affine4, affine2, mustafar50, mustafar70; int4+, int2+: twice as many bits where the pool "
        "has room; all but the first three with w16, say, behind them: the newest 16 of every head "
        "as they are, too (that of the weights)",
    )


def add_budget_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that says how many bytes a prompt's cache may take: `budget_bytes`."""
    parser.add_argument(
        "--budget-bytes", type=int, metavar="N", help="bytes of a prompt's cache, instead"
    )


def add_floor_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that says what a rate keeps at least; see `floor_of`."""
    parser.add_argument(
        "--floor", type=int, metavar="N", help="tokens that a rate keeps at least (128)"
    )


def floor_of(options: argparse.Namespace) -> int:
    """What a rate keeps at least, in tokens, by the option."""
    from kvjax.cache.budget import FLOOR_TOKENS

    return FLOOR_TOKENS if options.floor is None else options.floor


def check_cache_dtypes(names: Iterable[str | None]) -> None:
    """Refuse, before a model is loaded, what no codec stores.

    Raises:
        UserError: names what there is.
    """
    names = [name for name in names if name is not None]
    if names:
        from kvjax.cache import as_codec

        for name in names:
            as_codec(name, "float32")


def add_calibration_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that `chosen_calibration` reads."""
    parser.add_argument(
        "--calibration",
        default="auto",
        metavar="FILE",
        help="of `kvjax calibrate`, for methods that read one; auto: this package's, or made once "
        "per model; none (%(default)s)",
    )


def add_draft_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that `chosen_draft` reads."""
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="name or weights of a smaller model with the same tokenizer, which drafts for methods "
        "that look ahead: speckv, speckv-sparse (the model drafts for itself)",
    )


def check_draft(options: argparse.Namespace, methods: "Iterable[Method]") -> None:
    """Refuse, before a model is loaded, a model that would draft for nobody.

    Raises:
        UserError: none of the methods looks ahead.
    """
    if options.draft is not None and not any(method.drafts for method in methods):
        raise UserError(
            f"--draft {shown(options.draft)}: no method here looks ahead; leave it out, or take "
            "the method speckv"
        )


def _draft_model(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """Name and weights of the option `--draft`, one of them."""
    from kvjax.models.config import MODELS

    named = options.draft.lower() in MODELS
    return (options.draft, None) if named else (None, options.draft)


def _draft_tokenizer(options: argparse.Namespace, progress: Progress | None) -> "Tokenizer":
    """The tokenizer of the option `--draft`, of whose model no weights are read yet.

    Raises:
        UserError: there is no such model, or what it says of itself is damaged.
    """
    from kvjax.models import DEFAULT_MODEL, Tokenizer
    from kvjax.models.hub import resolve_weights
    from kvjax.models.weights import checkpoint_config

    name, weights = _draft_model(options)
    path = resolve_weights(name or DEFAULT_MODEL, weights, progress)
    checkpoint_config(path, None, None)
    return Tokenizer.from_path(path)


def chosen_draft(options: argparse.Namespace, longest: int, progress: Progress) -> "LLM | None":
    """The engine of the option `--draft`, for one prompt of so many tokens at a time, its cache
    compressed 4× by the usual method of its model.

    Raises:
        UserError: there is no such model, or it is damaged.
    """
    if options.draft is None:
        return None
    from kvjax.cache import CompressionConfig
    from kvjax.cache.methods.speckv import MOST_DRAFTED
    from kvjax.engine import LLM, EngineConfig
    from kvjax.models import load_model

    name, weights = _draft_model(options)
    model = load_model(name, weights=weights, dtype=dtype_of(options), progress=progress)
    most = min(model.config.max_position_embeddings, longest + MOST_DRAFTED)
    config = EngineConfig(max_batch=1, max_len=most, pool_tokens=most)
    return LLM(model, CompressionConfig(rate=4), config)


def chosen_calibration(
    options: argparse.Namespace,
    model: "LoadedModel",
    methods: "Iterable[Method]",
    progress: Progress,
) -> "Calibration | None":
    """The calibration of the option `--calibration`, where one of the methods reads one.

    Raises:
        UserError: there is no such file, or it is of another model.
    """
    from kvjax.engine.calibrate.shelf import AUTO, find, load

    if options.calibration != AUTO:
        return load(options.calibration, model, TimeLeft(progress))
    if not any(method.calibrated for method in methods):
        return None
    return find(model) or _made(model, progress)


def _one_process() -> bool:
    import jax

    return jax.process_count() == 1


def _made(model: "LoadedModel", progress: Progress) -> "Calibration":
    """A calibration of a model that has none, announced."""
    from kvjax.engine.calibrate.shelf import make

    progress.clear()
    print(
        f"{model.config.name} is calibrated once, on texts of this package "
        "(--calibration none switches it off)",
        file=sys.stderr,
    )
    return make(model, TimeLeft(progress))


def runnable(
    options: argparse.Namespace,
    model: "LoadedModel",
    methods: "Iterable[Method]",
    progress: Progress,
) -> set[str]:
    """Names of those methods that the calibration at hand has all arrays for; the others are told.

    None is made. What is found becomes the value of `--calibration`, so that it is looked up once.

    Raises:
        UserError: the calibration that the option names is no such file, or of another model.
    """
    from kvjax.engine.calibrate.shelf import AUTO, NONE, find

    methods = list(methods)
    if options.calibration == AUTO:
        found = find(model)
    else:
        found = chosen_calibration(options, model, methods, progress)
    options.calibration = found or NONE
    arrays = set(found.arrays if found else ())
    names = {method.name for method in methods if arrays.issuperset(method.calibrated)}
    lacking = [method.name for method in methods if method.name not in names]
    if lacking:
        progress.clear()
        told = "left out, as they need what `kvjax calibrate` (or --heads, --import) makes"
        print(f"{told}: {', '.join(lacking)}", file=sys.stderr)
    return names


def chosen_method(options: argparse.Namespace, model: "LoadedModel", progress: Progress) -> str:
    """The method where none is chosen: one that needs no question, for a model that is calibrated.

    The calibration becomes the option's value, so that it is looked up once. A model that has none
    is calibrated now, if that is a matter of minutes.

    Raises:
        UserError: the calibration that the option names is no such file, or of another model.
    """
    import jax

    from kvjax.cache.config import CALIBRATED, usual_method
    from kvjax.cache.methods import get_method
    from kvjax.engine.calibrate.shelf import AUTO, NONE, find

    if options.calibration == AUTO:
        found = find(model)
        least, most = CALIBRATES_ITSELF
        size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        soon = size >= least and (size <= most or jax.default_backend() != "cpu")
        if found is None and soon and not options.dummy_weights and _one_process():
            found = _made(model, progress)
    else:
        found = chosen_calibration(options, model, [get_method(CALIBRATED)], progress)
    options.calibration = found or NONE
    return usual_method(found.arrays if found else ())


def check_model_options(options: argparse.Namespace) -> None:
    """Refuse, before anything slow, what `add_model_options` reads and no model has.

    Raises:
        UserError: there is no model of that name, the context length is no length, or a number of
            devices is none.
    """
    if options.context_length is not None:
        check_whole("--context-length", options.context_length, 1)
    for name in ("tensor_parallel", "kv_replicas"):
        if (value := getattr(options, name, None)) is not None:
            check_whole(name, value, 1)
    if options.model is not None:
        from kvjax.models.config import get_model_entry

        get_model_entry(options.model)


def dtype_of(options: argparse.Namespace) -> str:
    """The name of the dtype of weights and cache that the options choose."""
    import jax

    return options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def asked_rate(options: argparse.Namespace) -> float | None:
    """The rate that the options ask of the cache: `USUAL_RATE` where they give it no size."""
    from kvjax.cache.config import USUAL_RATE

    sizes = (options.rate, options.max_cache_tokens, options.budget_bytes)
    sized = any(size is not None for size in sizes) or options.method == "full"
    return options.rate if sized else USUAL_RATE


def load_chosen_model(
    options: argparse.Namespace, progress: Progress | None = None
) -> "tuple[LoadedModel, str]":
    """The model that the options of `add_model_options` choose, and its dtype by name.

    Raises:
        UserError: unknown name; weights that are missing, damaged or do not fit the model; a model
            of the option `--draft` that is missing or has another tokenizer.
    """
    from kvjax.models import load_model

    startup.started()
    check = split = None
    if getattr(options, "draft", None) is not None:
        from kvjax.engine.draft import check_same

        check = functools.partial(check_same, _draft_tokenizer(options, progress))
    devices = getattr(options, "tensor_parallel", None) or 1
    if (devices, replicas := getattr(options, "kv_replicas", 1)) != (1, 1):
        from kvjax.engine.calibrate.shelf import AUTO
        from kvjax.engine.parallel import check_there
        from kvjax.engine.split import split_of

        # Before anything slow.
        check_there(devices)
        split = split_of(devices, getattr(options, "calibration", AUTO), replicas)
    try:
        model = load_model(
            options.model,
            weights=options.weights,
            dummy_weights=options.dummy_weights,
            dtype=dtype_of(options),
            weight_dtype=options.weight_dtype,
            progress=progress,
            split=split,
            check=check,
        )
    except NoWeights as error:
        raise UserError(
            f"{error}; or give --weights (a folder, GGUF file, Orbax checkpoint or hub id), or try "
            "the shapes with --dummy-weights"
        ) from error
    return model, dtype_of(options)
