"""Every method through the steps of the engine: admission, decoding, compression while running.

What is kept, and with which metrics, is what the oracle says: after the prompt, after every decode
step, and after compressing again.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.policy import Selector
from kvjax.engine import LLM, EngineConfig, SamplingParams
from kvjax.engine.decode import decode_step as decode_one
from kvjax.engine.prefill import prefill
from kvjax.models import load_model
from kvjax.models.fingerprint import model_hash
from tests.cache.pair import heads_of
from tests.cache.stand_in import (
    MODEL,
    QUICKLY,
    B,
    D,
    H,
    L,
    R,
    assert_close,
    assert_same_kvs,
    drawn,
    empty,
    stand_in,  # noqa: F401
)
from tests.cache.test_methods import marked
from tests.oracle import KV
from tests.oracle.audit import audit
from tests.oracle.decode import decode_step
from tests.oracle.methods import KEEPS, RESCORED, SCORES
from tests.oracle.question_free import calibrated
from tests.oracle.scores import Prompt
from tests.oracle.selection import newest_of

LIKE_OTHERS = (
    "snapkv-w32",
    "snapkv-w64-avg5",
    "pyramidkv-exact",
    "pyramidkv-geometric",
    "pyramidkv-entropy",
    "pyramidkv-gini",
    "razor-attention",
    "windowkv-average",
    "ada-snapkv-a50",
    "ada-pyramidkv",
    "kv-compress-w8-l1",
    "kv-compress-w32-l1",
    "kv-compress-w32-l2",
    "a2sf-f20",
    "snapkv-w32-avg5",
    "pyramidkv-faithful",
    "ada-snapkv",
    "ada-snapkv-kvpress",
    "kv-compress-full-l2",
    "wide-pool",
    "predicted-reads",
    "paged-h2o-openvino",
    "matched:kv-compress",
    "kvcrush:snapkv",
    "key-norm",
    "lazyeviction",
    "keydiff",
    "expected-attention",
    "kvzip-plus",
    "speckv",
    "speckv-sparse",
    "speckv-sparse-256",
    "epicache",
    "kvzap-linear",
    "kvzap-mlp",
    "duo-heads",
    "windowkv",
    "compresskv",
    "fastgen",
    "random",
    "tova",
)
"""Methods that differ from one of the others by a number or a part: they run with `-m slow`, and
with a model of random weights alone."""
T, CAP, STEPS = 112, 76, 9
"""Tokens that run, the cap in tokens, and decode steps."""
LENGTH = T - 3
KEEP = kv.budget_blocks(CAP, L, H, B)
PARAMS = drawn(3)
ARTEFACTS = jax.tree.map(jnp.asarray, calibrated(L, H, D))
Q, K, V = (PARAMS[x][:, :LENGTH] for x in "qkv")
PROMPT = Prompt(Q, K, V, CAP, B)


@cache
def decoder(rule):
    """Steps of slot 1, compiled once for all methods of one decode rule."""

    def decode(params, cache):
        active, tokens = jnp.array([False, True]), jnp.zeros(2, jnp.int32)

        def one(cache, _):
            cache, scores, ok = decode_one(
                MODEL, rule, params, cache, tokens, active, artefacts=ARTEFACTS
            )
            return cache, (scores[1], ok)

        cache, (scores, ok) = jax.lax.scan(one, cache, None, length=STEPS)
        return cache, scores, ok.all()

    return QUICKLY(decode)


@QUICKLY
def compress_half(cache, method):
    """Compression of slot 1 and of a slot that is not there to half of the cap."""
    slots, keep = jnp.array([1, 2], jnp.int32), jnp.full(2, KEEP // 2, jnp.int32)
    return kv.compress(cache, slots, keep, method, artefacts=ARTEFACTS, max_kvs_per_step=1000)[0]


# What they keep is asked by default, too, and nothing of them goes on while sequences decode.
BY_THE_ORACLE = ("a2sf", "compactor", "full", "h2o", "kvzip", "snapkv", "streaming-llm")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", [marked(name, *LIKE_OTHERS, *BY_THE_ORACLE) for name in METHODS])
def test_admission_decoding_and_compression(name):
    method = get_method(name)

    @QUICKLY
    def admit(params, cache, length):
        tokens = jnp.zeros(T, jnp.int32)
        prompt, scores = prefill(MODEL, method.observer, params, ARTEFACTS, tokens, length)
        given = (cache, jnp.int32(1), prompt.k, prompt.v)
        if not method.compresses:
            cache, ok = kv.write_prompt(*given, prompt.scores.metric, length)
            return cache, ok, scores
        keep = jnp.int32(KEEP)
        cache, _, ok = kv.write_survivors(
            *given, prompt.scores, length, keep, method, artefacts=ARTEFACTS
        )
        return cache, ok, scores

    now, ok, scores = admit(PARAMS, empty(planes=method.planes), np.int32(LENGTH))
    assert ok
    attention = [PROMPT.attention[layer][g][-1] for layer in range(L) for g in range(H * R)]
    value = [PROMPT.v[layer, :, g // R] for layer in range(L) for g in range(H * R)]
    out = np.concatenate([p @ v for p, v in zip(attention, value, strict=True)])
    np.testing.assert_allclose(scores, out, rtol=1e-4, atol=1e-5)
    assert audit(now) == []
    heads = admitted_as_the_oracle_says(name, now)

    grown, scores, ok = decoder(method.decode)(PARAMS, now)
    assert ok
    for step in range(STEPS):
        outs = []
        for (layer, h), kvs in heads.items():
            at = LENGTH + step
            new = KV(at, PARAMS["k"][layer, at, h], PARAMS["v"][layer, at, h])
            q = PARAMS["q"][layer, at, h * R : (h + 1) * R]
            heads[layer, h], out = decode_step(
                name, kvs, new, q, layer, h, PARAMS["q"][layer, at].reshape(-1)
            )
            outs.append(out.reshape(-1))
        np.testing.assert_allclose(scores[step], np.concatenate(outs), rtol=1e-4, atol=1e-5)
    for (layer, h), kvs in heads.items():
        assert_same_kvs(heads_of(grown)[1, layer, h], kvs, f"{name}, {(layer, h)}")
    assert audit(grown) == []
    if method.compresses:
        # Few enough tokens stay in any case for a choice to be left.
        again = dataclasses.replace(method, protected=6, sinks=min(4, method.sinks))
        after = compress_half(grown, again.eviction)
        assert audit(after) == []
        goes_by_the_metric(again, grown, after, RESCORED.get(name.split(":")[-1]))
        if method.rescored:
            # What a head's blocks have beside its KVs counts for nothing.
            stale = jnp.where(grown.position < 0, 3, grown.position)
            other = compress_half(dataclasses.replace(grown, position=stale), again.eviction)
            assert metrics_of(other) == metrics_of(after)


def metrics_of(cache: kv.PagedCache) -> dict:
    """Metrics by position, of each head of each sequence."""
    return {at: {x.position: x.metric for x in kvs} for at, kvs in heads_of(cache).items()}


def admitted_as_the_oracle_says(name: str, cache: kv.PagedCache) -> dict:
    """Checks positions, sinks among them, and metrics. Returns what each (layer, head) holds."""
    heads = {at[1:]: kvs for at, kvs in heads_of(cache).items() if at[0] == 1}
    want = KEEPS[name](PROMPT)
    scores = SCORES[name.split(":")[-1]](PROMPT) if METHODS[name].compresses else None
    for at, kvs in heads.items():
        metric = {j: 0.0 if scores is None else scores[at][j] for j in want[at]}
        assert_close({x.position: x.metric for x in kvs}, metric, f"{name}, {at}")
    return heads


def goes_by_the_metric(method, before: kv.PagedCache, after: kv.PagedCache, rescore=None) -> None:
    """Sinks and newest tokens stay; of the others, where KVs go one by one, the lowest went.

    `rescore` gives the metrics that KVs have when something goes, where they are given anew.
    """
    old, new = heads_of(before), heads_of(after)
    end = LENGTH + STEPS
    if rescore is not None:
        for layer, head in np.ndindex(L, H):
            kvs = old[1, layer, head]
            at = np.array([x.position for x in kvs])
            found = rescore(layer, head, np.array([x.k for x in kvs]), at, end).tolist()
            kvs = [dataclasses.replace(x, metric=m) for x, m in zip(kvs, found, strict=True)]
            old[1, layer, head] = kvs
            had = {x.position: x.metric for x in kvs}
            stays = {x.position: x.metric for x in new[1, layer, head]}
            assert_close(stays, {j: had[j] for j in stays}, f"{method.name}, {(layer, head)}")
    newest = newest_of(CAP / 2, method.protected, *method.shares)
    guarded = set(range(method.sinks)) | set(range(end - newest, end))
    held = sum(-(-len(kvs) // B) for kvs in new.values())
    if not method.allocator.overruns:
        assert held == KEEP // 2
    one_by_one = method.selector == Selector() and not method.planes
    for at, kvs in new.items():
        stays = {x.position for x in kvs}
        there = {x.position for x in old[at]}
        assert guarded & there <= stays
        gone = [x.metric for x in old[at] if x.position not in stays]
        if one_by_one and gone:
            kept = [x.metric for x in kvs if x.position not in guarded]
            assert max(gone) <= min(kept, default=np.inf)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    methods = tuple(name for name, method in METHODS.items() if method.planes)
    config = EngineConfig(
        max_batch=1, max_len=512, prefill_chunk=1024, pool_tokens=1024, methods=methods
    )
    model = load_model(weights=smollm2_path)
    shape = model.config
    arrays = calibrated(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.hidden_size,
        shape.group_size,
    )  # fmt: skip
    calibration = Calibration(arrays, model_hash(shape, model.params))
    return LLM(model, config=config, calibration=calibration)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in LIKE_OTHERS])
def test_every_method_continues_a_text(smollm2, name):
    """SmolLM2 through the engine: the cache holds what the cap says, and tokens come out."""
    method = METHODS[name]
    cap = max(128, method.protected + 64)
    compression = CompressionConfig(method=name, max_cache_tokens=cap)
    text = "The sea was calm that morning, and " * 40
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (output,) = smollm2.generate([text], sampling, compression)
    assert output.error is None
    assert len(output.token_ids) == 16
    stats = output.stats
    if method.compresses and not method.allocator.overruns:
        assert stats.blocks_after <= kv.budget_blocks(cap, 30, 3, 16) < stats.blocks_before
    kv.check_invariants(smollm2.worker.cache)
    assert smollm2.worker.free_blocks() == smollm2.plan.num_blocks
