"""Rows of the cache that are taken out for a step and put back."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.store import put_slots, take_slots
from tests.cache.pair import assert_identical, jitted
from tests.oracle import audit

L, H, D, B, T = 2, 2, 2, 4, 12


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("new", [1, 2, 4, 5, 9])
def test_of_rows_that_grew_their_last_blocks_are_put(sharing, new):
    rng = np.random.default_rng(new)
    cache = kv.init_cache(
        num_slots=4, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=60,
        max_blocks_per_head=6, block_size=B, sharing=sharing,
    )  # fmt: skip
    index = np.broadcast_to(np.arange(T, dtype=np.int32), (L, H, T))
    for slot in range(2):
        k, v = rng.standard_normal((2, L, T, H, D)).astype(np.float32)
        # A head has a block in full, and two lack one KV of that.
        kept = np.array([[4, 3], [7, 5 + slot]], np.int32)
        metric, given = np.zeros((L, H, T), np.float32), {"kept_index": index, "kept_len": kept}
        cache, ok = jitted("write_prompt")(
            cache, np.int32(slot), k, v, metric, np.int32(T), **given
        )
        assert ok
    first = 0
    if sharing:
        cache, ok = kv.share(cache, 0, first := 3)
        assert ok
    slots = jnp.asarray([first, 99, 1], jnp.int32)
    part, append = take_slots(cache, slots), jitted("append")
    for _ in range(new):
        k, v = rng.standard_normal((2, L, 3, H, D)).astype(np.float32)
        part, ok = append(part, k, v, jnp.asarray([True, False, True]))
        assert ok
    whole, little = put_slots(cache, slots, part), put_slots(cache, slots, part, new)
    assert_identical(whole, little, "all of the tables, or what has changed")
    assert audit(little) == []
    assert np.asarray(little.seq_len).tolist()[first] == T + new
    changed = np.asarray(little.block_table) != np.asarray(cache.block_table)
    assert changed[first].any()
    assert not changed[2].any()
