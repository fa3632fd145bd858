"""The engine's compiled steps change the cache in place too, and never ask the host."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import as_codec, get_method
from kvjax.cache import compress as compress_cache
from kvjax.engine.decode import decode as decode_loop
from kvjax.engine.decode import init_slots
from kvjax.engine.prefill import prefill_in_pool
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import abstract_params
from tests.cache.programs import Shapes, abstract_cache, equations, pool_bytes, unchecked

SHAPES = Shapes(S=8, L=8, H=2, M=128, N=12007, d=64)  # no other axis has this many blocks
MODEL = ModelConfig(
    name="tiny",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=SHAPES.L,
    num_heads=2 * SHAPES.H,
    num_kv_heads=SHAPES.H,
    head_dim=SHAPES.d,
)
METHODS = ("full", "kv-compress-continual", "kv-compress-full-l2")


def decode(method: str) -> tuple:
    """The decode loop with the cache first."""
    with unchecked():
        state = init_slots(SHAPES.S)

    def step(cache, params, state, slots, limit, eos):
        run = partial(decode_loop, MODEL, get_method(method).decode, 4, None, None)
        return run(params, cache, state, slots, limit, eos)

    params = abstract_params(MODEL, jnp.float32)
    slots, limit, eos = (jax.ShapeDtypeStruct(n, jnp.int32) for n in ((SHAPES.S,), (), (1,)))
    return step, (abstract_cache(SHAPES), params, state, slots, limit, eos)


def chunk(method: str) -> tuple:
    """The next chunk of a prompt with the cache first."""

    def step(cache, params, slot, tokens, length):
        run = partial(prefill_in_pool, MODEL, get_method(method).observer)
        return run(params, {}, cache, slot, tokens, length)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    params = abstract_params(MODEL, jnp.float32)
    return step, (abstract_cache(SHAPES), params, number, tokens, number)


def temporaries(step, method) -> float:
    """Bytes that a step takes beside the pool, in which it works in place, as a share of it."""
    fn, args = step(method)
    with unchecked():
        analysis = jax.jit(fn, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= pool_bytes(args[0])
    return analysis.temp_size_in_bytes / pool_bytes(args[0])


@pytest.mark.parametrize(
    ("step", "method"),
    [(decode, METHODS[0]), (decode, METHODS[1]), (chunk, METHODS[1]), (chunk, METHODS[2])],
)
def test_steps_copy_no_pool(step, method):
    assert temporaries(step, method) < 1 / 10


def compress(method: str) -> tuple:
    """Compression of running sequences with the cache first."""

    def step(cache, slots, keep):
        return compress_cache(cache, slots, keep, get_method(method), max_kvs_per_step=1 << 17)

    numbers = jax.ShapeDtypeStruct((2,), jnp.int32)
    return step, (abstract_cache(SHAPES), numbers, numbers)


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (compress, "ada-pyramidkv"),
        (compress, "kvcrush:snapkv"),
        (decode, "tova"),
        pytest.param(compress, "snapkv", marks=pytest.mark.slow),
        pytest.param(compress, "paged-h2o", marks=pytest.mark.slow),
        pytest.param(compress, "kmeans:snapkv", marks=pytest.mark.slow),
        pytest.param(decode, "key-norm", marks=pytest.mark.slow),
    ],
)
def test_no_method_copies_the_pool(step, method):
    assert temporaries(step, method) < 1 / 10


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (chunk, "full"),
        (chunk, "snapkv"),
        pytest.param(decode, "kv-compress-continual", marks=pytest.mark.slow),
        pytest.param(compress, "snapkv", marks=pytest.mark.slow),
    ],
)
def test_steps_over_shared_blocks_copy_no_pool(step, method, monkeypatch):
    """They copy the blocks that they write to and others own, in a loop of its own."""
    monkeypatch.setattr(f"{__name__}.abstract_cache", partial(abstract_cache, sharing=True))
    assert temporaries(step, method) < 1 / 10


def test_a_merger_copies_no_pool():
    # Of a few rows it has the keys and values as they were and as they are then.
    assert temporaries(compress, "kvmerger") < 1 / 6


@pytest.mark.parametrize(
    ("step", "stored"),
    [
        pytest.param(decode, "int8w16", marks=pytest.mark.slow),
        (chunk, "int8w16"),
        (decode, "int4+"),
    ],
)
def test_what_is_beside_codes_copies_no_pool_of_them(step, stored, monkeypatch):
    coded = partial(abstract_cache, codec=as_codec(stored, "float32"))
    monkeypatch.setattr(f"{__name__}.abstract_cache", coded)
    # Codes of keys, or of values, are more than two fifths of the pool.
    assert temporaries(step, METHODS[1]) < 1 / 3


IN_PLACE = {"scatter", "scatter-add", "scan", "while", "cond", "jit", "pjit", "ffi_call"}


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_decode_step_passes_over_no_pool_and_calls_nobody_back(method):
    fn, args = decode(method)
    with unchecked():
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    made = {
        e.primitive.name
        for e in equations(jaxpr)
        for o in e.outvars
        if getattr(o.aval, "shape", ())[:2] == (SHAPES.N, SHAPES.b)
    }
    assert made <= IN_PLACE
    calls = [e for e in equations(jaxpr) if e.primitive.name == "ffi_call"]
    calls = [e for e in calls if "matmul" not in e.params["target_name"]]
    assert len(calls) == 1
    assert len(calls[0].params["input_output_aliases"]) == (method == METHODS[1])
    names = {e.primitive.name for e in equations(jaxpr)}
    assert not [n for n in names if "callback" in n or "feed" in n]
