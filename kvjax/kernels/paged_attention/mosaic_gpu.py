"""Paged decode attention on Hopper GPUs: shapes and calls around the Mosaic GPU kernels."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kernels.device import LOG2E
from kvjax.kernels.encoded import Encoded, fine_table, form_of, turned, without_halves
from kvjax.kernels.paged_attention import mosaic_gpu_finish as finishing
from kvjax.kernels.paged_attention import worklist
from kvjax.kernels.paged_attention.exact import ExactKVs, Piece, piece_of
from kvjax.kernels.paged_attention.mosaic_gpu_attend import LOWEST, attend
from kvjax.kernels.paged_attention.mosaic_gpu_codes import FORMS, Form
from kvjax.kernels.paged_attention.mosaic_gpu_config import SUM_ROWS, TILE, Config
from kvjax.kernels.paged_attention.spec import Shape, served_shape
from kvjax.kernels.paged_attention.worklist import WorkList
from kvjax.kernels.rounding import rounded

SHARED_MEMORY = 228 * 1024
"""Bytes of shared memory of one multiprocessor."""
RESERVED = 3 * 1024 + 256
"""Bytes per program beside `Config.shared_bytes`: 1,024 for the system, 2,048 that JAX keeps for
reductions across warps, and barriers."""
MAX_STAGES = 8


def config(
    shape: Shape, *, scale: float, keep_logits: bool, cores: int, exact: bool = False
) -> Config:
    """The kernel instance that serves a shape, with exact KVs beside the pool or without: two
    programs per multiprocessor, or one for rows of float32, with as many tiles in flight as fit.

    Raises:
        NotImplementedError: no instance does, with the reason.
    """
    served_shape(shape, FORMS)
    if shape.halves:
        raise NotImplementedError("keys and values in one row")
    forms = _forms(shape)
    per_core = 1 if shape.dtype == "float32" and forms is None else 2
    draft = Config(
        dtype=jnp.dtype(shape.dtype),
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        group=shape.group,
        padded_group=8 if shape.group <= 8 else 16,
        stages=1,
        programs=per_core * cores,
        scale=scale * LOG2E,
        keep_logits=keep_logits,
        exact=exact,
        forms=forms,
        fine=shape.fine,
    )
    if keep_logits and _num_tiles(shape) * TILE >= 2**31:
        raise NotImplementedError(
            f"logits of {_num_tiles(shape) * TILE} KVs, served are fewer than 2^31"
        )
    # Where newest rows are appended they take room, too.
    one = draft if forms else dataclasses.replace(draft, newest_at=0)
    room = SHARED_MEMORY // per_core - RESERVED
    sizes = (dataclasses.replace(one, stages=n).shared_bytes() for n in range(1, MAX_STAGES + 1))
    return dataclasses.replace(draft, stages=sum(size <= room for size in sizes))


def _forms(shape: Shape) -> tuple[Form, Form] | None:
    """How what is stored of keys and values is read; None where rows are.

    Raises:
        NotImplementedError: not at this head dimension, or not both together.
    """
    keys, values = shape.codes
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise NotImplementedError("codes of either keys or values alone")
    forms = FORMS[keys], FORMS[values]
    if forms[0].operand != forms[1].operand:
        raise NotImplementedError(f"{keys} keys with {values} values")
    if shape.fine and not all(form.finite for form in forms):
        raise NotImplementedError(f"finer codes of {keys} and {values}")
    if shape.head_dim % (16 * max(form.packed for form in forms)):
        raise NotImplementedError(f"codes of head dimension {shape.head_dim}")
    return forms


def _num_tiles(shape: Shape) -> int:
    """Tiles that a work list can hold: bounded by the tables, and by the pool where every block
    belongs to one head, as metrics want it (see `paged_attention`)."""
    by_table = shape.rows * -(-shape.max_blocks * shape.block_size // TILE)
    by_pool = -(-shape.blocks * shape.block_size // TILE) + shape.rows
    return min(by_table, by_pool) + finishing.UNIT // TILE


def build_work(context_len: Int32[Array, "S H"], c: Config) -> WorkList:
    """The work list of one layer."""
    return worklist.build(context_len, TILE, c.programs)


def _operands(q: Float[Array, "rows r d"], c: Config) -> Float[Array, "rows parts R d"]:
    """Queries, and what stands behind them, padded to R per KV head or to whole tiles of 8 if they
    are more, in the tensor core's type: as they are, or two halves."""
    size = max(c.padded_group, -(-q.shape[1] // 8) * 8)
    q = jnp.pad(q, ((0, 0), (0, size - q.shape[1]), (0, 0)))
    if not c.halves:
        return q.astype(c.operand_dtype)[:, None]
    high = rounded(q, c.operand_dtype)
    return jnp.stack([high, q - high], axis=1).astype(c.operand_dtype)


def _begun(piece: Piece, c: Config) -> Float[Array, "rows n R"]:
    """What heads begin with; see `Config.begun_rows`."""
    of_channels = jnp.swapaxes(piece.out * c.unit, 1, 2)
    ranges = [of_channels[:, first : first + count] for first, count in c.channels]
    top = jnp.maximum(piece.top * LOG2E, LOWEST)
    sums = jnp.pad(jnp.stack([top, piece.total], axis=1), ((0, 0), (0, SUM_ROWS - 2), (0, 0)))
    begun = jnp.concatenate([*ranges, sums], axis=1)
    padding = (0, 0), (0, 0), (0, c.padded_group - c.group)
    return jnp.pad(begun, padding, constant_values=1)


def _finer(
    fine: Int32[Array, " N"],
    table: Int32[Array, "rows M"],
    lengths: Int32[Array, " rows"],
    c: Config,
) -> tuple[Int32[Array, "rows pages"], Int32[Array, "rows tiles"]]:
    """The blocks with the finer codes of a table's, N for none, of whole tiles; and a bit for each
    page of a tile that has any."""
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % c.pages)))
    blocks = fine_table(fine, table, lengths, c.block_size)
    bits = (blocks < fine.shape[0]).reshape(len(blocks), -1, c.pages) << jnp.arange(c.pages)
    return blocks, jnp.sum(bits, axis=2, dtype=jnp.int32)


def append_and_attend(
    q: Float[Array, "S Hr d"],
    new_k: Float[Array, "S H d"],
    new_v: Float[Array, "S H d"],
    k: Float[Array, "N b d"],
    v: Float[Array, "N b d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    c: Config,
    **options: Any,
) -> tuple[
    tuple[Float[Array, "N b d"], Float[Array, "N b d"]],
    Float[Array, "S Hr d"],
    Float[Array, "N b"] | None,
]:
    """See `kvjax.kernels.append_and_attend`: the pools, the output and the metric.

    Where the tensor core takes rows as they are, queries, key and value of a head are one array,
    which one fusion of XLA writes: what stands behind the queries are columns of attention that
    nobody reads. `options`: those of `paged_attention`.
    """
    num_seqs, num_heads, d = new_k.shape
    rows = num_seqs * num_heads
    q_of_heads = q.reshape(rows, c.group, d)
    pair = jnp.stack([new_k.reshape(rows, d), new_v.reshape(rows, d)], axis=1)
    if c.halves:
        queries, newest = _operands(q_of_heads, c), pair
        c = dataclasses.replace(c, newest_at=0)
    else:
        queries = _operands(jnp.concatenate([q_of_heads.astype(pair.dtype), pair], axis=1), c)
        newest, c = queries[:, 0], dataclasses.replace(c, newest_at=c.group)
    pools = jax.new_ref(k), jax.new_ref(v)
    out, metric = _attend(
        q, k, v, block_table, context_len, c=c, queries=queries, newest=newest, pools=pools,
        **options,
    )  # fmt: skip
    new_pools = jax.freeze(pools[0]), jax.freeze(pools[1])
    return new_pools, out, metric


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"] | Encoded,
    v: Float[Array, "N b d"] | Encoded,
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    c: Config,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
    exact: ExactKVs | None = None,
    work: WorkList | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`; `c` comes from `config`, `work` from `build_work`.

    float32 pools are computed to 16 bits of mantissa; the output is of the pool's type, of codes
    float32. `interpret`: an `InterpretGPUParams`.
    """
    rows = q.shape[0] * block_table.shape[1]
    queries = _operands(turned(k, q).reshape(rows, c.group, q.shape[2]), c)
    pools: list[Any] = [k, v]
    if isinstance(k, Encoded) and isinstance(v, Encoded):
        keys, values = (without_halves(pool.codes) for pool in (k, v))
        pools = [keys.stored, values.stored, keys.scale, values.scale]
    return _attend(
        q, k, v, block_table, context_len, c=c, queries=queries, newest=None, pools=pools,
        fine=k.fine if isinstance(k, Encoded) else None, metric=metric, power=power,
        observed=observed, exact=exact, work=work, interpret=interpret,
    )  # fmt: skip


def _attend(
    q: Array,
    k: Array | Encoded,
    v: Array | Encoded,
    block_table: Array,
    context_len: Array,
    *,
    c: Config,
    queries: Array,
    newest: Array | None,
    pools: Any,
    fine: Array | None = None,
    metric: Array | None = None,
    power: int = 2,
    observed: Array | None = None,
    exact: ExactKVs | None = None,
    work: WorkList | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None]:
    """Both kernels, on operands and what is stored of the pools (with `newest` refs to them)."""
    num_seqs, _, d = q.shape
    num_heads, max_blocks = block_table.shape[1:]
    rows = num_seqs * num_heads
    if work is None:
        work = build_work(context_len, c)
    if (work.tile, work.num_programs) != (TILE, c.programs):
        raise ValueError(
            f"work: got {work.num_programs} programs and tiles of {work.tile}, wanted {c.programs} "
            f"and {TILE}: plan with the arguments of the call"
        )
    table = block_table.reshape(rows, max_blocks)
    finer = [] if fine is None else _finer(fine, table, context_len.reshape(rows), c)
    beside, begun = None, []
    if exact is not None:
        beside = piece_of(q, exact, v, context_len, c.scale / LOG2E)
        tiles = -(-max_blocks * c.block_size // TILE)
        begun = [beside.words(tiles * TILE), _begun(beside, c)]
    call = functools.partial(
        plgpu.kernel,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    channels = (len(c.channels), c.channels[0][1])
    # Log-sum-exps are read many at once, so there is room behind the last program's.
    programs = c.programs + finishing.PARTS_AT_ONCE
    results = [
        jax.ShapeDtypeStruct((rows, c.group, d), c.out_dtype),
        jax.ShapeDtypeStruct((2, c.programs, *channels, c.padded_group), jnp.float32),
        jax.ShapeDtypeStruct((2, programs, c.padded_group), jnp.float32),
    ]
    if c.keep_logits:
        sizes = (num_seqs, num_heads, c.group, d, k.shape[0], k.shape[1], max_blocks)
        shape = Shape(*sizes, str(k.dtype), (form_of(k), form_of(v)))
        results += [
            jax.ShapeDtypeStruct((rows, c.padded_group), jnp.float32),
            jax.ShapeDtypeStruct((c.group, _num_tiles(shape) * TILE), jnp.float32),
        ]

    arguments = [work.heads, work.spans, table, queries, *pools, *finer]
    arguments += [*([] if newest is None else [newest]), *begun]

    def attend_body(*refs, **scratch):
        given, written = refs[: 4 + len(pools)], list(refs[4 + len(pools) :])
        scales = () if len(pools) > 2 else (None, None)
        of_finer = (written.pop(0), written.pop(0)) if finer else (None, None)
        rows_given = None if newest is None else written.pop(0)
        of_exact = (written.pop(0), written.pop(0)) if begun else (None, None)
        kept = () if c.keep_logits else (None, None)
        refs = (*given, *scales, *of_finer, rows_given, *of_exact, *written, *kept)
        attend(*refs, **scratch, c=c)

    out, part, part_lse, *kept = call(
        attend_body,
        out_type=results,
        grid=(c.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="thread",
        scratch_types=c.attend_scratch(),
        kernel_name="paged_attention",
    )(*arguments)
    # Written head by head: shared ones are still missing.
    out_ref, statistic, metric_ref, lse_ref = jax.new_ref(out), [], None, None
    if metric is not None:
        lse, logits = kept
        metric_ref = jax.new_ref(metric)
        if beside is not None:
            lse = lse_ref = jax.new_ref(lse)
        statistic = [table, logits.reshape(c.group, -1, c.block_size), lse, metric_ref]
        if observed is not None:
            statistic.append(jnp.repeat(observed.astype(jnp.int32), num_heads))
    finish = functools.partial(
        finishing.finish, c=c, power=power, complete=beside is not None,
        interpreted=interpret is not None,
    )  # fmt: skip
    call(
        finish,
        out_type=(),
        grid=finishing.grid(c),
        grid_names=("program", "worker"),
        scratch_types=finishing.scratch(c),
        kernel_name="paged_attention_finish",
    )(work.heads, work.spans, part, part_lse, out_ref, *statistic)
    metric = None if metric_ref is None else jax.freeze(metric_ref)
    if metric is not None and beside is not None and lse_ref is not None:
        log_total = jax.freeze(lse_ref)[:, : c.group] / LOG2E
        touched = None if observed is None else jnp.repeat(observed, num_heads)
        metric = beside.received(metric, table, touched, log_total, power)
    return turned(v, jax.freeze(out_ref).reshape(q.shape)), metric
