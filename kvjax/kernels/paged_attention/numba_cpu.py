"""Paged attention of one decode step on CPUs: pages are read where they lie.

Heads are cut into pieces of as many KVs each, each with a softmax of its own, as in the reference.
Whichever thread is free takes the next piece, and when all are done the next head, merges what its
pieces gave in their order, and adds to its metrics. So a head computes the same bits wherever it
stands and however many threads there are. Keys and values are rows of float32 or bfloat16, or codes
of 8 or 4 bits with scales, with finer codes of some blocks or without: they become float32 on the
way.
"""

import dataclasses
import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Bool, Float, Int32
from numba.misc.special import literally
from numba.np.numpy_support import carray

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.encoded import Encoded, turned, without_halves
from kvjax.kernels.numba_calls import BFLOAT16, FLOAT32, INT4, INT8, bfloat16_at, float32s, int32s
from kvjax.kernels.numba_matrices import FAST, exp, exponentials
from kvjax.kernels.numba_vectors import LINE, ROWS, add_weighted, dots, fetch, to_float32
from kvjax.kernels.paged_attention.spec import Shape

PIECE_TOKENS = 256
"""KVs of a piece; a multiple of `ROWS`."""
RESULT_BYTES = 1 << 28
"""What pieces may give in all, in bytes."""
STORED_ROWS = {"float32": FLOAT32, "bfloat16": BFLOAT16}
STORED_CODES = {"int8": INT8, "int4": INT4}


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration of a call."""

    scale: float
    kinds: tuple[int, int]
    """What is stored of keys and of values, as `numba_calls` names it."""
    fine: bool = False
    """Whether blocks may have finer codes."""


def config(shape: Shape, *, scale: float, keep_weights: bool, exact: bool) -> Config:
    """The configuration for a shape.

    Raises:
        NotImplementedError: it is not served, with the reason.
    """
    if exact:
        raise NotImplementedError("exact rows")
    if shape.halves:
        raise NotImplementedError("halves of rows")
    kinds, fine = [], shape.fine
    for form in shape.codes:
        name, served = (shape.dtype, STORED_ROWS) if form is None else (form, STORED_CODES)
        if name not in served:
            names = ", ".join((*STORED_ROWS, *STORED_CODES))
            raise NotImplementedError(f"{name} pools, served are {names}")
        kinds.append(served[name])
    if (kinds[0] >= INT8) != (kinds[1] >= INT8):
        raise NotImplementedError("codes of keys or values alone")
    if shape.rows == 0 or shape.blocks == 0 or shape.max_blocks == 0:
        raise NotImplementedError("an empty batch, pool or table")
    each = shape.group * 4 * (shape.head_dim + (PIECE_TOKENS if keep_weights else 0))
    held = shape.rows * math.ceil(shape.max_blocks * shape.block_size / PIECE_TOKENS) * each
    if held > RESULT_BYTES:
        raise NotImplementedError(
            f"{held >> 20} MB of partial results, served are {RESULT_BYTES >> 20}"
        )
    keys, values = kinds
    _target(shape.group, shape.head_dim, keys, values, fine)
    return Config(scale, (keys, values), fine)


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
    exact: None = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`. Softmax and sums in float32."""
    num_seqs, num_query_heads, d = q.shape
    num_heads, max_blocks = block_table.shape[1:]
    group, rows, block_size = num_query_heads // num_heads, num_seqs * num_heads, k.shape[1]
    queries = (turned(k, q.astype(jnp.float32)) * c.scale).reshape(rows, group, d)
    stored: list[Any] = []
    for pool in (k, v):
        stored += without_halves(pool.codes) if isinstance(pool, Encoded) else [pool]
    pieces = (rows, math.ceil(max_blocks * block_size / PIECE_TOKENS), group)
    shapes = [(rows, group, d), (*pieces, d), pieces, pieces]
    given = [queries, block_table.reshape(rows, max_blocks), context_len.reshape(rows), *stored]
    if c.fine:
        assert isinstance(k, Encoded)
        given.append(k.fine)
    aliases = {}
    if metric is not None:
        touched = jnp.ones(num_seqs, bool) if observed is None else observed
        aliases = {len(given) + 1: len(shapes)}
        given += [jnp.repeat(touched * jnp.int32(power), num_heads), metric]
        shapes += [metric.shape, (*pieces, PIECE_TOKENS)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    target = _target(group, d, *c.kinds, c.fine)
    found = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*given)
    out = turned(v, found[0].reshape(num_seqs, num_query_heads, d)).astype(q.dtype)
    return out, None if metric is None else found[4]


@calls.once
def _target(r: int, d: int, keys: int, values: int, fine: bool) -> str:
    """The name by which programs call it, for a group, a head dimension and what is stored; all
    else is read from the call."""
    name = f"kvjax_paged_attention_{r}_{d}_{keys}_{values}{'_fine' * fine}"
    stamp = numba_source.stamp()

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, r, d, keys, values, fine)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            task_address, rows, pieces = threads.address_of(name), calls.sizes(frame, 1)[0], 0
            for row in range(rows):
                pieces += _pieces(_length(frame, row))
            threads.run(frame, task_address, _PIECES, pieces)
            threads.run(frame, task_address, _HEADS, rows)
        return 0

    threads.serve(name, task, call)
    return name


_PIECES, _HEADS = 0, 1
"""What the chunks of a call are, first and last."""
_METRIC, _KEPT = 4, 5
"""Of results those that are there with a metric only: it, and weights of pieces."""


@no_type_check
@numba.njit
def _pieces(length):
    return -(-length // PIECE_TOKENS)


@no_type_check
@numba.njit
def _room(frame):
    """KVs for which a head's table has room."""
    return calls.sizes(frame, 1)[1] * calls.sizes(frame, 3)[1]


@no_type_check
@numba.njit
def _length(frame, row):
    """KVs of a head, of which there are no more than its table has room for."""
    return max(0, min(int32s(calls.argument(frame, 2))[row], _room(frame)))


@no_type_check
@numba.njit
def _work(address, r, d, keys, values, fine):
    """Chunks of a team's call, while there are any: pieces, or heads."""
    chunk = threads.take(address)
    team = calls.words(address)
    if chunk >= team[threads.TOTAL]:
        return
    frame = calls.words(team[threads.FRAME])
    if team[threads.PHASE] == _PIECES:
        _attend(address, chunk, frame, r, d, keys, values, fine)
        return
    while chunk < team[threads.TOTAL]:
        _merge(chunk, frame, r, d, keys, fine)
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def _attend(address, chunk, frame, r, d, keys, values, fine):
    """What pieces give: sums of values, largest logits, sums of weights, and weights."""
    _ = literally(r), literally(d), literally(keys), literally(values), literally(fine)
    chunks = calls.words(address)[threads.TOTAL]
    rows, max_blocks = calls.sizes(frame, 1)[0], calls.sizes(frame, 1)[1]
    blocks, b = calls.sizes(frame, 3)[0], calls.sizes(frame, 3)[1]
    most_pieces = _pieces(_room(frame))
    q = calls.argument(frame, 0)
    table = carray(int32s(calls.argument(frame, 1)), (rows, max_blocks))
    k = k_scale = calls.argument(frame, 3)
    v = v_scale = calls.argument(frame, 4)
    if keys >= INT8:
        k_scale, v, v_scale = v, calls.argument(frame, 5), calls.argument(frame, 6)
    tag = int32s(calls.argument(frame, 7 if fine else 2))
    top = carray(float32s(calls.result(frame, 2)), (rows, most_pieces, r))
    total = carray(float32s(calls.result(frame, 3)), (rows, most_pieces, r))
    s, lane = np.empty((r, PIECE_TOKENS), np.float32), np.empty(ROWS, np.float32)
    place, at = np.empty(ROWS, np.int64), np.empty(ROWS, np.int64)
    # And behind these a row of finer codes.
    tile = np.empty((ROWS + 1, d), np.float32)
    row, before, own = 0, 0, _pieces(_length(frame, 0))
    while chunk < chunks:
        while before + own <= chunk:
            before += own
            row += 1
            own = _pieces(_length(frame, row))
        piece = chunk - before
        begin = piece * PIECE_TOKENS
        n = min(_length(frame, row) - begin, PIECE_TOKENS)
        for t in range(0, n, ROWS):
            _find(at, place, tile, k, blocks, table[row], begin + t, n - t, d, b, keys)
            if t + ROWS < n:
                _fetch(k, blocks, table[row], begin + t + ROWS, d, b, keys)
            else:
                _fetch(v, blocks, table[row], begin, d, b, values)
            if fine:
                _refine(place, tile, k, k_scale, tag, blocks, d, b, keys)
            for i in range(r):
                logits = s.ctypes.data + (i * PIECE_TOKENS + t) * 4
                dots(q + (row * r + i) * d * 4, at.ctypes.data, logits, d)
                if keys >= INT8 and not fine:
                    for j in range(ROWS):
                        s[i, t + j] *= bfloat16_at(k_scale, place[j])
        for i in range(r):
            top[row, piece, i], total[row, piece, i] = exponentials(s[i], n, lane)
        if calls.num_results(frame) > _KEPT:
            kept = carray(
                float32s(calls.result(frame, _KEPT)), (rows, most_pieces, r, PIECE_TOKENS)
            )
            # By loops: Numba compiles an assignment of slices for seconds.
            for i in range(r):
                for t in range(n):
                    kept[row, piece, i, t] = s[i, t]
        sums = calls.result(frame, 1) + (row * most_pieces + piece) * r * d * 4
        carray(float32s(sums), r * d)[:] = 0
        for t in range(0, n, ROWS):
            _find(at, place, tile, v, blocks, table[row], begin + t, n - t, d, b, values)
            if t + ROWS < n:
                _fetch(v, blocks, table[row], begin + t + ROWS, d, b, values)
            if fine:
                _refine(place, tile, v, v_scale, tag, blocks, d, b, values)
            for i in range(r):
                if values >= INT8 and not fine:
                    for j in range(ROWS):
                        s[i, t + j] *= bfloat16_at(v_scale, place[j])
                weights = s.ctypes.data + (i * PIECE_TOKENS + t) * 4
                add_weighted(weights, at.ctypes.data, sums + i * d * 4, d)
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit(inline="always")
def _find(at, place, tile, pool, num_blocks, blocks, begin, n, d, b, kind):
    """Where `ROWS` rows of a head are as float32, and which of the pool they are; of fewer the
    last one counts for those that lack. Nothing outside the pool is read."""
    size = calls.row_bytes(d, kind)
    # A division takes longer than all else here.
    entry, offset = begin // b, begin % b
    start = _start(blocks[entry], num_blocks, b) + offset
    if offset + ROWS <= b and n >= ROWS:
        for j in range(ROWS):
            place[j] = start + j
    else:
        place[0] = start
        for j in range(1, ROWS):
            place[j] = place[j - 1]
            if j < n:
                place[j] += 1
                offset += 1
                if offset == b:
                    entry, offset = entry + 1, 0
                    place[j] = _start(blocks[entry], num_blocks, b)
    for j in range(ROWS):
        if kind == FLOAT32:
            at[j] = pool + place[j] * size
        else:
            at[j] = tile.ctypes.data + j * d * 4
            to_float32(pool + place[j] * size, at[j], d, kind)


@no_type_check
@numba.njit(inline="always")
def _fetch(pool, num_blocks, blocks, begin, d, b, kind):
    """Have the next `ROWS` rows of a head on their way while these are worked on: where a block's
    successor is no processor foresees."""
    size, last = calls.row_bytes(d, kind), blocks.shape[0] - 1
    for j in range(0, ROWS, b):
        block = blocks[min((begin + j) // b, last)]
        first = pool + (_start(block, num_blocks, b) + (begin + j) % b) * size
        for line in range(first, first + min(b, ROWS) * size, LINE):
            fetch(line)


@no_type_check
@numba.njit(fastmath=FAST, inline="always")
def _refine(place, tile, pool, scales, tag, num_blocks, d, b, kind):
    """Codes of `ROWS` rows times their scales, and those of their finer codes added, where a row
    has any."""
    size = calls.row_bytes(d, kind)
    spare = tile.ctypes.data + ROWS * d * 4
    block, start = np.int64(-1), np.int64(-1)
    for j in range(ROWS):
        # Rows of one block mostly: a division takes longer than all else here.
        if not block * b <= place[j] < block * b + b or block < 0:
            block = place[j] // b
            start = np.int64(tag[block]) * b if 0 <= tag[block] < num_blocks else np.int64(-1)
        scale = bfloat16_at(scales, place[j])
        if start < 0:
            for c in range(d):
                tile[j, c] *= scale
            continue
        other = start + place[j] - block * b
        to_float32(pool + other * size, spare, d, kind)
        more = bfloat16_at(scales, other)
        for c in range(d):
            tile[j, c] = tile[j, c] * scale + tile[ROWS, c] * more


@no_type_check
@numba.njit(inline="always")
def _start(block, num_blocks, b):
    """A block's first row; of one that is nowhere the nearest one's."""
    return max(0, min(np.int64(block), num_blocks - 1)) * b


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def _merge(row, frame, r, d, keys, fine):
    """Attention of a head of what its pieces gave, and metrics with what its KVs received."""
    _ = literally(r), literally(d), literally(keys), literally(fine)
    rows, max_blocks = calls.sizes(frame, 1)[0], calls.sizes(frame, 1)[1]
    most_pieces = _pieces(_room(frame))
    length = _length(frame, row)
    pieces = _pieces(length)
    out = carray(float32s(calls.result(frame, 0)), (rows, r, d))[row]
    sums = carray(float32s(calls.result(frame, 1)), (rows, most_pieces, r, d))[row]
    top = carray(float32s(calls.result(frame, 2)), (rows, most_pieces, r))[row]
    total = carray(float32s(calls.result(frame, 3)), (rows, most_pieces, r))[row]
    out[:] = 0
    if pieces == 0:
        return
    for i in range(r):
        most = top[0, i]
        for piece in range(1, pieces):
            most = top[piece, i] if top[piece, i] > most else most
        weight = np.float32(0)
        for piece in range(pieces):
            # From here on what a piece's weights count in all.
            top[piece, i] = exp(top[piece, i] - most)
            weight += total[piece, i] * top[piece, i]
        for piece in range(pieces):
            top[piece, i] /= weight
            for c in range(d):
                out[i, c] += sums[piece, i, c] * top[piece, i]
    if calls.num_results(frame) <= _METRIC:
        return
    # Of sequences that are not observed it is 0.
    power = int32s(calls.argument(frame, (8 if fine else 7) if keys >= INT8 else 5))[row]
    if power == 0:
        return
    table = carray(int32s(calls.argument(frame, 1)), (rows, max_blocks))[row]
    metric = float32s(calls.result(frame, _METRIC))
    blocks, b = calls.sizes(frame, 3)[0], calls.sizes(frame, 3)[1]
    kept = carray(float32s(calls.result(frame, _KEPT)), (rows, most_pieces, r, PIECE_TOKENS))[row]
    for entry in range(-(-length // b)):
        block = np.int64(table[entry])
        if not 0 <= block < blocks:
            continue
        for t in range(entry * b, min(length, entry * b + b)):
            received = np.float32(0)
            for i in range(r):
                p = kept[t // PIECE_TOKENS, i, t % PIECE_TOKENS] * top[t // PIECE_TOKENS, i]
                received += p * p if power == 2 else p
            metric[block * b + t - entry * b] += received
