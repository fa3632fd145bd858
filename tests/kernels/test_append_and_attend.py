"""Writing the newest KVs and attending to all: every implementation against what is there after."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import append_and_attend
from kvjax.kernels.paged_attention import mosaic_gpu, spec
from tests.kernels.devices import A100, H200
from tests.kernels.paged import Problem, problem, races_seen, tolerance

LENGTHS = [[0, 70], [1, 128]]
"""None, one in a page that others begin, one alone, one at a page's end."""
BASE = spec.Shape(2, 2, 4, 64, 0, 16, 8)


def before(p: Problem) -> tuple[list, list]:
    """The newest keys and values of a problem, and its pools without them."""
    _, k, v, table, lengths = p.arguments
    last = np.maximum(np.asarray(lengths) - 1, 0)
    page = np.take_along_axis(np.asarray(table), (last // k.shape[1])[..., None], -1)[..., 0]
    some = np.asarray(lengths) > 0
    at = page[some], last[some] % k.shape[1]
    newest, pools = [], []
    for pool in (k, v):
        # Rows of heads without KVs lead nowhere.
        rows = jnp.full((*lengths.shape, pool.shape[2]), 7, pool.dtype)
        newest.append(rows.at[some].set(pool[at]))
        pools.append(pool.at[at].set(-3))
    return newest, pools


def run_xla(p: Problem, newest, pools):
    q, _, _, *rest = p.arguments
    return append_and_attend(
        q, *newest, *pools, *rest, metric=p.metric, return_metric=True, implementation="xla"
    )


def run_mosaic_gpu(p: Problem, newest, pools):
    q, _, _, *rest = p.arguments
    c = mosaic_gpu.config(p.shape, scale=p.scale, keep_logits=True, cores=1)
    c = dataclasses.replace(c, stages=2, programs=3)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    pools, out, metric = mosaic_gpu.append_and_attend(
        q, *newest, *pools, *rest, c=c, metric=p.metric, interpret=interpret
    )
    return pools, (out, metric)


RUN = {"xla": run_xla, "mosaic_gpu": run_mosaic_gpu}


@pytest.mark.parametrize(
    ("name", "dtype", "group"),
    [
        ("xla", "bfloat16", 4),
        ("mosaic_gpu", "bfloat16", 4),
        pytest.param("mosaic_gpu", "float32", 4, marks=pytest.mark.slow),
        # Queries, key and value are more rows than the tensor core takes.
        pytest.param("mosaic_gpu", "bfloat16", 8, marks=pytest.mark.slow),
    ],
)
def test_newest_are_written_and_attended_to(name: str, dtype: str, group: int) -> None:
    p = problem(LENGTHS, dataclasses.replace(BASE, dtype=dtype, group=group))
    pools, (out, metric) = RUN[name](p, *before(p))
    for got, want in zip(pools, p.arguments[1:3], strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    allowed_out, allowed_metric = tolerance(name, p)
    np.testing.assert_allclose(np.asarray(out, np.float32), p.out, rtol=0, atol=allowed_out)
    np.testing.assert_allclose(metric, p.new_metric, rtol=0, atol=allowed_metric)
    assert not races_seen(name)


@pytest.mark.parametrize("group", [4, 7, 16])
@pytest.mark.parametrize(("d", "dtype"), [(64, "float16"), (80, "bfloat16"), (128, "float32")])
def test_attention_writes_keys_and_values(d: int, dtype: str, group: int) -> None:
    shape = dataclasses.replace(BASE, head_dim=d, dtype=dtype, group=group, blocks=97)
    arguments, rows = arguments_of(shape)
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(append_and_attend).trace(arguments[0], rows, rows, *arguments[1:])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert f"97x16x{d}" in text
    assert not any("scatter" in line and f"97x16x{d}" in line for line in text.splitlines())


def test_other_devices_scatter() -> None:
    arguments, rows = arguments_of(dataclasses.replace(BASE, blocks=97))
    with jax.sharding.use_abstract_mesh(A100):
        traced = jax.jit(append_and_attend).trace(arguments[0], rows, rows, *arguments[1:])
        assert "mosaic" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def arguments_of(shape: spec.Shape):
    rows = jax.ShapeDtypeStruct((shape.seqs, shape.heads, shape.head_dim), jnp.dtype(shape.dtype))
    return shape.arguments(metric=False), rows


def test_bad_rows_are_named() -> None:
    (q, *rest), rows = arguments_of(dataclasses.replace(BASE, blocks=97))
    unchecked = inspect.unwrap(append_and_attend)
    short, wide = (
        jax.ShapeDtypeStruct((2, 2, 32), rows.dtype),
        jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )
    with pytest.raises(ValueError, match=r"new_k shape: got \[2, 2, 32\], wanted \[2, 2, 64\]"):
        unchecked(q, short, rows, *rest)
    with pytest.raises(ValueError, match="new_v dtype: got float32, wanted that of the pool"):
        unchecked(q, rows, wide, *rest)
