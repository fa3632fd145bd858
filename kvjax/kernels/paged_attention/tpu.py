"""Paged decode attention on TPUs: shapes and calls around the kernel of `tpu_attend.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kernels.encoded import (
    LANES,
    Encoded,
    Half,
    HalfNumbers,
    fine_table,
    fold_of,
    turned,
)
from kvjax.kernels.paged_attention.exact import WORD, ExactKVs, Piece, piece_of
from kvjax.kernels.paged_attention.spec import Shape, served_shape
from kvjax.kernels.paged_attention.tpu_attend import Config, attend

CHUNK = 256
"""KVs fetched and computed at once."""
RING = 8
"""Chunks that are there or on their way."""
SUBLANES = 8
FORMS = {"int8": 1, "e4m3": 1, "e5m2": 1, "int4": 2, "int2": 4}
"""Of codes that the kernel reads, and how many numbers a byte holds."""
FREE_VECTOR_MEMORY = 12 << 20
"""Bytes of vector memory that need not be asked for."""
MAX_VECTOR_MEMORY = 64 << 20
MAX_SCALAR_MEMORY = 512 << 10
MAYBE = ("v_s", "scales_s", "logits_s", "squares_s", "updated")
"""Scratch that not every instance has."""


def config(
    shape: Shape,
    *,
    scale: float,
    keep_logits: bool,
    exact: bool = False,
    queries: str | None = None,
) -> Config:
    """The kernel instance that serves a shape, with exact KVs beside the pool or without, for
    queries of a dtype, by default that of the pool.

    Raises:
        NotImplementedError: none does, with the reason.
    """
    served_shape(shape, FORMS)
    keys, values = shape.codes
    if (keys is None) != (values is None):
        raise NotImplementedError("codes of either keys or values alone")
    packed = 1 if keys is None else FORMS[keys]
    if keys is not None and values is not None:
        if packed != FORMS[values]:
            raise NotImplementedError(f"{keys} keys with {values} values")
        if packed > 1 and not shape.halves:
            raise NotImplementedError(
                f"{keys} codes of head dimension {shape.head_dim} in blocks of {shape.block_size}"
            )
        if shape.fine and "int" not in keys:
            raise NotImplementedError(f"finer codes of {keys}")
    if "float16" in (shape.dtype, queries):
        raise NotImplementedError("float16, which TPUs have no vector type for")
    kvs = -(-shape.max_blocks * shape.block_size // CHUNK) * CHUNK
    table_bytes = 4 * 4 * shape.max_blocks * (1 + shape.fine)
    table_bytes += 2 * 4 * kvs // WORD if exact else 0
    if table_bytes > MAX_SCALAR_MEMORY or 2 * 4 * shape.rows > MAX_SCALAR_MEMORY:
        raise NotImplementedError(
            f"{shape.max_blocks} blocks per head and {shape.rows} heads, which overflow scalar "
            "memory"
        )
    logits = 4 * _padded(shape.group) * kvs if keep_logits else 0
    if logits > MAX_VECTOR_MEMORY:
        raise NotImplementedError(f"metrics of {kvs} KVs per head, which overflow vector memory")
    memory = FREE_VECTOR_MEMORY + logits
    fold = fold_of(shape.head_dim // packed) if shape.halves else 1
    return Config(scale, keep_logits, memory, shape.halves, packed, fold, shape.fine)


def _padded(group: int) -> int:
    return -(-group // SUBLANES) * SUBLANES


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"] | Encoded | Half,
    v: Float[Array, "N b d"] | Encoded | Half,
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    c: Config,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
    exact: ExactKVs | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`; `c` comes from `config`.

    `interpret`: True or an `InterpretParams`.
    """
    num_blocks, b, d = k.shape
    num_seqs, num_heads, _ = block_table.shape
    rows = num_seqs * num_heads
    group = q.shape[1] // num_heads
    pages = CHUNK // b
    table = block_table.reshape(rows, -1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    max_blocks = table.shape[1]
    padded = _padded(group)
    stored = d // c.packed
    width = -(-2 * stored // LANES) * LANES if c.halves else stored
    keys_at = tuple(range(0, 2 * stored * c.fold, 2 * stored))
    values_at = tuple(n + stored * c.halves for n in keys_at)
    queries = turned(k, q).astype(q.dtype).reshape(rows, group, d)
    queries = _parts(queries, c, padded, keys_at, width)
    tables = [table]
    if isinstance(k, Encoded) and k.fine is not None:
        tables.append(fine_table(k.fine, table, context_len.reshape(rows), b))
    pools, scales = [k, v], []
    if isinstance(k, Encoded) and isinstance(v, Encoded):
        pools = [k.codes.stored, v.codes.stored]
        scales = [_scales(k.codes.scale, v.codes.scale)]
    if c.halves:
        pools = [pool.both for pool in pools[:1] if isinstance(pool, Half)]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    per_head = pl.BlockSpec((None, *queries.shape[1:]), lambda i, *_: (i, 0, 0, 0))
    sums_per_head = pl.BlockSpec((None, padded, LANES), lambda i, *_: (i, 0, 0))
    of_tables = [
        pl.BlockSpec(
            (1, 1, max_blocks),
            lambda i, *_, ahead=ahead: (jnp.minimum(i + ahead, rows - 1), 0, 0),
            memory_space=pltpu.SMEM,
        )
        for _ in tables
        for ahead in (0, 1)
    ]
    both_tables = [x[:, None] for x in tables for _ in (0, 1)]
    keep = metric is not None
    prefetched = [context_len.reshape(-1)]
    if keep and observed is not None:
        prefetched.append(jnp.repeat(observed.astype(jnp.int32), num_heads))
    beside, begun, of_begun = None, [], []
    if exact is not None:
        beside = piece_of(q, exact, v, context_len, c.scale)
        words = beside.words(max_blocks * b)[:, None]
        begun = [words, *_begun(beside, c, padded, values_at, width)]
        of_words = (1, 1, words.shape[2])
        in_scalars = pl.BlockSpec(of_words, lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
        of_begun = [in_scalars, per_head, sums_per_head]
    arguments = [*prefetched, *both_tables, *begun, queries, *pools, *scales]
    in_specs = [*of_tables, *of_begun, per_head, *(in_hbm for _ in (*pools, *scales))]
    out_specs = [per_head]
    out_shape = [jax.ShapeDtypeStruct(queries.shape, jnp.float32 if scales else v.dtype)]
    if keep:
        arguments.append(metric.reshape(num_blocks, 1, b))
        in_specs.append(in_hbm)
        out_specs.append(in_hbm)
        out_shape.append(jax.ShapeDtypeStruct((num_blocks, 1, b), jnp.float32))
    if keep and beside is not None:
        out_specs.append(sums_per_head)
        out_shape.append(jax.ShapeDtypeStruct((rows, padded, LANES), jnp.float32))
    ring = RING * (1 + c.fine)
    scratch = {
        "k_s": pltpu.VMEM((ring, pages, *pools[0].shape[1:]), pools[0].dtype),
        "fetched": pltpu.SemaphoreType.DMA((RING, 2)),
        "turn": pltpu.SMEM((2,), jnp.int32),
    }
    for of_values in pools[1:]:
        scratch["v_s"] = pltpu.VMEM((ring, pages, *of_values.shape[1:]), of_values.dtype)
    for of in scales:
        scratch["scales_s"] = pltpu.VMEM((ring, pages, *of.shape[1:]), of.dtype)
    if keep:
        scratch |= {
            "logits_s": pltpu.VMEM((max_blocks // pages, padded, CHUNK), jnp.float32),
            "squares_s": pltpu.VMEM((2, pages, 1, b), jnp.float32),
            "updated": pltpu.SemaphoreType.DMA((2, 2)),
        }

    def body(*refs):
        rest = list(refs)
        lengths, rows_observed = rest.pop(0), rest.pop(0) if len(prefetched) > 1 else None
        tables_of, rest = rest[: len(of_tables)], rest[len(of_tables) :]
        tables_of += [None] * (4 - len(of_tables))
        of_exact, rest = rest[: len(begun)] or [None] * 3, rest[len(begun) :]
        head, rest = rest[:2], rest[2:]
        head.append(None if c.halves else rest.pop(0))
        head.append(rest.pop(0) if scales else None)
        if keep:
            rest.pop(0)  # the metric as an input: the same memory as the output
        out = rest.pop(0)
        metric_ref = rest.pop(0) if keep else None
        lse = rest.pop(0) if keep and begun else None
        named = dict.fromkeys(MAYBE) | dict(zip(scratch, rest))
        attend(
            lengths, rows_observed, *tables_of, *of_exact, *head,
            out=out, metric=metric_ref, lse=lse, **named, c=c, group=group, power=power,
        )  # fmt: skip

    out, *kept = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(rows,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=out_shape,
        input_output_aliases={len(arguments) - 1: 1} if keep else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=c.vector_memory
        ),
        interpret=interpret,
        name="paged_attention",
    )(*arguments)
    found = out.reshape(rows, c.fold, c.packed, padded, width)[:, :, :, :group]
    folds = (found[:, f, ..., at : at + stored] for f, at in enumerate(values_at))
    out = turned(v, jnp.swapaxes(functools.reduce(jnp.add, folds), 1, 2).reshape(q.shape))
    if not keep:
        return out, None
    new_metric: Array = kept[0].reshape(num_blocks, b)
    if beside is not None:
        touched = None if observed is None else jnp.repeat(observed, num_heads)
        of_head = block_table.reshape(rows, -1)
        log_total = kept[1][:, :group, 0]
        new_metric = beside.received(new_metric, of_head, touched, log_total, power)
    return out, new_metric


def _scales(
    keys: Float[Array, "N b"] | HalfNumbers, values: Float[Array, "N b"] | HalfNumbers
) -> Float[Array, "N 2 w"]:
    """Scales of keys and of values as one array, as pools on TPUs have them."""
    if isinstance(keys, HalfNumbers):
        return keys.both
    assert not isinstance(values, HalfNumbers)
    pair = jnp.stack([keys, values], axis=1)
    return jnp.pad(pair, ((0, 0), (0, 0), (0, -keys.shape[1] % LANES)))


def _parts(
    rows: Float[Array, "n r d"], c: Config, padded: int, at: tuple[int, ...], width: int
) -> Float[Array, "n parts R w"]:
    """Rows, each part of them from a lane on beside zeros; and so from each other lane."""
    parts = jnp.swapaxes(rows.reshape(*rows.shape[:2], c.packed, -1), 1, 2)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, padded - rows.shape[1]), (0, 0)))
    room = ((lane, width - lane - parts.shape[3]) for lane in at)
    return jnp.concatenate([jnp.pad(parts, ((0, 0),) * 3 + (x,)) for x in room], axis=1)


def _begun(piece: Piece, c: Config, padded: int, at: tuple[int, ...], width: int) -> list[Array]:
    """What heads begin with: outputs (`_parts`), and largest logits and sums in the first two lanes
    of [rows, R, 128]."""
    sums = jnp.stack([piece.top, piece.total], axis=2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, LANES - 2)))
    sums = jnp.pad(sums, ((0, 0), (0, padded - sums.shape[1]), (0, 0)))
    # The sum over the KVs of a row has it once.
    begun = _parts(piece.out, c, padded, at, width).at[:, c.packed :].set(0)
    return [begun, sums]
