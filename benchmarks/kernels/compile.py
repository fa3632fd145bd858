"""Compile every kernel for accelerators that are not here, and print what each one takes.

Why: the vendors' compilers see what lowering cannot (register spills, vector memory, operations
that only the last pass refuses), and need no device. Run it after every change of a kernel.

    pip install -e '.[cuda]'           # in an environment of its own: 4 GB
    python -m benchmarks.kernels.compile --target h200
    pip install -e '.[tpu]'            # in another one: 0.7 GB
    python -m benchmarks.kernels.compile --target v5e --target v6e --only 'd=128'

The table is printed in Markdown; the last line is the same as compact JSON. The exit code is 1 if a
kernel did not compile or spills registers, or a step computes anything twice to save memory or
copies its pool.
"""

from kvjax.startup import guard

guard(__name__)

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvjax import startup
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""
"""What XLA would read off an H200."""

TPU_SHAPES = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8"}
"""Of topologies with so many devices; a single one is one of four."""
TPU_BLOCKS = 1 << 20
"""Pools of more blocks do not fit a TPU's memory."""
NARROW = "llama3.2-1b"
"""A model of head dimension 64, of which two layers are compiled, and with other dimensions."""
NARROW_POOL = 4 * 10**9
"""Bytes of its pool, were that of bfloat16: far more than all else."""
LARGE_POOL = "steps kv-compress-continual, pool of 75 GB"
CODES = ("int8", "int4", "int4+", "int2")
"""Of pools whose steps are compiled, with few layers."""
PLUGINS = {
    "h200": ("jax_cuda13_plugin", "cuda"),
    "v5e": ("libtpu", "tpu"),
    "v6e": ("libtpu", "tpu"),
}
ABSENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""Variables by which compilers of accelerators do without them."""
NOT_TO_RUN = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_gpu_autotune_level=0"
)
"""Flags of XLA for programs of which only the operations and the buffers are looked at: both are
settled before code is generated, which takes most of the time."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one kernel of one call takes. Bytes; None where the device has no such thing."""

    target: str
    call: str
    kernel: str
    registers: int | None = None
    spilled: int | None = None
    shared_memory: int | None = None
    vector_memory: int | None = None
    temporaries: int | None = None
    error: str | None = None


def calls(target: str, only: str) -> Iterator[tuple[str, Callable, tuple, tuple[int, ...]]]:
    """(name, function, abstract arguments, donated arguments) of everything to compile."""
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels import cases
    from kvjax.kernels import (
        append_and_attend,
        move_kvs,
        paged_attention,
        prefill_attention,
        window_metrics,
    )
    from kvjax.kernels.paged_attention import spec

    def decode(q, k, v, table, lengths, metric):
        return paged_attention(q, k, v, table, lengths, metric=metric, return_metric=True)

    def with_exact(q, k, v, table, lengths, exact, metric=None):
        return paged_attention(
            q, k, v, table, lengths,
            exact=exact, metric=metric, return_metric=metric is not None,
        )  # fmt: skip

    def first_power(q, k, v, table, lengths, metric, observed):
        return paged_attention(
            q, k, v, table, lengths,
            metric=metric, return_metric=True, power=1, observed=observed,
        )  # fmt: skip

    for family, shape in spec.FAMILIES.items():
        if target != "h200" and shape.blocks > TPU_BLOCKS:
            continue
        if only in f"decode {family}":
            yield f"decode {family}", decode, shape.arguments(), (5,)
    halves = {} if target == "h200" else cases.HALVES
    for name, shape in (cases.CODES | halves).items():
        if only in f"decode {name}":
            yield f"decode {name}", decode, cases.coded(shape), (5,)
    for name in cases.EXACT:
        *call, metric = cases.coded(cases.CODES[name])
        beside = (*call, cases.exact_of(cases.CODES[name]))
        if only in f"exact KVs beside {name}":
            yield f"exact KVs beside {name}", with_exact, (*beside, metric), (6,)
    if only in f"exact KVs beside {name}, without metric":
        yield f"exact KVs beside {name}, without metric", with_exact, beside, ()
    plain = spec.FAMILIES["llama-3.1-8b"]
    if only in "decode without metric":
        yield "decode without metric", paged_attention, plain.arguments(metric=False), ()
    if only in "append and attend":
        q, *rest = plain.arguments(metric=False)
        rows = jax.ShapeDtypeStruct((plain.seqs, plain.heads, plain.head_dim), q.dtype)
        yield "append and attend", append_and_attend, (q, rows, rows, *rest), (3, 4)
    if only in "decode power 1, observed":
        observed = jax.ShapeDtypeStruct((plain.seqs,), jnp.bool_)
        yield "decode power 1, observed", first_power, (*plain.arguments(), observed), (5,)
    for d in spec.HEAD_DIMS:
        heads = [jax.ShapeDtypeStruct((8192, n, d), jnp.bfloat16) for n in (32, 8, 8)]
        if only in f"prefill d={d}":
            yield f"prefill d={d}", lambda q, k, v: prefill_attention(q, k, v), tuple(heads), ()
    if target == "h200":
        for d in spec.HEAD_DIMS:
            pool = jax.ShapeDtypeStruct((100_000, 16, d), jnp.bfloat16)
            slots = jax.ShapeDtypeStruct((256, 4096), jnp.int32)
            if only in f"move d={d}":
                count = jax.ShapeDtypeStruct((256,), jnp.int32)
                yield f"move d={d}", move_kvs, (pool, pool, slots, slots, count), (0, 1)
    keys = jax.ShapeDtypeStruct((8192, 8, 128), jnp.bfloat16)
    for window in (8, 8192):
        queries = jax.ShapeDtypeStruct((window, 32, 128), jnp.bfloat16)
        last = functools.partial(received_from_last, window_metrics)
        if only in f"window w={window}":
            yield f"window w={window}", last, (queries, keys), ()
    for d in spec.HEAD_DIMS:
        heads = [jax.ShapeDtypeStruct((8192, n, d), jnp.bfloat16) for n in (32, 8)]
        log_sum = jax.ShapeDtypeStruct((32, 8192), jnp.float32)
        if only in f"received d={d}":
            every = functools.partial(received_from_all, window_metrics)
            yield f"received d={d}", every, (*heads, log_sum), ()
    for method in ("full", "kv-compress-continual"):
        if only in f"steps {method}":
            yield f"steps {method}", *decode_steps(target, method)
    for stored in ("bfloat16", *CODES) if target != "h200" else ():
        for method in ("full", "kv-compress-continual"):
            for d in (64, 80, 96) if stored == "bfloat16" else (64, 96):
                if only in (name := f"steps {method} d={d} {stored}"):
                    narrow = decode_steps(
                        target, method, 2, NARROW_POOL, stored=stored, model=NARROW, head_dim=d
                    )
                    yield name, *narrow
    for stored in CODES if target == "h200" else ():
        for method in ("full", "kv-compress-continual"):
            if only in (name := f"steps {method} {stored}"):
                yield name, *decode_steps(target, method, 3, 10**10, stored=stored)
    if target == "h200" and only in LARGE_POOL:
        # Of which a few layers show what all do.
        large = decode_steps(target, "kv-compress-continual", 3, 75 * 10**9, slots=256)
        yield LARGE_POOL, *large
    for name in ("prefill_in_pool", "compress_slots"):
        if only in f"steps over shared blocks, {name}":
            yield f"steps over shared blocks, {name}", *shared_steps(target, name)


def received_from_last(window_metrics: Callable, q, k):
    """Window metrics of the last queries of a prompt."""
    import jax.numpy as jnp

    position = jnp.arange(k.shape[0] - q.shape[0], k.shape[0], dtype=jnp.int32)
    return window_metrics(q, k, query_position=position)


def received_from_all(window_metrics: Callable, q, k, log_sum):
    """Window metrics of all queries of a prompt, their softmax known."""
    import jax.numpy as jnp

    position = jnp.arange(k.shape[0], dtype=jnp.int32)
    return window_metrics(q, k, query_position=position, log_sum=log_sum)


def decode_steps(
    target: str,
    method: str,
    layers: int | None = None,
    pool_bytes: int | None = None,
    slots: int = 16,
    stored: str | None = None,
    model: str | None = None,
    head_dim: int | None = None,
) -> tuple[Callable, tuple, tuple[int, ...]]:
    """The engine's decode steps, for a model by its name, as it is or with another head dimension:
    sequences of up to 1024 KVs per head, in a pool (of a codec, by its name) that holds them all or
    has a given size. On GPUs single ones whose tokens are drawn, on TPUs a loop."""
    from kvjax.cache import get_method
    from kvjax.engine.decode import decode, decode_once
    from kvjax.engine.sampling import DRAWN

    arguments = engine_arguments(target, layers, pool_bytes, slots, stored, model, head_dim)
    config, params, cache, state, zeros = arguments
    rule, number = get_method(method).decode, array_like(zeros)
    if target == "h200":
        call = functools.partial(decode_once, config, rule, 8, None, None, DRAWN)
        return call, (params, cache, state, zeros, array_like(zeros, 1)), (1, 2)
    call = functools.partial(decode, config, rule, 8, None, None)
    return call, (params, cache, state, zeros, number, array_like(zeros, 1)), (1, 2)


def shared_steps(target: str, name: str) -> tuple[Callable, tuple, tuple[int, ...]]:
    """A step that writes to blocks which may have other owners: two layers of a model, in a pool
    that is far more than all else."""
    from kvjax.cache import get_method
    from kvjax.engine.prefill import prefill_in_pool
    from kvjax.engine.reclaim import compress_slots

    sizes = 2, NARROW_POOL, 16, None, NARROW
    config, params, cache, _, zeros = engine_arguments(target, *sizes, sharing=True)
    method = get_method("kv-compress-continual")

    def prefill(params, cache, slot, tokens, length):
        return prefill_in_pool(config, method.observer, params, {}, cache, slot, tokens, length)

    def compress(_, cache, slots, keep_blocks, protected):
        return compress_slots(1 << 17, 64, method, {}, cache, slots, keep_blocks, protected)

    number, tokens = array_like(zeros), array_like(zeros, 256)
    if name == "prefill_in_pool":
        return prefill, (params, cache, number, tokens, number), (1,)
    return compress, (params, cache, *(array_like(zeros, 4),) * 3), (1,)


def array_like(of: Any, *shape: int) -> Any:
    """An abstract array of that dtype and a shape."""
    import jax

    return jax.ShapeDtypeStruct(shape, of.dtype)


def engine_arguments(
    target: str,
    layers: int | None = None,
    pool_bytes: int | None = None,
    slots: int = 16,
    stored: str | None = None,
    model: str | None = None,
    head_dim: int | None = None,
    sharing: bool = False,
) -> tuple[Any, Any, Any, Any, Any]:
    """What the engine's steps work on (see `decode_steps`): the model's configuration, and, all
    abstract, its parameters, a cache, the state of slots, and a number for each of these."""
    import jax
    import jax.numpy as jnp

    from kvjax.cache import as_codec, init_cache
    from kvjax.engine.decode import init_slots
    from kvjax.models import stacks_layers
    from kvjax.models.config import get_model_entry
    from kvjax.models.decoder import abstract_params

    usual = "llama3.1-8b" if target == "h200" else "qwen2.5-1.5b"
    config = get_model_entry(model or usual).config
    config = config if layers is None else dataclasses.replace(config, num_layers=layers)
    config = config if head_dim is None else dataclasses.replace(config, head_dim=head_dim)
    heads, blocks_per_head = config.num_kv_heads, 64
    blocks = slots * config.num_layers * heads * blocks_per_head
    if pool_bytes is not None:
        blocks = pool_bytes // (16 * (4 * config.head_dim + 8))

    def arguments():
        cache = init_cache(
            num_slots=slots,
            num_layers=config.num_layers,
            num_kv_heads=heads,
            head_dim=config.head_dim,
            num_blocks=blocks,
            max_blocks_per_head=blocks_per_head,
            block_size=16,
            codec=as_codec(stored, jnp.bfloat16),
            sharing=sharing,
        )
        return cache, init_slots(slots), jnp.zeros(slots, jnp.int32)

    params = abstract_params(
        config, jnp.bfloat16, stacks_layers("gpu" if target == "h200" else "tpu")
    )
    with in_its_place(absent_device(target)):
        return config, params, *jax.eval_shape(arguments)


def in_its_place(device):
    """A context in which kernels are chosen for a device that is not there."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    if device.platform == "cpu":
        return contextlib.nullcontext()
    gpu = device.platform in ("gpu", "cuda")
    kind = "NVIDIA H200" if gpu else device.device_kind
    abstract = AbstractDevice(kind, 132 if gpu else 1, "gpu" if gpu else "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def compiled(
    function: Callable,
    arguments: tuple,
    donated: tuple[int, ...],
    device,
    options: dict[str, str] | None = None,
):
    """The function compiled for a device that is not there, with some of XLA's options."""
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with in_its_place(device):
        return jax.jit(function, donate_argnums=donated).lower(*arguments).compile(options)


def repeated(program) -> int:
    """Operations of a compiled program that XLA computes again to save memory."""
    return len(re.findall(r"%\S*\.remat\S* =", program.as_text() or ""))


def copied(program, shape: tuple[int, ...]) -> int:
    """Copies of arrays of that shape in a compiled program."""
    dims = re.escape(",".join(map(str, shape)))
    return len(re.findall(rf" = \(?\w+\[{dims}\].* copy(?:-start)?\(", program.as_text() or ""))


def gpu_rows(call: str, temporaries: int | None, folder: Path) -> Iterator[Row]:
    """One row per kernel, from the reports that Mosaic GPU left in `folder`."""
    for report in sorted(folder.glob("*.ptxas")):
        text = report.read_text()
        resources = report.with_suffix(".resources.txt").read_text()
        yield Row(
            target="h200",
            call=call,
            kernel=re.sub(r"_\d+$", "", report.stem),
            registers=int(re.findall(r"Used (\d+) registers", text)[-1]),
            spilled=sum(map(int, re.findall(r"(\d+) bytes spill", text))),
            shared_memory=int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[-1]),
            temporaries=temporaries,
        )


def tpu_rows(target: str, call: str, temporaries: int | None, text: str) -> Iterator[Row]:
    """One row per kernel, from the compiled program's text."""
    for match in re.finditer(r'%([\w-]+)[.\d]* = .*custom_call_target="tpu_custom_call"', text):
        used = text[text.index('"used_scoped_memory_configs"', match.end()) :]
        memory = re.match(r'[^\]]*"memory_space":"1","offset":"0","size":"(\d+)"', used)
        yield Row(
            target=target,
            call=call,
            kernel=match[1],
            vector_memory=int(memory[1]) if memory else None,
            temporaries=temporaries,
        )


def absent_device(target: str):
    """A device to compile for that is not there."""
    return absent_devices(target)[0]


def absent_devices(target: str, count: int = 1) -> list:
    """So many devices to compile for that are not there; of TPUs, at least four.

    Raises:
        UserError: none of the chip's topologies has as many.
    """
    from jax.experimental import topologies

    if target == "h200":
        shape = f"1x1x{count}"
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=shape, target_config=H200_TARGET, topology=shape
        )
    elif count in TPU_SHAPES:
        topology = topologies.get_topology_desc(f"{target}:{TPU_SHAPES[count]}", "tpu")
    else:
        counts = ", ".join(map(str, TPU_SHAPES))
        raise UserError(f"{count} devices of {target}: give one of {counts}")
    return topology.devices


def rows(target: str, only: str) -> Iterator[Row]:
    """Compile everything for one target."""
    import jax

    from kvjax.engine.compilation import compiler_options

    startup.started()
    device = absent_device(target)
    for call, function, arguments, donated in calls(target, only):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MOSAIC_GPU_DUMP_TO"] = folder
            try:
                steps = call.startswith("steps")
                options = compiler_options("gpu") if steps and target == "h200" else None
                program = compiled(function, arguments, donated, device, options)
            except Exception as error:
                yield Row(target, call, "", error=str(error).splitlines()[0][:200])
                continue
            if again := repeated(program):
                error = f"{again} operations are computed again"
                yield Row(target, call, "", error=error)
            if steps:
                shapes = {x.shape for x in jax.tree.leaves(arguments[1].kv) if x.ndim > 1}
                if copies := sum(copied(program, shape) for shape in shapes):
                    yield Row(target, call, "", error=f"{copies} copies of the pool")
            memory = program.memory_analysis()
            temporaries = memory.temp_size_in_bytes if memory else None
            if target == "h200":
                kernels = list(gpu_rows(call, temporaries, Path(folder)))
            else:
                kernels = list(tpu_rows(target, call, temporaries, program.as_text() or ""))
            library = "as above, or a library's"
            kernels = kernels or [Row(target, call, library, temporaries=temporaries)]
            yield from dict.fromkeys(kernels)


def markdown(row: Row) -> str:
    """The row as a line of the table."""
    return "| " + " | ".join("" if x is None else str(x) for x in dataclasses.astuple(row)) + " |"


def check_toolchain(target: str) -> None:
    """Refuse a target whose compiler is not installed."""
    module, extra = PLUGINS[target]
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"target {target!r} needs {module}: pip install 'jax[{extra}]' or '.[{extra}]'"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.kernels.compile", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(PLUGINS), required=True)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    options = parser.parse_args(arguments)
    os.environ |= ABSENT
    names = [field.name.replace("_", " ") for field in dataclasses.fields(Row)]
    done: list[Row] = []
    for target in options.target:
        check_toolchain(target)
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for target in options.target:
        for row in rows(target, options.only):
            print(markdown(row), flush=True)
            done.append(row)
    bad = [row for row in done if row.error or row.spilled]
    summary = {"kernels": len(done), "bad": [dataclasses.asdict(row) for row in bad]}
    print(json.dumps(summary, separators=(",", ":")))
    return 1 if bad or not done else 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
