"""Selection without a sort."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache.policy.block_cost import kth_smallest

KTH_SMALLEST = jax.jit(kth_smallest)
VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, 1.0]),
)


@given(st.lists(VALUES, min_size=1, max_size=12), st.data())
def test_the_kth_smallest_is_what_a_sort_finds(values, data):
    k = data.draw(st.integers(1, len(values)))
    keys = np.full(12, np.inf, np.float32)
    keys[: len(values)] = values
    found = KTH_SMALLEST(jnp.asarray([keys, keys[::-1]]), jnp.full(2, k, jnp.int32))
    assert (np.asarray(found) == np.sort(keys)[k - 1]).all()
