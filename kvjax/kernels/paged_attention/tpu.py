"""Paged decode attention on TPUs.

One grid step per (sequence, KV head), in order, on one core. Pages are fetched by hand into a ring
of chunks: the next ones of this head, then the first of the next head, stream in while the matrix
unit works. With the statistic on, a head's logits stay in vector memory until its normaliser is
known; then Σ p² is added to the pages of the metric in place, while those of the next chunk come in
and those of the last one go out.

Where keys and values are halves of one array's rows, a chunk of them serves both products: queries
have zeros beside the values, and of the outputs the half beside the keys counts nothing.

Codes are fetched as they are stored, with their scales, and become numbers in vector registers. The
scale of a key multiplies its logit, that of a value its weight.

Where some KVs of a head are read elsewhere, exactly, the head begins with what these gave, and
words of bits say which KVs of the pool they stand for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kernels.encoded import Encoded, Half, turned
from kvjax.kernels.paged_attention.exact import WORD, ExactKVs, Piece, piece_of
from kvjax.kernels.paged_attention.spec import Shape, served_shape

CHUNK = 256
"""KVs fetched and computed at once."""
RING = 8
"""Chunks that are there or on their way."""
SUBLANES = 8
FORMS = ("int8", "e4m3", "e5m2")
"""Of codes that the kernel reads."""
FREE_VECTOR_MEMORY = 12 << 20
"""Bytes of vector memory that need not be asked for."""
MAX_VECTOR_MEMORY = 64 << 20
MAX_SCALAR_MEMORY = 512 << 10
LANES = 128
MAYBE = ("v_s", "k_scale_s", "v_scale_s", "logits_s", "squares_s", "updated")
"""Scratch that not every instance has."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Static description of one kernel instance."""

    scale: float
    keep_logits: bool
    vector_memory: int
    halves: bool = False


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
    if (shape.forms[0] is None) != (shape.forms[1] is None):
        raise NotImplementedError("codes of either keys or values alone")
    if "float16" in (shape.dtype, queries):
        raise NotImplementedError("float16, which TPUs have no vector type for")
    kvs = -(-shape.max_blocks * shape.block_size // CHUNK) * CHUNK
    table_bytes = 4 * 4 * shape.max_blocks + (2 * 4 * kvs // WORD if exact else 0)
    if table_bytes > MAX_SCALAR_MEMORY or 2 * 4 * shape.rows > MAX_SCALAR_MEMORY:
        raise NotImplementedError(
            f"{shape.max_blocks} blocks per head and {shape.rows} heads, which overflow scalar "
            "memory"
        )
    logits = 4 * _padded(shape.group) * kvs if keep_logits else 0
    if logits > MAX_VECTOR_MEMORY:
        raise NotImplementedError(f"metrics of {kvs} KVs per head, which overflow vector memory")
    return Config(scale, keep_logits, FREE_VECTOR_MEMORY + logits, shape.halves)


def _padded(group: int) -> int:
    return -(-group // SUBLANES) * SUBLANES


def _attend(
    lengths,  # [rows] i32, prefetched
    observed,  # [rows] i32, prefetched: whether the metrics of a head are touched, or None for all
    table,  # [1, 1, M] i32 of this head
    next_table,  # [1, 1, M] i32 of the next head
    elsewhere,  # [1, 1, words] i32 of this head, a bit for each KV that is not read here, or None
    begun,  # [R, d] f32, the output that the head begins with, or None
    begun_sums,  # [R, 128] f32, its largest logits and its sums in the first two lanes, or None
    q,  # [R, d]
    k,  # [N, b, d] in HBM; of halves their array, and d is its width everywhere
    v,  # [N, b, d] in HBM, or None
    k_scale,  # [N, 1, b] in HBM, or None
    v_scale,  # [N, 1, b] in HBM, or None
    out,  # [R, d]
    metric,  # [N, 1, b] f32 in HBM, in place, or None
    lse,  # [R, 128] f32, alike in all lanes, or None
    *,
    k_s,  # [ring, pages, b, d]
    v_s,  # [ring, pages, b, d], or None
    fetched,  # semaphores [ring, k or v]
    turn,  # [2] i32, buffer of this head's first chunk, and how many of its chunks are fetched
    k_scale_s,  # [ring, pages, 1, b], or None
    v_scale_s,  # [ring, pages, 1, b], or None
    logits_s,  # [chunks, R, CHUNK] f32, or None
    squares_s,  # [2, pages, 1, b] f32, or None
    updated,  # semaphores [buffer, in or out], or None
    c: Config,
    group: int,
    power: int,
):
    row, num_rows = pl.program_id(0), pl.num_programs(0)
    pages, b, d = k_s.shape[1:]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def num_pages(length, chunk):
        """Pages of a chunk that exist."""
        return jnp.clip(pl.cdiv(length, b) - chunk * pages, 0, pages)

    def page_copies(head_table, chunk, slot, j):
        page = head_table[0, 0, chunk * pages + j]
        pairs = [(k, k_s)] if v is None else [(k, k_s), (v, v_s)]
        if k_scale is not None:
            pairs += [(k_scale, k_scale_s), (v_scale, v_scale_s)]
        return [
            pltpu.make_async_copy(there.at[page], here.at[slot, j], fetched.at[slot, n % 2])
            for n, (there, here) in enumerate(pairs)
        ]

    def numbers(pages_of):
        """A chunk of keys or values; codes without their scales, in the type of the queries."""
        chunk = pages_of.reshape(CHUNK, d)
        return chunk if k_scale is None else chunk.astype(q.dtype)

    def tile_scales(scales_s, slot):
        """The scales of a chunk, [1, CHUNK] f32."""
        of_pages = [scales_s[slot, j].astype(jnp.float32) for j in range(pages)]
        return jnp.concatenate(of_pages, axis=1)

    def fetch(head_table, length, chunk, slot):
        @pl.loop(0, num_pages(length, chunk))
        def _page(j):
            for copy in page_copies(head_table, chunk, slot, j):
                copy.start()

    length = lengths[row]
    next_length = jnp.where(row + 1 < num_rows, lengths[jnp.minimum(row + 1, num_rows - 1)], 0)
    chunks = pl.cdiv(length, CHUNK)

    @pl.when(row == 0)
    def _first_head():
        turn[0] = turn[1] = 0

    first_slot = turn[0]

    def fetch_ahead(i):
        """The i-th chunk from this head's first one on: its own, or one of the next head."""
        slot = lax.rem(first_slot + i, RING)

        @pl.when(i < chunks)
        def _this_head():
            fetch(table, length, i, slot)

        @pl.when(i >= chunks)
        def _next_head():
            fetch(next_table, next_length, i - chunks, slot)

    pl.loop(turn[1], RING - 1)(fetch_ahead)

    def metric_pages(i, out: bool, wait: bool):
        """Begin or await the copies of the metrics of a chunk."""
        slot = lax.rem(i, 2)

        @pl.loop(0, num_pages(length, i))
        def _page(j):
            ends = metric.at[table[0, 0, i * pages + j]], squares_s.at[slot, j]
            ends = ends[::-1] if out else ends
            copy = pltpu.make_async_copy(*ends, updated.at[slot, int(out)])
            copy.wait() if wait else copy.start()

    touched = chunks if observed is None else chunks * observed[row]
    if metric is not None:
        pl.when(touched > 0)(lambda: metric_pages(0, out=False, wait=False))

    def attend_chunk(i, carry):
        acc, top, total = carry
        slot = lax.rem(first_slot + i, RING)
        fetch_ahead(i + RING - 1)

        @pl.loop(0, num_pages(length, i))
        def _page(j):
            for copy in page_copies(table, i, slot, j):
                copy.wait()

        valid = length - i * CHUNK
        s = c.scale * lax.dot_general(
            q[...],
            numbers(k_s[slot]),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if k_scale_s is not None:
            s *= tile_scales(k_scale_s, slot)
        token = lax.broadcasted_iota(jnp.int32, s.shape, 1)
        held = token < valid
        if elsewhere is not None:
            words = CHUNK // WORD
            word = elsewhere[0, 0, i * words]
            for n in range(1, words):
                word = jnp.where(token >= n * WORD, elsewhere[0, 0, i * words + n], word)
            held &= lax.shift_right_logical(word, token & (WORD - 1)) & 1 == 0
        s = jnp.where(held, s, -jnp.inf)
        if logits_s is not None:
            logits_s[i] = s
        new_top = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp(s - new_top)
        decay = jnp.exp(top - new_top)
        # Weight 0 does not silence a NaN in a slot nobody wrote: clear what lies beyond the end.
        weights, values = p, numbers((k_s if v_s is None else v_s)[slot])
        if v_scale_s is not None:
            weights = jnp.where(held, p * tile_scales(v_scale_s, slot), 0)
        written = lax.broadcasted_iota(jnp.int32, values.shape, 0) < valid
        update = jnp.dot(
            weights.astype(values.dtype),
            jnp.where(written, values, jnp.zeros_like(values)),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        return acc * decay + update, new_top, total * decay + jnp.sum(p, axis=1, keepdims=True)

    num_queries = q.shape[0]
    if begun is None:
        before = (
            jnp.zeros((num_queries, d), jnp.float32),
            jnp.full((num_queries, 1), -jnp.inf, jnp.float32),
            jnp.zeros((num_queries, 1), jnp.float32),
        )
    else:
        before = begun[...], begun_sums[:, :1], begun_sums[:, 1:2]
    acc, top, total = lax.fori_loop(0, chunks, attend_chunk, before)

    turn[0] = lax.rem(first_slot + chunks, RING)
    turn[1] = jnp.minimum(RING - 1, pl.cdiv(next_length, CHUNK))
    total = jnp.where(total > 0, total, 1.0)
    out[...] = (acc / total).astype(out.dtype)
    if metric is None:
        return
    log_total = top + jnp.log(total)
    if lse is not None:
        lse[...] = jnp.broadcast_to(log_total, lse.shape)

    @pl.loop(0, touched)
    def _add_squares(i):
        @pl.when(i + 1 < touched)
        def _next_chunk():
            pl.when(i > 0)(lambda: metric_pages(i - 1, out=True, wait=True))
            metric_pages(i + 1, out=False, wait=False)

        metric_pages(i, out=False, wait=True)
        squares = jnp.exp(power * (logits_s[i] - log_total))[:group]
        squares = jnp.sum(squares, axis=0, keepdims=True)
        for j in range(pages):
            squares_s[lax.rem(i, 2), j] += squares[:, j * b : (j + 1) * b]
        metric_pages(i, out=True, wait=False)

    for last in (2, 1):

        @pl.when(touched >= last)
        def _written(last=last):
            metric_pages(touched - last, out=True, wait=True)


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
    table = block_table.reshape(rows, 1, -1)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[2] % pages)))
    max_blocks = table.shape[2]
    padded = _padded(group)
    queries = turned(k, q).astype(q.dtype).reshape(rows, group, d)
    width = -(-2 * d // LANES) * LANES if c.halves else d
    queries = jnp.pad(queries, ((0, 0), (0, padded - group), (0, width - d)))
    pools, scales = [k, v], []
    if isinstance(k, Encoded) and isinstance(v, Encoded):
        pools = [k.codes.stored, v.codes.stored]
        scales = [pool.codes.scale.reshape(num_blocks, 1, b) for pool in (k, v)]
    if c.halves:
        pools = [pool.both for pool in pools[:1] if isinstance(pool, Half)]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    per_head = pl.BlockSpec((None, padded, width), lambda i, *_: (i, 0, 0))
    sums_per_head = pl.BlockSpec((None, padded, LANES), lambda i, *_: (i, 0, 0))
    tables = [
        pl.BlockSpec(
            (1, 1, max_blocks),
            lambda i, *_, ahead=ahead: (jnp.minimum(i + ahead, rows - 1), 0, 0),
            memory_space=pltpu.SMEM,
        )
        for ahead in (0, 1)
    ]
    keep = metric is not None
    prefetched = [context_len.reshape(-1)]
    if keep and observed is not None:
        prefetched.append(jnp.repeat(observed.astype(jnp.int32), num_heads))
    beside, begun, of_begun = None, [], []
    if exact is not None:
        beside = piece_of(q, exact, v, context_len, c.scale)
        words = beside.words(max_blocks * b)[:, None]
        begun = [words, *_begun(beside, padded, d if c.halves else 0, width)]
        of_words = (1, 1, words.shape[2])
        in_scalars = pl.BlockSpec(of_words, lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
        of_begun = [in_scalars, per_head, sums_per_head]
    arguments = [*prefetched, table, table, *begun, queries, *pools, *scales]
    in_specs = [*tables, *of_begun, per_head, *(in_hbm for _ in (*pools, *scales))]
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
    scratch = {
        "k_s": pltpu.VMEM((RING, pages, b, pools[0].shape[2]), pools[0].dtype),
        "fetched": pltpu.SemaphoreType.DMA((RING, 2)),
        "turn": pltpu.SMEM((2,), jnp.int32),
    }
    for of_values in pools[1:]:
        scratch["v_s"] = pltpu.VMEM((RING, pages, b, of_values.shape[2]), of_values.dtype)
    for name, of in zip(("k_scale_s", "v_scale_s"), scales):
        scratch[name] = pltpu.VMEM((RING, pages, 1, b), of.dtype)
    if keep:
        scratch |= {
            "logits_s": pltpu.VMEM((max_blocks // pages, padded, CHUNK), jnp.float32),
            "squares_s": pltpu.VMEM((2, pages, 1, b), jnp.float32),
            "updated": pltpu.SemaphoreType.DMA((2, 2)),
        }

    def body(*refs):
        rest = list(refs)
        lengths, rows_observed = rest.pop(0), rest.pop(0) if len(prefetched) > 1 else None
        tables_of, rest = rest[:2], rest[2:]
        of_exact, rest = rest[: len(begun)] or [None] * 3, rest[len(begun) :]
        head, rest = rest[:2], rest[2:]
        head.append(None if c.halves else rest.pop(0))
        head += [rest.pop(0) if scales else None for _ in "kv"]
        if keep:
            rest.pop(0)  # the metric as an input: the same memory as the output
        out = rest.pop(0)
        metric_ref = rest.pop(0) if keep else None
        lse = rest.pop(0) if keep and begun else None
        named = dict.fromkeys(MAYBE) | dict(zip(scratch, rest))
        _attend(
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
    at = d if c.halves else 0
    out = turned(v, out[:, :group, at : at + d].reshape(q.shape))
    if not keep:
        return out, None
    new_metric: Array = kept[0].reshape(num_blocks, b)
    if beside is not None:
        touched = None if observed is None else jnp.repeat(observed, num_heads)
        of_head = block_table.reshape(rows, -1)
        log_total = kept[1][:, :group, 0]
        new_metric = beside.received(new_metric, of_head, touched, log_total, power)
    return out, new_metric


def _begun(piece: Piece, padded: int, at: int, width: int) -> list[Array]:
    """What heads begin with: outputs from lane `at` of [rows, R, width] on, and largest logits and
    sums in the first two of [rows, R, 128]."""
    sums = jnp.stack([piece.top, piece.total], axis=2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, LANES - 2)))
    out = jnp.pad(piece.out, ((0, 0), (0, 0), (at, width - at - piece.out.shape[2])))
    return [jnp.pad(x, ((0, 0), (0, padded - x.shape[1]), (0, 0))) for x in (out, sums)]
