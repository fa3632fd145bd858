"""Attention of a prompt on CPUs: a tile's logits stay in a core's cache.

A tile is some queries of one KV head, of its query heads side by side, with the logits of all keys
that they see: a product, a softmax that is final, another product, and what keys receive as one
more sum. Whichever thread is free takes the next tiles, those that see most first. What a tile
computes depends on no other, so results are the same in every bit on any number of threads.
"""

import math
from typing import no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Float, Int32
from numba.misc.special import literally
from numba.np.numpy_support import carray

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.numba_calls import float32s, int32s
from kvjax.kernels.numba_matrices import FAST, exponentials, multiply
from kvjax.kernels.numba_tiles import SIDE
from kvjax.kernels.numba_vectors import ROWS, TALL, VECTORS, WIDTH, product
from kvjax.kernels.prefill_attention.reference import Observed, Partial

PANEL = WIDTH * VECTORS
"""Keys whose channels lie together: the columns of a product."""
MOST_ROWS, LEAST_ROWS = 48, 12
"""Queries of a tile, of all query heads of a group, where few keys are and where many: 48 halved
some times."""
CACHED = 3 << 19
"""Bytes of logits that a core's cache has room for, beside keys and values."""
SPANS = 64
"""Parts that a head's queries are dealt in, at most: each has its own sums of what keys receive."""
BETWEEN = ROWS
"""Numbers between rows of logits: of rows a power of two apart few can be in a cache."""
OWN = -1
"""In place of how many keys all queries of a head see: each up to its own token."""


def causal(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    scale: float,
    tiles: bool = False,
) -> Partial:
    """Causal attention, as of `reference.causal`; in tiles of AMX, or by vectors."""
    return _attention(q, k.swapaxes(0, 1), v.swapaxes(0, 1), _own(k), scale, None, tiles)[0]


def causal_with_received(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    scale: float,
    observed: Observed,
    tiles: bool = False,
) -> tuple[Partial, Float[Array, "Hr T"]]:
    """`causal`, and Σ over the queries of weight · p^power for each key."""
    k, v, seen = k.swapaxes(0, 1), v.swapaxes(0, 1), _own(k)
    part, received = _attention(q, k, v, seen, scale, observed, tiles)
    assert received is not None
    return part, received


def over_prefix(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "H P d"],
    v: Float[Array, "H P d"],
    length: Int32[Array, " H"],
    scale: float,
    tiles: bool = False,
) -> Partial:
    """Attention of all queries over the first `length` KVs of each head."""
    return _attention(q, k, v, jnp.clip(length, 0, k.shape[1]), scale, None, tiles)[0]


def _own(k: Array) -> Int32[Array, " H"]:
    return jnp.full(k.shape[1], OWN, jnp.int32)


def _attention(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "H P d"],
    v: Float[Array, "H P d"],
    seen: Int32[Array, " H"],
    scale: float,
    observed: Observed | None,
    tiles: bool,
) -> tuple[Partial, Float[Array, "Hr T"] | None]:
    num_tokens, num_query_heads, d = q.shape
    num_heads, num_keys, _ = k.shape
    group = num_query_heads // num_heads
    rows = num_tokens * group
    at_once = SIDE if tiles else MOST_ROWS
    span = at_once * math.ceil(rows / (at_once * SPANS))
    spans = math.ceil(rows / span)
    queries = (q.astype(jnp.float32) * scale).reshape(num_tokens, num_heads, group, d)
    queries = queries.transpose(1, 0, 2, 3).reshape(num_heads, rows, d)
    queries = jnp.pad(queries, ((0, 0), (0, spans * span - rows), (0, 0)))
    packed: list[jax.ShapeDtypeStruct] = []
    if tiles:
        from kvjax.kernels.prefill_attention import tiled

        kind = tiled.kind_of(k, v)
        k, v = (tiled.padded(x, kind) for x in (k, v))
        packed, target = [tiled.scratch(x, kind) for x in (k, v)], tiled.target(group, d, kind)
    else:
        k = jnp.pad(k.astype(jnp.float32), ((0, 0), (0, -num_keys % PANEL), (0, 0)))
        k = k.reshape(num_heads, -1, PANEL, d).swapaxes(2, 3)
        v, target = v.astype(jnp.float32), _target(group, d)
    given = [queries, k, v, seen, jnp.array([num_tokens, span], jnp.int32)]
    each = (num_heads, group, num_tokens)
    shapes = [(*each, d), each, each]
    if observed is not None:
        rule = jnp.array([observed.power, observed.excluded_distance], jnp.int32)
        given += [observed.weight.astype(jnp.float32), rule]
        shapes += [each, (spans, *each)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] + packed
    out, top, total, *further = jax.ffi.ffi_call(target, results, vmap_method="sequential")(*given)
    if observed is None:
        return (out, top, total), None
    return (out, top, total), further[0].reshape(num_query_heads, num_tokens)


@calls.once
def _target(r: int, d: int) -> str:
    """The name by which programs call what attends, for a group and a head dimension; all else is
    read from the call."""
    name = f"kvjax_prefill_attention_{r}_{d}"
    stamp = numba_source.stamp()
    width = math.gcd(d, WIDTH)

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, r, d, width)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            chunks = calls.sizes(frame, 0)[0] * spans_of(frame)
            threads.run(frame, threads.address_of(name), _TILES, chunks)
            if observes(frame):
                heads = calls.sizes(frame, 0)[0] * r
                threads.run(frame, threads.address_of(name), _SUMS, heads)
        return 0

    threads.serve(name, task, call)
    return name


_TILES, _SUMS = 0, 1
"""What the chunks of a call are, first and last."""
RECEIVED, OF_SPANS = 3, 4
"""Of results those that are there with a statistic only: in all, and of each span of queries."""
WEIGHT, RULE = 5, 6
"""Of arguments those that are there then."""


@no_type_check
@numba.njit(inline="always")
def observes(frame):
    """Whether what keys receive is asked for."""
    return calls.num_arguments(frame) > WEIGHT


@no_type_check
@numba.njit(inline="always")
def spans_of(frame):
    """How many spans a head's queries are dealt in."""
    return calls.sizes(frame, 0)[1] // int32s(calls.argument(frame, 4))[1]


@no_type_check
@numba.njit
def _work(address, r, d, width):
    """Chunks of a team's call, spans of queries or query heads, while there are any."""
    chunk = threads.take(address)
    team = calls.words(address)
    if chunk >= team[threads.TOTAL]:
        return
    if team[threads.PHASE] == _TILES:
        _attend(address, chunk, r, d, width)
        return
    while chunk < team[threads.TOTAL]:
        sum_up(chunk, calls.words(team[threads.FRAME]), r)
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def _attend(address, chunk, r, d, width):
    _ = literally(r), literally(d), literally(width)
    team = calls.words(address)
    frame = calls.words(team[threads.FRAME])
    num_heads, padded = calls.sizes(frame, 0)[0], calls.sizes(frame, 0)[1]
    panels, num_keys = calls.sizes(frame, 1)[1], calls.sizes(frame, 2)[1]
    q, k, v = calls.argument(frame, 0), calls.argument(frame, 1), calls.argument(frame, 2)
    limit = int32s(calls.argument(frame, 3))
    num_tokens = np.int64(int32s(calls.argument(frame, 4))[0])
    span, spans = np.int64(int32s(calls.argument(frame, 4))[1]), spans_of(frame)
    each = (num_heads, r, num_tokens)
    out = carray(float32s(calls.result(frame, 0)), (num_heads, r, num_tokens, d))
    top = carray(float32s(calls.result(frame, 1)), each)
    total = carray(float32s(calls.result(frame, 2)), each)
    across = panels * PANEL + BETWEEN
    tile = MOST_ROWS
    while tile > LEAST_ROWS and tile * across * 4 > CACHED:
        tile //= 2
    s, lane = np.empty((tile, across), np.float32), np.empty(ROWS, np.float32)
    sums = np.empty((tile, d), np.float32)
    while chunk < team[threads.TOTAL]:
        head, number = chunk % num_heads, spans - 1 - chunk // num_heads
        if observes(frame):
            clear(frame, number, head, r, num_tokens)
        for first in range(number * span, (number + 1) * span, tile):
            if first >= num_tokens * r:
                break
            most = np.int64(limit[head])
            if most == OWN:
                most = min((first + tile - 1) // r, num_tokens - 1) + 1
            for panel in range(-(-most // PANEL)):
                of_panel = k + (head * panels + panel) * d * PANEL * 4
                for i in range(0, tile, TALL):
                    product(
                        q + (head * padded + first + i) * d * 4,
                        of_panel,
                        s.ctypes.data + (i * across + panel * PANEL) * 4,
                        d,
                        (d * 4, PANEL * 4, across * 4),
                        WIDTH,
                        VECTORS,
                    )
            for i in range(min(tile, num_tokens * r - first)):
                token, member = (first + i) // r, (first + i) % r
                own = most if limit[head] != OWN else token + 1
                largest, weight = exponentials(s[i], own, lane)
                for j in range(own, most):
                    s[i, j] = 0
                top[head, member, token], total[head, member, token] = largest, weight
                if observes(frame):
                    _receive(frame, number, head, member, token, s[i], weight, r, num_tokens)
            if most == 0:
                sums[:] = 0
            else:
                values, strides = v + head * num_keys * d * 4, (across * 4, d * 4, d * 4)
                weights, into = s.ctypes.data, sums.ctypes.data
                multiply(weights, values, into, tile, most, d, strides, width)
            for i in range(min(tile, num_tokens * r - first)):
                # By a loop: Numba compiles an assignment of slices for seconds.
                for c in range(d):
                    out[head, (first + i) % r, (first + i) // r, c] = sums[i, c]
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit(inline="always")
def clear(frame, number, head, r, num_tokens):
    """What no key has received yet of a head's span of queries."""
    for member in range(r):
        received_of(frame, number, head, member, r, num_tokens)[:] = 0


@no_type_check
@numba.njit(inline="always")
def received_of(frame, number, head, member, r, num_tokens):
    """What each key receives of a query head's span of queries."""
    num_heads, start = calls.sizes(frame, 0)[0], calls.result(frame, OF_SPANS)
    own = start + ((number * num_heads + head) * r + member) * num_tokens * 4
    return carray(float32s(own), num_tokens)


@no_type_check
@numba.njit(inline="always", fastmath={"contract"}, error_model="numpy")
def _receive(frame, number, head, member, token, p, weight, r, num_tokens):
    """Add what keys receive of one query, whose weights are p over their sum."""
    rule = int32s(calls.argument(frame, RULE))
    counts = float32s(calls.argument(frame, WEIGHT))[token]
    received = received_of(frame, number, head, member, r, num_tokens)
    if rule[0] == 2:
        share = counts / (weight * weight)
        for j in range(token + 1 - rule[1]):
            received[j] += share * (p[j] * p[j])
    else:
        share = counts / weight
        for j in range(token + 1 - rule[1]):
            received[j] += share * p[j]


@no_type_check
@numba.njit
def sum_up(head, frame, r):
    """What the keys of a query head receive, span after span."""
    heads, spans = calls.sizes(frame, 0)[0] * r, spans_of(frame)
    num_tokens = np.int64(int32s(calls.argument(frame, 4))[0])
    own = calls.result(frame, RECEIVED) + head * num_tokens * 4
    received = carray(float32s(own), num_tokens)
    received[:] = 0
    for span in range(spans):
        start = calls.result(frame, OF_SPANS) + (span * heads + head) * num_tokens * 4
        part = carray(float32s(start), num_tokens)
        for j in range(num_tokens):
            received[j] += part[j]
