"""Converts a checkpoint to Orbax, in the dtype it will run in.

Why: an Orbax checkpoint loads straight into the arrays of the model, sharded as they are on the
devices; a GGUF file is dequantised and safetensors are transposed every time they are loaded.

Examples:
    kvjax convert smollm2-135m /tmp/smollm2-orbax
    kvjax convert ~/models/Llama-3.1-8B-Instruct /tmp/llama-orbax --dtype bfloat16
    kvjax convert model.Q4_K_M.gguf /tmp/model-orbax --dtype float32 --force
    kvjax convert Qwen/Qwen2.5-0.5B-Instruct /tmp/qwen-orbax
    kvjax decode --model smollm2-135m --weights /tmp/smollm2-orbax

The source is a folder (safetensors, Orbax), a GGUF file, a hub id, or the name of a known model.
The tokenizer comes along. The output folder appears whole or not at all: what a killed run left
behind is cleared away by the next one.
"""

import argparse
import os
import time
from pathlib import Path

from kvjax import startup
from kvjax.cli.models import DTYPES
from kvjax.cli.progress import Progress


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder, GGUF file, hub id, or name of a known model")
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=DTYPES,
        help="dtype of the stored weights (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def convert(options: argparse.Namespace) -> str:
    """Converts as `options` say; a sentence on what came out of it."""
    import jax

    from kvjax.models.config import MODELS
    from kvjax.models.hub import resolve_weights
    from kvjax.models.weights import checkpoint_hash, load_params, save_orbax
    from kvjax.models.weights.orbax_save import check_target

    startup.started()
    begin = time.perf_counter()
    check_target(options.output, options.force)
    named = options.source.lower() in MODELS and not Path(options.source).exists()
    with Progress() as line:
        progress = None if options.quiet else line
        if named:
            source = resolve_weights(options.source, None, progress)
        else:
            source = resolve_weights(options.source, options.source, progress)
        known = MODELS[options.source.lower()].config if named else None
        config, params = load_params(source, known, options.dtype, progress, stacked=False)
        if progress:
            progress("write", 0, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
        target = save_orbax(
            options.output,
            config,
            params,
            source,
            overwrite=options.force,
            fingerprint=checkpoint_hash(source, config, "float32"),
        )
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    seconds = time.perf_counter() - begin
    return f"{target}: {config.name}, {options.dtype}, {size / 1e6:.0f} MB, {seconds:.1f} s"


def run(options: argparse.Namespace) -> int:
    # Nothing is computed here: memory of an accelerator would only be in the way.
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(convert(options))
    return 0
