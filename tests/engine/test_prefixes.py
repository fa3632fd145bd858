"""Prompts that go on from what is left of others: the same tokens as without, and nothing lost."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from kvjax.cache.methods import get_method
from kvjax.engine.config import EngineConfig
from kvjax.engine.prefixes import Prefixes, common, sharing_of
from kvjax.errors import UserError
from tests.cache.free import free_of
from tests.engine.conftest import TINY
from tests.engine.serving import (
    FULL,
    HEADS,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)

GRAIN = 16
SHARED = {"share_prefix": "auto", "share_grain": GRAIN, "retained_prefixes": 3}
NORMS = CompressionConfig(method="key-norm", max_cache_tokens=16, protected=8)
"""A method that looks at no question, with a cache of 16 tokens' worth of KVs."""
READS = CompressionConfig(method="h2o", max_cache_tokens=16)
"""Another one; what comes behind a prefix changes what its KVs count."""
ADDS = CompressionConfig(method="h2o-decode", max_cache_tokens=32)
"""One whose decode steps change what all KVs count."""
(DOCUMENT,) = prompts_of(70)
QUESTIONS = prompts_of(9, 8, 5)


def asked(question: np.ndarray) -> np.ndarray:
    return np.concatenate([DOCUMENT, question])


def forget(llm) -> None:
    check_invariants(llm.worker.cache)
    llm.forget_prefixes()
    assert not np.asarray(llm.worker.cache.shared).any()
    assert_empty(llm)


@pytest.fixture(scope="module")
def chained(tiny_params):
    """Tokens of prompts that go through the same compressions, each alone, with nothing shared."""
    llm = make_llm(tiny_params, **SHARED)

    def tokens(compression, prompt, sampling, shared=None):
        asked = llm.enqueue(prompt, sampling, compression, shared=shared)
        output = drain(llm)[asked.id]
        assert output.stats.cached_tokens == 0
        forget(llm)
        return tokens_of([output])[0]

    return tokens


def tighten(llm, blocks: int):
    """Leave so many blocks free, as in a smaller pool. Returns what undoes it."""
    cache = llm.worker.cache
    taken = jnp.arange(cache.num_blocks) >= blocks
    llm.worker.cache = dataclasses.replace(cache, free=free_of(~taken))
    llm.scheduler.accounts.free[:] = blocks

    def undo():
        now = llm.worker.cache
        llm.worker.cache = dataclasses.replace(now, free=free_of(now.free.mask | taken))
        llm.scheduler.accounts.free[:] = llm.worker.free_blocks()

    return undo


@pytest.mark.parametrize(
    "compression",
    [FULL, pytest.param(NORMS, marks=pytest.mark.slow), READS],
    ids=["whole", "settled", "read"],
)
def test_another_question_about_a_document(tiny_params, chained, compression):
    llm = make_llm(tiny_params, compression, **SHARED)
    for number, question in enumerate(QUESTIONS):
        (output,) = llm.generate([asked(question)], greedy())
        # Compressed at the last multiple of 16 with 16 tokens behind it, which is in the document.
        assert output.stats.cached_tokens == (0 if number == 0 else 48)
        assert tokens_of([output])[0] == chained(compression, asked(question), greedy())
        # Those that ended held blocks that are still others'.
        assert llm.scheduler.accounts.num_free == llm.worker.free_blocks()
    forget(llm)


def test_a_prefix_that_is_whole_changes_no_token(tiny_params):
    prompts = [asked(question) for question in QUESTIONS]
    plain = tokens_of(make_llm(tiny_params, FULL).generate(prompts, greedy()))
    llm = make_llm(tiny_params, FULL, **SHARED)
    assert [tokens_of(llm.generate([prompt], greedy()))[0] for prompt in prompts] == plain
    forget(llm)


@pytest.mark.parametrize("compression", [FULL, NORMS], ids=["whole", "compressed"])
def test_many_questions_at_once(tiny_params, chained, compression):
    llm = make_llm(tiny_params, compression, **SHARED)
    outputs = llm.generate([asked(question) for question in QUESTIONS], greedy())
    # They part behind the document; the first runs it for all.
    assert [output.stats.cached_tokens for output in outputs] == [0, 70, 70]
    wanted = [chained(compression, asked(q), greedy(), shared=70) for q in QUESTIONS]
    assert tokens_of(outputs) == wanted
    forget(llm)


@pytest.mark.parametrize("compression", [NORMS, ADDS], ids=["settled", "added to"])
def test_forks_of_one_prompt(tiny_params, compression):
    """Several answers to one prompt, each with a seed of its own: only the first one runs it."""
    settings = [greedy(temperature=1.0, seed=seed) for seed in range(3)]
    llm = make_llm(tiny_params, compression, **SHARED)
    outputs = llm.generate([DOCUMENT] * 3, settings)
    assert [output.stats.cached_tokens for output in outputs] == [0, 70, 70]
    assert len(set(tokens_of(outputs))) == 3
    (again,) = llm.generate([DOCUMENT], settings[2])
    assert again.stats.cached_tokens == 70
    assert tokens_of([again])[0] == tokens_of(outputs)[2]
    forget(llm)


@pytest.mark.parametrize("compression", [FULL, NORMS], ids=["whole", "compressed"])
def test_a_next_turn_goes_on_from_the_last_answer(tiny_params, chained, compression):
    llm = make_llm(tiny_params, compression, **SHARED)
    (first,) = llm.generate([DOCUMENT], greedy(8))
    said = np.concatenate([DOCUMENT, np.asarray(first.token_ids, np.int32), QUESTIONS[0]])
    (second,) = llm.generate([said], greedy(8))
    # The last token was never run.
    assert second.stats.cached_tokens == 70 + 7
    assert llm.metrics.as_dict()["kvjax_prefix_hits_total"] == 1
    assert llm.metrics.as_dict()["kvjax_prompt_tokens_total"] == 70 + 1 + 9
    if compression is FULL:
        assert tokens_of([second])[0] == chained(FULL, said, greedy(8))
    forget(llm)


def test_as_many_conversations_as_there_are_rows(tiny_params):
    """Of a turn that has been answered its end is held, and the end before it goes for that."""
    llm = make_llm(tiny_params, FULL, **{**SHARED, "retained_prefixes": 2})
    said, held = list(prompts_of(20, 21)), [0, 0]
    for question in QUESTIONS:
        for at, before in enumerate(said):
            (output,) = llm.generate([before], greedy(4))
            assert output.stats.cached_tokens == held[at]
            tokens = np.concatenate([before, np.asarray(output.token_ids, np.int32)])
            # The last one was never run.
            said[at], held[at] = np.concatenate([tokens, question]), len(tokens) - 1
    forget(llm)


def test_settings_of_their_own_share_nothing(tiny_params):
    llm = make_llm(tiny_params, FULL, **SHARED)
    found = [
        llm.generate([DOCUMENT], greedy(2), compression)[0].stats.cached_tokens
        for compression in (FULL, NORMS, NORMS)
    ]
    assert found == [0, 0, 48]
    forget(llm)


def test_methods_that_look_at_the_question_share_only_where_asked(tiny_params):
    looks = CompressionConfig(method="snapkv", max_cache_tokens=16, window=4)
    for share, cached in (("auto", 0), ("always", 70)):
        settings: dict[str, Any] = {**SHARED, "share_prefix": share}
        llm = make_llm(tiny_params, looks, **settings)
        llm.generate([DOCUMENT], greedy(1))
        llm.generate([DOCUMENT, DOCUMENT], greedy(1))
        (output,) = llm.generate([DOCUMENT], greedy(1))
        assert output.stats.cached_tokens == cached
        forget(llm)


def test_methods_that_score_held_kvs_anew_share_nothing():
    """They would do so in blocks that others own, too."""
    method, settings = get_method("triattention"), CompressionConfig("triattention", rate=2)
    assert sharing_of("auto", settings, method) is None
    assert sharing_of("always", settings, method) is None
    norms = get_method("key-norm")
    assert sharing_of("auto", settings, norms) is settings


def test_retained_prefixes_go_first_when_blocks_are_needed(tiny_params, chained):
    """A pool in which little fits beside what runs: nobody is preempted for what is retained."""
    prompts = prompts_of(60, 61, 62, 63)
    llm = make_llm(tiny_params, NORMS, **SHARED)
    undo = tighten(llm, 108)
    for prompt in prompts:
        (output,) = llm.generate([prompt], greedy())
        assert output.stats.preemptions == 0
        assert output.stats.blocks_evicted_decoding == 0
        assert tokens_of([output])[0] == chained(NORMS, prompt, greedy())
    undo()
    forget(llm)


def test_a_document_of_half_the_pool_is_retained(tiny_params):
    """It lies there once, for its prefix and its slot: nothing has to give way to it."""
    (document,) = prompts_of(60)
    llm = make_llm(tiny_params, FULL, share_prefix="auto", pool_tokens=120, max_batch=1)
    assert llm.retain(document) == 60
    assert len(llm.scheduler.prefixes) == 1


def test_a_prompt_does_not_wait_for_what_is_retained(tiny_params):
    """What is retained goes as soon as a prompt that waits beside others needs its blocks."""
    llm = make_llm(tiny_params, FULL, **SHARED)
    undo = tighten(llm, 210)
    retained, *prompts = prompts_of(60, 59, 58)
    llm.generate([retained], greedy(2))
    first, second = llm.generate(prompts, greedy(12))
    assert second.stats.first_token is not None
    assert first.stats.finished is not None
    assert second.stats.first_token < first.stats.finished
    undo()
    forget(llm)


def test_what_lies_in_its_slot_needs_no_room_a_second_time(tiny_params):
    """A prompt that is retained whole is in its slot then: it decodes, whoever runs beside it."""
    other, document = prompts_of(70, 33)
    llm = make_llm(tiny_params, FULL, **SHARED)
    undo = tighten(llm, (19 + 9 + 5) * HEADS)
    first = llm.add_request(other, greedy(40))
    while not llm.scheduler.running:
        llm.step()
    second = llm.enqueue(document, greedy(3), shared=len(document)).id
    last = drain(llm)
    begun, ended = last[second].stats.first_token, last[first].stats.finished
    assert begun is not None
    assert ended is not None
    assert begun < ended
    assert last[second].stats.preemptions == last[first].stats.preemptions == 0
    undo()
    forget(llm)


def test_under_pressure_all_come_to_their_ends(tiny_params, chained):
    llm = make_llm(tiny_params, FULL, **SHARED)
    undo = tighten(llm, 168)
    outputs = llm.generate([asked(question) for question in QUESTIONS] * 2, greedy(20))
    wanted = [chained(FULL, asked(question), greedy(20)) for question in QUESTIONS]
    assert tokens_of(outputs) == wanted * 2
    assert sum(output.stats.preemptions for output in outputs) > 0
    undo()
    forget(llm)


def test_what_a_prompt_took_from_a_prefix_stays_told_when_it_comes_back(tiny_params):
    """It runs again with all that it has: neither that nor what it finds then was the caller's."""
    llm = make_llm(tiny_params, FULL, **SHARED)
    llm.retain(DOCUMENT)
    name = llm.add_request(asked(QUESTIONS[0]), greedy(12))
    while not llm.scheduler.running:
        llm.step()
    (request,) = llm.scheduler.running
    length = request.length
    ran = llm.metrics.as_dict()["kvjax_prompt_tokens_total"]
    llm.recovery._resume()
    output = drain(llm)[name]
    assert output.stats.preemptions == 1
    assert output.stats.cached_tokens == len(DOCUMENT)
    assert llm.metrics.as_dict()["kvjax_prompt_tokens_total"] == ran + length
    forget(llm)


def test_what_is_only_shared_with_its_own_prefix_needs_no_room(tiny_params):
    """A prompt fills the pool but for copies of blocks that it shares with what is retained of its
    own beginning: when that is forgotten, there is nothing to copy."""
    begins, ends, others = prompts_of(50, 20, 19)
    first = np.concatenate([begins, ends])
    second = np.concatenate([begins, (ends[:1] + 1) % TINY.vocab_size, others])
    outputs = {}
    for sharing in ({}, SHARED):
        llm = make_llm(tiny_params, FULL, pool_tokens=72, **sharing)
        outputs[bool(sharing)] = tokens_of(llm.generate([first, second], greedy(2)))
    assert outputs[True] == outputs[False]
    forget(llm)


def test_the_usual_method_is_the_engines_own_for_prefixes_too(tiny_params, tmp_path):
    """Settings that name no method."""
    path, plain = tmp_path / "document.safetensors", dataclasses.replace(NORMS, method="auto")
    llm = make_llm(tiny_params, dataclasses.replace(NORMS, max_cache_tokens=24), **SHARED)
    assert llm.retain(DOCUMENT, plain) == llm.save_prefix(path, DOCUMENT, NORMS) == len(DOCUMENT)
    (output,) = llm.generate([asked(QUESTIONS[0])], greedy(), NORMS)
    assert output.stats.cached_tokens == len(DOCUMENT)
    forget(llm)
    assert llm.load_prefix(path, plain) == len(DOCUMENT)
    forget(llm)


def test_gauges_tell_of_prefixes_between_rounds(tiny_params, tmp_path):
    path = tmp_path / "document.safetensors"
    llm = make_llm(tiny_params, NORMS, **SHARED)

    def used() -> float:
        return llm.metrics.as_dict()["kvjax_blocks_used"]

    llm.save_prefix(path, DOCUMENT)
    assert (holds := used()) > 0
    forget(llm)
    assert used() == 0
    llm.load_prefix(path)
    assert used() == holds
    forget(llm)


def test_blocks_that_leave_what_is_retained_are_counted(tiny_params):
    llm = make_llm(tiny_params, NORMS, **SHARED)
    llm.retain(DOCUMENT)
    found, spec = llm.metrics.as_dict(), llm.plan.spec
    whole = spec.heads * -(-len(DOCUMENT) // spec.block_size)
    assert 0 < found["kvjax_evicted_blocks_total"] == whole - found["kvjax_blocks_used"]
    forget(llm)


def test_a_round_that_fails_forgets_what_was_retained(tiny_params, monkeypatch):
    llm = make_llm(tiny_params, FULL, **SHARED)
    (first,) = llm.generate([DOCUMENT], greedy(4))
    failures, observe = [RuntimeError("once")], llm.metrics.observe

    def fails(*args):
        if failures:
            raise failures.pop()
        observe(*args)

    monkeypatch.setattr(llm.metrics, "observe", fails)
    (again,) = llm.generate([DOCUMENT], greedy(4))
    assert not failures
    (later,) = llm.generate([DOCUMENT], greedy(4))
    assert later.stats.cached_tokens == 0
    assert tokens_of([again, later]) == tokens_of([first, first])
    forget(llm)


def test_the_longest_is_found_and_the_oldest_goes():
    prefixes = Prefixes(range(4, 7), grain=4)
    tokens = np.arange(20, dtype=np.int32)
    short = prefixes.add(tokens[:5], "a", None)
    long = prefixes.add(tokens[:9], "a", None)
    other = prefixes.add(tokens[:12], "b", None)
    assert prefixes.full
    assert prefixes.find("a", tokens) is long
    assert prefixes.find("a", tokens[:9]) is short, "nobody knows the token after the ninth"
    assert prefixes.find("a", tokens + 1) is None
    prefixes.used(short)
    assert prefixes.oldest() is long
    assert prefixes.oldest(besides=long) is other
    prefixes.remove(long)
    assert not prefixes.full
    assert prefixes.find("a", tokens) is short
    end = prefixes.add(tokens[:10], "a", None, ended=True)
    prefixes.continued(short)
    assert prefixes.oldest() is other
    prefixes.continued(end)
    assert prefixes.oldest() is end, "the end of its next turn takes its place"
    prefixes.continued(end)
    assert prefixes.oldest() is other, "two go on from it"


@pytest.mark.parametrize(
    ("one", "other", "want"), [("", "", 0), ("", "a", 0), ("b", "a", 0), ("ab", "ac", 1),
                               ("abc", "ab", 2), ("ab", "abc", 2), ("ab", "ab", 2)],
)  # fmt: skip
def test_how_far_prompts_are_the_same(one, other, want):
    assert common(*(np.array([*map(ord, text)], np.int32) for text in (one, other))) == want


def test_what_cannot_be_retained_is_refused(tiny_params):
    with pytest.raises(UserError, match=r"'never': give EngineConfig\(share_prefix='auto'\)$"):
        make_llm(tiny_params, FULL).retain(DOCUMENT)
    looks = CompressionConfig(method="snapkv", max_cache_tokens=16, window=4)
    for share in ("auto", "never"):
        sharing: dict[str, Any] = SHARED | {"share_prefix": share}
        llm = make_llm(tiny_params, looks, **sharing)
        with pytest.raises(UserError, match=r"give EngineConfig\(share_prefix='always'\)$"):
            llm.retain(DOCUMENT)
    repeats = CompressionConfig(method="kvzip", max_cache_tokens=16)
    sharing = SHARED | {"share_prefix": "always"}
    llm = make_llm(tiny_params, repeats, **sharing)
    with pytest.raises(UserError, match=r"'always': give another method$"):
        llm.retain(DOCUMENT)


@pytest.mark.usefixtures("unchecked_signatures")
def test_sharing_has_to_be_one_of_three():
    with pytest.raises(UserError, match="share_prefix 'sometimes': give one of"):
        EngineConfig(share_prefix="sometimes")  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_that_share_can_be_warmed_up(tiny_params):
    llm = make_llm(tiny_params, NORMS, **SHARED)
    llm.warm_up([len(DOCUMENT)])
    known = set(llm.worker.compiled.seconds)
    assert llm.metrics.as_dict()["kvjax_compiled_steps"] == len(known)
    (first,) = llm.generate([DOCUMENT], greedy(8))
    turn = np.concatenate([DOCUMENT, np.asarray(first.token_ids, np.int32), QUESTIONS[2]])
    (second,) = llm.generate([turn], greedy(8))
    assert second.stats.cached_tokens > len(DOCUMENT)
    assert set(llm.worker.compiled.seconds) == known
    forget(llm)
