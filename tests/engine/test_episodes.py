"""A prompt's caches of all its episodes, and the questions that choose among them."""

import dataclasses
import functools
import re
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.methods.epicache import Episode, Medoid, nearest_episode, unit
from kvjax.cache.policy.method import KEY_SIMILARITY
from kvjax.cache.policy.probe import AtHand
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.needs import needs_of
from kvjax.engine.parallel import check_on_devices
from kvjax.engine.prefixes import sharing_of
from kvjax.engine.retaining import SHORTEST
from kvjax.errors import UserError
from tests.cache.pair import heads_of
from tests.engine.serving import assert_empty, drain, greedy, tokens_of
from tests.engine.test_probe import CAP, LENGTH, PROMPT, Checkpoint, check_kept, similar
from tests.oracle.behind import chosen_episode, medoids
from tests.oracle.selection import keeps_cheapest_by_layer
from tests.tiny import TINY

B, SEGMENT, EPISODES = 4, 4, 3
METHOD = dataclasses.replace(
    get_method("epicache"), scorer=Episode(segment=SEGMENT, episodes=EPISODES)
)
SETTINGS = CompressionConfig(METHOD, max_cache_tokens=CAP)
NORMS = CompressionConfig("key-norm", max_cache_tokens=CAP)
BUDGET = CAP // B * TINY.num_layers * TINY.num_kv_heads
"""Blocks of a cache."""
QUESTIONS = [
    np.random.default_rng(seed).integers(0, 256, 9 + seed).astype(np.int32) for seed in range(6)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("tiny"), TINY)


def engine(tiny, **sizes) -> LLM:
    given: dict[str, Any] = {"max_batch": 4, "max_len": 256, "block_size": B, "pool_tokens": 600}
    given |= {"prefill_scratch": 160, "prefill_chunk": 64, "share_prefix": "auto", **sizes}
    return LLM(tiny.model, SETTINGS, EngineConfig(decode_steps_per_sync=1, **given))


def rows_of(llm, caches) -> list[int]:
    found = [llm.scheduler.prefixes.exactly(one, PROMPT) for one in caches.compressions]
    return [prefix.row for prefix in found]


def check_freed(llm) -> None:
    assert not np.asarray(llm.worker.cache.shared).any()
    assert_empty(llm)


def test_each_cache_holds_what_its_episodes_medoid_reads(tiny):
    llm = engine(tiny)
    alike = np.array([0.5, 0.9], np.float32)
    llm.worker.artefacts[KEY_SIMILARITY] = jnp.asarray(alike)
    caches = llm.episodes(PROMPT)
    wanted, _ = medoids(tiny.table, PROMPT, SEGMENT, EPISODES)
    assert len(caches) == len(wanted) == EPISODES
    keeps_of = functools.partial(
        keeps_cheapest_by_layer, protected=1, sinks=4, layers_of=similar(alike)
    )
    for row, (medoid, _) in zip(rows_of(llm, caches), wanted.values(), strict=True):
        check_kept(llm, tiny.read_by(medoid, itself=False), keeps_of, row)
    held = llm.plan.num_blocks - int(llm.worker.free_blocks().sum())
    assert (EPISODES - 1) * BUDGET < held <= EPISODES * BUDGET
    # The prompt ran once, and its medoids by one compiled step.
    found = llm.metrics.as_dict()
    assert found["kvjax_prompt_tokens_total"] == LENGTH
    assert found["kvjax_probe_tokens_total"] == EPISODES * SEGMENT
    assert len([key for key in llm.worker.compiled.seconds if key.step == "probe"]) == 1
    assert llm.worker.kept is None
    caches.free()
    check_freed(llm)


class Table(AtHand):
    """Embeddings of 48 tokens: those of the first half are alike, the others are not."""

    rows = np.random.default_rng(1).standard_normal((48, 8)) + 4 * (np.arange(48) < 24)[:, None]

    def embedded(self, tokens):
        return self.rows[tokens]


def test_questions_go_to_the_episode_at_the_smallest_angle():
    rng = np.random.default_rng(4)
    prompt = np.concatenate([rng.permutation(24), 24 + rng.permutation(24)]).astype(np.int32)
    scorers, centroids = zip(*Episode(segment=2, episodes=3).found(prompt, Table()))
    wanted, _ = medoids(Table.rows, prompt, 2, 3)
    centres = [centre for _, centre in wanted.values()]
    np.testing.assert_allclose(centroids, unit(np.stack(centres)), rtol=1e-6)
    assert [one.tokens for one in scorers] == [tuple(m.tolist()) for m, _ in wanted.values()]
    assert {one.prompt for one in scorers} == {48}
    questions = np.concatenate([rng.integers(0, 48, (40, 3)), rng.integers(24, 48, (40, 3))])
    found = [nearest_episode(np.stack(centroids), Table.rows[one]) for one in questions]
    assert found == [chosen_episode(Table.rows, centres, one) for one in questions]
    assert set(found) == {0, 1, 2}
    # Means that are not brought to unit length would choose otherwise.
    assert found != [
        int(np.argmax(np.stack(centres) @ Table.rows[one].mean(0))) for one in questions
    ]


def test_a_question_goes_on_from_the_cache_it_chooses(tiny):
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    wanted, _ = medoids(tiny.table, PROMPT, SEGMENT, EPISODES)
    centres = [centre for _, centre in wanted.values()]
    routes = [chosen_episode(tiny.table, centres, one) for one in QUESTIONS]
    assert [caches.route(one) for one in QUESTIONS] == routes
    assert len(set(routes)) > 1
    outputs = caches.generate(QUESTIONS, greedy(4))
    assert [output.stats.cached_tokens for output in outputs] == [LENGTH] * len(QUESTIONS)
    for question, route, output in zip(QUESTIONS, routes, outputs, strict=True):
        tokens, compression = caches.asked(question)
        assert np.array_equal(tokens, [*PROMPT, *question])
        assert compression is caches.compressions[route]
        assert np.array_equal(output.prompt_token_ids, tokens)
    # From any other cache there are other tokens.
    others = [caches.compressions[(route + 1) % EPISODES] for route in routes]
    prompts = [caches.asked(one)[0] for one in QUESTIONS]
    assert tokens_of(llm.generate(prompts, greedy(4), others)) != tokens_of(outputs)
    caches.free()
    check_freed(llm)


def test_a_question_is_not_what_makes_room_for_itself(tiny):
    """Nothing has measured it: it takes the place of what the medoid reads least."""
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    tokens, compression = caches.asked(QUESTIONS[0])
    one = llm.add_request(tokens, greedy(3), compression)
    while not any(output.request_id == one and output.token_ids for output in llm.step()):
        pass
    for (slot, *_), kvs in heads_of(llm.worker.cache).items():
        if slot == 0:
            behind = [kv.position for kv in kvs if LENGTH <= kv.position < len(tokens)]
            assert sorted(behind) == list(range(LENGTH, len(tokens)))
    held = np.asarray(llm.worker.cache.context_len)[0].sum()
    assert held <= BUDGET * B + 3 * TINY.num_layers * TINY.num_kv_heads
    drain(llm)


def test_a_cache_that_had_to_give_way_is_made_again(tiny):
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    before = tokens_of(caches.generate(QUESTIONS[:2], greedy(4)))
    llm.forget_prefixes()
    check_freed(llm)
    for cached in (0, LENGTH):
        (again,) = caches.generate(QUESTIONS[0], greedy(4))
        assert again.stats.cached_tokens == cached
        assert tokens_of([again]) == before[:1]
    assert [len(prefix.tokens) for prefix in llm.scheduler.prefixes] == [LENGTH]


def test_a_cache_in_a_file_is_gone_on_from(tiny, tmp_path):
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    prompt, compression = caches.asked(QUESTIONS[1])
    assert llm.save_prefix(tmp_path / "one.safetensors", PROMPT, compression) == LENGTH
    other = engine(tiny)
    assert other.load_prefix(tmp_path / "one.safetensors", compression) == LENGTH
    (output,) = other.generate([prompt], greedy(4), compression)
    assert output.stats.cached_tokens == LENGTH
    assert tokens_of([output]) == tokens_of(caches.generate(QUESTIONS[1], greedy(4)))


def test_freeing_leaves_other_prefixes(tiny):
    llm = engine(tiny)
    llm.retain(PROMPT, NORMS)
    free = llm.worker.free_blocks()
    caches = llm.episodes(PROMPT, number=2)
    assert len(caches) == 2
    caches.free()
    caches.free()
    assert llm.worker.free_blocks() == free
    assert [prefix.settings for prefix in llm.scheduler.prefixes] == [NORMS]
    llm.forget_prefixes()
    check_freed(llm)


def test_a_pool_that_is_too_small_names_one_that_is_not(tiny):
    """Nor does the whole prompt find room in that."""
    small, norms = (dataclasses.replace(one, max_cache_tokens=20) for one in (SETTINGS, NORMS))
    llm = engine(tiny, pool_tokens=80)
    llm.retain(PROMPT, norms)
    refused = r"^3 caches of 20 blocks and a question need \d+ [^\n]* a pool of (\d+) tokens[^\n]*$"
    with pytest.raises(UserError, match=refused) as e:
        llm.episodes(PROMPT, small)
    assert [prefix.settings for prefix in llm.scheduler.prefixes] == [norms]
    found = re.match(refused, str(e.value))
    assert found is not None
    enough = engine(tiny, pool_tokens=int(found[1]))
    assert enough.plan.num_blocks < LENGTH
    caches = enough.episodes(PROMPT, small)
    assert len(enough.scheduler.prefixes) == EPISODES
    caches.generate(QUESTIONS[0][:1], greedy(1))
    assert len(enough.scheduler.prefixes) == EPISODES


def test_caches_give_way_to_what_runs(tiny):
    """Nothing of them stays, and those that run lose no token."""
    full, prompt = CompressionConfig("full"), PROMPT[:90]
    llm = engine(tiny, pool_tokens=230)
    (alone,) = llm.generate([prompt], greedy(60), full)
    llm.add_request(prompt, greedy(60), full, request_id="runs")
    with pytest.raises(UserError, match=r"^(\d of 3 caches had to give way|the prompt of)[^\n]*$"):
        llm.episodes(PROMPT)
    assert not [prefix for prefix in llm.scheduler.prefixes if prefix.settings != "whole"]
    outputs = drain(llm)
    assert outputs["runs"].token_ids == alone.token_ids
    llm.forget_prefixes()
    check_freed(llm)


def test_questions_come_from_several_threads(tiny):
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    alone = [tokens_of(caches.generate(question, greedy(4)))[0] for question in QUESTIONS]
    start = threading.Barrier(3)

    def ask(numbers):
        start.wait()
        for number in numbers:
            tokens, compression = caches.asked(QUESTIONS[number])
            llm.add_request(tokens, greedy(4), compression, request_id=str(number))

    threads = [threading.Thread(target=ask, args=(part,)) for part in ((0, 1, 2), (3, 4, 5))]
    for thread in threads:
        thread.start()
    start.wait()
    outputs = {}
    while any(thread.is_alive() for thread in threads) or llm.has_unfinished():
        outputs |= {output.request_id: output for output in llm.step()}
    for thread in threads:
        thread.join()
    assert [outputs[str(number)].token_ids for number in range(6)] == alone
    caches.free()
    check_freed(llm)


def test_a_scratch_is_kept_for_the_same_prompt_alone(tiny):
    llm = engine(tiny)
    caches = llm.episodes(PROMPT)
    caches.free()
    first, second, _ = caches.compressions
    with llm.worker.keeping_scratch():
        llm.retain(PROMPT, first)
        assert llm.worker.kept is not None
        # What may be compiled for others does not depend on what is kept.
        one = llm.enqueue(PROMPT, SHORTEST, second)
        assert "prefill in scratch" in {need.key.step for need in needs_of(llm.worker, one)}
        drain(llm)
        assert one.stats.cached_tokens == LENGTH
        other = llm.enqueue(PROMPT[::-1].copy(), SHORTEST, second)
        drain(llm)
        assert other.stats.cached_tokens == 0
        assert llm.worker.kept is not None
        assert llm.worker.kept.request is other
        llm.generate([PROMPT], greedy(1), CompressionConfig("full"))
        assert llm.worker.kept is None
    llm.retain(PROMPT[:50], first)
    assert llm.worker.kept is None


@pytest.mark.parametrize(
    ("given", "sizes", "message"),
    [
        ({"prompt": []}, {}, "the prompt is empty: give at least one token"),
        ({"number": 26}, {}, "26 episodes of a prompt of 100 tokens, which are 25 segments of 4: "),
        ({"number": 0}, {}, "number 0: "),
        ({"compression": NORMS}, {}, "method key-norm has no episodes: give method 'epicache'"),
        ({"compression": CompressionConfig(METHOD)}, {}, "the settings evict nothing: give a rate"),
        ({}, {"share_prefix": "never"}, "method epicache shares no prefixes with share_prefix "),
        ({}, {"retained_prefixes": 2}, "3 episodes and retained_prefixes 2: give at least as many"),
    ],
    ids=["no prompt", "segments", "number", "method", "size", "unshared", "rows"],
)
def test_what_cannot_be_prepared_is_refused(tiny, given, sizes, message):
    llm = engine(tiny, **sizes)
    with pytest.raises(UserError, match=rf"^{re.escape(message)}[^\n]*$"):
        llm.episodes(**({"prompt": PROMPT} | given))
    assert_empty(llm)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("", "the question is empty: give at least one token"),
        ([], "the question is empty: give at least one token"),
        ([99999], "token id 99999 of the prompt: give ids from 0 to "),
    ],
)
def test_no_question_is_refused(tiny, question, message):
    caches = engine(tiny).episodes(PROMPT)
    with pytest.raises(UserError, match=rf"^{re.escape(message)}[^\n]*$"):
        caches.asked(question)


def test_only_what_is_of_a_prompts_beginning_is_shared():
    """Whose episode is that of the prompt's end needs all of the prompt."""
    assert sharing_of("always", SETTINGS, METHOD) is None
    medoid = dataclasses.replace(METHOD, scorer=Medoid(tokens=(1,), prompt=2), query_aware=False)
    assert sharing_of("auto", SETTINGS, medoid) is SETTINGS
    assert sharing_of("never", SETTINGS, medoid) is None


def test_fewer_episodes_where_segments_are_equal(tiny):
    llm = engine(tiny)
    caches = llm.episodes(np.tile(PROMPT[:SEGMENT], 20))
    assert len(caches) == 1
    assert caches.route(QUESTIONS[0]) == 0


def test_a_medoid_of_a_longer_prompt_is_of_all_of_a_shorter_one(tiny):
    """Nobody hands out such settings, and whoever makes them finds no fault."""
    medoid = dataclasses.replace(METHOD, scorer=Medoid(tokens=(1, 2), prompt=300))
    with pytest.raises(UserError, match=r"^method epicache with tensor_parallel 2: [^\n]*$"):
        check_on_devices(medoid, 2)
    llm = engine(tiny)
    (output,) = llm.generate([PROMPT], greedy(3), dataclasses.replace(SETTINGS, method=medoid))
    assert output.error is None
    llm.forget_prefixes()
    check_freed(llm)
