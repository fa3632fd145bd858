"""What a large deployment needs on paper: bytes on each device, and bytes between them.

    python -m benchmarks.scale                                 # 70B, 128 k prompts, 1,000 sequences
    python -m benchmarks.scale --model llama3.1-8b --devices 1 --sequences 90 --prompt-len 6000
    python -m benchmarks.scale --devices 1 --weight-dtype float8_e4m3fn --sequences 100
    python -m benchmarks.scale --model llama3.1-405b --devices 16 --kv-replicas 2
    python -m benchmarks.scale --compile                       # and what the compiler says of it
    python -m benchmarks.scale --compile v6e --sequences 200   # for TPUs, by the extra `tpu`

Weights, KV heads, their blocks and their tables are split over the devices (blocks and tables over
fewer, where KV heads have replicas); tokens, lengths of sequences and sampling are replicated.
Nothing is run: the numbers follow from the shapes that `kvjax.cache` and `kvjax.engine` allocate.
With `--compile` the engine's own decode step and a chunk of a prompt are compiled at the full size
for devices that are not there: CPU devices, or accelerators whose compiler is installed. Its memory
analysis stands beside the plan: what comes in has to be what was planned, and what is computed in
between is what this compiler needs. So do the exchanges that are left in the program, those of one
layer in a loop once. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from typing import Any

from benchmarks.kernels.compile import (
    ABSENT,
    NOT_TO_RUN,
    PLUGINS,
    absent_devices,
    check_toolchain,
    in_its_place,
)
from kvjax.checks import check_number
from kvjax.cli import ArgumentParser, run_script
from kvjax.cli.models import DTYPES, WEIGHT_DTYPES
from kvjax.errors import UserError

EXCHANGE = re.compile(
    r"= (\S+|\([^=]*?\)) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)
SHAPE = re.compile(r"[a-z]\w*\[[\d,]*\]")
MOST = 1e12
"""Of anything that is given."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    add = parser.add_argument
    add("--model", default="llama3.1-70b", help="(%(default)s)")
    add("--devices", type=int, default=8, help="(%(default)s)")
    add("--kv-replicas", type=int, default=1, help="of these, that hold each KV head (%(default)s)")
    add("--device-gib", type=float, default=139.0, help="memory of each (%(default)s)")
    add("--sequences", type=int, default=1000, help="at once (%(default)s)")
    add("--prompt-len", type=int, default=131072, help="(%(default)s tokens)")
    add("--output-len", type=int, default=500, help="(%(default)s tokens)")
    add("--rate", type=float, default=64.0, help="compression rate (%(default)s)")
    add("--prefill-chunk", type=int, default=8192, help="(%(default)s tokens)")
    add("--block-size", type=int, default=16, help="(%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (%(default)s)")
    add("--weight-dtype", choices=WEIGHT_DTYPES, help="of matrices and embeddings (--dtype)")
    add("--kv-bytes", type=int, default=2, help="per element of the pool (%(default)s)")
    add("--longest-head", type=float, default=8.0,
        help="most KVs of a head, in multiples of the mean it keeps (%(default)s)")  # fmt: skip
    add("--compile", nargs="?", const="cpu", choices=("cpu", *PLUGINS), metavar="TARGET",
        help="compile the steps and say what they take: for cpu, or one of "
        f"{', '.join(PLUGINS)}")  # fmt: skip
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(f"--{name.replace('_', '-')}", value, 0, MOST, above=True)
    return options


def model_of(options: argparse.Namespace) -> Any:
    """The configuration that is asked for."""
    from kvjax.models import get_model_entry

    model = get_model_entry(options.model).config
    return dataclasses.replace(model, weight_dtype=options.weight_dtype)


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes per device and bytes exchanged, by name."""
    import jax
    from flax import nnx

    from kvjax.cache import CacheSpec, budget_blocks, cache_cap
    from kvjax.engine.parallel import check_replicas
    from kvjax.models.decoder import abstract_params, logical_axes
    from kvjax.models.parallel import SPLIT_AXES, Dealing, dealt_shape

    model = model_of(options)
    layers, kv_heads, d = model.num_layers, model.num_kv_heads, model.head_dim
    spec = CacheSpec.of(model, _elements(options.kv_bytes), options.block_size)
    devices, b, slots = options.devices, options.block_size, options.sequences
    check_replicas(devices, options.kv_replicas, model)
    shards = devices // options.kv_replicas
    if kv_heads % shards and shards % kv_heads:
        raise UserError(
            f"--devices {devices}: {options.model} has {kv_heads} KV heads; give a divisor of that "
            f"or a multiple, times --kv-replicas ({options.kv_replicas})"
        )
    # Where there are more shards than heads, each has a place in every layer and some are empty.
    here = layers * max(1, kv_heads // shards)
    dealing = Dealing.even(1, kv_heads, shards, options.kv_replicas)
    axes = logical_axes(model)
    weights = on_device = 0
    flat: Any = nnx.to_flat_state(abstract_params(model, options.dtype))
    for path, leaf in flat:
        (array,) = jax.tree.leaves(leaf)
        names = axes[path]
        parts = devices if set(names) & set(SPLIT_AXES) else 1
        weights += array.size * array.dtype.itemsize
        dealt = math.prod(dealt_shape(array.shape, names, dealing))
        on_device += dealt * array.dtype.itemsize // parts
    cap = cache_cap(options.prompt_len, options.rate, b)
    budget = budget_blocks(cap, layers, kv_heads, b)
    # One more block per head is not full yet while a sequence decodes.
    blocks = slots * (budget + layers * kv_heads)
    # A prompt that runs in chunks holds its budget and a chunk, for the moment of one prompt.
    blocks += layers * kv_heads * -(-options.prefill_chunk // b)
    whole = -(-(options.prompt_len + options.output_len) // b)
    mean = -(-cap // b)
    width = min(whole, int(mean * options.longest_head) + -(-options.prefill_chunk // b))
    hidden = model.hidden_size
    activations = options.prefill_chunk * (6 * hidden + 3 * model.intermediate_size // devices)
    per_device = {
        "weights": on_device,
        "pool, keys and values": blocks // shards * b * spec.kv_bytes,
        "pool, metric and position": blocks // shards * b * spec.number_bytes,
        "free blocks": (1 + blocks // shards) * 4,
        "block tables": slots * here * width * 4,
        "context lengths": slots * here * 4,
        "slot states": slots * 48,
        "logits and sampling": 3 * slots * model.vocab_size * 4 // devices,
        "activations of a chunk": activations * 2,
    }
    total = sum(per_device.values())
    full = (options.prompt_len + options.output_len) * spec.heads * spec.kv_bytes
    # Attention's output and the MLP's are summed over devices; a ring moves 2 (n − 1) / n of it.
    ring = 2 * (devices - 1) / devices
    # Queries are gathered among replicas: each gets what the others have of its heads.
    heads = model.num_heads // shards if shards <= kv_heads else model.group_size
    gathered = (options.kv_replicas - 1) / options.kv_replicas * heads * d
    decode = layers * slots * 2 * (ring * 2 * hidden + gathered)
    prefill = layers * options.prefill_chunk * 2 * (ring * 2 * hidden + gathered)
    prices = layers * kv_heads * width * 4
    read = per_device["weights"] + slots * cap * layers * kv_heads * spec.kv_bytes // shards
    return {
        "model": options.model,
        "devices": devices,
        "kv_replicas": options.kv_replicas,
        "sequences": slots,
        "prompt_len": options.prompt_len,
        "rate": options.rate,
        "weight_bytes": weights,
        "cap_tokens": cap,
        "budget_blocks": budget,
        "pool_blocks_per_device": blocks // shards,
        "pool_elements_per_device": blocks // shards * b * d,
        "block_table_width": width,
        "bytes_per_device": per_device,
        "total_bytes_per_device": total,
        "fits": total <= options.device_gib * 2**30,
        "full_cache_bytes_per_sequence": full,
        "full_cache_sequences": int(
            (options.device_gib * 2**30 - total + per_device["pool, keys and values"])
            * shards
            // full
        ),
        "exchanged_bytes_per_decode_step": int(decode),
        "exchanged_bytes_per_prefill_chunk": int(prefill),
        "eviction_exchange_bytes_prices": prices,
        "eviction_exchange_bytes_bisection": 32 * 4 * ring,
        "bytes_read_per_decode_step": int(read),
        "block_bytes": spec.block_bytes,
    }


def compiled(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """What each device takes of the compiled steps, in bytes: what comes in, what of it is written
    in place, what goes out beside it, and what is computed in between.

    Args:
        options: the same as of `sizes`.
        found: what that says.

    Raises:
        UserError: keys and values of so many bytes are no dtype's.
    """
    import jax
    import numpy as np
    from flax import nnx

    from kvjax.cache import CacheSpec, as_codec, get_method
    from kvjax.engine.compilation import compiler_options
    from kvjax.engine.decode import init_slots
    from kvjax.engine.parallel import Parallel
    from kvjax.models.decoder import abstract_params, logical_axes
    from kvjax.models.parallel import Dealing, Split, dealt_shape

    names = {1: "int8", 2: "bfloat16", 4: "float32"}
    if options.kv_bytes not in names:
        raise UserError(f"--kv-bytes {options.kv_bytes} with --compile: give 1, 2 or 4")
    model, slots, devices = model_of(options), options.sequences, options.devices
    codec = as_codec(names[options.kv_bytes], options.dtype)
    spec = CacheSpec.of(model, codec, options.block_size)
    shards = devices // options.kv_replicas
    dealing = Dealing.even(model.num_layers, model.num_kv_heads, shards, options.kv_replicas)
    there = jax.devices() if options.compile == "cpu" else absent_devices(options.compile, devices)
    parallel, axes = Parallel(model, dealing, devices=there), logical_axes(model)
    split = Split(dealing, parallel.mesh)

    def lying(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def dealt(path: Any, leaf: Any) -> Any:
        (array,) = jax.tree.leaves(leaf)
        shape = dealt_shape(array.shape, axes[path], dealing)
        return lying(jax.ShapeDtypeStruct(shape, array.dtype), split.sharding(axes[path]))

    flat: Any = nnx.to_flat_state(abstract_params(model, options.dtype))
    params = nnx.from_flat_state([(path, leaf.replace(dealt(path, leaf))) for path, leaf in flat])
    cache = parallel.shape_of_cache(
        found["pool_blocks_per_device"],
        num_slots=slots,
        num_layers=spec.num_layers,
        num_kv_heads=dealing.places,
        head_dim=spec.head_dim,
        max_blocks_per_head=found["block_table_width"],
        block_size=spec.block_size,
        codec=spec.codec,
    )
    method, steps = get_method("kv-compress"), parallel.steps(params)
    state = lying(jax.eval_shape(lambda: init_slots(slots)), parallel.everywhere)
    number = np.int32(0)
    calls = {
        "decode": (
            model, method.decode, 8, None, None, params, cache, state, np.zeros(slots, np.int32),
            number, np.zeros(1, np.int32), {},
        ),
        "prefill in pool": (
            model, method.observer.without_query_heads, params, {}, cache, number,
            np.zeros(options.prefill_chunk, np.int32), number,
        ),
    }  # fmt: skip
    rows = {}
    for name, arguments in calls.items():
        with in_its_place(there[0]):
            lowered = steps[name].lower(*arguments)  # type: ignore[attr-defined, index]
            gpu = "gpu" if options.compile == "h200" else "cpu"
            program = lowered.compile(compiler_options(gpu))
        told = program.memory_analysis()
        rows[name] = {
            "arguments": told.argument_size_in_bytes,
            "in place": told.alias_size_in_bytes,
            "results": told.output_size_in_bytes - told.alias_size_in_bytes,
            "temporaries": told.temp_size_in_bytes,
            "exchanges": exchanges(program.as_text()),
        }
    return rows


def exchanges(text: str) -> dict[str, int]:
    """How often each exchange between devices stands in a compiled program, by what it is and what
    it results in: "all-reduce f32[8,1,4096]"."""
    found: dict[str, int] = {}
    for match in EXCHANGE.finditer(text):
        shapes = ", ".join(SHAPE.findall(match[1]))
        found[f"{match[2]} {shapes}"] = found.get(f"{match[2]} {shapes}", 0) + 1
    return dict(sorted(found.items()))


PLANNED = ("weights", "pool, keys and values", "pool, metric and position", "free blocks",
           "block tables", "context lengths", "slot states")  # fmt: skip
"""Of the plan, what comes into a step."""


def _elements(size: int) -> Any:
    """A codec whose rows have so many bytes per element, whatever they are."""
    from kvjax.cache import Codec

    class Elements(Codec):
        def row_bytes(self, head_dim: int) -> int:
            return head_dim * size

    return Elements()


def show(found: dict[str, Any], device_gib: float) -> None:
    from rich.console import Console
    from rich.table import Table

    def gib(count: float) -> str:
        return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.2f} MiB"

    table = Table(show_edge=False)
    table.add_column("on each device")
    table.add_column("size", justify="right")
    for name, count in found["bytes_per_device"].items():
        table.add_row(name, gib(count))
    verdict = "fits" if found["fits"] else "does not fit"
    table.add_row("together", gib(found["total_bytes_per_device"]))
    facts = Table(show_header=False, show_edge=False, box=None)
    facts.add_row(f"memory of a device ({verdict})", f"{device_gib:g} GiB")
    facts.add_row("sequences without compression there", f"{found['full_cache_sequences']:,}")
    names = {
        "exchanged_bytes_per_decode_step": "exchanged in a decode step, per device",
        "exchanged_bytes_per_prefill_chunk": "exchanged in a prefill chunk, per device",
        "eviction_exchange_bytes_prices": "eviction of one prompt, all prices gathered",
        "eviction_exchange_bytes_bisection": "the same by bisection on the price",
        "bytes_read_per_decode_step": "read by a decode step, per device",
    }
    for key, name in names.items():
        count = found[key]
        facts.add_row(name, gib(count) if count >= 2**13 else f"{count:,.0f} bytes")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)
    console.print(
        f"{found['model']}, {found['sequences']:,} sequences of {found['prompt_len']:,} tokens, "
        f"rate {found['rate']:g}, {found['devices']} devices"
    )
    planned = sum(found["bytes_per_device"][name] for name in PLANNED)
    for step, told in found.get("compiled", {}).items():
        counts = [(name, count) for name, count in told.items() if name != "exchanges"]
        row = ", ".join(f"{name} {gib(count)}" for name, count in counts)
        facts.add_row(f"{step}, compiled", row)
        for what, count in told["exchanges"].items():
            facts.add_row("", f"{count} × {what}")
        facts.add_row("of these arguments planned", f"{planned / told['arguments']:.4f}")
    console.print(table)
    console.print(facts)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.compile == "cpu":
        flags = f"--xla_force_host_platform_device_count={options.devices} {NOT_TO_RUN}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif options.compile:
        check_toolchain(options.compile)
        os.environ |= ABSENT
    found = sizes(options)
    if options.compile:
        found["compiled"] = compiled(options, found)
    show(found, options.device_gib)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
