"""The public call: what it refuses, which implementation it picks, and the work list."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels import explain, paged_attention, plan_paged_attention
from kvjax.kernels.paged_attention import spec, worklist
from tests.kernels.devices import A100, B200, H200, TPU_V5E
from tests.kernels.paged import problem

SHAPE = spec.Shape(2, 2, 4, 64, 5, 16, 3, "float32")
Q, K, V, TABLE, LENGTHS, METRIC = SHAPE.arguments()


def changed(array: jax.ShapeDtypeStruct, shape=None, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or array.shape, dtype or array.dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": changed(Q, (8, 64))}, r"q shape: got \[8, 64\], wanted \[S, H·r, d\]"),
        ({"q": changed(Q, (2, 7, 64))}, "q shape: got 7 query heads, wanted a multiple of 2"),
        ({"q": changed(Q, (2, 8, 32))}, r"q shape: got \[2, 8, 32\], wanted \[2, H·r, 64\]"),
        ({"q": changed(Q, dtype=jnp.int8)}, "q dtype: got int8, wanted one of bfloat16"),
        ({"k": changed(K, dtype=jnp.float8_e4m3fn)}, "k dtype: got float8_e4m3fn, wanted one of"),
        ({"k": changed(K, (0, 16, 64))}, r"k shape: got \[0, 16, 64\], wanted .* at least 1"),
        ({"k": changed(K, (5, 0, 64))}, r"k shape: got \[5, 0, 64\], wanted .* at least 1"),
        ({"block_table": changed(TABLE, (2, 2, 0))}, r"block_table shape: got .* M at least 1"),
        ({"v": changed(V, (5, 16, 32))}, r"v shape: got \[5, 16, 32\], wanted that of k"),
        ({"v": changed(V, dtype=jnp.bfloat16)}, "v dtype: got bfloat16, wanted that of k"),
        ({"block_table": changed(TABLE, dtype=jnp.float32)}, "block_table dtype: got float32"),
        ({"context_len": changed(LENGTHS, (2, 3))}, r"context_len shape: got \[2, 3\], wanted"),
        ({"metric": changed(METRIC, (5, 8))}, r"metric shape: got \[5, 8\], wanted \[5, 16\]"),
        ({"metric": None}, "metric: got None, wanted the pool of metrics"),
        ({"power": 3}, "power: got 3, wanted 1 or 2"),
        (
            {"observed": changed(LENGTHS, (3,), jnp.bool_)},
            r"observed shape: got \[3\], wanted \[2\]",
        ),
        ({"observed": changed(LENGTHS, (2,))}, "observed dtype: got int32, wanted bool"),
        ({"implementation": "triton"}, "implementation: got 'triton', wanted one of 'mosaic_gpu'"),
        ({"implementation": "tpu"}, "implementation: got 'tpu', wanted one that serves device"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    good = {"q": Q, "k": K, "v": V, "block_table": TABLE, "context_len": LENGTHS, "metric": METRIC}
    with pytest.raises(ValueError, match=message):
        explain(paged_attention, **good | arguments, return_metric=True)


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        ([[[0, 9]]], [[17]], r"block_table\[0, 0, 1\]: got 9, wanted 0 to 4"),
        ([[[-1, 0]]], [[1]], r"block_table\[0, 0, 0\]: got -1, wanted 0 to 4"),
        ([[[0, 1]]], [[33]], r"context_len\[0, 0\]: got 33, wanted 0 to 32"),
        ([[[0, 1]]], [[-1]], r"context_len\[0, 0\]: got -1, wanted 0 to 32"),
    ],
)
def test_debugging_checks_tables(monkeypatch, table, lengths, message: str) -> None:
    q = jnp.zeros((1, 4, 64))
    pool = jnp.zeros((5, 16, 64))
    arguments = (q, pool, pool, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32))
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments, debug=True)
    monkeypatch.setenv(spec.DEBUG_VARIABLE, "1")
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments)


def test_debugging_follows_only_used_entries() -> None:
    p = problem([[0, 17]], SHAPE)
    paged_attention(*p.arguments, debug=True)
    jax.jit(lambda *a: paged_attention(*a, debug=True))(*p.arguments)


def test_public_call_returns_metric_only_when_asked() -> None:
    p = problem([[3, 40], [0, 16]], SHAPE)
    out = paged_attention(*p.arguments, metric=p.metric)
    with_metric, metric = paged_attention(*p.arguments, metric=p.metric, return_metric=True)
    np.testing.assert_array_equal(out, with_metric)
    np.testing.assert_allclose(out, p.out, atol=1e-5)
    np.testing.assert_allclose(metric, p.new_metric, atol=1e-5)


def explained(device, shape: spec.Shape, **kwargs) -> str:
    with jax.sharding.use_abstract_mesh(device):
        return explain(paged_attention, *shape.arguments(metric=False), **kwargs)


def test_explains_the_choice() -> None:
    assert explained(H200, SHAPE) == "mosaic_gpu"
    assert explained(H200, dataclasses.replace(SHAPE, head_dim=72)).startswith(
        "xla: mosaic_gpu does not serve head dimension 72, served are 64, 80, 96, 128"
    )
    assert "block size 12" in explained(H200, dataclasses.replace(SHAPE, block_size=12))
    assert "17 query heads" in explained(H200, dataclasses.replace(SHAPE, group=17))
    for device in (A100, B200):
        assert "wanted: compute capability 9.0" in explained(device, SHAPE)
    assert explained(TPU_V5E, SHAPE).startswith("tpu: mosaic_gpu does not serve device TPU v5 lite")
    half = dataclasses.replace(SHAPE, dtype="bfloat16").arguments(metric=False)
    for dtype, told in ((jnp.float16, "xla: "), (jnp.bfloat16, "tpu: ")):
        with jax.sharding.use_abstract_mesh(TPU_V5E):
            found = explain(paged_attention, changed(half[0], dtype=dtype), *half[1:])
        assert found.startswith(told)
        assert ("float16, which TPUs have no vector type for" in found) == (told == "xla: ")
    assert explained(H200, SHAPE, implementation="xla") == "xla"
    assert explain(paged_attention, *SHAPE.arguments(metric=False)).startswith("numba: ")


def test_logits_beyond_32_bits_fall_back() -> None:
    huge = dataclasses.replace(SHAPE, seqs=8192, heads=8, max_blocks=2**12, blocks=2**28)
    arguments = huge.arguments()
    with jax.sharding.use_abstract_mesh(H200):
        assert explain(paged_attention, *arguments[:5]) == "mosaic_gpu"
        told = explain(paged_attention, *arguments[:5], metric=arguments[5], return_metric=True)
    assert "served are fewer than 2^31" in told


def covered(work: worklist.WorkList, num_rows: int) -> list[list[tuple[int, int]]]:
    """(program, tile) of every row, as the kernel walks the list."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    heads, spans = np.asarray(work.heads), np.asarray(work.spans)
    for program, span in enumerate(spans):
        for i in range(span[1]):
            row, start, length, _ = heads[span[0] + i]
            tiles = -(-length // work.tile)
            begin, end = max(span[2] - start, 0), min(span[3] - start, tiles)
            assert begin < end
            seen[row] += [(program, t) for t in range(begin, end)]
    return seen


build = jax.jit(worklist.build, static_argnums=(1, 2))


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 900)), min_size=12, max_size=12),
    st.sampled_from([1, 2, 7, 40]),
)
def test_work_list_covers_every_tile_once_in_equal_shares(lengths, programs: int) -> None:
    work = build(jnp.asarray([lengths], jnp.int32), 64, programs)
    seen = covered(work, len(lengths))
    tiles = [-(-n // 64) for n in lengths]
    for row, expected in zip(seen, tiles, strict=True):
        assert [t for _, t in row] == list(range(expected))
        assert [p for p, _ in row] == sorted(p for p, _ in row)
    share = int(work.spans[0, 3])
    assert share == -(-sum(tiles) // programs)
    loads = np.bincount([p for row in seen for p, _ in row], minlength=programs)
    assert loads.max() <= share
    parts = [{p for p, _ in row} for row in seen]
    assert sum(len(p) for p in parts if len(p) > 1) <= 2 * programs


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 900]), min_size=12, max_size=12),
    st.sampled_from([1, 2, 7, 40]),
)
def test_work_list_deals_empty_heads_once_in_equal_shares(lengths, programs: int) -> None:
    work = build(jnp.asarray([lengths], jnp.int32), 64, programs)
    heads, spans = np.asarray(work.heads), np.asarray(work.spans)
    dealt = [[int(heads[i, 0]) for i in range(*span[4:6])] for span in spans]
    empty = [row for row, length in enumerate(lengths) if not length]
    assert [row for rows in dealt for row in rows] == empty
    assert max(map(len, dealt)) == -(-len(empty) // programs)


@jax.jit
def plan(lengths) -> worklist.WorkList | None:
    pool = jnp.zeros(K.shape, K.dtype)
    return plan_paged_attention(lengths, pool, num_query_heads=8, max_blocks=SHAPE.max_blocks)


def test_one_plan_serves_all_layers() -> None:
    lengths = jnp.asarray([[[3, 700], [0, 64]], [[0, 0], [1, 2]]], jnp.int32)
    with jax.sharding.use_abstract_mesh(H200):
        work, *alone_by_layer = plan(lengths), plan(lengths[0]), plan(lengths[1])
    assert work is not None
    assert work.num_programs == 132
    for layer, alone_work in enumerate(alone_by_layer):
        of_layer = jax.tree.leaves(alone_work)
        for alone, shared in zip(of_layer, jax.tree.leaves(work), strict=True):
            np.testing.assert_array_equal(alone, shared[layer])


def test_no_plan_where_none_is_needed() -> None:
    lengths = jnp.ones((2, 2), jnp.int32)
    pool = jnp.zeros(K.shape, K.dtype)
    assert plan_paged_attention(lengths, pool, num_query_heads=8, max_blocks=3) is None
    for heads in (0, 7):
        with pytest.raises(ValueError, match=f"num_query_heads: got {heads}, wanted a multiple of"):
            plan_paged_attention(lengths, pool, num_query_heads=heads, max_blocks=3)


def test_a_plan_for_other_arguments_is_refused() -> None:
    work = worklist.build(jnp.ones((2, 2), jnp.int32), 64, 7)
    with (
        jax.sharding.use_abstract_mesh(H200),
        pytest.raises(ValueError, match="work: got 7 programs and tiles of 64, wanted 132 and 64"),
    ):
        jax.eval_shape(lambda *a: paged_attention(*a, work=work), *SHAPE.arguments(metric=False))
