"""An engine whose pool has more bits of some KVs where it has room."""

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from tests.engine.serving import FULL, assert_empty, greedy, make_llm, prompts_of

CAPPED = CompressionConfig("streaming-llm", max_cache_tokens=16, compress_every=4)


def rounds(llm, prompts, tokens: int):
    """What the pool holds after every round, and how many blocks have finer codes."""
    for prompt in prompts:
        llm.add_request(prompt, greedy(tokens))
    held, refined = [], []
    while llm.has_unfinished():
        llm.step()
        cache = llm.worker.cache
        check_invariants(cache)
        held.append((cache.position.tolist(), llm.metrics.as_dict()["kvjax_blocks_free"]))
        fine = cache.kv.fine
        refined.append(0 if fine is None else int((fine.tag < cache.num_blocks).sum()) // 2)
    return held, refined


def test_finer_codes_take_no_block_from_anybody(tiny_params):
    """Which KVs are held and which blocks are free is what it is without them, round by round."""
    found = []
    for stored in ("int4", "int4+"):
        llm = make_llm(tiny_params, CAPPED, cache_dtype=stored, max_len=128, prefill_scratch=64)
        found.append(rounds(llm, prompts_of(30, 100), 16))
        assert_empty(llm)
    (held, _), (held_too, refined) = found
    assert held == held_too
    assert max(refined) > 0
    fine, blocks = llm.worker.cache.kv.fine, llm.worker.cache.num_blocks
    assert fine is not None
    assert (np.asarray(fine.tag) == blocks).all()


@pytest.mark.slow
def test_sequences_are_preempted_as_ever(tiny_params):
    """Blocks run out: those with finer codes are free, and go first."""
    given = {"pool_tokens": 72, "max_len": 64}
    llm = make_llm(tiny_params, FULL, cache_dtype="int4+", **given)
    _, refined = rounds(llm, prompts_of(30, 25, 28), 16)
    assert llm.metrics.as_dict()["kvjax_preemptions_total"] > 0
    assert max(refined) > min(refined[:-1])
    assert_empty(llm)


def test_prompts_leave_room_for_finer_codes(tiny_params):
    """Beside others a prompt is let in where a tenth of the pool stays free."""
    for stored, kept in (("int4", 100), ("int4+", 10)):
        accounts = make_llm(tiny_params, FULL, cache_dtype=stored).scheduler.accounts
        most = accounts.num_free - accounts.num_free // kept
        assert accounts.have(most)
        assert not accounts.have(most + 1)


@pytest.mark.slow
def test_a_shared_prefix_brings_its_finer_codes(tiny_params):
    """A second question about a document reads what the first one read."""
    (document,) = prompts_of(40)
    asked = [np.concatenate([document, question]) for question in prompts_of(9, 5)]
    found = []
    for sharing in ({}, {"share_prefix": "auto", "share_grain": 8, "retained_prefixes": 2}):
        llm = make_llm(tiny_params, cache_dtype="int4+", max_len=64, **sharing)
        if sharing:
            llm.retain(document)
        outputs = llm.generate(asked, greedy(8))
        assert [output.stats.cached_tokens for output in outputs] == [40 if sharing else 0] * 2
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
