"""Numbers as a narrower type keeps them, also where XLA may keep more digits than it is told."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache import as_codec
from kvjax.eval.prompt_codecs.codes import in_bfloat16
from kvjax.kernels.paged_attention import mosaic_gpu, spec
from kvjax.kernels.rounding import rounded

NUMBERS = st.floats(2.0**-100, 2.0**100, width=32)


@given(st.lists(NUMBERS | NUMBERS.map(lambda x: -x) | st.sampled_from([0.0, np.inf, np.nan])))
def test_it_is_what_the_type_keeps(numbers):
    x = jnp.asarray(numbers, jnp.float32)
    wanted = x.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded(x, jnp.bfloat16), wanted)


def operands(x):
    shape = spec.FAMILIES["float32 d=64"]
    c = mosaic_gpu.config(shape, scale=1, keep_logits=True, cores=1)
    high, low = jnp.moveaxis(mosaic_gpu._operands(x, c), 1, 0)
    return high, low


@pytest.mark.parametrize("made", [operands, as_codec("affine4", jnp.float32).encode, in_bfloat16])
def test_nothing_is_rounded_and_widened_again(made):
    """XLA for GPUs would leave both out: halves would lack the lower one, and codes be those of
    other numbers than are stored."""
    found = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive is jax.lax.convert_element_type_p:
                kinds = (equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype)
                found.append(tuple(map(str, kinds)))
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                look(inner)

    look(jax.make_jaxpr(made)(jnp.ones((3, 4, 64), jnp.float32)).jaxpr)
    assert ("bfloat16", "float32") not in found
