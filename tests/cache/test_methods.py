"""Every method keeps what an independent selection keeps, on its way in and in the pool.

`tests.oracle.methods` knows the rules by heart and shares no code with kvjax.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.policy import LayerView
from tests.oracle.methods import KEEPS, KEEPS_IN_POOL, KEEPS_OF_SHORT, SCORES
from tests.oracle.question_free import calibrated
from tests.oracle.scores import Prompt
from tests.oracle.selection import newest_of

L, H, R, D, T, B = 3, 2, 2, 8, 112, 4
M = T // B
ARTEFACTS = jax.tree.map(jnp.asarray, calibrated(L, H, D))


def empty(planes: tuple[kv.Plane, ...] = ()) -> kv.PagedCache:
    return kv.init_cache(
        num_slots=2,
        num_layers=L,
        num_kv_heads=H,
        head_dim=D,
        num_blocks=L * H * M,
        max_blocks_per_head=M,
        block_size=B,
        planes=planes,
    )


# On arrays this small, compiling is all that takes time.
QUICKLY = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@cache
def observer(name: str):
    observer = get_method(name).observer

    @jax.jit
    def observe(q, k, v, length):
        def one(inputs):
            layer, q, k, v = inputs
            # What enters attention is taken to be the queries themselves.
            hidden = q.reshape(len(q), -1)
            view = LayerView(layer, q, k, length, jnp.int32(0), v=v, hidden=hidden)
            return observer.observe(view, ARTEFACTS)

        return observer.finish(jax.lax.map(one, (jnp.arange(L), q, k, v)), None, length, T)

    return observe


@partial(QUICKLY, static_argnums=6)
def both(k, v, scores, length, keep, method, planes):
    """Both ways to compress a prompt; methods that evict alike share a compiled program."""
    slot = jnp.int32(1)
    given = {"artefacts": ARTEFACTS}
    direct, report, ok = kv.write_survivors(
        empty(planes), slot, k, v, scores, length, keep, method, **given
    )
    whole, written = kv.write_prompt(
        empty(planes), slot, k, v, scores.metric, length, state=scores.state
    )
    whole, later = kv.compress(
        whole, slot[None], keep[None], method, max_kvs_per_step=T * H, **given
    )
    return direct, whole, report, later, ok & written


@cache
def inputs(
    kind: str, length: int, cap: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Prompt]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((L, T, H * R, D)).astype(np.float32)
    k = rng.standard_normal((L, T, H, D)).astype(np.float32)
    if kind == "ties":  # every key is the same to every query
        k[:] = k[:, :1]
    elif kind == "peaks":  # a few keys take nearly everything, the rest next to nothing
        q = np.abs(q)
        k = np.where(rng.random((L, T, H, 1)) < 0.1, 6, -1).astype(np.float32) + k / 8
    elif kind == "one head":  # all of a layer's attention mass sits far back in one head only
        q = np.abs(q)
        k[:, :16, 0] = 4
    q[:, length:], k[:, length:] = 1e4, -1e4  # padding must not matter
    v = rng.integers(1, 4, k.shape).astype(np.float32)
    return q, k, v, Prompt(q[:, :length], k[:, :length], v[:, :length], cap, B)


CASES = [
    ("random", 70, 12),
    ("random", 61, 24),
    ("random", 72, 4),  # one block per head
    ("random", 40, 40),  # the cap is the prompt
    ("random", 41, 40),  # the cap is one token less, the last block is ragged
    ("random", 33, 8),  # the cap is the usual window
    ("random", 5, 4),  # shorter than any window
    ("random", 1, 4),
    ("ties", 70, 16),
    ("ties", 9, 8),
    ("peaks", 69, 12),
    ("peaks", 71, 36),
    ("one head", 67, 20),
    ("random", 112, 76),  # room for pages between the ends
    ("peaks", 110, 100),
]


def positions(cache: kv.PagedCache, slot: int) -> dict[tuple[int, int], list[int]]:
    table, count, position = (
        np.asarray(x) for x in (cache.block_table, cache.context_len, cache.position)
    )
    return {
        (layer, head): sorted(
            int(position[table[slot, layer, head, i // B], i % B])
            for i in range(count[slot, layer, head])
        )
        for layer in range(L)
        for head in range(H)
    }


def test_the_oracle_knows_every_method():
    assert set(KEEPS) == set(METHODS)
    scored = {name.split(":")[-1] for name, method in METHODS.items() if method.compresses}
    assert scored <= set(SCORES)


# Each wrapper is a program of its own that takes long to compile.
DEFAULT_WRAPPERS = ("kvcrush:snapkv",)


def marked(name: str, *others: str):
    """The method as a parameter; wrappers but for one, and `others`, run with `-m slow`."""
    slow = name in others or (":" in name and name not in DEFAULT_WRAPPERS)
    return pytest.param(name, marks=pytest.mark.slow) if slow else name


# These differ from another by a number or a part.
LIKE_OTHERS = (
    "snapkv-w32",
    "snapkv-w32-avg5",
    "pyramidkv-faithful",
    "ada-snapkv-a50",
    "kv-compress-w8-l1",
    "kv-compress-w32-l1",
    "kv-compress-w32-l2",
    "matched:kv-compress",
    "paged-h2o-openvino",
    "a2sf-f20",
    "kvzip-plus",
    "windowkv-average",
    "ada-pyramidkv",
    "ada-snapkv-kvpress",
    "pyramidkv-geometric",
    "pyramidkv-gini",
    "pyramidkv-entropy",
    "snapkv-w64-avg5",
    "kv-compress-full-l2",
    "wide-pool",
    "predicted-reads",
    "kvzap-linear",
)


# Programs of their own that take long to compile, and run in test_methods_end_to_end.py by default.
WITH_THE_ENGINE = (
    *("ems", "kvmerger", "paged-h2o", "pyramidinfer", "r-kv", "scissorhands", "triattention"),
)


@pytest.mark.parametrize("name", [marked(name, *LIKE_OTHERS, *WITH_THE_ENGINE) for name in METHODS])
def test_keeps_what_the_oracle_keeps(name):
    method, rules = get_method(name), (KEEPS[name], KEEPS_IN_POOL[name])
    if name in KEEPS_OF_SHORT:
        protected, rule = KEEPS_OF_SHORT[name]
        method, rules = dataclasses.replace(method, protected=protected), (rule, rule)
    evicts = False
    for seed, (kind, length, cap) in enumerate(CASES):
        q, k, v, prompt = inputs(kind, length, cap, seed)
        keep = kv.budget_blocks(cap, L, H, B)
        if not method.compresses:
            keep = L * H * M
        length = np.int32(length)
        scores = observer(name)(q, k, v, length)
        direct, whole, report, later, ok = both(
            k, v, scores, length, np.int32(keep), method.eviction, method.planes
        )
        assert ok
        want, in_pool = (rule(prompt) for rule in rules)
        evicts |= any(len(kept) < length for kept in want.values())
        case = f"{name}: {kind}, {length} tokens, cap {cap}"
        assert positions(direct, 1) == want, case
        assert positions(whole, 1) == in_pool, f"{case}, in the pool"
        assert np.array_equal(report.freed, later.freed)
        kv.check_invariants(direct)
        kv.check_invariants(whole)
        held = -(-np.asarray(direct.context_len[1]) // B)
        over = held.sum() - min(keep, L * H * -(-length // B))
        if method.allocator.overruns:
            continue
        assert int(report.shortfall[0]) == max(0, over)
        if length > cap:
            newest = newest_of(-(-cap // B) * B, method.protected, *method.shares)
            guarded = min(length, newest + method.sinks)
            assert over <= 0 or (held == max(1, -(-guarded // B))).all(), case
    assert evicts == method.compresses
