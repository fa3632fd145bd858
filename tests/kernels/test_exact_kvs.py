"""Attention that reads some rows beside the pool, in place of what the pool has of the same KVs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels import cases
from kvjax.kernels import ExactKVs, explain, paged_attention
from kvjax.kernels.paged_attention import mosaic_gpu, reference, spec, tpu
from tests.kernels import paged
from tests.kernels.devices import H200, TPU_V5E

SHAPE = spec.Shape(3, 2, 3, 16, 0, 8, 20, "float32", ("int4", "int8"))
LENGTHS = [[150, 1], [0, 77], [64, 9]]
ANY, ALL, NEWEST = "any", "all", "newest"
"""Which KVs of a head are exact: some number of them up to the most, as many as there are, or the
last ones."""


def with_exact(p: paged.Problem, size: int, rng: np.random.Generator, chosen: str = ANY):
    """Random rows for some KVs of each head; the problem's answer with these rows in the places of
    the pool's, in NumPy."""
    q, k, v, table, lengths = p.arguments
    pools = [np.array(paged.rows_of(x), np.float32) for x in (k, v)]
    (seqs, heads), (b, d) = lengths.shape, pools[0].shape[1:]
    rows = rng.standard_normal((2, seqs, heads, size, d)).astype(np.float32)
    index = np.full((seqs, heads, size), -1, np.int32)
    for s, h in np.ndindex(seqs, heads):
        held = int(lengths[s, h])
        most = min(size, held)
        count = int(rng.integers(0, most + 1)) if chosen == ANY else most
        at = rng.permutation(size)[:count]
        which = np.arange(held)[::-1] if chosen == NEWEST else rng.permutation(held)
        index[s, h, at] = which[:count]
        for w in at:
            page = table[s, h, index[s, h, w] // b], index[s, h, w] % b
            for pool, row in zip(pools, rows, strict=True):
                pool[page] = row[s, h, w]
    # What no row is of hides nothing, and what lies beyond a head's end is no KV of it.
    rows[:, index < 0] = np.nan
    index[0, 1, index[0, 1] < 0] = lengths[0, 1]
    touched = np.ones(seqs, bool) if p.observed is None else np.asarray(p.observed)
    new_k, new_v = (jnp.asarray(x) for x in pools)
    out, metric = paged.exact(
        q, new_k, new_v, np.asarray(table), np.asarray(lengths), p.scale, np.asarray(p.metric),
        p.power, touched,
    )  # fmt: skip
    exact = ExactKVs(jnp.asarray(rows[0]), jnp.asarray(rows[1]), jnp.asarray(index))
    return exact, dataclasses.replace(p, out=out, new_metric=metric)


@pytest.mark.parametrize(
    ("size", "chosen", "power", "observed"),
    [(5, ANY, 2, None), (200, ALL, 1, [True, False, True])],
    ids=["some", "all"],
)
def test_exact_rows_stand_in_for_the_pools(size, chosen, power, observed):
    """Where all are exact, whole pieces of the pool have no KV left, whatever their logits are."""
    rng = np.random.default_rng(size)
    p = paged.problem(LENGTHS, SHAPE, seed=3, spread=12.0, power=power, observed=observed)
    exact, p = with_exact(p, size, rng, chosen)
    for pieces in (None, (8, 2)):
        out, metric = attend(p, exact, pieces)
        np.testing.assert_allclose(out, p.out, atol=2e-4)
        np.testing.assert_allclose(metric, p.new_metric, atol=2e-4)


def attend(p: paged.Problem, exact: ExactKVs, pieces: tuple[int, ...] | None = None):
    """Output and metric of the public function, or of so many pieces at once."""
    if pieces is None:
        call = functools.partial(paged_attention, return_metric=True)
    else:
        call = functools.partial(reference.paged_attention, pieces_at_once=pieces)
    given = p.statistic(True)
    power = given.pop("power")
    return jax.jit(functools.partial(call, scale=p.scale, power=power))(
        *p.arguments, exact=exact, **given
    )


def test_a_piece_of_the_pool_without_kvs_adds_nothing():
    """However far below 0 the logits of what is exact are: e to 200 is no number."""
    shape = dataclasses.replace(SHAPE, group=1)
    p = paged.problem([[2, 2]], shape, seed=5)
    q = jnp.asarray(p.arguments[0])
    k = -q[:, :, None] / jnp.sum(q * q, axis=-1)[:, :, None, None] * 200 / p.scale
    k = jnp.broadcast_to(k, (1, 2, 2, shape.head_dim))
    both = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (1, 2, 2))
    exact = ExactKVs(k, jnp.ones_like(k), both)
    out, metric = attend(p, exact)
    np.testing.assert_allclose(out, 1, atol=1e-4)
    added = np.asarray(metric) - np.asarray(p.metric)
    assert np.sort(added.ravel())[-4:] == pytest.approx(0.25, abs=1e-3)
    assert np.isfinite(added).all()


def test_heads_that_are_dealt_keep_their_exact_rows(monkeypatch):
    """As few heads at a time as the memory for their results allows."""
    monkeypatch.setattr(reference, "RESULT_BYTES", 1 << 14)
    p = paged.problem(LENGTHS, SHAPE, seed=4)
    exact, p = with_exact(p, 6, np.random.default_rng(1))
    out, metric = attend(p, exact)
    np.testing.assert_allclose(out, p.out, atol=1e-4)
    np.testing.assert_allclose(metric, p.new_metric, atol=1e-4)


BORDERS = [[70, 140], [0, 450]]
"""The last head falls to two of three programs, which have five tiles at most. With the newest 130
exact, one of them finds none of its KVs in the pool and one all of them, and of a tile and of a
word of 32 KVs some are exact and some not."""


def coded(
    keys: str, values: str, dtype: str = "bfloat16", d: int = 64, r: int = 3, b: int = 16
) -> spec.Shape:
    return spec.Shape(2, 2, r, d, 0, b, 12, dtype, (keys, values))


HALVES = dataclasses.replace(coded("int8", "int8"), halves=True)
FOLDED = dataclasses.replace(coded("int2+", "int2+", b=32), halves=True)
SLOW = pytest.mark.slow
IN_KERNELS = [
    pytest.param("mosaic_gpu", coded("int8", "int8"), NEWEST, 130, 2, None, id="hopper"),
    pytest.param("tpu", coded("int8", "int8"), NEWEST, 130, 1, [False, True], id="tpu"),
    pytest.param("tpu", HALVES, NEWEST, 130, 2, None, id="tpu-halves"),
    *(
        pytest.param(*case, id=f"{case[0]}-{n}", marks=SLOW)
        for n, case in enumerate(
            [
                ("mosaic_gpu", coded("int8", "int4", dtype="float32"), ALL, 450, 1, [False, True]),
                ("mosaic_gpu", coded("int4", "int4", d=128, r=5), ANY, 40, 1, [True, False]),
                ("mosaic_gpu", coded("int4+", "int4+"), NEWEST, 20, 2, None),
                ("tpu_checked", FOLDED, ANY, 40, 2, None),
                ("mosaic_gpu", coded("int8", "int8", d=96, r=16, b=8), NEWEST, 64, 2, None),
                ("mosaic_gpu", coded("e4m3", "e4m3", b=64), NEWEST, 130, 2, None),
                ("mosaic_gpu", coded("e5m2", "e5m2", dtype="float32", r=9), ANY, 90, 2, None),
                ("mosaic_gpu", spec.Shape(2, 2, 1, 80, 0, 32, 6), NEWEST, 16, 2, None),
                ("mosaic_gpu", spec.Shape(2, 2, 8, 64, 0, 16, 12, "float32"), ALL, 450, 2, None),
                ("tpu_checked", coded("int8", "int8", dtype="float32"), ALL, 450, 2, None),
                ("tpu_checked", coded("e4m3", "e4m3", d=128, r=9, b=64), ANY, 40, 2, None),
                ("tpu_checked", spec.Shape(2, 2, 4, 80, 0, 8, 24), NEWEST, 1, 2, None),
            ]
        )
    ),
]


@pytest.mark.parametrize(("name", "shape", "chosen", "size", "power", "observed"), IN_KERNELS)
def test_kernels_begin_with_exact_rows(
    name, shape, chosen, size, power, observed, monkeypatch
) -> None:
    """Rings of small chunks on TPUs, so that a head's KVs are exact in some and not in others."""
    monkeypatch.setattr(tpu, "RING", 3)
    monkeypatch.setattr(tpu, "CHUNK", 64)
    p = paged.problem(BORDERS, shape, seed=size, spread=2.0, power=power, observed=observed)
    exact, p = with_exact(p, size, np.random.default_rng(size), chosen)
    paged.assert_exact(name, p, exact=exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mosaic_gpu", "tpu_checked"])
def test_kernels_without_metric(name: str) -> None:
    p = paged.problem(BORDERS, coded("int8", "int8"), seed=1)
    exact, p = with_exact(p, 130, np.random.default_rng(1), NEWEST)
    paged.assert_exact(name, p, with_metric=False, exact=exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mosaic_gpu", "tpu"])
def test_kernels_repeat_every_bit(name: str) -> None:
    p = paged.problem(BORDERS, coded("int8", "int8"), seed=2)
    exact, p = with_exact(p, 20, np.random.default_rng(2))
    run = paged.IMPLEMENTATIONS[name]
    for one, other in zip(run(p, True, exact), run(p, True, exact), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["mosaic_gpu", "tpu_checked"]),
    st.lists(st.lists(st.integers(0, 260), min_size=2, max_size=2), min_size=1, max_size=3),
    st.sampled_from([("int8", "int8"), ("e4m3", "e4m3"), (None, None)]),
    st.sampled_from([8, 16, 64]),
    st.integers(1, 9),
    st.integers(1, 130),
    st.sampled_from([ANY, ALL, NEWEST]),
)
def test_kernels_on_drawn_windows(name, lengths, forms, b, group, size, chosen) -> None:
    shape = spec.Shape(len(lengths), 2, group, 64, 0, b, 6, "bfloat16", forms)
    p = paged.problem(lengths, shape, seed=size)
    exact, p = with_exact(p, size, np.random.default_rng(size), chosen)
    paged.assert_exact(name, p, exact=exact)


@pytest.mark.parametrize(
    "name", [name if name == "int4 int4 b=16 d=128" else pytest.param(name, marks=SLOW)
             for name in cases.EXACT],
)  # fmt: skip
def test_kernels_take_them_and_lower(name: str) -> None:
    """On Hopper still two kernels, without the metric and with it; a TPU's takes int8."""
    shape = cases.CODES[name]
    exact, call = cases.exact_of(shape), cases.coded(shape)

    def attended(q, k, v, table, lengths, metric, exact):
        attend = functools.partial(paged_attention, q, k, v, table, lengths, exact=exact)
        return attend(), attend(metric=metric, return_metric=True)

    for device, platform, kernel, calls in (
        (H200, "cuda", "mosaic_gpu", ("custom_call @mosaic_gpu", 4)),
        (TPU_V5E, "tpu", "tpu: mosaic_gpu", ("custom_call @tpu_custom_call", 2)),
    ):
        with jax.sharding.use_abstract_mesh(device):
            said = explain(paged_attention, *call[:5], exact=exact)
            if platform == "tpu" and "int4" in shape.forms:
                assert "tpu does not serve int4 codes of head dimension 128" in said
                continue
            text = jax.jit(attended).trace(*call, exact).lower(lowering_platforms=(platform,))
        assert said.startswith(kernel)
        assert text.as_text().count(calls[0]) == calls[1]


def test_what_is_not_asked_for_takes_nothing() -> None:
    """No shared or scalar memory is given to exact KVs that a call does not have; what they take
    is taken of the room for tiles."""
    shape = dataclasses.replace(SHAPE, head_dim=128, blocks=40, block_size=16, forms=("int4",) * 2)
    plain, beside = (
        mosaic_gpu.config(shape, scale=1.0, keep_logits=True, cores=132, exact=x)
        for x in (False, True)
    )
    assert plain.attend_scratch()["begun_s"] is None
    assert beside.attend_scratch()["begun_s"].shape == (2, 128 + 8, 8)
    assert plain.stages == mosaic_gpu.MAX_STAGES
    assert beside.stages < plain.stages
    room = mosaic_gpu.SHARED_MEMORY // 2 - mosaic_gpu.RESERVED
    assert room - (12 << 10) < beside.shared_bytes() <= room
    wide = dataclasses.replace(shape, max_blocks=32_000, forms=("int8",) * 2)
    tpu.config(wide, scale=1.0, keep_logits=False)
    finer = dataclasses.replace(wide, forms=("int8+",) * 2)
    with pytest.raises(NotImplementedError, match=r"32000 blocks per head .* scalar memory"):
        tpu.config(finer, scale=1.0, keep_logits=False)
    with pytest.raises(NotImplementedError, match=r"32000 blocks per head .* scalar memory"):
        tpu.config(wide, scale=1.0, keep_logits=False, exact=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": (3, 2, 4, 8)}, r"exact.k shape: got \[3, 2, 4, 8\], wanted \[3, 2, 4, 16\]"),
        ({"v": (3, 1, 4, 16)}, r"exact.v shape: got \[3, 1, 4, 16\]"),
        ({"index": (1, 2, 4)}, r"exact.index shape: got \[1, 2, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, said):
    shapes = {"k": (3, 2, 4, 16), "v": (3, 2, 4, 16), "index": (3, 2, 4), **wrong}
    exact = ExactKVs(
        jnp.zeros(shapes["k"]), jnp.zeros(shapes["v"]), jnp.zeros(shapes["index"], jnp.int32)
    )
    shape = dataclasses.replace(SHAPE, blocks=40, forms=(None, None))
    with pytest.raises(ValueError, match=said):
        explain(paged_attention, *shape.arguments(metric=False), exact=exact)
