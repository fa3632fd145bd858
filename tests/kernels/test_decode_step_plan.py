"""The engine's decode step on a GPU that is not there: one work list for all layers, lowered."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from kvjax.cache import as_codec, init_cache
from kvjax.cache.methods import get_method
from kvjax.engine import sampling
from kvjax.engine.decode import decode, decode_once, decode_step, init_slots
from kvjax.kernels.paged_attention import worklist
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import abstract_params
from tests.kernels.devices import H200

MODEL = ModelConfig(
    name="narrow",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
)
SLOTS = 5
PROGRAMS = 2 * 132


def abstract_cache(stored: str | None = None):
    return jax.eval_shape(
        lambda: init_cache(
            num_slots=SLOTS,
            num_layers=MODEL.num_layers,
            num_kv_heads=MODEL.num_kv_heads,
            head_dim=MODEL.head_dim,
            num_blocks=64,
            max_blocks_per_head=8,
            block_size=16,
            codec=as_codec(stored, jnp.bfloat16),
        )
    )


def traced(method: str, stored: str | None = None):
    """The decode step, traced for the device of the mesh in use."""
    cache = abstract_cache(stored)
    params = abstract_params(MODEL, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    active = jax.ShapeDtypeStruct((SLOTS,), jnp.bool_)
    step = jax.jit(functools.partial(decode_step, MODEL, get_method(method).decode))
    return step.trace(params, cache, tokens, active)


def programs_built(jaxpr, inside_layers: bool = False):
    """Each array of spans: whether it is built inside the scan over layers, and its shape."""
    for equation in jaxpr.eqns:
        inside = inside_layers or equation.primitive.name == "scan"
        if equation.primitive.name == "pad":
            shape = equation.outvars[0].aval.shape
            if shape[-2:] == (PROGRAMS, worklist.SPAN_WIDTH):
                yield inside, shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from programs_built(inner, inside)


@pytest.mark.parametrize(
    ("method", "stored"),
    [("full", None), ("kv-compress-continual", None), ("kv-compress-continual", "int4w16")],
)
def test_one_work_list_per_step(method: str, stored: str | None) -> None:
    """Of a pool of codes with exact KVs beside it, too."""
    with jax.sharding.use_abstract_mesh(H200):
        step = traced(method, stored)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert list(programs_built(step.jaxpr.jaxpr)) == [
        (False, (MODEL.num_layers, PROGRAMS, worklist.SPAN_WIDTH))
    ]
    assert "paged_attention_finish" in text


def test_no_work_list_where_none_is_used() -> None:
    assert not list(programs_built(traced("full").jaxpr.jaxpr))


@pytest.mark.parametrize("effort", [sampling.GREEDY, sampling.DRAWN, sampling.FILTERED])
def test_a_single_step_makes_the_host_wait_for_nothing(effort: int) -> None:
    """At a loop's turns and at branches it does, and what comes behind is dispatched late."""
    rule = get_method("kv-compress-continual").decode
    state = jax.eval_shape(lambda: init_slots(SLOTS))
    slots, eos = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    params = abstract_params(MODEL, jnp.bfloat16, stacked=False)

    def text(step, *more) -> str:
        given = (params, abstract_cache(), state, slots, *more, eos)
        with jax.sharding.use_abstract_mesh(H200):
            lowered = jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    waits = re.compile(r"stablehlo\.(while|case|if)\b")
    once = functools.partial(decode_once, MODEL, rule, 8, None, None, effort)
    assert not waits.findall(text(once))
    loop = functools.partial(decode, MODEL, rule, 8, None, None)
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    assert {"while", "case"} == set(waits.findall(text(loop, limit)))
