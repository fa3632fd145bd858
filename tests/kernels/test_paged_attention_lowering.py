"""Every kernel lowers for its device, for every family of shapes, on a machine without one.

Lowering runs Mosaic's own passes: it catches what does not fit shared memory, wrong swizzles and
layouts, and unsupported operations. Compiling needs the vendors' toolchains:
benchmarks/kernels/compile.py.
"""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import cases
from kvjax.kernels import explain, paged_attention
from kvjax.kernels.paged_attention import spec
from tests.kernels.devices import H200, TPU_V5E, TPU_V6E

FAMILIES = sorted(spec.FAMILIES)


def assert_two_kernels(text: str, what: object = None) -> None:
    """All that a call launches on Hopper of its own: attention, and what finishes it."""
    assert text.count("custom_call @mosaic_gpu") == 2, what
    assert "paged_attention_finish" in text, what


def lowered(shape: spec.Shape, platform: str, with_metric: bool) -> str:
    def call(q, k, v, table, lengths, metric):
        return paged_attention(
            q, k, v, table, lengths, metric=metric, return_metric=with_metric
        )  # fmt: skip

    arguments = shape.arguments() if shape.forms == (None, None) else cases.coded(shape)
    traced = jax.jit(call).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_lowers_for_h200(family: str) -> None:
    shape = spec.FAMILIES[family]
    with jax.sharding.use_abstract_mesh(H200):
        assert explain(paged_attention, *shape.arguments(metric=False)) == "mosaic_gpu"
        text = lowered(shape, "cuda", with_metric=True)
    assert_two_kernels(text)


@pytest.mark.parametrize("name", cases.CODES)
def test_codes_lower(name: str) -> None:
    """No array of rows is made of a pool: the kernels take codes and scales as they are stored."""
    shape = cases.CODES[name]
    rows = f"{shape.blocks}x{shape.block_size}x{shape.head_dim}x"
    for device, platform, kernel in ((H200, "cuda", "mosaic_gpu"), (TPU_V5E, "tpu", "tpu: mos")):
        with jax.sharding.use_abstract_mesh(device):
            said = explain(paged_attention, *cases.coded(shape, metric=False))
            if platform == "tpu" and "int4" in shape.forms:
                assert "tpu does not serve int4 pools" in said
                continue
            text = lowered(shape, platform, with_metric=True)
        assert said.startswith(kernel)
        assert not any(rows + kind in text for kind in ("bf16", "f16", "f32"))


@pytest.mark.parametrize(
    ("forms", "d", "said"),
    [
        (("int8", "int8"), 80, "codes of head dimension 80"),
        (("int4", "int4"), 96, "codes of head dimension 96"),
        (("e4m3", "int8"), 64, "e4m3 keys with int8 values"),
        (("int8", None), 64, "codes of either keys or values alone"),
        (("int8", "int2"), 64, "int2 pools, served are int8"),
        (("int5", "int4"), 64, "int5 pools, served are int8"),
    ],
)
def test_why_no_kernel_reads_codes_is_said(forms, d: int, said: str) -> None:
    shape = spec.Shape(4, 2, 4, d, 97, 16, 12, "bfloat16", forms)
    with jax.sharding.use_abstract_mesh(H200):
        why = explain(paged_attention, *cases.coded(shape, metric=False))
    assert why.startswith(f"xla: mosaic_gpu does not serve {said}")


def test_lowers_for_h200_with_two_halves_of_many_query_heads() -> None:
    """Queries of float32 pools are two halves, each of two tiles from 9 query heads on."""
    shape = dataclasses.replace(spec.FAMILIES["float32 d=96"], group=9)
    with jax.sharding.use_abstract_mesh(H200):
        assert_two_kernels(lowered(shape, "cuda", with_metric=False))


# Query heads are padded to 8 or 16, and the statistic takes them one by one.
GROUPS = (1, 3, 8, 9, spec.MAX_GROUP)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", spec.BLOCK_SIZES)
@pytest.mark.parametrize("dtype", spec.DTYPES)
def test_whatever_is_accepted_lowers(dtype: str, block_size: int) -> None:
    """Every shape that the kernels say they serve, and nothing is served by chance."""
    for group, d in itertools.product((*GROUPS, spec.MAX_GROUP + 1), (*spec.HEAD_DIMS, 72)):
        shape = spec.Shape(2, 2, group, d, 40, block_size, 8, dtype)
        with jax.sharding.use_abstract_mesh(H200):
            said = explain(paged_attention, *shape.arguments(metric=False))
            served = group <= spec.MAX_GROUP and d in spec.HEAD_DIMS
            assert said.startswith("mosaic_gpu" if served else "xla: mosaic_gpu does not serve")
            if served:
                assert_two_kernels(lowered(shape, "cuda", with_metric=True), shape)


@pytest.mark.parametrize("family", ["llama-3.1-8b", "float32 d=96"])
def test_lowers_for_h200_without_metric(family: str) -> None:
    """Off, the statistic costs nothing: no logits are kept."""
    shape = spec.FAMILIES[family]
    with jax.sharding.use_abstract_mesh(H200):
        without, with_metric = (lowered(shape, "cuda", with_metric=x) for x in (False, True))
    assert_two_kernels(without)
    line = re.compile(rf"tensor<{shape.group}x\d+xf32>")
    assert not line.search(without)
    assert line.search(with_metric)


@pytest.mark.parametrize(
    ("device", "family"),
    [(TPU_V5E, f) for f in FAMILIES] + [(TPU_V6E, "llama-3.1-8b"), (TPU_V6E, "float32 d=96")],
    ids=lambda x: x if isinstance(x, str) else x.abstract_device.device_kind,
)
def test_lowers_for_tpu(device, family: str) -> None:
    shape = spec.FAMILIES[family]
    with jax.sharding.use_abstract_mesh(device):
        served = explain(paged_attention, *shape.arguments(metric=False))
        text = lowered(shape, "tpu", with_metric=True)
    if shape.dtype == "float16":
        assert served.startswith("xla: ")
        assert "tpu does not serve float16" in served
    else:
        assert served.startswith("tpu: ")
        assert "tpu_custom_call" in text


@pytest.mark.parametrize("device", [H200, TPU_V5E], ids=["h200", "tpu"])
@pytest.mark.parametrize("power", [1, 2])
def test_lowers_with_powers_and_observed_sequences(device, power: int) -> None:
    shape = spec.FAMILIES["llama-3.1-8b"]
    observed = jax.ShapeDtypeStruct((shape.seqs,), jnp.bool_)

    def call(q, k, v, table, lengths, metric, observed):
        return paged_attention(
            q, k, v, table, lengths,
            metric=metric, return_metric=True, power=power, observed=observed,
        )  # fmt: skip

    platform = "cuda" if device is H200 else "tpu"
    with jax.sharding.use_abstract_mesh(device):
        traced = jax.jit(call).trace(*shape.arguments(), observed)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    wanted = "paged_attention_finish" if device is H200 else "tpu_custom_call"
    assert wanted in text
