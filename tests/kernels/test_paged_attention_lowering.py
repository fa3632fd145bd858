"""Every kernel lowers for its device, for every family of shapes, on a machine without one.

Lowering runs Mosaic's own passes: it catches what does not fit shared memory, wrong swizzles and
layouts, and unsupported operations. Compiling needs the vendors' toolchains:
benchmarks/kernels/compile.py.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import cases
from kvjax.kernels import Half, explain, paged_attention
from kvjax.kernels.encoded import is_half
from kvjax.kernels.paged_attention import spec
from kvjax.kernels.paged_attention.mosaic_gpu import MAX_STAGES, RESERVED, SHARED_MEMORY, config
from tests.kernels.devices import H200, TPU_V5E, TPU_V6E

FAMILIES = sorted(spec.FAMILIES)
BY_DEFAULT = {
    *("llama-3.1-70b", "pool of more than 2^31 elements", "b=64", "r=7"),
    *("bfloat16 d=80", "float16 d=64", "float32 d=96"),
    *("int8 int8 b=16 d=128", "int4 int4 b=8 d=96", "int2+ int2+ b=16 d=64"),
    *("e5m2 e5m2 b=32 d=64", "int4+ halves b=16 r=4 d=128", "int2 halves b=16 r=16 d=128"),
}
"""What runs without `-m slow`, of families and of kinds of codes; a product of all shapes runs with
it."""


def some(names: Iterable[str]) -> list:
    """Parameters, slow ones but for those of `BY_DEFAULT`."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[] if name in BY_DEFAULT else slow) for name in names]


def assert_two_kernels(text: str, what: object = None) -> None:
    """All that a call launches on Hopper of its own: attention, and what finishes it."""
    assert text.count("custom_call @mosaic_gpu") == 2, what
    assert "paged_attention_finish" in text, what


def lowered(shape: spec.Shape, platform: str, with_metric: bool) -> str:
    def call(q, k, v, table, lengths, metric):
        return paged_attention(
            q, k, v, table, lengths, metric=metric, return_metric=with_metric
        )  # fmt: skip

    traced = jax.jit(call).trace(*cases.coded(shape))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("family", some(FAMILIES))
def test_lowers_for_h200(family: str) -> None:
    shape = spec.FAMILIES[family]
    with jax.sharding.use_abstract_mesh(H200):
        assert explain(paged_attention, *shape.arguments(metric=False)) == "mosaic_gpu"
        text = lowered(shape, "cuda", with_metric=True)
    assert_two_kernels(text)


@pytest.mark.parametrize("name", some(cases.CODES))
def test_codes_lower(name: str) -> None:
    """No array of rows is made of a pool: the kernels take codes and scales as they are stored."""
    shape = cases.CODES[name]
    packed = {"int4", "int2"} & set(shape.codes)
    rows = f"{shape.blocks}x{shape.block_size}x{shape.head_dim}x"
    for device, platform, kernel in ((H200, "cuda", "mosaic_gpu"), (TPU_V5E, "tpu", "tpu: mos")):
        with jax.sharding.use_abstract_mesh(device):
            said = explain(paged_attention, *cases.coded(shape, metric=False))
            if platform == "tpu" and packed:
                assert re.search(r"tpu does not serve int[248] (codes of head|keys with)", said)
                continue
            text = lowered(shape, platform, with_metric=True)
        assert said.startswith(kernel)
        assert not any(rows + kind in text for kind in ("bf16", "f16", "f32"))


@pytest.mark.parametrize("name", some(cases.HALVES))
def test_halves_lower_for_tpu(name: str) -> None:
    """One array of both comes to the kernel, and none of keys or of values."""
    shape = cases.HALVES[name]
    with jax.sharding.use_abstract_mesh(TPU_V5E):
        assert explain(paged_attention, *cases.coded(shape, metric=False)).startswith("tpu: ")
        text = lowered(shape, "tpu", with_metric=True)
    blocks = f"tensor<{shape.blocks}x"
    keys = cases.coded(shape)[1]
    (half, *_) = jax.tree.leaves(getattr(keys, "stored", keys), is_leaf=is_half)
    assert f"{blocks}{half.both.shape[1]}x{half.both.shape[2]}x" in text
    assert half.both.shape[2] % 128 == 0
    rows = f"{blocks}{shape.block_size}x"
    assert f"{rows}{half.width}x" not in text
    assert not any(f"{rows}{shape.head_dim}x{kind}" in text for kind in ("bf16", "f32"))


def test_why_no_kernel_reads_halves_is_said() -> None:
    said = "mosaic_gpu does not serve keys and values in one row"
    q, k, _, *rest = spec.Shape(4, 2, 4, 64, 97, 16, 12).arguments(metric=False)
    both = jax.ShapeDtypeStruct((*k.shape[:2], 128), k.dtype)
    keys, values = (Half(both, 64, x) for x in (False, True))  # type: ignore[arg-type]
    with jax.sharding.use_abstract_mesh(H200):
        assert said in explain(paged_attention, q, keys, values, *rest)
    for wrong in ((values, keys), (keys, k), (keys, keys)):
        with pytest.raises(ValueError, match=r"^halves of rows that k and v are: got "):
            explain(paged_attention, q, *wrong, *rest)


@pytest.mark.parametrize(
    ("forms", "d", "said"),
    [
        (("int4", "int4"), 80, "codes of head dimension 80"),
        (("int2", "int2"), 96, "codes of head dimension 96"),
        (("e4m3", "int8"), 64, "e4m3 keys with int8 values"),
        (("int8", None), 64, "codes of either keys or values alone"),
        (("int5", "int4"), 64, "int5 pools, served are int8"),
    ],
)
def test_why_no_kernel_reads_codes_is_said(forms, d: int, said: str) -> None:
    shape = spec.Shape(4, 2, 4, d, 97, 16, 12, "bfloat16", forms)
    with jax.sharding.use_abstract_mesh(H200):
        why = explain(paged_attention, *cases.coded(shape, metric=False))
    assert why.startswith(f"xla: mosaic_gpu does not serve {said}")


def test_which_finer_codes_kernels_read_is_said() -> None:
    """Of whole numbers: those of floating point may be NaN where nobody wrote."""
    shape = spec.Shape(4, 2, 4, 128, 97, 16, 12, "bfloat16", ("e4m3", "e4m3"))
    q, k, v, *rest = cases.coded(shape, metric=False)
    tag = jax.ShapeDtypeStruct((97,), jnp.int32)
    finer = [dataclasses.replace(x, fine=tag) for x in (k, v)]
    for device, name in ((H200, "mosaic_gpu"), (TPU_V5E, "tpu")):
        with jax.sharding.use_abstract_mesh(device):
            why = explain(paged_attention, q, *finer, *rest)
        assert why.startswith("xla: mosaic_gpu does not serve")
        assert f"{name} does not serve finer codes of e4m3" in why
    with pytest.raises(ValueError, match=r"^finer codes of k and v: got \[True, False\], wanted"):
        explain(paged_attention, q, finer[0], v, *rest)


def test_lowers_for_h200_with_two_halves_of_many_query_heads() -> None:
    """Queries of float32 pools are two halves, each of two tiles from 9 query heads on."""
    shape = dataclasses.replace(spec.FAMILIES["float32 d=96"], group=9)
    with jax.sharding.use_abstract_mesh(H200):
        assert_two_kernels(lowered(shape, "cuda", with_metric=False))


# Query heads are padded to 8 or 16, and the statistic takes them one by one.
GROUPS = (1, 3, 8, 9, spec.MAX_GROUP)


FORMS = (None, "int8", "int4", "int4+", "int2", "e4m3", "e5m2")
KERNELS = {"mosaic_gpu": (H200, "cuda"), "tpu": (TPU_V5E, "tpu")}


PACKED = {"int4": 2, "int2": 4}


def has_halves(form: str | None, d: int, block_size: int) -> bool:
    """Whether TPUs have rows of both keys and values, of so many bytes or numbers."""
    width = d // PACKED.get((form or "").removesuffix("+"), 1)
    fold = {32: 2, 24: 2, 16: 4}.get(width, 1)
    return width in (16, 24, 32, 48, 64, 80, 96) and block_size % (4 * fold if fold > 1 else 1) == 0


def served(kernel: str, shape: spec.Shape) -> bool:
    """What docs/kernels.md says the decode kernels serve."""
    form, d = shape.codes[0], shape.head_dim
    if shape.group > spec.MAX_GROUP or d not in spec.HEAD_DIMS:
        return False
    if shape.block_size not in spec.BLOCK_SIZES:
        return False
    if kernel == "tpu":
        return shape.dtype != "float16" and (form not in PACKED or shape.halves)
    dims = {"int4": (64, 96, 128), "int2": (64, 128)}
    return not shape.halves and d in dims.get(form or "", spec.HEAD_DIMS)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [*spec.BLOCK_SIZES, 128])
@pytest.mark.parametrize("dtype", spec.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_whatever_is_accepted_lowers(
    kernel: str, dtype: str, block_size: int, form: str | None
) -> None:
    """What the kernels say of every shape, and that those that they serve lower: in blocks of 16
    all of them, in others one number of query heads of each head dimension, taking turns."""
    device, platform = KERNELS[kernel]
    groups = GROUPS if form is None else (3, spec.MAX_GROUP)
    groups, dims = (*groups, spec.MAX_GROUP + 1), (*spec.HEAD_DIMS, 72)
    turn = spec.BLOCK_SIZES.index(block_size) if block_size in spec.BLOCK_SIZES else 0
    for group, d, halves in itertools.product(groups, dims, (False, True)):
        if halves and not has_halves(form, d, block_size):
            continue
        shape = spec.Shape(2, 2, group, d, 40, block_size, 8, dtype, (form, form), halves)
        with jax.sharding.use_abstract_mesh(device):
            # The Hopper kernel says why first, the TPU's behind it.
            said = explain(paged_attention, *cases.coded(shape, metric=False))
            if not served(kernel, shape):
                assert said.startswith("xla: mosaic_gpu does not serve"), shape
                assert f"{kernel} does not serve" in said, shape
                with pytest.raises(ValueError, match=f"^implementation: got '{kernel}'"):
                    explain(paged_attention, *cases.coded(shape, False), implementation=kernel)
                continue
            assert said.split(":")[0] == kernel, shape
            at = (turn + dims.index(d) + halves) % (len(groups) - 1)
            if block_size != 16 and group != groups[at]:
                continue
            text = lowered(shape, platform, with_metric=True)
        if kernel == "mosaic_gpu":
            assert_two_kernels(text, shape)
        else:
            assert "tpu_custom_call" in text, shape


@pytest.mark.parametrize(
    "family", ["llama-3.1-8b", pytest.param("float32 d=96", marks=pytest.mark.slow)]
)
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
    ("shape", "exact"),
    [
        pytest.param(spec.FAMILIES["llama-3.1-70b"], False, marks=pytest.mark.slow),
        # The scales of a tile of it leave the end of 1,024 bytes unused.
        (cases.CODES["int8 int8 b=32 d=96"], False),
        pytest.param(cases.CODES["int4+ int4+ b=16 d=128"], False, marks=pytest.mark.slow),
        (cases.CODES["int4 int4 b=16 d=128"], True),
    ],
    ids=["70b", "int8 d=96", "int4+", "int4w16"],
)
def test_two_programs_fit_a_multiprocessor(
    shape: spec.Shape, exact: bool, monkeypatch, tmp_path
) -> None:
    """By what the kernel asks of the system at its launch: the plan leaves nothing out, and a
    further tile would not fit."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def call(*arguments):
        q, k, v, table, lengths, metric, *beside = arguments
        return paged_attention(
            q, k, v, table, lengths, metric=metric, return_metric=True,
            exact=beside[0] if beside else None,
        )  # fmt: skip

    arguments = (*cases.coded(shape), *([cases.exact_of(shape)] if exact else []))
    with jax.sharding.use_abstract_mesh(H200):
        jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    (file,) = tmp_path.glob("paged_attention_[0-9]*.before_layout_inference.txt")
    (asked,) = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", file.read_text())
    used, c = int(asked) + 1024, config(shape, scale=1, keep_logits=True, cores=132, exact=exact)
    assert c.programs == 2 * 132
    assert c.shared_bytes() + RESERVED - 256 < used <= c.shared_bytes() + RESERVED
    assert 2 * used <= SHARED_MEMORY
    more = dataclasses.replace(c, stages=c.stages + 1).shared_bytes() - c.shared_bytes()
    assert 2 * (used + more) > SHARED_MEMORY or c.stages == MAX_STAGES


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
