"""A budget of all heads is split as on one device, wherever the heads lie."""

import dataclasses
import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import METHODS, compress, init_cache, write_prompt, write_survivors
from kvjax.cache.policy import Method, Scores
from kvjax.cache.policy.block_cost import cheapest_blocks
from tests.sharded.heads import AXIS, SAME, SPLIT, by_head, dealt, in_places, on_devices

LAYERS, HEADS, BLOCKS = 2, 5, 4


@functools.cache
def _cheapest(devices: int):
    return on_devices(
        lambda shard, cost, evict: cheapest_blocks(cost, evict, shard),
        devices, HEADS, (SPLIT, SAME), SPLIT,
    )  # fmt: skip


def _sorted_choice(cost: np.ndarray, evict: int) -> np.ndarray:
    """How many blocks each head gives up: the cheapest, equal ones by (layer, head, block)."""
    blocks = sorted((float(c), at) for at, c in np.ndenumerate(cost) if np.isfinite(c))
    out = np.zeros(cost.shape[:2], int)
    for _, (layer, head, _) in blocks[: max(0, evict)]:
        out[layer, head] += 1
    return out


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.sampled_from([(2, 3), (3, 2), (4, 2)]),
    st.integers(0, 2**32 - 1),
    st.integers(-2, LAYERS * HEADS * BLOCKS + 2),
    st.sampled_from(["few", "signed", "any", "none"]),
)
def test_cheapest_blocks_are_those_of_a_sorted_list(split, seed, evict, values):
    devices, places = split
    rng = np.random.default_rng(seed)
    shape = (LAYERS, HEADS, BLOCKS)
    cost = {
        "few": rng.integers(0, 3, shape),
        "signed": rng.choice([-1.5, -0.0, 0.0, 1e-30, 2.0], shape),
        "any": rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20, shape),
        "none": np.full(shape, np.inf),
    }[values].astype(np.float32)
    cost = np.sort(cost, axis=-1)
    stay = rng.integers(0, BLOCKS + 1, shape[:2])[..., None]
    cost = np.where(np.arange(BLOCKS) >= BLOCKS - stay, np.inf, cost).astype(np.float32)
    number = dealt(rng, LAYERS, HEADS, devices, places)
    padded = np.where((number == HEADS)[..., None], np.inf, in_places(cost, number))
    found = np.asarray(_cheapest(devices)(number, padded.astype(np.float32), np.int32(evict)))
    assert found[number == HEADS].sum() == 0
    np.testing.assert_array_equal(by_head(found, number, HEADS), _sorted_choice(cost, evict))


TOKENS, SLOTS, B = 40, 2, 4
SIZES: dict[str, Any] = {"num_slots": SLOTS, "num_layers": LAYERS, "head_dim": 2, "block_size": B}
SPLITS = [
    ("kv-compress", 3),
    ("ada-snapkv", 3),
    ("pyramidkv-exact", 3),
    *(
        pytest.param(name, 3, marks=pytest.mark.slow)
        for name in ("ada-snapkv-kvpress", "pyramidkv-gini", "fastgen")
    ),
]
"""The cheapest blocks of all, by Ada-KV's count, the cheapest of each layer; evenly in a layer,
layers by a measure, heads by need."""


def _positions(cache) -> jax.Array:
    """Token positions [S, L, H, T] that each head holds, −1 for none."""
    shape = (*cache.block_table.shape[:3], -1)
    at = cache.position.at[cache.block_table].get(mode="fill", fill_value=-1).reshape(shape)
    return jnp.sort(at, axis=-1)


def _compressed(method: Method, shard, kv, metric, length, keep, protected):
    """Two sequences compressed, one from the pool and one from a scratch: what is left where."""
    heads = kv.shape[2]
    cache = init_cache(
        **SIZES, num_kv_heads=heads, num_blocks=2 * LAYERS * heads * TOKENS // B,
        max_blocks_per_head=TOKENS // B + 1, shard=shard,
    )  # fmt: skip
    method = method.protecting(protected)
    cache, fits = write_prompt(cache, 0, kv, kv, metric[0], length)
    cache, pooled = compress(cache, jnp.array([0]), keep[:1], method)
    scores = Scores(metric[1])
    cache, direct, ok = write_survivors(cache, 1, kv, kv, scores, length, keep[1], method)
    short = jnp.concatenate([pooled.shortfall, direct.shortfall])
    return jnp.moveaxis(_positions(cache), 1, 2), short, fits & ok


@functools.cache
def _compressor(method: Method, devices: int | None):
    call = functools.partial(_compressed, method)
    if devices is None:
        return jax.jit(functools.partial(call, None))
    over = jax.sharding.PartitionSpec(None, None, AXIS)
    specs = (over, over, SAME, SAME, SAME)
    return on_devices(call, devices, HEADS, specs, (SPLIT, SAME, SAME))


@pytest.mark.parametrize(("name", "devices"), SPLITS)
def test_what_stays_is_what_one_device_keeps(name, devices):
    method = dataclasses.replace(METHODS[name], protected=0).eviction
    places = -(-HEADS // devices)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        few = seed % 2  # many are equal then
        metric = (
            rng.integers(0, 3, (2, LAYERS, HEADS, TOKENS))
            if few
            else rng.random((2, LAYERS, HEADS, TOKENS))
        )
        metric = (metric * 10.0 ** rng.integers(-2, 3, (LAYERS, HEADS, 1))).astype(np.float32)
        kv = rng.standard_normal((LAYERS, TOKENS, HEADS, 2)).astype(np.float32)
        length = np.int32(rng.integers(TOKENS // 2, TOKENS + 1))
        keep = rng.integers(0, LAYERS * HEADS * TOKENS // B, 2).astype(np.int32)
        protected = np.int32(rng.integers(0, 9))
        rest = (length, keep, protected)
        want, short, ok = _compressor(method, None)(kv, metric, *rest)
        assert ok
        number = dealt(rng, LAYERS, HEADS, devices, places)
        moved = np.moveaxis(in_places(np.moveaxis(kv, 1, 2), number), 2, 1)
        metrics = np.stack([in_places(one, number) for one in metric])
        found, told, fits = _compressor(method, devices)(number, moved, metrics, *rest)
        assert fits
        np.testing.assert_array_equal(told, short)
        for one, other in zip(np.moveaxis(found, 1, 2), np.moveaxis(want, 1, 2)):
            assert (one[number == HEADS] == -1).all()
            np.testing.assert_array_equal(by_head(one, number, HEADS), other)
