"""What goes where in a device's memory, decided before anything runs."""

import bisect
import contextlib
import dataclasses
import gc
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.cache import CacheSpec, Codec, CompressionConfig, Plane, as_codec
from kvjax.cache.budget import USUAL_BLOCK
from kvjax.cache.policy.probe import AT_ONCE
from kvjax.checks import INT32_MAX
from kvjax.engine.config import EngineConfig
from kvjax.engine.decode import init_slots
from kvjax.engine.probe import NOTHING, Behind
from kvjax.engine.tables import Tables
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import activation_dtype
from kvjax.models.parallel import Dealing

CPU_FRACTION = 0.5
"""Share of the free memory that an engine takes where the device is the host itself."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that lives on a device, and the pool that fits beside it."""

    weights: int
    pool: int
    """Keys, values, 8 bytes of metadata and the planes of methods per KV."""
    tables: int
    """Block tables, context lengths, windows of exact KVs and slot states."""
    scratch: int
    """A prompt of `prefill_scratch` tokens with its metrics, and one more chunk."""
    workspace: int
    """Activations of the largest step, as an estimate."""
    limit: int
    num_blocks: int
    """Of the pool, over all shards: what several devices have alike counts once."""
    spec: CacheSpec
    devices: int = 1
    """How many hold the model and the pool together; bytes are those of one of them."""

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.tables + self.scratch + self.workspace

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.spec.heads

    @property
    def pool_tokens(self) -> int:
        """Tokens' worth of KVs that the pool holds, one per layer and head."""
        return self.num_blocks // self.heads * self.spec.block_size

    def __str__(self) -> str:
        parts = ("weights", "pool", "tables", "scratch", "workspace")
        sizes = ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts)
        return (
            f"{sizes}: {_size(self.total)} of {_size(self.limit)}; "
            f"pool of {self.num_blocks:,} blocks = {self.pool_tokens:,} tokens"
        )


def plan_memory(
    model: LoadedModel,
    config: EngineConfig,
    max_len: int,
    cache_dtype: Codec | jax.typing.DTypeLike | None = None,
    planes: Sequence[Plane] = (),
    behind: Behind = NOTHING,
    dealing: Dealing | None = None,
    allowed: Callable[[int], int] = lambda limit: limit,
) -> MemoryPlan:
    """The pool that fits beside everything else.

    Args:
        model: the model, its weights already on the device.
        config: sizes; see `EngineConfig` for how the pool is sized.
        max_len: most tokens of a sequence.
        cache_dtype: what keys and values are stored in, or the codec that stores them; by default
            the dtype of the activations.
        planes: further numbers per KV that the pool has room for.
        behind: what methods run behind a prompt.
        dealing: how the model's heads are dealt to several devices, if they are.
        allowed: bytes that it may take of a device, from those that it could.

    Raises:
        UserError: it does not fit, with the numbers; no codec stores that dtype; its window is
            longer than any sequence.
    """
    devices = 1 if dealing is None else dealing.devices
    weights = sum(_bytes_on_a_device(leaf) for leaf in jax.tree.leaves(model.params))
    limit = allowed(_limit(config, weights, devices))
    return plan_sizes(
        model.config, model.params, config, max_len, cache_dtype, planes, behind, dealing,
        limit=limit,
    )  # fmt: skip


def plan_sizes(
    shape: ModelConfig,
    params: Any,
    config: EngineConfig,
    max_len: int,
    cache_dtype: Codec | jax.typing.DTypeLike | None = None,
    planes: Sequence[Plane] = (),
    behind: Behind = NOTHING,
    dealing: Dealing | None = None,
    *,
    limit: int,
) -> MemoryPlan:
    """`plan_memory` of a model's shapes, for a device with `limit` bytes: that of the current mesh,
    if it has an abstract one."""
    slots, rows, b = config.max_batch, config.num_rows, config.block_size or USUAL_BLOCK
    weights = sum(_bytes_on_a_device(leaf) for leaf in jax.tree.leaves(params))
    dtype = activation_dtype(params)
    codec = as_codec(cache_dtype, dtype)
    if codec.window > max_len:
        raise UserError(
            f"cache_dtype {codec.name}: no sequence is longer than max_len {max_len}; give a "
            "window of as many KVs at most"
        )
    whole = CacheSpec.of(shape, codec, b, tuple(planes))
    spec, devices, heads, mlp = whole, 1, whole.heads, shape.intermediate_size
    shards = 1 if dealing is None else dealing.shards
    if dealing is not None:
        spec, devices = dataclasses.replace(whole, num_kv_heads=dealing.places), dealing.devices
        heads, mlp = int(dealing.heads_of_shards.max()), -(-mlp // devices)
    scratch_tokens = min(config.prefill_scratch, max_len)
    chunk = min(config.prefill_chunk, max_len) + behind.tokens
    scratch = spec.scratch_bytes(scratch_tokens + chunk)
    width = spec.blocks_per_head(max_len)
    states = jax.eval_shape(lambda: init_slots(rows))
    tables = spec.table_bytes(rows, width)
    tables += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states))
    # Rows of float32 logits with their sampling copies, activations of a chunk, one layer's
    # attention over the scratch; a gathered copy of what those that take part have beside tables.
    workspace = (
        slots * shape.vocab_size * 4 * 3
        + chunk * (4 * shape.hidden_size + 3 * mlp) * dtype.itemsize
        + spec.attention_bytes(scratch_tokens)
        + slots * spec.window_bytes
    )

    def of_tables(blocks: int) -> int:
        """A gathered copy of the tables of those that take part in a decode step, and logits of
        attention that it keeps of a layer for its statistic."""
        rows, columns = Tables.of(width, b, slots, blocks, heads).largest
        kept = spec.num_kv_heads * shape.group_size * b * 4
        return rows * columns * (spec.heads * 4 + kept)

    if behind.tokens:
        # What some of a probe's queries pay every key of the prompt.
        workspace += AT_ONCE * spec.num_kv_heads * shape.group_size * scratch_tokens * 4
    if behind.drafted:
        workspace += spec.scratch_bytes(scratch_tokens + behind.drafted)
    # Steps number the pool's KVs in int32.
    most_blocks = INT32_MAX // b
    room = limit - weights - scratch - tables - workspace
    if config.pool_tokens is not None:
        blocks = heads * spec.blocks_per_head(config.pool_tokens)
    elif config.pool_bytes is not None:
        blocks = spec.blocks_in(config.pool_bytes // devices, config.sharing)
    else:
        most = min(rows * heads * width, most_blocks)
        taken = lambda n: spec.pool_bytes(n, config.sharing) + of_tables(n)  # noqa: E731
        blocks = max(0, bisect.bisect_right(range(most + 1), room, key=taken) - 1)
    pool, workspace = spec.pool_bytes(blocks, config.sharing), workspace + of_tables(blocks)
    plan = MemoryPlan(
        weights, pool, tables, scratch, workspace, limit, blocks * shards, whole, devices
    )
    if plan.total > limit or not heads <= blocks <= most_blocks:
        raise UserError(
            f"this does not fit: {plan}; give a smaller pool, max_batch {slots}, max_len {max_len} "
            f"or prefill_scratch {config.prefill_scratch}"
        )
    return plan


def pool_tokens_for(
    model: ModelConfig,
    config: EngineConfig,
    compression: CompressionConfig,
    prompt_len: int,
    max_tokens: int,
) -> int:
    """Pool, in tokens' worth of KVs, in which such a request never runs out of blocks.

    A prompt that is compressed on its way in needs its budget alone; one that runs in the pool, or
    would if it were prefilled again near its end, needs the budget and a chunk. While decoding,
    every head can grow by the generated tokens, or by those between two compressions. Of several
    devices any may hold nearly all that is kept, as heads keep unequally, and every one of them
    gets as many blocks.

    Raises:
        UserError: the request's cap cannot be held, as `CompressionConfig.cap` says.
    """
    b = config.block_size or compression.block_size()
    shards = config.tensor_parallel // config.kv_replicas
    heads = -(-model.num_layers * model.num_kv_heads // shards)
    whole = -(-(prompt_len + max_tokens) // b)
    budget = compression.blocks(prompt_len, model.num_layers * model.num_kv_heads, b)
    if budget is None or not compression.on_prefill:
        return whole * b
    growth = max_tokens
    if compression.compress_every is not None:
        growth = min(growth, compression.compress_every)
    if prompt_len + max_tokens > config.prefill_scratch:
        growth = max(growth, config.prefill_chunk)
    # One more block per head: what it holds need not end with a full one.
    return min(whole, -(-budget // heads) + -(-growth // b) + 1) * b


def _bytes_on_a_device(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _limit(config: EngineConfig, weights: int, devices: int) -> int:
    """Bytes that an engine may take of a device, weights that are there already included."""
    sized = config.pool_tokens is not None or config.pool_bytes is not None
    if not sized:
        # Pools of engines that were dropped: these are parts of cycles.
        gc.collect()
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * config.memory_fraction)
    # Devices of a CPU share its memory.
    available = available_bytes() // devices + weights
    return int(available * (config.memory_fraction if sized else CPU_FRACTION))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that programs may still take of the host or of their cgroup; what files that were read
    take of it can be had again.

    Args:
        root: of the file system that says so.
    """

    def said(path: str, name: str) -> int:
        lines = (root / path).read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.split()[:1] == [name]))

    found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        found = 1024 * said("proc/meminfo", "MemAvailable:")
    # Of a whole host, or where there is no limit ("max"), there is no number.
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = "sys/fs/cgroup/memory"
        most, used = (int((root / f"{group}.{x}").read_text()) for x in ("max", "current"))
        found = min(found, most - used + said(f"{group}.stat", "inactive_file"))
    return max(0, found)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
