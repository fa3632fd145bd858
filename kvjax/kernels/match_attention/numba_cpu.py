"""Attention matching on CPUs: a thread fits a head, whose matrices stay in a core's cache.

KVs that are there are put one after the other, those that stay first, so that what stays is a part
of each row and nothing is multiplied by 0.
"""

import math
from typing import no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Bool, Float
from numba.misc.special import literally
from numba.np.numpy_support import carray

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.numba_calls import float32s, int32s
from kvjax.kernels.numba_matrices import FAST, exponentials, hold, multiply, room, solve, transpose
from kvjax.kernels.numba_vectors import ROWS, TALL, VECTORS, WIDTH, product

PANEL = WIDTH * VECTORS
"""Keys whose channels lie together: the columns of a product."""
BETWEEN = ROWS
"""Numbers between rows of weights: of rows a power of two apart few can be in a cache."""
LEAST = np.float32(1e-30)
"""Of a mass: of what a query hardly looks at nothing may be left in float32, and that is no weight
at all, lest new values be made of its rounding errors."""
LEAST_RIDGE = np.float32(1e-20)
"""Of a head that weighs nothing at all there is nothing to solve, and no 0 / 0."""
KEPT, DROPPED = 1, 2
"""What becomes of a KV; 0 where there is none."""


def match_attention(
    q: Float[Array, "H Q d"],
    k: Float[Array, "H T d"],
    v: Float[Array, "H T d"],
    dropped: Bool[Array, "H T"],
    kept: Bool[Array, "H T"],
    most_mass: float,
    stiffness: float,
    drawn_back: float,
) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
    """See `kvjax.kernels.match_attention`."""
    num_queries, d = q.shape[1:]
    state = jnp.where(kept, KEPT, jnp.where(dropped, DROPPED, 0)).astype(jnp.int32)
    rule = jnp.array([most_mass, stiffness, drawn_back], jnp.float32)
    padded = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, -num_queries % TALL), (0, 0)))
    count = jnp.int32(num_queries)
    given = [padded, k.astype(jnp.float32), v.astype(jnp.float32), state, rule, count]
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k, v)]
    new_k, new_v = jax.ffi.ffi_call(_target(d), results, vmap_method="broadcast_all")(*given)
    return new_k.astype(k.dtype), new_v.astype(v.dtype)


@calls.once
def _target(d: int) -> str:
    """The name by which programs call it, for a head dimension; all else is read from the call."""
    name = f"kvjax_match_attention_{d}"
    stamp = numba_source.stamp()
    width = math.gcd(d, WIDTH)

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, d, width)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            heads = 1
            for axis in range(calls.rank(frame, 3) - 1):
                heads *= calls.sizes(frame, 3)[axis]
            threads.run(frame, threads.address_of(name), 0, heads)
        return 0

    threads.serve(name, task, call)
    return name


@no_type_check
@numba.njit
def _work(address, d, width):
    """Heads of a team's call, while there are any."""
    head = threads.take(address)
    while head < calls.words(address)[threads.TOTAL]:
        _fit(address, head, d, width)
        threads.finished(address)
        head = threads.take(address)


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def _fit(address, head, d, width):
    """A head's keys and values."""
    _ = literally(d), literally(width)
    frame = calls.words(calls.words(address)[threads.FRAME])
    num_tokens = calls.sizes(frame, 3)[calls.rank(frame, 3) - 1]
    num_queries = np.int64(int32s(calls.argument(frame, 5))[0])
    rows = -(-num_queries // TALL) * TALL
    q = carray(float32s(calls.argument(frame, 0) + head * rows * d * 4), (rows, d))
    each = (num_tokens, d)
    k, v = (
        carray(float32s(calls.argument(frame, 1) + head * num_tokens * d * 4), each),
        carray(float32s(calls.argument(frame, 2) + head * num_tokens * d * 4), each),
    )
    new_k, new_v = (
        carray(float32s(calls.result(frame, 0) + head * num_tokens * d * 4), each),
        carray(float32s(calls.result(frame, 1) + head * num_tokens * d * 4), each),
    )
    state = carray(int32s(calls.argument(frame, 3) + head * num_tokens * 4), num_tokens)
    rule = float32s(calls.argument(frame, 4))
    # By loops: Numba compiles an assignment of slices for seconds.
    for t in range(num_tokens):
        for c in range(d):
            new_k[t, c], new_v[t, c] = k[t, c], v[t, c]
    at = np.empty(num_tokens, np.int64)
    n = _placed(state, KEPT, at, 0)
    stay, n = n, _placed(state, DROPPED, at, n)
    if stay == 0 or stay == n:
        return

    length = -(-n // PANEL) * PANEL + BETWEEN
    weight, lane = np.empty((rows, length), np.float32), np.empty(ROWS, np.float32)
    _logits(q, k, at, n, weight, d)
    values, said = np.empty((n, d), np.float32), np.empty((rows, d), np.float32)
    for t in range(n):
        for c in range(d):
            values[t, c] = v[at[t], c]
    lacks = np.zeros((num_queries, WIDTH), np.float32)
    mass = np.empty(num_queries, np.float32)
    for i in range(num_queries):
        _, mass[i] = exponentials(weight[i], n, lane)
        left = np.float32(0)
        for t in range(stay):
            left += weight[i, t]
        mass[i], left = max(mass[i], LEAST), max(left, LEAST)
        lacks[i, 0] = min(max(np.log(mass[i] / left), np.float32(0)), rule[0])
    moved = _moved(q, lacks, rule[1], num_queries, d, width)

    strides = (length * 4, d * 4, d * 4)
    start = weight.ctypes.data
    multiply(start, values.ctypes.data, said.ctypes.data, rows, n, d, strides, width)
    missing = np.empty((num_queries, d), np.float32)
    gram = np.empty(room(num_queries), np.float32)
    across = gram.shape[1]
    turned = np.zeros((-(-stay // TALL) * TALL, across), np.float32)
    for i in range(num_queries):
        left = np.float32(0)
        for t in range(stay):
            left += weight[i, t]
        scale = np.float32(0) if left < LEAST else np.float32(1) / left
        for c in range(d):
            missing[i, c] = said[i, c] / mass[i]
        for t in range(stay):
            weight[i, t] *= scale
    transpose(weight[:num_queries], turned, 0, stay)
    multiply(start, values.ctypes.data, said.ctypes.data, rows, stay, d, strides, width)
    for i in range(num_queries):
        for c in range(d):
            missing[i, c] -= said[i, c]
    own, strides = turned.ctypes.data, (length * 4, across * 4, across * 4)
    multiply(start, own, gram.ctypes.data, rows, stay, across, strides, WIDTH)
    trace = np.float32(0)
    for i in range(num_queries):
        trace += gram[i, i]
    ridge = max(rule[2] * trace / num_queries, LEAST_RIDGE)
    solve(gram, num_queries, ridge, missing, width)
    change = np.empty((turned.shape[0], d), np.float32)
    into, strides = change.ctypes.data, (across * 4, d * 4, d * 4)
    multiply(own, missing.ctypes.data, into, stay, num_queries, d, strides, width)
    hold(weight, values, said, missing, turned, gram, change)
    for t in range(stay):
        for c in range(d):
            new_k[at[t], c] = k[at[t], c] + moved[c, 0]
            new_v[at[t], c] = values[t, c] + change[t, c]


@no_type_check
@numba.njit
def _placed(state, kind, at, n):
    """Write where KVs of a kind are behind the first n; how many there are then."""
    for t in range(state.shape[0]):
        if state[t] == kind:
            at[n] = t
            n += 1
    return n


@no_type_check
@numba.njit(inline="always")
def _logits(q, k, at, n, out, d):
    """Products of all queries with the keys of some places."""
    panel = np.empty((d, PANEL), np.float32)
    for first in range(0, n, PANEL):
        for j in range(PANEL):
            own = k[at[min(first + j, n - 1)]]
            for c in range(d):
                panel[c, j] = own[c]
        for i in range(0, q.shape[0], TALL):
            product(
                q.ctypes.data + i * d * 4,
                panel.ctypes.data,
                out.ctypes.data + (i * out.shape[1] + first) * 4,
                d,
                (d * 4, PANEL * 4, out.shape[1] * 4),
                WIDTH,
                VECTORS,
            )


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def _moved(q, lacks, stiffness, num_queries, d, width):
    """The vector, in the first column, that gives queries the mass that they lack."""
    # No literal: what is called is compiled for other sizes as well.
    size = np.int64(d)
    gram = np.zeros(room(size), np.float32)
    right = np.empty((-(-d // TALL) * TALL, WIDTH), np.float32)
    turned = np.empty((gram.shape[0], num_queries), np.float32)
    transpose(q[:num_queries], turned, 0, size)
    own, across = turned.ctypes.data, gram.shape[1]
    strides = (num_queries * 4, d * 4, across * 4)
    multiply(own, q.ctypes.data, gram.ctypes.data, d, num_queries, d, strides, width)
    strides = (num_queries * 4, WIDTH * 4, WIDTH * 4)
    multiply(own, lacks.ctypes.data, right.ctypes.data, d, num_queries, WIDTH, strides, WIDTH)
    hold(turned, lacks)
    trace = np.float32(0)
    for c in range(d):
        trace += gram[c, c]
    solve(gram, size, max(stiffness * trace / d, LEAST_RIDGE), right[:d], WIDTH)
    return right
