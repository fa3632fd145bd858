"""An engine whose pool has few bits, and the newest KVs of each head beside it."""

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from kvjax.errors import UserError
from tests.engine.conftest import TINY
from tests.engine.serving import (
    FULL,
    SIZES,
    assert_empty,
    cache_behind,
    greedy,
    make_llm,
    mean_kl,
    prompts_of,
    told_behind,
)

H2O = CompressionConfig("h2o-decode", max_cache_tokens=16, compress_every=4)


def every(max_len: int) -> str:
    """A window that no head outgrows: whatever is read is exact."""
    return f"int2w{max_len}"


def rounds(llm, prompts, tokens: int = 10):
    """Tokens and what the pool holds after every round."""
    for prompt in prompts:
        llm.add_request(prompt, greedy(tokens))
    found = []
    while llm.has_unfinished():
        told = {out.request_id: out.token_ids for out in llm.step()}
        cache = llm.worker.cache
        check_invariants(cache)
        found.append((told, np.asarray(cache.position).tolist(), np.asarray(cache.metric)))
    return found


@pytest.mark.parametrize(
    ("compression", "prompts", "given"),
    [
        # A prompt in its scratch, one in chunks in the pool, compression while decoding by what
        # decode steps measured.
        (H2O, (30, 150), {"max_len": 192, "prefill_scratch": 64}),
        # Blocks run out: sequences are preempted, and begin again in other slots.
        pytest.param(
            FULL, (30, 25, 28), {"pool_tokens": 72, "max_len": 64}, marks=pytest.mark.slow
        ),
    ],
    ids=["compressed", "preempted"],
)
@pytest.mark.slow
def test_with_every_kv_in_it_an_engine_is_one_of_exact_kvs(
    tiny_params, compression, prompts, given
):
    """Tokens, kept positions and metrics, round by round."""
    found = []
    for stored in (None, every(given["max_len"])):
        llm = make_llm(tiny_params, compression, cache_dtype=stored, **given)
        found.append(rounds(llm, prompts_of(*prompts), 20))
        assert (llm.metrics.as_dict()["kvjax_preemptions_total"] > 0) == (compression is FULL)
        assert_empty(llm)
        window = llm.worker.cache.window
        assert window is None or not (np.asarray(window.position) >= 0).any()
    for (tokens, held, metric), (of_window, held_too, metric_too) in zip(*found, strict=True):
        assert tokens == of_window
        assert held == held_too
        np.testing.assert_allclose(metric, metric_too, atol=1e-4)


@pytest.mark.slow
def test_a_shared_prefix_brings_its_window(tiny_params):
    """A second question about a document reads what the first one read."""
    (document,) = prompts_of(40)
    asked = [np.concatenate([document, question]) for question in prompts_of(9, 5)]
    found = []
    for stored in (None, every(64)):
        llm = make_llm(
            tiny_params, cache_dtype=stored, max_len=64, share_prefix="auto", share_grain=8,
            retained_prefixes=2,
        )  # fmt: skip
        llm.retain(document)
        outputs = llm.generate(asked, greedy(8))
        assert [output.stats.cached_tokens for output in outputs] == [40, 40]
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_window_brings_answers_nearer_to_those_of_exact_kvs(tiny_params):
    """KL of the next tokens, step by step behind the same prompt and tokens."""
    ids, first = prompts_of(32)[0], 24
    rows = {
        kind: told_behind(
            TINY, tiny_params, cache_behind(TINY, tiny_params, ids[:first], kind), ids[first:]
        )
        for kind in ("float32", "int2", "int2w24", "int2+")
    }
    exact = rows.pop("float32")
    lost = {kind: mean_kl(exact, told) for kind, told in rows.items()}
    assert 0 < lost["int2w24"] < 0.7 * lost["int2"], lost
    assert 0 < lost["int2+"] < 0.2 * lost["int2"], lost


def test_a_window_longer_than_any_sequence_is_refused(tiny_params):
    said = "^cache_dtype int4w257: no sequence is longer than max_len 256; give a window of as many"
    assert SIZES["max_len"] == 256
    with pytest.raises(UserError, match=said):
        make_llm(tiny_params, cache_dtype="int4w257")
