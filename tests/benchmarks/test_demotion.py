"""`python -m benchmarks.demotion`: which blocks go through fewer bits, and at which rates."""

import argparse
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demotion import BLOCK, cheapest, demoting, lines, main, rates_of
from kvjax.cache import as_codec, get_method
from kvjax.cache.methods.matched import REFERENCE_QUERY
from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.cli import main_of


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
def test_the_cheapest_blocks_of_a_layer_are_demoted(share):
    rng = np.random.default_rng(5)
    heads, tokens = 3, 150
    kept = rng.random((heads, tokens)) < np.asarray([[0.2], [0.9], [0]])
    score = rng.random((heads, tokens)).astype(np.float32)
    score[:, -5:] = np.inf
    blocks = []
    for head in range(heads):
        held = np.flatnonzero(kept[head])
        blocks += [(head, list(part)) for part in itertools.batched(held, BLOCK)]
    blocks.sort(key=lambda block: float(np.sum(score[block[0], block[1]])))
    want = np.zeros_like(kept)
    for head, held in blocks[: int(share * len(blocks))]:
        want[head, held] = True
    assert (np.asarray(cheapest(jnp.asarray(score), jnp.asarray(kept), share)) == want).all()
    assert want.any() == (share > 0)


@pytest.mark.parametrize(("share", "name"), [(0, "int8"), (1, "int4")])
def test_what_stays_goes_through_the_types(share, name):
    merger = demoting(
        get_method("matched:predicted-reads-blind"), share, "int8", "int4", "some"
    ).merger
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((2, 40, 8)), jnp.float32) for _ in range(2))
    kept, position = jnp.ones((2, 40), bool), jnp.tile(jnp.arange(40, dtype=jnp.int32), (2, 1))
    artefacts = {
        REFERENCE_QUERY: jnp.zeros((4, 2, 8)),
        ROPE_FREQUENCY: jnp.ones(4),
    }
    found = merger.fold(k, v, position, kept * 1.0, ~kept, kept, jnp.int32(40), artefacts)
    codec = as_codec(name, "float32")
    for one, x, got in ((codec.of_keys, k, found[0]), (codec.of_values, v, found[1])):
        np.testing.assert_allclose(got, one.decode(one.encode(x)), rtol=1e-6, atol=1e-6)


def test_shares_take_the_same_bytes():
    options = argparse.Namespace(high="int8", low="int4", equal_to=[8.0, 32.0, 1.0])
    # 64 channels: 132 and 68 bytes of a KV, and 8 of numbers.
    assert rates_of(options, 0, 64) == [8, 32, 1]
    assert rates_of(options, 1, 64) == [round(8 * 76 / 140, 3), round(32 * 76 / 140, 3), 1]
    assert rates_of(options, 0.5, 64) == [round(8 * 108 / 140, 3), round(32 * 108 / 140, 3), 1]


def test_results_of_a_share_are_those_at_its_rate():
    def result(method, rate, score, kl):
        same = {"protocol": "chat", "kvs": 10, "kvs_full": 80}
        return {**same, "method": method, "rate": rate, "score": score, "kl": kl}

    results = [
        result("a", 8.0, 1.0, 0.25),
        result("a", 8.0, 0.0, 0.75),
        result("a", 4.0, 0.0, 9.0),
        result("b", 4.0, 1.0, None),
        result("full", 1.0, 1.0, 0.0),
    ]
    options = argparse.Namespace(protocols="chat", equal_to=[8.0])
    first, second = lines(options, {"a": [8.0], "b": [4.0]}, results)
    assert first[:5] == ["chat", "8", "a", "1/8.0", 2]
    assert first[5].startswith("0.50 ")
    assert first[6].startswith("0.500 ")
    assert second[5].startswith("1.00 ")
    assert second[6] is None


def test_what_is_refused(capsys):
    for given, says in (
        (("--shares", "2"), "--shares 2"),
        (("--equal-to", "a"), "--equal-to"),
        (("--low", "none"), "none"),
        (("--low", "int4+"), "--low int4+: which KVs have finer codes is a pool's; give int4"),
        (("--method", "snapkv", "--tasks", "passkey", "--rows", "1"), "matched:NAME"),
    ):
        assert main_of(main, list(given)) == 2
        assert says in capsys.readouterr().err.strip().splitlines()[-1]
