"""Attention of a prompt on CPUs with AMX: products of tiles, with a softmax in between.

What `numba_cpu` does by vectors. 32 queries of one KV head meet 32 keys at a time; the logits of
all keys that they see, in squares, stay in a core's cache, and become weights, and then digits of
these, where they are. Queries and weights are two numbers of bfloat16 each; keys and values are as
many as they need, one where they are of that type.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Float
from numba.misc.special import literally
from numba.np.numpy_support import carray

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source, numba_tiles
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.numba_calls import BFLOAT16, FLOAT32, float32s, int32s
from kvjax.kernels.numba_matrices import hold
from kvjax.kernels.numba_squares import PLACES, add_received, maxima, weights
from kvjax.kernels.numba_tiles import (
    DEPTH,
    SIDE,
    TILE,
    pack_columns,
    pack_rows,
    pack_turned,
    product,
    step_bytes,
)
from kvjax.kernels.prefill_attention import numba_cpu
from kvjax.kernels.prefill_attention.numba_cpu import (
    OWN,
    RULE,
    WEIGHT,
    clear,
    observes,
    received_of,
    spans_of,
    sum_up,
)

LANES = 16
"""Maxima and sums of a row that are made side by side."""
SQUARE = SIDE * SIDE * 4
"""Bytes of a square."""
TOGETHER = 8
"""Panels of keys and values that a thread packs at a time."""


def check(d: int) -> None:
    """
    Raises:
        NotImplementedError: the processor has no AMX, or heads of that dimension fill no tiles.
    """
    numba_tiles.check()
    if d % DEPTH:
        raise NotImplementedError(f"d={d}, which fills no tiles")


def kind_of(k: Array, v: Array) -> int:
    """What is packed of keys and values."""
    return BFLOAT16 if k.dtype == v.dtype == jnp.bfloat16 else FLOAT32


def padded(x: Float[Array, "H P d"], kind: int) -> Float[Array, "H P2 d"]:
    """Keys or values as whole panels."""
    x = x.astype(jnp.bfloat16 if kind == BFLOAT16 else jnp.float32)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % SIDE), (0, 0)))


def scratch(x: Float[Array, "H P2 d"], kind: int) -> jax.ShapeDtypeStruct:
    """Room for what is packed of them."""
    heads, keys, d = x.shape
    panels = keys // SIDE * (d // DEPTH)
    return jax.ShapeDtypeStruct((heads, panels, step_bytes(kind)), jnp.uint8)


@calls.once
def target(r: int, d: int, kind: int) -> str:
    """The name by which programs call what attends, for a group, a head dimension and what keys and
    values are; all else is read from the call."""
    name = f"kvjax_tiled_attention_{r}_{d}_{kind}"
    stamp = numba_source.stamp(numba_cpu.__name__)

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, r, d, kind)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            heads, address = calls.sizes(frame, 0)[0], threads.address_of(name)
            parts = -(-calls.sizes(frame, 1)[1] // (SIDE * TOGETHER))
            threads.run(frame, address, _PACK, heads * parts)
            threads.run(frame, address, _TILES, heads * spans_of(frame))
            if observes(frame):
                threads.run(frame, address, _SUMS, heads * r)
        return 0

    threads.serve(name, task, call)
    return name


_PACK, _TILES, _SUMS = range(3)
"""What the chunks of a call are, one after the other."""


@no_type_check
@numba.njit
def _work(address, r, d, kind):
    """Chunks of a team's call, while there are any: panels, spans of queries, or query heads."""
    chunk = threads.take(address)
    team = calls.words(address)
    if chunk >= team[threads.TOTAL]:
        return
    if team[threads.PHASE] == _TILES:
        _attend(address, chunk, r, d, kind)
        return
    while chunk < team[threads.TOTAL]:
        if team[threads.PHASE] == _PACK:
            _pack(calls.words(team[threads.FRAME]), chunk, d, kind)
        else:
            sum_up(chunk, calls.words(team[threads.FRAME]), r)
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit(inline="always")
def _packed(frame, which, head, kind):
    """Where a head's packed keys are (1) or its values (2), and the bytes of all its panels, of as
    many steps as there are panels in a column of values."""
    panels, d = calls.sizes(frame, 1)[1] // SIDE, calls.sizes(frame, 1)[2]
    size = panels * (d // DEPTH) * step_bytes(kind)
    return calls.result(frame, calls.num_results(frame) - 3 + which) + head * size


@no_type_check
@numba.njit
def _pack(frame, chunk, d, kind):
    """Some panels of a head's keys, and as many steps of its values."""
    _ = literally(d), literally(kind)
    num_heads, panels = calls.sizes(frame, 0)[0], calls.sizes(frame, 1)[1] // SIDE
    head, first = chunk % num_heads, chunk // num_heads * TOGETHER
    steps, size = d // DEPTH, calls.row_bytes(d, kind)
    room = np.empty(steps * step_bytes(kind), np.uint8)
    to_keys, to_values = _packed(frame, 1, head, kind), _packed(frame, 2, head, kind)
    limit = np.int64(int32s(calls.argument(frame, 3))[head])
    for panel in range(first, min(first + TOGETHER, panels)):
        at = (head * panels + panel) * SIDE * size
        own = to_keys + panel * steps * step_bytes(kind)
        pack_turned(calls.argument(frame, 1) + at, size, steps, room.ctypes.data, own, kind)
        from_values, held = calls.argument(frame, 2) + at, limit - panel * SIDE
        if limit != OWN and held < SIDE:
            _held(from_values, max(0, held) * size, SIDE * size, room.ctypes.data)
            from_values = room.ctypes.data
        for column in range(steps):
            source = from_values + column * calls.row_bytes(SIDE, kind)
            own = to_values + (column * panels + panel) * step_bytes(kind)
            pack_columns(source, size, 1, own, kind)
    hold(room)


@no_type_check
@numba.njit(inline="always")
def _held(source, held, size, out):
    """So many bytes, and zeros behind: a weight of 0 does not silence what nobody wrote."""
    rows, into = int32s(source), int32s(out)
    for i in range(size // 4):
        into[i] = rows[i] if i < held // 4 else 0


@no_type_check
@numba.njit
def _attend(address, chunk, r, d, kind):
    """Spans of queries."""
    _ = literally(r), literally(d), literally(kind)
    team = calls.words(address)
    frame = calls.words(team[threads.FRAME])
    num_heads, padded = calls.sizes(frame, 0)[0], calls.sizes(frame, 0)[1]
    panels, steps = calls.sizes(frame, 1)[1] // SIDE, d // DEPTH
    limit = int32s(calls.argument(frame, 3))
    num_tokens = np.int64(int32s(calls.argument(frame, 4))[0])
    span, spans = np.int64(int32s(calls.argument(frame, 4))[1]), spans_of(frame)
    each = (num_heads, r, num_tokens)
    out = carray(float32s(calls.result(frame, 0)), (num_heads, r, num_tokens, d))
    top = carray(float32s(calls.result(frame, 1)), each)
    total = carray(float32s(calls.result(frame, 2)), each)
    s = np.empty(panels * SIDE * SIDE, np.float32)
    queries, sums = np.empty(steps * 4 * TILE, np.uint8), np.empty((SIDE, d), np.float32)
    lanes, seen = np.empty((SIDE, LANES), np.float32), np.empty(SIDE, np.int64)
    most, weight = np.empty(SIDE, np.float32), np.empty(SIDE, np.float32)
    numba_tiles.begin()
    while chunk < team[threads.TOTAL]:
        # The spans of a head come one after the other: its keys and values stay near.
        head, number = chunk // spans, spans - 1 - chunk % spans
        keys, values = _packed(frame, 1, head, kind), _packed(frame, 2, head, kind)
        if observes(frame):
            clear(frame, number, head, r, num_tokens)
        for first in range(number * span, (number + 1) * span, SIDE):
            if first >= num_tokens * r:
                break
            rows, last = min(SIDE, num_tokens * r - first), 0
            for i in range(SIDE):
                seen[i] = np.int64(limit[head])
                if limit[head] == OWN:
                    seen[i] = (first + min(i, rows - 1)) // r + 1
                last = max(last, seen[i])
            count = -(-last // SIDE)
            from_q = calls.argument(frame, 0) + (head * padded + first) * d * 4
            pack_rows(from_q, d * 4, SIDE, steps, queries.ctypes.data, FLOAT32)
            for panel in range(count):
                own = s.ctypes.data + panel * SQUARE
                from_k = keys + panel * steps * step_bytes(kind)
                from_q = queries.ctypes.data
                product(from_q, from_k, own, steps, PLACES, FLOAT32, kind, False)
            _softmax(s, count, seen, lanes, most, weight)
            for i in range(rows):
                token, member = (first + i) // r, (first + i) % r
                top[head, member, token], total[head, member, token] = most[i], weight[i]
            if observes(frame):
                _receive(frame, number, head, first, rows, s, weight, r, num_tokens)
            if count == 0:
                sums[:] = 0
            else:
                places = (d * 4, SIDE // 2 * d * 4, SIDE // 2 * 4)
                for column in range(steps):
                    from_v = values + column * panels * step_bytes(kind)
                    own = sums.ctypes.data + column * SIDE * 4
                    product(s.ctypes.data, from_v, own, count, places, FLOAT32, kind, False)
            for i in range(rows):
                out[head, (first + i) % r, (first + i) // r] = sums[i]
        threads.finished(address)
        chunk = threads.take(address)
    numba_tiles.release()
    hold(s, queries, sums)


@no_type_check
@numba.njit(inline="always")
def _row(i):
    """Where a row is in a square, in bytes."""
    return i // (SIDE // 2) * PLACES[1] + i % (SIDE // 2) * PLACES[0]


@no_type_check
@numba.njit(inline="always")
def _number(i, key):
    """The place of a number in squares that come one after the other, counted in numbers."""
    j = key % SIDE
    return (key // SIDE * SQUARE + _row(i) + j // LANES * PLACES[2]) // 4 + j % LANES


@no_type_check
@numba.njit(error_model="numpy")
def _softmax(s, count, seen, lanes, most, weight):
    """Make of logits, in squares, the digits of their exponentials over the largest of each row; 0
    of what the row does not see. Where there are squares, every row sees something."""
    start, of_lanes = s.ctypes.data, lanes.ctypes.data
    lanes[:] = -np.inf
    for i in range(SIDE):
        for key in range(seen[i], count * SIDE):
            s[_number(i, key)] = -np.inf
    for panel in range(count):
        for i in range(SIDE):
            maxima(start + panel * SQUARE + _row(i), of_lanes + i * LANES * 4)
    for i in range(SIDE):
        most[i] = -np.inf
        for j in range(LANES):
            most[i] = lanes[i, j] if lanes[i, j] > most[i] else most[i]
        lanes[i] = 0
    for panel in range(count):
        for i in range(SIDE):
            weights(start + panel * SQUARE + _row(i), most[i], of_lanes + i * LANES * 4)
    for i in range(SIDE):
        weight[i] = 0
        for j in range(LANES):
            weight[i] += lanes[i, j]
        for panel in range(seen[i] // SIDE, count):
            _forget(start + panel * SQUARE + _row(i), seen[i] - panel * SIDE)
    hold(s, lanes)


@no_type_check
@numba.njit(inline="always")
def _forget(row, seen):
    """Make weights of a row in a square 0 from one on, both digits of each."""
    for digit in range(2):
        own = calls.int16s(row + digit * PLACES[2])
        for j in range(max(0, seen), SIDE):
            own[j] = 0


@no_type_check
@numba.njit(error_model="numpy")
def _receive(frame, number, head, first, rows, s, weight, r, num_tokens):
    """Add what keys receive of some queries, whose weights are over their sums."""
    rule, counts = int32s(calls.argument(frame, RULE)), float32s(calls.argument(frame, WEIGHT))
    for i in range(rows):
        token, member = (first + i) // r, (first + i) % r
        share = counts[token] / weight[i]
        if rule[0] == 2:
            share /= weight[i]
        received = received_of(frame, number, head, member, r, num_tokens)
        whole = max(0, token + 1 - rule[1])
        for panel in range(whole // SIDE):
            place = received.ctypes.data + panel * SIDE * 4
            own = s.ctypes.data + panel * SQUARE + _row(i)
            add_received(own, share, place, np.int64(rule[0]))
        rest = whole % SIDE
        if rest > 0:
            part = np.zeros(SIDE, np.float32)
            own = s.ctypes.data + whole // SIDE * SQUARE + _row(i)
            add_received(own, share, part.ctypes.data, np.int64(rule[0]))
            for j in range(rest):
                received[whole - rest + j] += part[j]
    hold(s)
