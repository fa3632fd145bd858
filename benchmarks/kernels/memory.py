"""Compare the memory plan of an engine with what its compiled steps take, step by step.

Why: the pool is all that the plan leaves. A plan that is too small ends in "out of memory" under
load, one that is too large holds fewer sequences. The steps of an engine are compiled for an H200
that is not there, from shapes alone: no weight is allocated and nothing runs.

    pip install -e '.[cuda]'           # in an environment of its own: 4 GB
    python -m benchmarks.kernels.memory                        # three sizes of model
    python -m benchmarks.kernels.memory --model llama3.1-8b --max-batch 128 --only decode

The pool is what the plan leaves of the device. What a step takes beside weights, cache and slot
states is what XLA says of it: temporaries, and results that are not written over an argument. A
prompt in the scratch is there while others decode. Steps that run the model are compiled with two
layers and with three (`--layers`): what the third one adds, each further one does. The last line is
one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.kernels.compile import (
    H200_TARGET,
    NOT_TO_RUN,
    absent_device,
    check_toolchain,
    compiled,
    in_its_place,
)
from kvjax import startup
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script

MODELS = ("smollm2-135m", "llama3.2-1b", "llama3.1-8b")
SIZES = {
    "max_batch": (64, 1 << 12),
    "max_len": (16384, 1 << 20),
    "prefill_chunk": (2048, 1 << 20),
    "prefill_scratch": (8192, 1 << 20),
}
"""Of the engine: what is asked of it by default, and the most that makes sense."""
PARTS = ("weights", "pool", "tables", "scratch", "workspace")
COLUMNS = (
    "model", "planned, GiB", "compiled, GiB", "difference", "scratch and workspace, MiB",
    "compiled, MiB", "largest step",
)  # fmt: skip
LAYERS = (2, 3)
"""By default, of the models that are compiled of steps that run the layers one after the other."""
BY_LAYER = ("prefill in scratch", "prefill in pool", "decode")
"""Such steps; the others are loops over all layers, and compiled whole."""


class Step(NamedTuple):
    """A step of an engine, and bytes of a prompt that stands in the scratch meanwhile."""

    name: str
    function: Any
    arguments: tuple
    donated: tuple[int, ...]
    beside: int


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.kernels.memory", description=__doc__)
    parser.add_argument("--model", action="append", help=f"by default {', '.join(MODELS)}")
    parser.add_argument("--method", default="kv-compress-continual", help="(%(default)s)")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    for name, (usual, _) in SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=usual, help="(%(default)s)"
        )
    parser.add_argument(
        "--layers", type=int, nargs=2, default=LAYERS, metavar="N",
        help="what further layers take is read off models of so many and of so many (2 3)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    check_whole("--layers", options.layers[0], 1, 1 << 10)
    check_whole("--layers", options.layers[1], options.layers[0] + 1, 1 << 10)
    for name, (_, most) in SIZES.items():
        check_whole(f"--{name.replace('_', '-')}", getattr(options, name), 1, most)
    return options


def device_memory() -> int:
    """Bytes of the device that steps are compiled for."""
    found = re.search(r"device_memory_size: (\d+)", H200_TARGET)
    assert found is not None
    return int(found[1])


def size_of(tree: Any) -> int:
    """Bytes of all leaves."""
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def worker_of(model: Any, params: Any, plan: Any, config: Any, max_len: int) -> Any:
    """An engine's device side that holds shapes instead of arrays."""
    import jax

    from kvjax.engine.worker import Worker

    made = []

    def make():
        worker = Worker(
            model, params, config, spec=plan.spec, num_blocks=plan.num_blocks, max_len=max_len
        )
        made.append(worker)
        return worker.cache, worker.state, worker.eos_ids, worker.artefacts

    shapes = jax.eval_shape(make)
    worker = made[0]
    worker.cache, worker.state, worker.eos_ids, worker.artefacts = shapes
    return worker


def steps_of(worker: Any, method_name: str, max_len: int) -> Iterator[Step]:
    """The largest call of every step that takes much."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kvjax.cache import CompressionConfig
    from kvjax.engine.request import Request
    from kvjax.engine.sampling import SamplingParams
    from kvjax.engine.steps import FUNCTIONS

    config, model, b = worker.config, worker.model, worker.cache.block_size
    compression = CompressionConfig(method=method_name)
    method, slots = compression.resolved, list(range(config.max_batch))

    def request(length: int) -> Request:
        heads = model.num_layers * model.num_kv_heads
        budget = compression.blocks(length, heads, b)
        return Request(
            "one", 0, np.zeros(length, np.int32), SamplingParams(max_tokens=1), compression,
            method, budget, heads, b, method.decode,
        )  # fmt: skip

    def step(call: Any, beside: int) -> Step:
        function = FUNCTIONS[call.key.step]
        static, rest = call.args[: function.num_static], call.args[function.num_static :]
        donated = tuple(i - function.num_static for i in function.donated)

        def run(*args):
            return function.call(*static, *args)

        # A method's leaves are Python's numbers.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), rest)
        return Step(call.key.step, run, shapes, donated, beside)

    def chunk(length: int) -> tuple[Any, int]:
        job = worker.begin(request(length))
        if not job.in_pool and len(job.chunks) > 1:
            job.prompt = jax.eval_shape(worker.scratch_maker(job))
        return worker.chunk_call(job), size_of(job.prompt)

    whole = min(config.prefill_scratch, max_len)
    in_scratch, before = chunk(whole)
    yield step(in_scratch, before)
    prompt, _ = in_scratch.step.eval_shape(*in_scratch.args)
    scratch = size_of(prompt)
    yield step(worker.place_call(request(whole), prompt, 0, 1), scratch)
    count, width = worker.decode_tables.largest
    call = worker.decode_call(slots[:count], width * b, 1, method.decode, None, exact=True)
    yield step(call, scratch)
    if method.compresses:
        most, (count, width) = compression.max_kvs_per_step, worker.compress_tables.largest
        some, ones = slots[:count], [1] * count
        call = worker.compress_call(some, ones, ones, method, most, width * b, exact=True)
        yield step(call, scratch)
    if max_len > config.prefill_scratch:
        yield step(chunk(max_len)[0], 0)


def sized(model: Any, config: Any, max_len: int, platform: str, limit: int) -> tuple[Any, Any]:
    """A model's parameters as shapes, and its plan."""
    import jax.numpy as jnp

    from kvjax.engine.memory import plan_sizes
    from kvjax.models import stacks_layers
    from kvjax.models.decoder import abstract_params

    params = abstract_params(model, jnp.bfloat16, stacks_layers(platform))
    return params, plan_sizes(model, params, config, max_len, limit=limit)


def compare(name: str, options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Planned and compiled bytes of one model."""
    from kvjax.engine.compilation import compiler_options
    from kvjax.engine.config import EngineConfig
    from kvjax.models import get_model_entry

    model = get_model_entry(name).config
    sizes = {size: getattr(options, size) for size in SIZES}
    max_len = min(sizes.pop("max_len"), model.max_position_embeddings)
    config = EngineConfig(**sizes, max_len=max_len)
    platform = "cpu" if device.platform == "cpu" else "gpu"
    limit = int(device_memory() * config.memory_fraction)

    def steps(model: Any, config: Any) -> tuple[Any, list[Step], int]:
        """The plan, every step, and bytes that are there before one runs."""
        params, plan = sized(model, config, max_len, platform, limit)
        with in_its_place(device):
            worker = worker_of(model, params, plan, config, max_len)
            found = [s for s in steps_of(worker, options.method, max_len) if options.only in s.name]
        return plan, found, size_of((params, worker.cache, worker.state))

    def further(step: Step, layers: int) -> int:
        """Bytes that a compiled step takes beside what is there."""
        call = step.function, step.arguments, step.donated
        memory = compiled(*call, device, compiler_options(platform)).memory_analysis()
        assert memory is not None, "GPUs and CPUs say what a program takes"
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        found = memory.temp_size_in_bytes + results
        print(f"  {name}, {layers} layers, {step.name}: {found / 2**20:.1f} MiB", file=sys.stderr)
        return found

    plan, whole, resident = steps(model, config)
    config = dataclasses.replace(config, pool_tokens=plan.pool_tokens)
    took = {
        step.name: further(step, model.num_layers)
        for step in whole if step.name not in BY_LAYER
    }  # fmt: skip
    few, more = (
        {
            step.name: further(step, layers)
            for step in steps(dataclasses.replace(model, num_layers=layers), config)[1]
            if step.name in BY_LAYER
        }
        for layers in options.layers
    )
    for step in few:
        # Buffers of a few layers lie as it comes: more layers never take less.
        each = max(0, more[step] - few[step]) // (options.layers[1] - options.layers[0])
        most = max(few[step], more[step])
        took[step] = most + each * (model.num_layers - options.layers[1])
    beside = {step.name: step.beside for step in whole}
    largest = max(took, key=lambda step: took[step] + beside[step])
    total = resident + took[largest] + beside[largest]
    return {
        "model": name, "planned": plan.total, "compiled": total,
        "difference": plan.total / total - 1, "largest": largest,
        "planned_parts": {part: getattr(plan, part) for part in PARTS},
        "resident": resident, "beside": beside, "steps": took,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NOT_TO_RUN}".strip()
    check_toolchain("h200")
    startup.started()
    device, found = absent_device("h200"), []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in options.model or MODELS:
        one = compare(name, options, device)
        found.append(one)
        parts, largest = one["planned_parts"], one["largest"]
        row = [
            name,
            *(f"{one[key] / 2**30:.2f}" for key in ("planned", "compiled")),
            f"{one['difference']:+.2%}",
            f"{(parts['scratch'] + parts['workspace']) / 2**20:,.0f}",
            f"{(one['steps'][largest] + one['beside'][largest]) / 2**20:,.0f}",
            largest,
        ]
        print(f"| {' | '.join(row)} |", flush=True)
    print(json.dumps(found, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
