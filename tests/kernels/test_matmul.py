"""Products of activations and weights: every kind of number by every implementation."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import explain, matmul, numba_tiles
from tests.kernels.amx import needs_amx
from tests.kernels.devices import H200, TPU_V5E
from tests.kernels.threads import assert_one_thread_suffices

DEPTH, COLUMNS = 96, 544
"""Three steps of a panel; more than one chunk of columns of any kind, with a rest."""
KINDS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
]
BY = [pytest.param("amx", marks=needs_amx), "numba", "xla"]
OFF = {"amx": 2.0**-16, "numba": 2.0**-20, "xla": 2.0**-20}
"""Of Σ |x · weight|, by which float32 activations may be off."""


@functools.cache
def operands(rows: int, of_x: str, of_weight: str, depth: int = DEPTH, columns: int = COLUMNS):
    rng = np.random.default_rng([rows, depth])
    weight = rng.standard_normal((depth, columns))
    if of_weight == "int8":
        weight = rng.integers(-127, 128, (depth, columns))
    x = jnp.asarray(rng.standard_normal((rows, depth)), of_x)
    return x, jnp.asarray(weight, of_weight)


def exact(x, weight) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and that of absolute values."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x @ weight, np.abs(x) @ np.abs(weight)


def assert_product(name: str, x, weight, axis: int = 0) -> None:
    got = matmul(x, weight, axis=axis, dtype="float32", implementation=name)
    assert got.dtype == jnp.float32
    want, size = exact(x, weight.T if axis else weight)
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= OFF[name] * size)


@pytest.mark.parametrize("name", BY)
@pytest.mark.parametrize(("of_x", "of_weight"), KINDS)
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
def test_the_product_in_float64(name: str, of_x: str, of_weight: str, rows: int) -> None:
    assert_product(name, *operands(rows, of_x, of_weight))


@needs_amx
@pytest.mark.parametrize("depth", [32, 1536])
def test_rows_that_a_cache_has_no_room_for(depth: int) -> None:
    """Of 1,536 inputs 160 rows are a chunk, of 32 a fourth of the panels."""
    assert_product("amx", *operands(421, "float32", "float32", depth, 64))


@needs_amx
def test_both_digits_of_both_sides_count() -> None:
    """Numbers of 16 bits are two digits: with one of them 1, the product has all of theirs."""
    some = np.random.default_rng(0).integers(1 << 15, 1 << 16, (64, 64)).astype(np.float32)
    one = jnp.eye(64)
    for x, weight in ((some, one), (one, some)):
        got = matmul(jnp.asarray(x), jnp.asarray(weight), implementation="amx")
        np.testing.assert_array_equal(got, some)


@pytest.mark.parametrize("name", BY)
def test_results_are_of_the_dtype_asked_for(name: str) -> None:
    x, weight = operands(3, "bfloat16", "bfloat16")
    assert matmul(x, weight, implementation=name).dtype == jnp.bfloat16
    got = matmul(x, weight, implementation=name)
    wide = matmul(x, weight, dtype="float32", implementation=name)
    np.testing.assert_array_equal(got, wide.astype("bfloat16"))


@pytest.mark.parametrize("name", BY[:2])
def test_a_row_is_the_same_among_others(name: str) -> None:
    x, weight = operands(70, "float32", "float32")
    together = np.asarray(matmul(x, weight, implementation=name))
    for some in (slice(0, 1), slice(33, 38), slice(64, 70)):
        alone = matmul(x[some], weight, implementation=name)
        np.testing.assert_array_equal(together[some], alone)


@pytest.mark.parametrize("name", BY[:2])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000])
def test_what_is_not_finite_stays_its_own(name: str, bits: int) -> None:
    """Whatever a NaN's bits are, and an infinity, too."""
    bad = np.uint32(bits).view(np.float32)
    x, weight = (np.array(a) for a in operands(40, "float32", "float32"))
    usual = np.array(matmul(jnp.asarray(x), jnp.asarray(weight), implementation=name))
    x[37, 50], weight[5, 300] = bad, bad
    got = np.array(matmul(jnp.asarray(x), jnp.asarray(weight), implementation=name))
    assert not np.isfinite(got[37]).any()
    assert not np.isfinite(got[:, 300]).any()
    got[37], got[:, 300] = usual[37], usual[:, 300]
    np.testing.assert_array_equal(got, usual)


def told() -> list[np.ndarray]:
    found = []
    for name, rows in (("amx", 421), ("numba", 9)):
        if name == "amx" and explain(matmul, *operands(421, "float32", "float32")) != "amx":
            continue
        for of_x, of_weight in KINDS:
            product = matmul(*operands(rows, of_x, of_weight), implementation=name)
            found.append(np.asarray(product, np.float32))
    return found


def test_one_thread_computes_what_several_do(tmp_path) -> None:
    assert_one_thread_suffices(tmp_path, "from tests.kernels.test_matmul import told", "told()")


@pytest.mark.parametrize("name", BY[:2])
def test_the_way_back_is_that_of_a_plain_product(name: str) -> None:
    x, weight = operands(5, "float32", "float32")

    def loss(product, x, weight):
        return jnp.sum(jnp.sin(product(x, weight)))

    by_hand = functools.partial(matmul, implementation=name)
    got = jax.grad(functools.partial(loss, by_hand), argnums=(0, 1))(x, weight)
    want = jax.grad(functools.partial(loss, jnp.matmul), argnums=(0, 1))(x, weight)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2)


def test_weights_that_are_not_differentiated_have_no_derivative() -> None:
    """A product the other way is all: no matrix of derivatives is made and thrown away."""
    x, weight = operands(5, "float32", "int8")

    def loss(x):
        return jnp.sum(matmul(x, weight, implementation="numba"))

    found = jax.make_jaxpr(jax.grad(loss))(x)
    assert str(found).count("dot_general") == 1
    np.testing.assert_allclose(jax.grad(loss)(x)[0], np.sum(weight, axis=1), rtol=1e-5)


def test_several_matrices_one_after_the_other() -> None:
    x, weight = operands(6, "float32", "float32")
    by = functools.partial(matmul, implementation="numba")
    both = jax.vmap(by)(jnp.stack([x, -x]), jnp.stack([weight, 2 * weight]))
    np.testing.assert_array_equal(both[1], by(-x, 2 * weight))


@needs_amx
def test_float32_at_full_precision_is_left_to_xla() -> None:
    given = operands(70, "float32", "float32")
    assert explain(matmul, *given) == "amx"
    assert explain(matmul, *operands(70, "bfloat16", "bfloat16")) == "amx"
    for precision in ("float32", "BF16_BF16_F32_X6"):
        with jax.default_matmul_precision(precision):
            assert f"amx does not serve float32 at precision {precision}" in explain(matmul, *given)
    with jax.default_matmul_precision("highest"):
        assert "amx does not serve float32 at precision highest" in explain(matmul, *given)
        assert explain(matmul, *operands(70, "bfloat16", "bfloat16")) == "amx"
    with jax.default_matmul_precision("high"):
        assert explain(matmul, *given) == "amx"


@pytest.mark.parametrize(
    ("rows", "kinds", "name"),
    [
        (1, KINDS[0], "xla"),
        (2, KINDS[0], "numba"),
        (32, KINDS[0], "numba"),
        (33, KINDS[0], "xla"),
        (1, KINDS[1], "numba"),
        (17, KINDS[1], "xla"),
        (1, KINDS[2], "numba"),
        (17, KINDS[2], "xla"),
    ],
)
def test_few_rows_are_for_whoever_is_faster(rows: int, kinds, name: str) -> None:
    assert explain(matmul, *operands(rows, *kinds)).startswith(name)


def test_a_processor_without_amx(monkeypatch) -> None:
    def lacks():
        raise NotImplementedError("a processor without AMX")

    monkeypatch.setattr(numba_tiles, "check", lacks)
    given = operands(70, "float32", "float32")
    assert explain(matmul, *given).startswith("xla: amx does not serve a processor without AMX;")
    with pytest.raises(ValueError, match="'amx', wanted one that serves a processor without AMX"):
        matmul(*given, implementation="amx")


@pytest.mark.parametrize(("where", "platform"), [(H200, "cuda"), (TPU_V5E, "tpu")])
def test_devices_have_products_of_their_own(where, platform: str) -> None:
    with jax.sharding.use_abstract_mesh(where):
        assert explain(matmul, *operands(70, "float32", "float32")).startswith("xla: ")
        traced = jax.jit(matmul).trace(*operands(70, "bfloat16", "int8"))
        assert "dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_matrices_that_fill_no_vectors_are_left_to_xla() -> None:
    for shape in ((95, 544), (96, 543), (90, 544)):
        found = explain(matmul, jnp.ones((4, shape[0])), jnp.ones(shape))
        assert f"numba does not serve a matrix of {list(shape)}" in found


@needs_amx
def test_matrices_that_fill_no_tiles_are_left_to_xla() -> None:
    found = explain(matmul, jnp.ones((70, 100)), jnp.ones((100, 544)))
    assert "amx does not serve a matrix of [100, 544]" in found


def test_no_rows_have_no_product() -> None:
    x, weight = jnp.ones((0, 32)), jnp.ones((32, 48))
    assert matmul(x, weight).shape == (0, 48)
    for name in ("amx", "numba"):
        with pytest.raises(ValueError, match=f"'{name}', wanted one that serves"):
            matmul(x, weight, implementation=name)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (jnp.ones((2, 0)), jnp.ones((0, 4)), r"x shape: got \[2, 0\]"),
        (jnp.ones((2, 3, 4)), jnp.ones((4, 4)), r"x shape: got \[2, 3, 4\]"),
        (jnp.ones((2, 4)), jnp.ones((5, 4)), r"weight shape: got \[5, 4\], wanted \[4, O\]"),
        (jnp.ones((2, 4), jnp.int32), jnp.ones((4, 4)), "x dtype: got int32"),
        (jnp.ones((2, 4)), jnp.ones((4, 4), jnp.bfloat16), "weight dtype: got bfloat16"),
        (jnp.ones((2, 4)), jnp.ones((4, 4)), "implementation: got 'cublas'"),
    ],
)
def test_bad_arguments_are_named(x, weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(matmul)(x, weight, implementation="cublas")


def test_amx_is_asked_for_once_and_refused_in_words(monkeypatch) -> None:
    monkeypatch.setattr(numba_tiles.platform, "machine", lambda: "aarch64")
    with pytest.raises(NotImplementedError, match=r"^a processor without AMX$"):
        numba_tiles.check.__wrapped__()
    monkeypatch.undo()
    usual = dict.fromkeys(("amx-tile", "amx-bf16", "avx512f"), True)
    monkeypatch.setattr(numba_tiles.llvmlite.binding, "get_host_cpu_features", lambda: usual)
    monkeypatch.setattr(numba_tiles.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numba_tiles, "_not_allowed", lambda: True)
    with pytest.raises(NotImplementedError, match=r"^AMX on "):
        numba_tiles.check.__wrapped__()
    monkeypatch.setattr(numba_tiles, "_not_allowed", lambda: False)
    numba_tiles.check.__wrapped__()
    monkeypatch.setattr("numba.config.CPU_NAME", "generic")
    with pytest.raises(NotImplementedError, match=r"^a processor that NUMBA_CPU_NAME or"):
        numba_tiles.check.__wrapped__()
