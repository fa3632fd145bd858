"""The steps of continuous batching change the pool in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import Scores, get_method
from kvjax.engine import decode, insert, prefill, reclaim
from kvjax.models.decoder import abstract_params
from tests.cache.programs import abstract_cache, pool_bytes, unchecked
from tests.cache.test_memory_of_steps import MODEL, SHAPES


def array(*shape: int, dtype=jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


NUMBER, EOS, SOME = array(), array(1), array(4)


def abstract(tree) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def loop(method: str, num_top: int | None = None, stacked: bool = True) -> tuple:
    run = partial(decode.decode, MODEL, get_method(method).decode, 4, num_top, None)
    params = abstract_params(MODEL, jnp.float32, stacked)
    state = abstract(decode.init_slots(SHAPES.S))

    def step(cache, params, state, slots, limit, eos):
        return run(params, cache, state, slots, limit, eos)

    return step, (abstract_cache(SHAPES), params, state, SOME, NUMBER, EOS)


def admit(method: str | None) -> tuple:
    chosen = None if method is None else get_method(method)

    def run(cache, prompt, keep, slot):
        return insert.place(chosen, {}, cache, prompt, keep, slot)

    kv = array(SHAPES.L, 64, SHAPES.H, SHAPES.d, dtype=jnp.float32)
    metric = array(SHAPES.L, SHAPES.H, 64, dtype=jnp.float32)
    prompt = prefill.PromptKV(kv, kv, Scores(metric), NUMBER)
    return run, (abstract_cache(SHAPES), prompt, NUMBER, NUMBER)


def compress(method: str) -> tuple:
    run = partial(reclaim.compress_slots, 100_000, 16, get_method(method), {})
    return run, (abstract_cache(SHAPES), SOME, SOME, SOME)


def empty() -> tuple:
    marked = array(SHAPES.S, dtype=jnp.bool_)
    return reclaim.empty, (abstract_cache(SHAPES), abstract(decode.init_slots(SHAPES.S)), marked)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (loop, ("full",)),
        (loop, ("full", None, False)),
        (loop, ("kv-compress-continual", 20)),
        (admit, (None,)),
        (admit, ("kv-compress",)),
        (compress, ("kv-compress",)),
        (empty, ()),
    ],
)
def test_steps_copy_no_pool(step, arguments):
    with unchecked():
        fn, args = step(*arguments)
        analysis = jax.jit(fn, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= pool_bytes(args[0])
    assert analysis.temp_size_in_bytes < pool_bytes(args[0]) / 10
