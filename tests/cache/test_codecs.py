"""Codecs with a scale per row: what is stored, what decodes, and what attention makes of it."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache.store import CacheSpec, restored, saved, typed
from kvjax.cache.store.codec import Codec, Plain
from kvjax.engine.tell import tell_of_codes
from kvjax.errors import UserError
from kvjax.kernels import Encoded, paged_attention
from tests.cache.test_merger import METHOD
from tests.cache.test_store import SIZES, D, H, L, S, decoded, run
from tests.kernels.devices import H200, TPU_V5E
from tests.oracle import codecs as oracle

NAMES = ("int8", "int4", "int2", "e4m3", "e5m2")


def codec_of(name: str, dtype: str = "float32") -> Codec:
    return kv.as_codec(name, dtype)


@functools.cache
def coded(name: str):
    codec = codec_of(name)
    return jax.jit(lambda x: codec.decode(codec.encode(x)))


def through(name: str, rows: Any) -> np.ndarray:
    """What rows decode to."""
    return np.asarray(coded(name)(jnp.asarray(rows)))


FURTHER = [(name, d) for name in ("int5", "int3.6") for d in (16, 64, 96)]
FURTHER += [("mustafar50", 64), ("mustafar70", 96), ("mustafar70", 8)]
FURTHER += [("affine4", 64), ("affine2", 96), ("affine2", 4)]


@pytest.mark.parametrize(("name", "d"), [*itertools.product(NAMES, (4, 64, 96)), *FURTHER])
def test_rows_decode_to_what_the_definition_says(name, d):
    rng = np.random.default_rng(d)
    rows = rng.standard_normal((24, d)) * 10 ** rng.uniform(-6, 6, (24, 1))
    # A channel that is much larger than the others, as keys have them.
    rows[:12, 3] *= 30
    rows = rows.astype(np.float32)
    found = through(name, rows)
    for row, got in zip(rows, found, strict=True):
        want, size = oracle.decoded(name, row), np.abs(row).max()
        # Rotated in float32, an entry between two codes may fall to the other one.
        near = np.isclose(got, want, atol=1e-5 * size, rtol=0).all()
        error = np.sum((got - row) ** 2) - np.sum((want - row) ** 2)
        assert near or abs(error) < 1e-4 * size**2, (got, want)
    exact = np.array([oracle.decoded(name, row) for row in rows])
    close = np.isclose(found, exact, atol=1e-5 * np.abs(rows).max(axis=1, keepdims=True), rtol=0)
    assert close.all(axis=1).mean() > 0.8


def test_bent_levels_cost_less_than_even_ones():
    """Of normal rows of 64, twelve even levels lose .0158."""
    rows = np.random.default_rng(3).standard_normal((400, 64)).astype(np.float32)
    error = np.mean((through("int3.6", rows) - rows) ** 2)
    assert 0.0125 < error < 0.0137
    assert codec_of("int3.6").row_bytes(64) == 16 + 13 + 2


BOUND = {
    # Of the largest entry: half a step, with what a scale is rounded up by (2⁻⁷ at most).
    "int8": (0.5 / 127) * (1 + 2**-7),
    "e4m3": 2**-4 * (1 + 2**-7),
    "e5m2": 2**-3 * (1 + 2**-7),
}
ROWS = st.lists(
    st.lists(
        st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), min_size=8, max_size=8
    ),
    min_size=4,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_far_from_what_it_was(name, rows):
    rows = np.asarray(rows, np.float32)
    found = through(name, rows)
    top = np.abs(rows).max(axis=1)
    # What is less than the least scale is lost.
    least = 1e-36
    if name in BOUND:
        assert (np.abs(found - rows).max(axis=1) <= top * BOUND[name] + least).all()
        return
    steps = 2 ** int(name[3:]) - 1
    turned = np.abs(rows.astype(np.float64) @ oracle.rotation(8)).max(axis=1)
    # Half a step in every rotated entry, or less in all of them together, is what direction is
    # lost at most; as long as it is all of the row, nothing is said.
    size = np.sqrt(np.sum(rows.astype(np.float64) ** 2, axis=1))
    sine = np.minimum(np.sqrt(8) * turned / steps / np.maximum(size, least), 1)
    error = np.sqrt(np.sum((found.astype(np.float64) - rows) ** 2, axis=1))
    most = size * sine / np.sqrt(np.maximum(1 - sine**2, 1e-12))
    assert (error <= most * (1 + 1e-4) + 2**-8 * (size + most) + least).all()
    # Products are what they were, but for the rounding of the scale.
    along = np.sum(found.astype(np.float64) * rows, axis=1)
    assert (np.abs(along - size**2) <= (2**-8 + 1e-4) * size**2 + least).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=8, max_size=8))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", BOUND)
def test_what_is_finite_stays_finite(name, dtype, shares):
    """Up to the largest number of the dtype: also as kernels have it, of codes times scales."""
    codec, most = codec_of(name, dtype), float(jnp.finfo(dtype).max)
    rows = np.asarray(shares, np.float64) * most
    rows[0] = most
    stored = codec.encode(jnp.asarray(rows, dtype))
    found = np.asarray(codec.decode(stored), np.float64)
    # A scale that may not be rounded up is rounded down.
    assert (np.abs(found - rows) <= most * (BOUND[name] + 2**-7)).all()
    assert np.abs(codec.factors(stored).rows).max() <= most  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMES, "int5", "int3.6"])
def test_zeros_stay_and_what_is_not_finite_is_not_hidden(name, dtype):
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    rows[1] = 0
    rows[2, 3], rows[3, 0], rows[4, 7] = np.nan, np.inf, -np.inf
    codec = codec_of(name, dtype)
    stored = jax.jit(codec.encode)(jnp.asarray(rows, dtype))
    found = jax.jit(codec.decode)(stored)
    assert found.dtype == dtype
    found = np.asarray(found, np.float32)
    assert np.isfinite(found[0]).all()
    assert np.abs(found[0] - rows[0]).max() < 2
    assert not found[1].any()
    assert np.isnan(found[2:]).all()
    # Attention multiplies codes whatever the scale is.
    assert np.isfinite(np.asarray(codec.factors(stored).codes, np.float32)).all()  # type: ignore[attr-defined]
    # What nobody wrote is zeros.
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), codec.stored_shapes(3, 8))
    assert not np.asarray(codec.decode(empty), np.float32).any()


def test_pruned_rows_keep_what_is_equal_or_not_finite():
    rows = np.array([[1, -1, 1, 1, -1, 1, 1, 1], [0, np.nan, 9, 3, -np.inf, 5, 7, 2]], np.float32)
    assert through("mustafar50", rows)[0].tolist() == [1, -1, 1, 1, 0, 0, 0, 0]
    assert np.array_equal(
        through("mustafar50", rows)[1], [0, np.nan, 9, 0, -np.inf, 0, 7, 0], equal_nan=True
    )
    assert not through("mustafar70", np.zeros((2, 8), np.float32)).any()
    with pytest.raises(UserError, match=r"^cache_dtype mustafar50 has a bit for each .* is 12"):
        CacheSpec(L, H, 12, codec_of("mustafar50"))


def test_affine_rows_have_their_ends_and_hide_nothing():
    rows = np.array([[3, 5, 4.2, 3.5], [2, 2, 2, 2], [0, 0, 0, 0], [1, np.inf, 0, 0]], np.float32)
    found = through("affine2", np.concatenate([rows, [[-100.2, -100.1, -100.15, -99.9]]]))
    assert found[0].tolist() == pytest.approx([3, 5, 4.34, 3.67], abs=0.02)
    assert found[1:3].tolist() == [[2] * 4, [0] * 4]
    assert np.isnan(found[3]).all()
    # A least entry that bfloat16 rounds up is the lowest code all the same.
    assert np.abs(found[4] + 100).max() <= 0.11
    with pytest.raises(UserError, match=r"^cache_dtype affine2 packs 4 numbers .* is 6: give int8"):
        CacheSpec(L, H, 6, codec_of("affine2"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "int4"))
        for name in (*NAMES, "k5v4", "k5v3.6", "mustafar50", "affine4")
    ],
)
def test_a_cache_of_codes_is_that_of_the_rows_they_decode_to(name):
    """Written, moved, compressed and attended to, with the metric."""
    q = jnp.asarray(np.random.default_rng(8).standard_normal((S, 2 * H, D)), jnp.float32)
    codec = codec_of(name)

    @jax.jit
    def attend(k, v, table, lengths, metric):
        return paged_attention(q, k, v, table, lengths, metric=metric, return_metric=True)

    for ours, plain in zip(run(codec), run(Plain(), codec), strict=True):
        for field in ("metric", "position", "block_table", "context_len", "seq_len"):
            assert np.array_equal(getattr(ours, field), getattr(plain, field)), field
        assert np.array_equal(ours.free.mask, plain.free.mask)
        for got, want in zip(decoded(ours), decoded(plain), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        heads = (ours.block_table[:, 1], ours.context_len[:, 1], ours.metric)
        assert isinstance(ours.k, Encoded)
        got = attend(*ours.kv.operands, *heads)
        want = attend(plain.kv.stored_k, plain.kv.stored_v, *heads)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert np.abs(decoded(plain)[0]).max() > 1


def stored_rows(cache: kv.PagedCache) -> dict[tuple[int, int, int, int], bytes]:
    """The bytes of each KV, by slot, layer, head and position."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(cache.kv)]
    table, lengths = np.asarray(cache.block_table), np.asarray(cache.context_len)
    position, found = np.asarray(cache.position), {}
    for at in np.ndindex(*lengths.shape):
        for i in range(lengths[at]):
            block, offset = table[at][i // cache.block_size], i % cache.block_size
            row = b"".join(leaf[block, offset].tobytes() for leaf in leaves)
            found[*at, int(position[block, offset])] = row
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "k8v4"))
        for name in (*NAMES, "k8v4", "mustafar50", "affine2")
    ],
)
def test_moves_files_and_copies_keep_every_byte(name):
    *_, before, after = run(codec_of(name))
    old, new = stored_rows(before), stored_rows(after)
    assert 0 < len(new) < len(old)
    assert new == {key: old[key] for key in new}

    held = typed(after, saved(after, 0))
    empty = kv.init_cache(**SIZES, codec=codec_of(name), sharing=True)
    cache, ok = jax.jit(restored)(empty, jnp.int32(1), held)
    assert ok
    back = {(0, *key[1:]): row for key, row in stored_rows(cache).items()}
    assert back == {key: row for key, row in new.items() if key[0] == 0}

    # A slot that shares them writes to blocks of its own.
    cache, ok = jax.jit(kv.share)(cache, 1, 0)
    assert ok
    row = jnp.ones((L, S, H, D), jnp.float32)
    cache, ok = jax.jit(kv.append)(cache, row, row, jnp.arange(S) == 0)
    assert ok
    both = stored_rows(cache)
    assert {(0, *key[1:]): x for key, x in both.items() if key[0] == 1} == back
    assert {key: both[key] for key in back} == back
    assert len(both) == 2 * len(back) + L * H


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_a_merger_leaves_alone_is_not_encoded_again(name):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((L, 19, H, D)), jnp.float32) for _ in range(2))
    metric = jnp.asarray(rng.random((L, H, 19)), jnp.float32)
    cache = kv.init_cache(**SIZES, codec=codec_of(name))
    cache, ok = jax.jit(kv.write_prompt)(cache, jnp.int32(0), k, v, metric, 19)
    assert ok
    before, old = stored_rows(cache), decoded(cache)
    shrink = jax.jit(kv.compress)
    cache, report = shrink(cache, jnp.zeros(1, jnp.int32), jnp.asarray([9], jnp.int32), METHOD)
    assert report.freed[0] > 0
    after = stored_rows(cache)
    changed = [key for key in after if after[key] != before[key]]
    assert 0 < len(changed) <= L * H
    # The merged value is the sum of what had been decoded.
    plain = kv.init_cache(**SIZES)
    plain = dataclasses.replace(
        cache_like(plain, k, v, metric),
        kv=dataclasses.replace(plain.kv, stored_k=old[0], stored_v=old[1]),
    )
    plain, _ = shrink(plain, jnp.zeros(1, jnp.int32), jnp.asarray([9], jnp.int32), METHOD)
    want = through(name, decoded(plain)[1])
    held = np.asarray(cache.position) >= 0
    got = decoded(cache)[1]
    moved = np.isclose(got, want, atol=1e-5).all(-1) | np.isclose(
        got, decoded(plain)[1], atol=1e-5
    ).all(-1)
    assert moved[held].all()


def cache_like(cache, k, v, metric):
    cache, ok = jax.jit(kv.write_prompt)(cache, jnp.int32(0), k, v, metric, k.shape[1])
    assert ok
    return cache


@pytest.mark.parametrize(
    ("name", "kv_bytes", "fewer"),
    [
        ("int8", 132, 1.9),
        ("e4m3", 132, 1.9),
        ("int4", 68, 3.7),
        ("int2", 36, 7.1),
        ("k8v4", 100, 2.5),
        ("k5v4", 76, 3.3),
        ("k5v3.6", 73, 3.5),
        ("affine4", 72, 3.5),
        ("affine2", 40, 6.35),
        ("mustafar50", 144, 1.7),
        ("mustafar70", 96, 2.6),
    ],
)
def test_bytes_beside_bfloat16(name, kv_bytes, fewer):
    spec = CacheSpec(L, H, 64, codec_of(name, "bfloat16"))
    plain = CacheSpec(L, H, 64, codec_of("bfloat16", "bfloat16"))
    assert spec.codec.name == name
    assert spec.kv_bytes == kv_bytes
    assert fewer < plain.kv_bytes / kv_bytes < fewer + 0.1


def test_where_kernels_read_no_codes_it_is_said(caplog):
    names = ("int5", "int8", "int8w4", "int4", "int4+", "int2", "e4m3", "float32")
    sizes = {**SIZES, "head_dim": 64, "block_size": 32}

    def tell_of_all():
        for name in names:
            given = {**sizes, "codec": codec_of(name)}
            tell_of_codes(jax.eval_shape(functools.partial(kv.init_cache, **given)), 3)

    tell_of_all()
    assert not caplog.messages
    for where in (H200, TPU_V5E):
        caplog.clear()
        with jax.sharding.use_abstract_mesh(where):
            tell_of_all()
        (said,) = caplog.messages
        assert said.startswith("keys and values in int5: decode attention is xla: mosaic_gpu does")
        assert "does not serve int5 pools, served are int8" in said


def test_what_cannot_be_packed_is_refused_in_one_line():
    said = "cache_dtype int4 packs 2 numbers into a byte, and the head dimension is 7: give int8"
    for make in (
        lambda: CacheSpec(L, H, 7, codec_of("int4")),
        lambda: kv.init_cache(**{**SIZES, "head_dim": 7}, codec=codec_of("int4")),
    ):
        with pytest.raises(UserError, match=f"^{said}$"):
            make()
    with pytest.raises(UserError, match=r"int2 packs 4 numbers .* is 6"):
        CacheSpec(L, H, 6, codec_of("int2"))
    with pytest.raises(UserError, match=r"int3.6 packs 4 numbers .* is 18: give int8"):
        CacheSpec(L, H, 18, codec_of("int3.6"))
    assert CacheSpec(L, H, 7, codec_of("int8")).kv_bytes == 2 * (7 + 2)
