"""What goes where in a device's memory, decided before anything runs."""

import dataclasses
import os
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.cache import CompressionConfig, Plane, budget_blocks
from kvjax.checks import INT32_MAX
from kvjax.engine.config import EngineConfig
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig

CPU_FRACTION = 0.5
"""Share of the free memory that an engine takes where the device is the host itself."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that lives on the device, and the pool that fits beside it."""

    weights: int
    pool: int
    """Keys, values, 8 bytes of metadata and the planes of methods per KV."""
    tables: int
    """Block tables, context lengths, free mask and slot states."""
    scratch: int
    """A prompt of `prefill_scratch` tokens with its metrics, and one more chunk."""
    workspace: int
    """Activations of the largest step, as an estimate."""
    limit: int
    num_blocks: int
    cache_dtype: np.dtype
    heads: int
    block_size: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.tables + self.scratch + self.workspace

    @property
    def pool_tokens(self) -> int:
        """Tokens' worth of KVs that the pool holds, one per layer and head."""
        return self.num_blocks // self.heads * self.block_size

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
    cache_dtype: jax.typing.DTypeLike,
    planes: Sequence[Plane] = (),
) -> MemoryPlan:
    """The pool that fits beside everything else.

    Args:
        model: the model, its weights already on the device.
        config: sizes; see `EngineConfig` for how the pool is sized.
        max_len: most tokens of a sequence.
        cache_dtype: of keys and values in the pool.
        planes: further numbers per KV that the pool has room for.

    Raises:
        UserError: it does not fit, with the numbers.
    """
    shape, dtype = model.config, np.dtype(cache_dtype)
    leaves = jax.tree.leaves(model.params)
    weights = sum(leaf.nbytes for leaf in leaves)
    layers, kv_heads = shape.num_layers, shape.num_kv_heads
    heads, b, slots = layers * kv_heads, config.block_size, config.max_batch
    item = leaves[0].dtype.itemsize
    further = sum(plane.kv_bytes for plane in planes)
    block = b * (2 * shape.head_dim * dtype.itemsize + 8 + further)
    # Beside keys and values up to three numbers of what was observed.
    per_token = heads * (2 * shape.head_dim * item + 12 + further)
    scratch_tokens = min(config.prefill_scratch, max_len)
    chunk = min(config.prefill_chunk, max_len)
    scratch = per_token * (scratch_tokens + chunk)
    width = -(-max_len // b)
    tables = slots * heads * (width + 1) * 4 + slots * 64
    # Rows of float32 logits with their sampling copies, activations of a chunk, one layer's
    # attention over the scratch; a gathered copy of the tables of those that take part.
    workspace = (
        slots * shape.vocab_size * 4 * 3
        + chunk * (4 * shape.hidden_size + 3 * shape.intermediate_size) * item
        + 2 * scratch_tokens * kv_heads * shape.head_dim * (item + 4)
        + tables
    )
    limit = _limit(config, weights)
    fixed = weights + scratch + tables + workspace
    most = slots * heads * width
    if config.pool_tokens is not None:
        blocks = -(-config.pool_tokens // b) * heads
    elif config.pool_bytes is not None:
        blocks = config.pool_bytes // block
    else:
        blocks = min(most, max(0, limit - fixed) // block, INT32_MAX)
    plan = MemoryPlan(
        weights, blocks * (block + 1), tables, scratch, workspace, limit, blocks, dtype, heads, b
    )
    if plan.total > limit or not heads <= blocks <= INT32_MAX:
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

    A prompt that is compressed on its way in needs its budget alone; one that runs in the pool
    needs the budget and a chunk. While decoding, every head can grow by the generated tokens, or by
    those between two compressions.

    Raises:
        UserError: the request's cap cannot be held, as `CompressionConfig.cap` says.
    """
    b = config.block_size
    heads = model.num_layers * model.num_kv_heads
    whole = -(-(prompt_len + max_tokens) // b)
    cap = compression.cap(prompt_len, b)
    if cap is None or not compression.on_prefill:
        return whole * b
    growth = max_tokens
    if compression.compress_every is not None:
        growth = min(growth, compression.compress_every)
    if prompt_len > config.prefill_scratch:
        growth = max(growth, config.prefill_chunk)
    budget = budget_blocks(cap, model.num_layers, model.num_kv_heads, b)
    # One more block per head: what it holds need not end with a full one.
    return min(whole, -(-budget // heads) + -(-growth // b) + 1) * b


def _limit(config: EngineConfig, weights: int) -> int:
    """Bytes that an engine may take, weights that are there already included."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * config.memory_fraction)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + weights
    sized = config.pool_tokens is not None or config.pool_bytes is not None
    return int(available * (config.memory_fraction if sized else CPU_FRACTION))


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
