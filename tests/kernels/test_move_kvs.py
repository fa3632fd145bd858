"""Moving KVs inside the pool: every implementation against NumPy, its choice, its lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import explain, move_kvs
from kvjax.kernels.move_kvs import mosaic_gpu, reference
from tests.kernels.devices import A100, H200
from tests.kernels.paged import races_seen

BLOCKS, B, D = 30, 16, 64
WIDTH = 100
NOWHERE = 2**30
"""What a row holds beyond its moves in every other place; it must not be followed."""


def problem(count, d: int = D, dtype: str = "bfloat16", seed: int = 0):
    """Pools, moves between disjoint slots, and the pools afterwards."""
    rng = np.random.default_rng(seed)
    pools = [jnp.asarray(10 + rng.standard_normal((BLOCKS, B, d)), dtype) for _ in "kv"]
    slots = rng.permutation(BLOCKS * B)
    moves = np.full((2, len(count), WIDTH), NOWHERE, np.int32)
    # Nor must slots that exist, which a scatter would not drop.
    moves[..., ::2] = rng.integers(0, BLOCKS * B, moves[..., ::2].shape)
    expected = [np.array(x).reshape(-1, d) for x in pools]
    taken = 0
    for row, n in enumerate(count):
        moves[:, row, :n] = slots[taken : taken + 2 * n].reshape(2, n)
        taken += 2 * n
        for pool in expected:
            pool[moves[1, row, :n]] = pool[moves[0, row, :n]]
    arguments = (*pools, jnp.asarray(moves[0]), jnp.asarray(moves[1]), jnp.asarray(count))
    return arguments, [x.reshape(BLOCKS, B, d) for x in expected]


def run_mosaic_gpu(*arguments):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return mosaic_gpu.move_kvs(*arguments, programs=3, interpret=interpret)


IMPLEMENTATIONS = {"xla": reference.move_kvs, "mosaic_gpu": run_mosaic_gpu}


def assert_moved(name: str, arguments, expected) -> None:
    for got, wanted in zip(IMPLEMENTATIONS[name](*arguments), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted)
    assert not races_seen(name)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (64, "bfloat16"),
        (32, "uint8"),
        pytest.param(64, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param(80, "bfloat16", marks=pytest.mark.slow),
        pytest.param(128, "float32", marks=pytest.mark.slow),
    ],
)
def test_moves(name: str, d: int, dtype: str) -> None:
    assert_moved(name, *problem(np.array([0, 70, 1, 65, 33], np.int32), d, dtype))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nothing_to_move(name: str) -> None:
    assert_moved(name, *problem(np.zeros(3, np.int32)))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=3, max_size=3), st.integers(0, 999))
def test_xla_on_drawn_moves(count, seed: int) -> None:
    assert_moved("xla", *problem(np.array(count, np.int32), seed=seed))


def shapes(d: int = 128, dtype: str = "bfloat16"):
    pool = jax.ShapeDtypeStruct((12_000_000, 16, d), jnp.dtype(dtype))
    slots = jax.ShapeDtypeStruct((256, 4096), jnp.int32)
    return pool, pool, slots, slots, jax.ShapeDtypeStruct((256,), jnp.int32)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        *((d, "bfloat16") for d in (64, 80, 96, 128)),
        # Codes of 8, 4 and 2 bits.
        *((64, dtype) for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")),
        *((d, "uint8") for d in (64, 32, 16)),
    ],
)
def test_lowers_for_h200(d: int, dtype: str) -> None:
    with jax.sharding.use_abstract_mesh(H200):
        assert explain(move_kvs, *shapes(d, dtype)) == "mosaic_gpu"
        traced = jax.jit(move_kvs).trace(*shapes(d, dtype))
        assert "move_kvs" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_explains_the_choice() -> None:
    assert explain(move_kvs, *shapes()).startswith("xla: mosaic_gpu does not serve device")
    with jax.sharding.use_abstract_mesh(A100):
        assert "wanted: compute capability 9.0" in explain(move_kvs, *shapes())
    with jax.sharding.use_abstract_mesh(H200):
        assert "rows of 8 bytes" in explain(move_kvs, *shapes(d=4))


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, jax.ShapeDtypeStruct((16, 128), jnp.bfloat16), r"k shape: got \[16, 128\], wanted"),
        (2, jax.ShapeDtypeStruct((256,), jnp.int32), r"source shape: got \[256\], wanted"),
        (1, jax.ShapeDtypeStruct((3, 16, 128), jnp.bfloat16), r"v: got bfloat16\[3, 16, 128\]"),
        (3, jax.ShapeDtypeStruct((256, 8), jnp.int32), r"target shape: got \[256, 8\], wanted"),
        (4, jax.ShapeDtypeStruct((8,), jnp.int32), r"count shape: got \[8\], wanted \[256\]"),
        (4, jax.ShapeDtypeStruct((256,), jnp.int16), "count dtype: got int16, wanted int32"),
    ],
)
def test_bad_arguments_are_named(place: int, wrong, message: str) -> None:
    arguments = list(shapes())
    arguments[place] = wrong
    with pytest.raises(ValueError, match=message):
        explain(move_kvs, *arguments)
