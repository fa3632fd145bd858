"""Weights of few bits: what is stored of them, where it comes from, and what it multiplies to."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import LLM, EngineConfig
from kvjax.cli.models import WEIGHT_DTYPES as OFFERED
from kvjax.engine.probe import probe_artefacts
from kvjax.errors import UserError
from kvjax.models import LoadedModel, load_model, narrow
from kvjax.models.config import WEIGHT_DTYPES, get_model_entry
from kvjax.models.decoder import abstract_params, init_params, logical_axes
from kvjax.models.fingerprint import model_hash
from kvjax.models.tokenizer import ByteTokenizer
from kvjax.models.weights import checkpoint_hash, load_params, save_orbax
from tests.models.checkpoints import CONFIG, QWEN3, random_tensors, write_folder, write_gguf
from tests.models.decoder_helpers import empty_cache, run
from tests.oracle.narrow import narrow_rows

BIASED = dataclasses.replace(CONFIG, attention_bias=True, tie_word_embeddings=True)
OUTPUTS = {"embed": (0,), "qkv": (1, 2, 3), "out": (3,), "gate_up": (1, 2), "down": (1,)}
OUTPUTS["lm_head"] = (1,)
"""Axes of the outputs of every matrix."""


def leaves(params: nnx.State) -> dict[tuple, np.ndarray]:
    flat: Any = nnx.to_flat_state(params)
    return {path: np.asarray(leaf[...]) for path, leaf in flat}


def oracle(value: np.ndarray, name: str, dtype: str, scale_dtype: Any) -> tuple:
    """Numbers and scales of a matrix, by the axes of its outputs."""
    outputs = OUTPUTS[name]
    rows = np.moveaxis(value, outputs, range(len(outputs)))
    shape = rows.shape
    numbers, scale = narrow_rows(
        rows.reshape(int(np.prod(shape[: len(outputs)])), -1), dtype, scale_dtype
    )
    numbers = np.moveaxis(numbers.reshape(shape), range(len(outputs)), outputs)
    return numbers, scale.reshape(shape[: len(outputs)])


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_numbers_are_the_nearest(dtype, scale_dtype):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 33)) * 10.0 ** rng.integers(-3, 3, (64, 1))
    # On the line between two numbers, in rows whose largest weight is the largest number.
    rows[:8] = rng.integers(-254, 255, (8, 33)) / 2
    rows[:8, 0], rows[8], rows[9] = 127, 0, 1e-12
    rows = rows.astype(jnp.bfloat16)
    as_dtype = jnp.dtype(scale_dtype)
    numbers, scale = narrow.narrowed(rows, jnp.dtype(dtype), as_dtype)
    assert numbers.dtype == dtype
    assert scale.dtype == as_dtype
    want = narrow_rows(np.asarray(rows, np.float64), dtype, as_dtype)
    np.testing.assert_array_equal(scale.astype(np.float64), want[1])
    np.testing.assert_array_equal(numbers.astype(np.float64), want[0])


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("config", "dtype"), [(BIASED, "int8"), (QWEN3, "float8_e4m3fn")])
def test_every_format_loads_as_the_oracle_says(tmp_path, config, dtype, stacked):
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "folder", config, tensors)
    _, whole = load_params(folder, stacked=stacked)
    orbax = save_orbax(tmp_path / "orbax", config, whole)
    paths = [folder, orbax]
    if config is BIASED:
        paths.append(write_gguf(tmp_path / "model.gguf", config, tensors))
    for path in paths:
        told = []

        def progress(*what, told=told):
            told.append(what)

        found, params = load_params(
            path, None, "float32", progress, weight_dtype=dtype, stacked=stacked
        )
        assert found.weight_dtype == dtype
        abstract = jax.tree.map(
            lambda x: (x.shape, x.dtype), abstract_params(found, "float32", stacked)
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == abstract
        assert logical_axes(found, stacked).keys() == leaves(params).keys()
        got = leaves(params)
        for place, value in leaves(whole).items():
            name = place[-1]
            if name not in OUTPUTS:
                np.testing.assert_array_equal(got.pop(place), value, str(place))
                continue
            layers = value if stacked and len(place) == 2 else value[None]
            want = [oracle(one, name, dtype, np.float32) for one in layers]
            numbers, scales = (np.stack(part).reshape(-1) for part in zip(*want))
            np.testing.assert_array_equal(
                got.pop(place).astype(np.float64).ravel(), numbers, str(place)
            )
            scale = got.pop((*place[:-1], f"{name}_scale"))
            np.testing.assert_array_equal(scale.ravel(), scales.astype(np.float32), str(place))
        assert not got
        if path != orbax:
            assert told[-1] == ("load", *[sum(x.nbytes for x in jax.tree.leaves(params))] * 2)


@pytest.mark.parametrize(("config", "stacked"), [(BIASED, False), (QWEN3, True)])
def test_products_are_those_of_the_weights_that_it_stands_for(config, stacked):
    few = dataclasses.replace(config, weight_dtype="int8")
    params = init_params(few, "float32", 4, stacked)
    found = leaves(params)
    whole: Any = nnx.to_flat_state(init_params(config, "float32", 4, stacked))
    plain = []
    for path, leaf in whole:
        value = found[path]
        if path[-1] in OUTPUTS:
            shift = len(path) == 2 and stacked
            scale = found[(*path[:-1], f"{path[-1]}_scale")]
            inputs = set(range(value.ndim - shift)) - set(OUTPUTS[path[-1]])
            value = value * np.expand_dims(scale, tuple(at + shift for at in sorted(inputs)))
            # What is drawn is what would be drawn with all bits.
            np.testing.assert_allclose(value, leaf[...], atol=scale.max() / 2, rtol=1e-6)
        plain.append((path, leaf.replace(jnp.asarray(value, jnp.float32))))
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    cache = empty_cache(config, 1, 8)
    step = jax.jit(run, static_argnums=0)
    want, _ = step(config, nnx.from_flat_state(plain), tokens, 0, cache)
    got, _ = step(few, params, tokens, 0, cache)
    np.testing.assert_allclose(got, want, atol=3e-4 * float(jnp.abs(want).max()))
    gram, whole_gram = (probe_artefacts(config, p) for p in (params, nnx.from_flat_state(plain)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), gram, whole_gram)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [32, 75, 300])
def test_products_in_tiles(monkeypatch, rows, axis):
    """Whatever is left over for the last one."""
    monkeypatch.setattr(narrow, "_TILE", 64 * 20)
    rng = np.random.default_rng(rows)
    weight = rng.integers(-15, 16, (rows, 20)).astype("float8_e4m3fn")
    scale = rng.random(20 if axis == 0 else rows).astype(np.float32)
    x = rng.standard_normal((2, 3, rows if axis == 0 else 20)).astype(np.float32)
    want = x.astype(np.float64) @ (weight.T if axis else weight).astype(np.float64) * scale
    found = narrow.scaled_product(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale), axis)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_by_integers(axis, dtype):
    """Off by no more than activations of 16 bits are, each row by its own largest."""
    rng = np.random.default_rng(axis)
    weight = rng.integers(-127, 128, (40, 24)).astype(np.int8)
    scale = rng.random(40 if axis else 24).astype(np.float32)
    x = rng.standard_normal((2, 3, 24 if axis else 40)) * 10.0 ** np.arange(-4, 2).reshape(2, 3, 1)
    x[1, 2, 3], x[0, 1] = 900, 0
    x = np.asarray(x.astype(dtype), np.float64)
    found = narrow.scaled_product(
        jnp.asarray(x, dtype), jnp.asarray(weight), jnp.asarray(scale), axis
    )
    assert found.dtype == jnp.float32
    matrix = (weight.T if axis else weight).astype(np.float64) * scale
    allowed = np.abs(x).max(-1, keepdims=True) * (2.0**-16 + 2.0**-22) * np.abs(matrix).sum(0)
    assert (np.abs(found - x @ matrix) <= allowed).all()
    assert (np.abs(found - x @ matrix)[1, 2] > 0).any()


def test_products_by_kernels_that_serve():
    """Of few rows activations are not rounded."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((3, 32)).astype(np.float32), rng.random(48).astype(np.float32)
    weight = rng.integers(-127, 128, (32, 48)).astype(np.int8)
    found = narrow.scaled_product(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale))
    matrix = weight.astype(np.float64) * scale
    assert (np.abs(found - x @ matrix) <= 2.0**-20 * (np.abs(x) @ np.abs(matrix))).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(bad):
    x = np.ones((2, 8), np.float32)
    x[0, 3] = bad
    found = narrow.scaled_product(jnp.asarray(x), jnp.ones((8, 4), jnp.int8), jnp.ones(4))
    assert not np.isfinite(found[0]).any()
    np.testing.assert_allclose(found[1], 8, rtol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, BIASED, QWEN3])
def test_calibrations_of_all_bits_fit(tmp_path, config):
    """The fingerprint is that of the checkpoint, whatever its format."""
    # So small that float16 keeps few bits of them.
    tensors = {name: x * 1e-6 for name, x in random_tensors(config).items()}
    folder = write_folder(tmp_path / "folder", config, tensors)
    ByteTokenizer().save(folder)
    _, whole = load_params(folder)
    want = model_hash(config, whole)
    assert load_model(weights=folder, dtype="float16").fingerprint == want
    assert load_model(weights=folder, weight_dtype="int8", dtype="bfloat16").fingerprint == want
    if config is CONFIG:
        file = write_gguf(tmp_path / "model.gguf", config, tensors)
        assert checkpoint_hash(file, config, "float32") == want
        orbax = save_orbax(tmp_path / "orbax", config, whole)
        assert checkpoint_hash(orbax, config, "float32") == want


def test_an_engine_plans_with_their_bytes():
    config = dataclasses.replace(CONFIG, weight_dtype="float8_e4m3fn", vocab_size=257)
    model = LoadedModel(config, init_params(config, "bfloat16"), ByteTokenizer(), "dummy weights")
    sizes = EngineConfig(
        max_batch=1, max_len=64, prefill_chunk=64, prefill_scratch=64, pool_tokens=64
    )
    llm = LLM(model, config=sizes)
    matrices = 2 * 257 * 256 + 2 * (256 * 12 * 32 + 256 * 256 + 3 * 256 * 512)
    outputs = 2 * 257 + 2 * (12 * 32 + 256 + 2 * 512 + 256)
    assert llm.plan.weights == matrices + 2 * (outputs + 5 * 256)
    assert llm.plan.spec.codec.name == "bfloat16"


def test_what_is_refused(tmp_path):
    assert OFFERED == WEIGHT_DTYPES
    folder = write_folder(tmp_path / "folder", CONFIG, random_tensors(CONFIG))
    for name in ("int4", "float32"):
        with pytest.raises(UserError, match="give one of int8, float8_e4m3fn, or none"):
            load_params(folder, weight_dtype=name)
    with pytest.raises(UserError, match="'int3'"):
        load_model("smollm2-135m", dummy_weights=True, weight_dtype="int3")
    config, params = load_params(folder, weight_dtype="int8")
    with pytest.raises(UserError, match="weight_dtype int8: checkpoints hold all bits"):
        save_orbax(tmp_path / "orbax", config, params)


def test_large_models_fit_where_they_are_to():
    """70B beside a pool on a card of 141 GB, 8B on one of 24 GB: bytes of weights."""

    def size(name, dtype):
        config = dataclasses.replace(get_model_entry(name).config, weight_dtype=dtype)
        return sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_params(config, "bfloat16"))
        )

    assert 70.5e9 < size("llama3.1-70b", "float8_e4m3fn") < 70.7e9
    assert 8.0e9 < size("llama3.1-8b", "int8") < 8.1e9
