"""A prompt compressed on its way into the pool equals one written whole and compressed there."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from tests.cache.pair import Geometry, Pair, heads_of, jitted, levels

ROOMY = Geometry(blocks=72)


def prompt(geometry: Geometry, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    shape = (geometry.layers, geometry.prompt, geometry.heads, geometry.d)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return k, v, levels(rng, (geometry.layers, geometry.heads, geometry.prompt))


@pytest.mark.parametrize("keep", [0, 4, 7, 12, 99])
@pytest.mark.parametrize(("length", "protected", "sinks"), [(16, 0, 0), (15, 3, 1), (13, 8, 0)])
def test_survivors_equal_write_then_compress(length, protected, sinks, keep):
    k, v, metric = prompt(ROOMY, keep + length)
    options = {"protected": protected, "sinks": sinks}
    direct, report, ok = jitted("write_survivors")(
        ROOMY.init(), jnp.int32(1), k, v, metric, jnp.int32(length), jnp.int32(keep), **options
    )
    whole, written = jitted("write_prompt")(
        ROOMY.init(), jnp.int32(1), k, v, metric, jnp.int32(length)
    )
    whole, want = jitted("compress")(
        whole, jnp.ones(1, jnp.int32), jnp.full(1, keep, jnp.int32), **options
    )
    assert ok
    assert written
    kv.check_invariants(direct)
    assert np.array_equal(report.freed, want.freed)
    assert np.array_equal(report.shortfall, want.shortfall)
    assert int(kv.free_blocks(direct)) == int(kv.free_blocks(whole))
    assert np.array_equal(direct.seq_len, whole.seq_len)
    left, right = heads_of(direct), heads_of(whole)
    for at, kvs in left.items():
        assert sorted(x.bits() for x in kvs) == sorted(x.bits() for x in right[at])
        assert [x.position for x in kvs] == sorted(x.position for x in kvs)


def test_a_prompt_larger_than_pool_and_table_fits_by_its_survivors():
    """16 blocks whole, 8 survive: they fit a pool of 8 although the prompt never would."""
    geometry = Geometry(slots=1, blocks=8, max_blocks=4)
    pair = Pair(geometry, seed=1)
    assert not pair.write_prompt(0, 16)
    ok, choice = pair.write_survivors(0, 16, keep=8, protected=2)
    assert ok
    assert sum(choice.blocks.values()) == 8
    assert int(kv.free_blocks(pair.cache)) == 0


def test_survivors_that_do_not_fit_change_nothing():
    geometry = Geometry(slots=2, blocks=10)
    pair = Pair(geometry, seed=2)
    assert pair.write_survivors(0, 16, keep=6)[0]
    assert not pair.write_survivors(1, 16, keep=5)[0]
    assert pair.write_survivors(1, 16, keep=4)[0]


def test_other_sequences_are_untouched():
    pair = Pair(ROOMY, seed=3)
    assert pair.write_prompt(0, 11)
    before = [x.bits() for x in heads_of(pair.cache)[0, 1, 0]]
    assert pair.write_survivors(2, 16, keep=6)[0]
    assert [x.bits() for x in heads_of(pair.cache)[0, 1, 0]] == before
