"""Paged attention: every implementation against float64, over one matrix of shapes and lengths."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels.encoded import fine_table
from kvjax.kernels.paged_attention import (
    mosaic_gpu_finish,
    reference,
    spec,
    tpu,
)
from tests.kernels.paged import (
    IMPLEMENTATIONS,
    assert_exact,
    problem,
    run_xla,
    tolerance,
)

BASE = spec.Shape(2, 2, 4, 128, 0, 16, 12)
RAGGED = [[0, 70], [1, 190]]
"""Empty, a partial tile, one KV, and a head longer than a program's share."""


def shaped(**changes) -> spec.Shape:
    return dataclasses.replace(BASE, **changes)


CASES = {
    "ragged": (RAGGED, BASE),
    "all empty": ([[0, 0], [0, 0]], BASE),
    "one long head": ([[0, 0], [0, 700]], BASE),
    "whole tiles": ([[64, 128], [256, 16]], BASE),
    "many short heads": ([[5] * 6, [16] * 6, [17] * 6], BASE),
    "d=64": (RAGGED, shaped(head_dim=64)),
    "d=80": (RAGGED, shaped(head_dim=80)),
    "d=96": (RAGGED, shaped(head_dim=96)),
    "float16": (RAGGED, shaped(dtype="float16")),
    "float32": (RAGGED, shaped(dtype="float32")),
    "float32 d=80": (RAGGED, shaped(dtype="float32", head_dim=80)),
    "float32 d=80 r=16": (RAGGED, shaped(dtype="float32", head_dim=80, group=16)),
    "b=8": (RAGGED, shaped(block_size=8)),
    "b=32": (RAGGED, shaped(block_size=32)),
    "b=64": (RAGGED, shaped(block_size=64)),
    "r=1": (RAGGED, shaped(group=1)),
    "r=3": (RAGGED, shaped(group=3)),
    "r=8": (RAGGED, shaped(group=8)),
    "r=16": (RAGGED, shaped(group=16)),
}

CODES = {
    "int8": (RAGGED, shaped(forms=("int8", "int8"))),
    "int8 d=64": (RAGGED, shaped(forms=("int8", "int8"), head_dim=64)),
    "int8 d=96": (RAGGED, shaped(forms=("int8", "int8"), head_dim=96)),
    "int8 b=8": (RAGGED, shaped(forms=("int8", "int8"), block_size=8)),
    "int8 b=32": (RAGGED, shaped(forms=("int8", "int8"), block_size=32)),
    "int8 b=64 r=16": (RAGGED, shaped(forms=("int8", "int8"), block_size=64, group=16)),
    "int8 float32": (RAGGED, shaped(forms=("int8", "int8"), dtype="float32")),
    "int8 long": ([[0, 0], [0, 700]], shaped(forms=("int8", "int8"))),
    "int4": (RAGGED, shaped(forms=("int4", "int4"))),
    "int8 int4 d=64": (RAGGED, shaped(forms=("int8", "int4"), head_dim=64)),
    "int8 d=80 r=3": (RAGGED, shaped(forms=("int8", "int8"), head_dim=80, group=3)),
    "int4 d=96": (RAGGED, shaped(forms=("int4", "int4"), head_dim=96)),
    "int2": (RAGGED, shaped(forms=("int2", "int2"))),
    "int8 int2 d=64": (RAGGED, shaped(forms=("int8", "int2"), head_dim=64)),
    "int4+": (RAGGED, shaped(forms=("int4+", "int4+"))),
    "int4+ d=64 b=8": (RAGGED, shaped(forms=("int4+", "int4+"), head_dim=64, block_size=8)),
    "int2+ float32 d=64 b=64 r=16": (
        [[0, 0], [0, 700]],
        shaped(forms=("int2+", "int2+"), head_dim=64, dtype="float32", group=16, block_size=64),
    ),
    "e4m3": (RAGGED, shaped(forms=("e4m3", "e4m3"))),
    "e4m3 float32": (RAGGED, shaped(forms=("e4m3", "e4m3"), dtype="float32")),
    "e5m2 d=64": (RAGGED, shaped(forms=("e5m2", "e5m2"), head_dim=64)),
}
CASES |= CODES

HALVES = {
    "halves": (RAGGED, shaped(head_dim=64, halves=True)),
    "halves long": ([[0, 0], [0, 700]], shaped(head_dim=64, halves=True)),
    "halves float32 b=8": (RAGGED, shaped(head_dim=64, halves=True, dtype="float32", block_size=8)),
    "halves r=16 b=64": (RAGGED, shaped(head_dim=64, halves=True, group=16, block_size=64)),
    "halves d=80": (RAGGED, shaped(head_dim=80, halves=True)),
    "halves d=96": (RAGGED, shaped(head_dim=96, halves=True)),
    "halves e5m2 d=96": (RAGGED, shaped(head_dim=96, halves=True, forms=("e5m2", "e5m2"))),
    "halves int8": (RAGGED, shaped(head_dim=64, halves=True, forms=("int8", "int8"))),
    "halves e4m3 b=32": (
        RAGGED,
        shaped(head_dim=64, halves=True, forms=("e4m3", "e4m3"), block_size=32),
    ),
    "halves int4": (RAGGED, shaped(halves=True, forms=("int4", "int4"))),
    "halves int4 float32 d=64": (
        RAGGED,
        shaped(head_dim=64, halves=True, forms=("int4", "int4"), dtype="float32"),
    ),
    "halves int4+ b=8 float32": (
        RAGGED,
        shaped(halves=True, forms=("int4+", "int4+"), block_size=8, dtype="float32"),
    ),
    "halves int4+ d=64 long": (
        [[0, 0], [0, 700]],
        shaped(head_dim=64, halves=True, forms=("int4+", "int4+"), block_size=64, group=3),
    ),
    "halves int2 d=96": (RAGGED, shaped(head_dim=96, halves=True, forms=("int2", "int2"))),
    "halves int2+ d=64 b=32": (
        RAGGED,
        shaped(head_dim=64, halves=True, forms=("int2+", "int2+"), block_size=32),
    ),
}
"""Keys and values in one row each, or several of them in one, as TPUs have them."""
CASES |= HALVES

BY_DEFAULT = {
    "xla": (
        set(CASES)
        - {"r=1", "r=3", "b=32", "float32 d=80 r=16", "int8 b=32", "e4m3 float32", *HALVES}
        - {"int8 d=80 r=3", "int4 d=96", "int8 int2 d=64"}
        | {"halves", "halves int8", "halves int2+ d=64 b=32"}
    ),
    "numba": {
        "ragged", "all empty", "one long head", "many short heads", "b=8", "int8 float32",
        "int8 int4 d=64", "int4+ d=64 b=8",
    },
    "tpu": {
        "ragged", "all empty", "one long head", "many short heads", "b=8", "r=3", "d=80",
        "float32", "int8", "halves", "halves int8", "halves int4 float32 d=64",
        "halves int4+ b=8 float32",
    },
    "tpu_checked": {"ragged", "b=8", "int8 b=8", "halves int2+ d=64 b=32"},
    "mosaic_gpu": {"ragged", "all empty", "b=64", "int4+ d=64 b=8"},
}  # fmt: skip
"""Programs take long to compile, and the interpreter of Hopper kernels takes seconds per case: the
rest runs with `-m slow`."""


def serves(name: str, shape: spec.Shape) -> bool:
    """Whether an implementation reads what is stored."""
    codes, packed = set(shape.codes), {"int4", "int2"} & set(shape.codes)
    if name.startswith("tpu"):
        return shape.dtype != "float16" and (shape.halves or not packed)
    if name == "mosaic_gpu":
        return not shape.halves
    if name == "numba":
        rows = codes == {None} and shape.dtype != "float16"
        return not shape.halves and (rows or codes <= {"int8", "int4"})
    return True


MATRIX = [
    pytest.param(
        name,
        case,
        id=f"{name}-{case}",
        marks=[] if case in BY_DEFAULT[name] else [pytest.mark.slow],
    )
    for name in IMPLEMENTATIONS
    for case in CASES
    if serves(name, CASES[case][1])
]


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_exact_with_metric(name: str, case: str) -> None:
    lengths, shape = CASES[case]
    assert_exact(name, problem(lengths, shape))


def test_finer_codes_of_held_blocks_alone_count() -> None:
    """A table may still name blocks behind a head's end, which are others' by now."""
    table = jnp.asarray([[0, 1, 2], [3, 4, 5]], jnp.int32)
    fine = jnp.asarray([10, 11, 11, 11, 11, 9, 11, 11, 11, 11, 11], jnp.int32)
    found = fine_table(fine, table, jnp.asarray([4, 17], jnp.int32), 8)
    np.testing.assert_array_equal(found, [[10, 11, 11], [11, 11, 9]])
    found = fine_table(fine, table, jnp.asarray([0, 16], jnp.int32), 8)
    np.testing.assert_array_equal(found, np.full((2, 3), 11))


@pytest.mark.parametrize("name", [n for n in IMPLEMENTATIONS if n != "tpu_checked"])
def test_exact_without_metric(name: str) -> None:
    assert_exact(name, problem(RAGGED, BASE, seed=1), with_metric=False)


@pytest.mark.parametrize(
    ("power", "observed"),
    [(1, None), (1, [False, True]), (2, [True, False]), (2, [False, False])],
)
@pytest.mark.parametrize(
    "name",
    ["xla", "numba", "tpu", pytest.param("tpu_checked", marks=pytest.mark.slow)],
)
def test_powers_and_observed_sequences(name: str, power: int, observed) -> None:
    assert_exact(name, problem(RAGGED, BASE, power=power, observed=observed))


@pytest.mark.parametrize(
    ("power", "observed"),
    [
        (1, [False, True]),
        pytest.param(1, None, marks=pytest.mark.slow),
        pytest.param(2, [True, False], marks=pytest.mark.slow),
        pytest.param(2, [False, False], marks=pytest.mark.slow),
    ],
)
def test_powers_and_observed_sequences_on_hopper(power: int, observed) -> None:
    assert_exact("mosaic_gpu", problem(RAGGED, BASE, power=power, observed=observed))


@pytest.mark.parametrize("ring", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_rings_of_chunks_wrap(monkeypatch, ring: int) -> None:
    """Chunks ahead are this head's, the next one's, or none; heads are longer and shorter than the
    ring, and their metrics come and go chunk by chunk."""
    monkeypatch.setattr(tpu, "RING", ring)
    monkeypatch.setattr(tpu, "CHUNK", 32)
    lengths = [[150, 0, 33], [1, 64, 0]]
    assert_exact("tpu_checked", problem(lengths, shaped(heads=3, block_size=16, head_dim=64)))


@pytest.mark.parametrize(
    ("workers", "block_size", "observed"),
    [
        (1, 16, [True, False, True]),
        (2, 16, None),
        pytest.param(1, 8, None, marks=pytest.mark.slow),
        pytest.param(2, 64, [False, True, False], marks=pytest.mark.slow),
    ],
)
def test_units_of_the_statistic_come_ahead(
    monkeypatch, workers: int, block_size: int, observed
) -> None:
    """A worker has several units, of whole heads and of shared ones, longer and shorter than a
    unit, and of some that are left out: the unit ahead is this head's, the next one's, or none."""
    monkeypatch.setattr(mosaic_gpu_finish, "WORKERS", workers)
    monkeypatch.setattr(mosaic_gpu_finish, "UNIT", 128)
    monkeypatch.setattr(mosaic_gpu_finish, "UNIT_TILES", 2)
    lengths = [[5, 150, 300], [64, 0, 20], [520, 3, 129]]
    shape = shaped(head_dim=64, heads=3, block_size=block_size)
    assert_exact("mosaic_gpu", problem(lengths, shape, observed=observed))


def test_parts_of_a_head_are_read_in_turns(monkeypatch) -> None:
    """As many log-sum-exps at once as a layout has rows; here one."""
    monkeypatch.setattr(mosaic_gpu_finish, "PARTS_AT_ONCE", 1)
    assert_exact("mosaic_gpu", problem([[0, 700]], shaped(head_dim=64), spread=4.0))


@pytest.mark.parametrize("name", ["xla", "numba", "tpu"])
def test_large_logits(name: str) -> None:
    """Logits in the hundreds: weights collapse to one KV, nothing overflows."""
    assert_exact(name, problem(RAGGED, shaped(dtype="float32"), spread=100.0))


@st.composite
def drawn(draw, dtypes=spec.DTYPES, longest: int = 300):
    """A shape, ragged lengths and a seed."""
    shape = spec.Shape(
        seqs=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        head_dim=draw(st.sampled_from(spec.HEAD_DIMS)),
        blocks=0,
        block_size=draw(st.sampled_from(spec.BLOCK_SIZES)),
        max_blocks=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(dtypes)),
    )
    length = st.one_of(st.integers(0, 20), st.integers(0, longest))
    lengths = draw(
        st.lists(
            st.lists(length, min_size=shape.heads, max_size=shape.heads),
            min_size=shape.seqs,
            max_size=shape.seqs,
        )
    )
    return lengths, shape, draw(st.integers(0, 2**16))


@pytest.mark.parametrize("pieces", [(1,), (5, 3), (64,)])
@pytest.mark.parametrize("case", ["ragged", "many short heads"])
def test_how_many_pieces_come_at_once_changes_nothing(case: str, pieces: tuple[int, ...]) -> None:
    lengths, shape = CASES[case]
    p = problem(lengths, dataclasses.replace(shape, dtype="float32"))
    usual, others = run_xla(p, True), run_xla(p, True, pieces=pieces)
    for one, other in zip(usual, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("RESULT_BYTES", 1), ("RESULT_BYTES", 1 << 15), ("PARTS_MERGED", 2)]
)
def test_what_pieces_give_is_merged_in_portions(monkeypatch, name: str, value: int) -> None:
    """One head at a time, two or three of six, and two pieces of a head's six at a time."""
    monkeypatch.setattr(reference, name, value)
    p = problem([[350, 70], [1, 190], [0, 320]], BASE, spread=4.0, observed=[True, False, True])
    assert_exact("xla", p)


def test_a_head_computes_the_same_wherever_it_stands() -> None:
    """In every bit: among longer and shorter heads, at the start of a turn or across two."""
    p = problem([[70, 190], [300, 5], [0, 129]], shaped(dtype="float32", head_dim=64), spread=4.0)
    q, k, v, table, lengths = p.arguments
    out, metric = reference.paged_attention(
        *p.arguments, scale=p.scale, metric=p.metric, pieces_at_once=(8, 3)
    )
    for order in ([2, 0, 1], [1, 2, 0]):
        moved = [x[jnp.asarray(order)] for x in (q, table, lengths)]
        out_moved, metric_moved = reference.paged_attention(
            moved[0], k, v, *moved[1:], scale=p.scale, metric=p.metric, pieces_at_once=(8, 3)
        )
        np.testing.assert_array_equal(out_moved, np.asarray(out)[order])
        np.testing.assert_array_equal(metric_moved, metric)  # type: ignore[arg-type]


@settings(max_examples=5, deadline=None)
@given(drawn())
def test_xla_on_drawn_shapes(case) -> None:
    lengths, shape, seed = case
    assert_exact("xla", problem(lengths, shape, seed))


@settings(max_examples=3, deadline=None)
@given(drawn(dtypes=("bfloat16", "float32")))
def test_tpu_on_drawn_shapes(case) -> None:
    lengths, shape, seed = case
    assert_exact("tpu", problem(lengths, shape, seed))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(drawn(dtypes=("bfloat16", "float32"), longest=700))
def test_numba_on_drawn_shapes(case) -> None:
    lengths, shape, seed = case
    assert_exact("numba", problem(lengths, shape, seed))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(drawn())
def test_mosaic_gpu_on_drawn_shapes(case) -> None:
    lengths, shape, seed = case
    assert_exact("mosaic_gpu", problem(lengths, shape, seed))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(drawn(dtypes=("bfloat16", "float32")))
def test_tpu_checked_on_drawn_shapes(case) -> None:
    lengths, shape, seed = case
    assert_exact("tpu_checked", problem(lengths, shape, seed))


def test_xla_beyond_what_kernels_serve() -> None:
    """Any head dimension, block size and group."""
    assert_exact("xla", problem(RAGGED, shaped(head_dim=40, block_size=12, group=20)))


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_jax_own_paged_attention_agrees(name: str) -> None:
    """JAX's TPU kernel, with (sequence × KV head) folded into its batch."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as shipped

    p = problem([[33, 70], [128, 5]], shaped(max_blocks=8))
    q, k, v, table, lengths = p.arguments
    clean = [jnp.nan_to_num(x)[None] for x in (k, v)]
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="zero")):
        theirs = shipped(
            (q.astype(jnp.float32) * p.scale).astype(q.dtype).reshape(4, 4, 128),
            *clean,
            lengths.reshape(4),
            jnp.minimum(table, k.shape[0] - 1).reshape(4, -1),
            pages_per_compute_block=4,
        )
    ours, _ = IMPLEMENTATIONS[name](p, False)
    difference = ours.reshape(4, 4, 128).astype(jnp.float32) - theirs.astype(jnp.float32)
    # Theirs also rounds the scaled queries, a relative 2^-9 of logits of a few units.
    assert jnp.max(jnp.abs(difference)) < 2 * tolerance(name, p)[0]
