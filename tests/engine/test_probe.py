"""Methods that run something behind the prompt: in the engine and in evaluation, against NumPy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.methods.epicache import Episode, UnlikeLayers, clustered, medoid_of_last
from kvjax.cache.policy import Budget, Scores
from kvjax.cache.policy.method import KEY_SIMILARITY
from kvjax.engine import LLM, EngineConfig, memory
from kvjax.engine.dense import dense_pass
from kvjax.engine.draft import Draft, check_same
from kvjax.engine.key_similarity import Blocks, key_similarity
from kvjax.engine.needs import needs_of
from kvjax.engine.parallel import check_on_devices
from kvjax.engine.prefill import PromptKV
from kvjax.engine.probe import draft
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.sizes import EvaluatorConfig
from kvjax.models import load_model
from tests.cache.pair import heads_of
from tests.engine.serving import assert_empty, greedy
from tests.models.tokenizer_builders import tiny_tokenizer
from tests.oracle.behind import (
    episodes,
    key_similarities,
    lookahead_scores,
    medoid_segment,
    most_read,
    said_behind,
)
from tests.oracle.scores import Prompt
from tests.oracle.selection import keeps, keeps_cheapest_by_layer, unlike_layers
from tests.tiny import TINY, write_tiny

LENGTH, CHUNK, CAP, B, DRAFTED = 100, 64, 48, 4, 32
PROMPT = np.random.default_rng(8).integers(0, 256, LENGTH).astype(np.int32)
EPICACHE = dataclasses.replace(get_method("epicache"), scorer=Episode(segment=4, episodes=2))
SMALLER = dataclasses.replace(TINY, name="smaller", num_layers=1, intermediate_size=16)


class Checkpoint:
    """A tiny model, and its tensors for the oracle."""

    def __init__(self, folder, config):
        write_tiny(folder, config)
        # Queries that tell keys apart: else those that see the fewest keys read most of each.
        path = folder / "model.safetensors"
        scale = {name: 6.0 if "q_proj" in name else 1.0 for name in load_file(path)}
        save_file({name: scale[name] * x for name, x in load_file(path).items()}, path)
        self.model = load_model(weights=folder)
        self.hf = json.loads((folder / "config.json").read_text())
        self.hf |= {"rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps}
        self.hf["tie_word_embeddings"] = config.tie_word_embeddings
        self.weights = load_file(folder / "model.safetensors")

    @functools.cached_property
    def said(self) -> list[int]:
        return said_behind(self.hf, self.weights, PROMPT, DRAFTED)

    def read_by(self, behind, *, itself: bool = True) -> np.ndarray:
        """What is read of the prompt by tokens behind it, which see themselves or not."""
        tokens = np.concatenate([PROMPT, behind])
        queries = range(LENGTH, len(tokens))
        return most_read(self.hf, self.weights, tokens, queries, LENGTH, itself=itself)

    @property
    def table(self) -> np.ndarray:
        return self.weights["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("smaller"), SMALLER)


def engine(model, name, drafts=None, **sizes) -> LLM:
    given = {"prefill_scratch": 160, "prefill_chunk": CHUNK, "decode_steps_per_sync": 1, **sizes}
    config = EngineConfig(max_batch=2, max_len=512, block_size=B, pool_tokens=600, **given)
    return LLM(model, CompressionConfig(name, max_cache_tokens=CAP), config, draft=drafts)


def started(llm, prompt=PROMPT) -> str:
    """A request that has its first token."""
    one = llm.add_request(prompt, greedy(8))
    while not any(output.request_id == one and output.token_ids for output in llm.step()):
        pass
    return one


def check_kept(llm, scores, keeps_of, row=0) -> None:
    """What a row of the cache holds of the prompt is what these scores keep, with these metrics."""
    shape = (TINY.num_layers, LENGTH, TINY.num_kv_heads, 1)
    prompt = Prompt(np.zeros(shape), np.zeros(shape), np.zeros(shape), CAP, B)
    rows = {at: scores[at] for at in np.ndindex(scores.shape[:2])}
    want = keeps_of(lambda _: rows)(prompt)
    for (slot, *at), kvs in heads_of(llm.worker.cache).items():
        if slot == row:
            held = {x.position: x.metric for x in kvs if x.position < LENGTH}
            assert sorted(held) == want[tuple(at)]
            found = scores[tuple(at)][list(held)]
            np.testing.assert_allclose(
                list(held.values()), np.nan_to_num(found), rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize(
    "chunk", [CHUNK, pytest.param(128, marks=pytest.mark.slow)], ids=["in parts", "whole"]
)
def test_speckv_keeps_what_its_own_draft_reads(tiny, chunk):
    llm = engine(tiny.model, "speckv", prefill_chunk=chunk)
    one = started(llm)
    scores = lookahead_scores(tiny.hf, tiny.weights, PROMPT, tiny.said)
    check_kept(llm, scores, functools.partial(keeps, protected=33))
    found = llm.metrics.as_dict()
    assert found["kvjax_probe_tokens_total"] == 33 + DRAFTED
    assert found["kvjax_prompt_tokens_total"] == LENGTH
    assert found['kvjax_seconds_total{phase="probe"}'] > 0
    llm.abort(one)
    while llm.has_unfinished():
        llm.step()
    assert_empty(llm)


def test_speckv_keeps_what_another_models_draft_reads(tiny, smaller):
    drafts = LLM(
        smaller.model,
        CompressionConfig("full"),
        EngineConfig(max_batch=1, max_len=512, block_size=B, pool_tokens=512),
    )
    llm = engine(tiny.model, "speckv", drafts)
    started(llm)
    assert smaller.said != tiny.said
    scores = lookahead_scores(tiny.hf, tiny.weights, PROMPT, smaller.said)
    check_kept(llm, scores, functools.partial(keeps, protected=33))
    assert drafts.metrics.as_dict()["kvjax_output_tokens_total"] == DRAFTED
    assert not any(key.step == "draft" for key in llm.worker.compiled.seconds)


def test_a_draft_that_cannot_draft_is_refused(tiny, smaller, monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda *_: 2**30)
    sizes = EngineConfig(max_batch=1, max_len=LENGTH + 20, block_size=B, pool_tokens=512)
    drafts = LLM(smaller.model, CompressionConfig("full"), sizes)
    llm = engine(tiny.model, "speckv", drafts)
    assert llm.plan.limit == 2**30 - drafts.plan.total
    with pytest.raises(UserError, match=r"^draft: the prompt has 108 tokens [^\n]*$"):
        llm.add_request(PROMPT, greedy(8))
    # Whose method looks not ahead needs none.
    llm.abort(llm.add_request(PROMPT, greedy(8), CompressionConfig("kvzip", max_cache_tokens=CAP)))
    with pytest.raises(UserError, match=r"^draft 'smollm2': give an LLM$"):
        engine(tiny.model, "speckv", "smollm2")


def test_nobody_is_told_of_the_rate_of_a_draft(smaller, caplog, monkeypatch):
    sizes = EngineConfig(max_batch=1, max_len=512, block_size=B, pool_tokens=512)
    own = CompressionConfig("kv-compress", rate=4, floor=64)
    llm = LLM(smaller.model, own, sizes)
    drafts, run, asked = Draft(llm, smaller.model.tokenizer), llm.generate, []

    def generate(prompts, sampling, compression):
        asked.append(compression)
        return run(prompts, sampling, compression)

    monkeypatch.setattr(llm, "generate", generate)
    assert len(drafts(PROMPT, 4)) == 4
    assert asked == [dataclasses.replace(own, rate=None, max_cache_tokens=64)]
    assert own.reached_rate(LENGTH, llm.plan.heads, B) < 2
    assert not [record for record in caplog.records if "rate" in record.getMessage()]


def test_a_draft_of_another_tokenizer_is_refused(tiny):
    same, other = tiny.model.tokenizer, tiny_tokenizer()
    check_same(same, same)
    with pytest.raises(UserError, match=r"^draft: its tokenizer differs .* at token \d+: [^\n]*$"):
        check_same(same, other)


def test_a_draft_that_says_nothing_leaves_the_window(tiny, monkeypatch):
    llm = engine(tiny.model, "speckv")
    llm.worker.probing.draft = lambda tokens, most: ()
    started(llm)
    scores = lookahead_scores(tiny.hf, tiny.weights, PROMPT, [])
    check_kept(llm, scores, functools.partial(keeps, protected=33))


@pytest.fixture(scope="module")
def dense(tiny):
    padded, at = np.concatenate([PROMPT, np.full(28, 9, np.int32)]), np.zeros(1, np.int32)
    return jax.jit(dense_pass, static_argnums=0)(tiny.model.config, tiny.model.params, padded, at)


@pytest.fixture(scope="module")
def drafted(tiny, dense):
    """What the model says behind the prompt up to a token: all tokens, and how many."""
    held = PromptKV(dense.k, dense.v, Scores(jnp.zeros((2, 2, 128))), jnp.int32(LENGTH))
    run = jax.jit(draft, static_argnums=(0, 1))

    def drafted(end):
        given, ends = np.zeros(64, np.int32), np.array([end], np.int32)
        given[:5] = PROMPT[-5:]
        model = tiny.model
        tokens, length = run(model.config, DRAFTED, model.params, held, given, np.int32(5), ends)
        assert np.array_equal(tokens[:5], PROMPT[-5:])
        return np.asarray(tokens[5 : int(length)]).tolist()

    return drafted


@pytest.mark.parametrize("which", [0, 4])
def test_a_draft_ends_where_an_answer_ends(tiny, drafted, which):
    """With the token that ends it."""
    end = tiny.said[which]
    assert drafted(end) == tiny.said[: tiny.said.index(end) + 1]
    assert drafted(-1) == tiny.said


def test_a_draft_begins_behind_any_token(tiny, drafted):
    """A prompt may end with the token that ends answers."""
    end = int(PROMPT[-1])
    count = tiny.said.index(end) + 1 if end in tiny.said else DRAFTED
    assert drafted(end) == tiny.said[:count] != []


def test_prompts_may_be_shorter_than_the_window(tiny):
    llm, settings = engine(tiny.model, "speckv"), CompressionConfig("speckv", max_cache_tokens=36)
    prompts = [PROMPT[:1], PROMPT[:20], PROMPT[:40]]
    outputs = llm.generate(prompts, greedy(2), settings)
    assert [len(one.token_ids) for one in outputs] == [2, 2, 2]
    kept = [one.stats.kept for one in outputs]
    assert [int(one.min()) for one in kept if one is not None] == [1, 20, 36]
    assert llm.metrics.as_dict()["kvjax_probe_tokens_total"] == 1 + 20 + 33 + 3 * DRAFTED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speckv", "epicache"])
def test_warming_up_compiles_what_runs_behind_prompts(tiny, name):
    llm = engine(tiny.model, name)
    llm.warm_up([LENGTH])
    steps = set(llm.worker.compiled.seconds)
    assert {key.step for key in steps} >= ({"draft", "probe"} if name == "speckv" else {"probe"})
    llm.generate([PROMPT], greedy(2))
    assert set(llm.worker.compiled.seconds) == steps


@pytest.mark.parametrize(
    "drafts", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["by itself", "by another"]
)
def test_evaluation_looks_ahead_of_what_is_compressed(tiny, smaller, dense, drafts):
    said, other = tiny.said, None
    if drafts:
        sizes = EngineConfig(max_batch=1, max_len=512, block_size=B, pool_tokens=512)
        other = Draft(LLM(smaller.model, CompressionConfig("full"), sizes), tiny.model.tokenizer)
        said = smaller.said
    evaluator = Evaluator(tiny.model, EvaluatorConfig(block_size=B), draft=other)
    method = get_method("speckv")
    scores, seconds = evaluator.probing.scores(evaluator._timed, method, dense, PROMPT)
    want = np.nan_to_num(lookahead_scores(tiny.hf, tiny.weights, PROMPT, said))
    np.testing.assert_allclose(scores.metric[..., :LENGTH], want, rtol=1e-3, atol=1e-6)
    assert not np.asarray(scores.metric[..., LENGTH:]).any()
    assert seconds > 0


def similar(layers_alike):
    """The layers' tokens that follow from how alike their keys are."""

    def layers(p, window):
        return unlike_layers(layers_alike, float(p.cap_tokens)), p.cap_blocks * p.layers * p.heads

    return layers


@pytest.mark.parametrize("method", ["epicache", EPICACHE], ids=["one segment", "segments of 4"])
def test_epicache_keeps_what_the_last_topics_medoid_reads(tiny, method):
    llm = engine(tiny.model, method)
    # So that layers keep unequal shares: what is measured of random weights is nearly even.
    alike = np.array([0.5, 0.9], np.float32)
    llm.worker.artefacts[KEY_SIMILARITY] = jnp.asarray(alike)
    started(llm)
    whole = method == "epicache"
    probe = medoid_segment(tiny.table, PROMPT, *((64, 4) if whole else (4, 2)))
    assert np.array_equal(probe, PROMPT[-len(probe) :]) == whole
    keeps_of = functools.partial(
        keeps_cheapest_by_layer, protected=1, sinks=4, layers_of=similar(alike)
    )
    check_kept(llm, tiny.read_by(probe, itself=False), keeps_of)
    kept = llm.worker.cache.context_len[0].sum(axis=1)
    assert kept[0] > 2 * kept[1]
    assert llm.metrics.as_dict()["kvjax_probe_tokens_total"] == len(probe)


def test_evaluation_probes_with_the_last_topics_medoid(tiny, dense):
    evaluator = Evaluator(tiny.model, EvaluatorConfig(block_size=B))
    scores, seconds = evaluator.probing.scores(evaluator._timed, EPICACHE, dense, PROMPT)
    want = tiny.read_by(medoid_segment(tiny.table, PROMPT, 4, 2), itself=False)
    np.testing.assert_allclose(scores.metric[..., :LENGTH], want, rtol=1e-3, atol=1e-6)
    assert seconds > 0


def test_what_is_needed_is_known_without_the_prompt(tiny, monkeypatch):
    """Of which segment the probe is made changes no shape, and nothing is embedded to know it."""
    llm = engine(tiny.model, EPICACHE)
    one = llm.add_request(PROMPT, greedy(4))
    request, _ = llm.engine.intake.open[one]
    with monkeypatch.context() as patched:
        patched.setattr(llm.worker.probing.bench, "_embed", None)
        needs = {need.key for need in needs_of(llm.worker, request)}
    while llm.has_unfinished():
        llm.step()
    probes = [key for key in llm.worker.compiled.seconds if key.step == "probe"]
    assert probes == [key for key in needs if key.step == "probe"]


@pytest.mark.parametrize("seed", range(12))
def test_episodes_are_found_as_by_the_oracle(seed):
    rng = np.random.default_rng(seed)
    number, clusters = rng.integers(1, 24), int(rng.integers(1, 6))
    points = rng.standard_normal((number, 3))
    # Some stand in one place.
    points = points[rng.integers(0, number, number)]
    labels = clustered(points, clusters)
    assert labels.tolist() == episodes(points, clusters)
    chosen = medoid_of_last(points, clusters)
    assert labels[chosen] == labels[-1]


def test_topics_that_lie_apart_are_told_apart():
    rng = np.random.default_rng(3)
    topic = rng.permutation(np.arange(40) % 4)
    points = np.eye(4)[topic] + rng.uniform(-0.1, 0.1, (40, 4))
    labels = clustered(points, 4)
    assert {len(set(labels[topic == t])) for t in range(4)} == {1}
    assert len(set(labels)) == 4
    same = points[topic == topic[-1]]
    centre = same.mean(axis=0)
    assert points[medoid_of_last(points, 4)] @ centre == max(same @ centre)


def test_keys_are_alike_as_in_the_oracle(tiny):
    blocks = Blocks(size=24, first=3, before=8, window=15)
    run = jax.jit(key_similarity, static_argnums=(0, 1))
    found = run(tiny.model.config, blocks, tiny.model.params, PROMPT)
    want = key_similarities(tiny.hf, tiny.weights, PROMPT, 24, 3, 8, 15)
    np.testing.assert_allclose(found, want, rtol=1e-4)
    # The first layer's keys follow from the tokens alone.
    assert found[0] == pytest.approx(1, abs=1e-5)
    assert found[1] < 0.99


@pytest.mark.parametrize("alike", [[0.2, 0.9, 0.6, 0.85], [0.7] * 4], ids=["unlike", "alike"])
def test_layers_keep_a_quarter_of_the_mean_at_least(alike):
    budget = Budget.of(jnp.int32(8 * 6), jnp.int32(99), 0, (0.0, 0.0), (4, 2, B))
    cap = 6 * B
    found = UnlikeLayers().tokens(budget, {KEY_SIMILARITY: jnp.asarray(alike, jnp.float32)})
    np.testing.assert_allclose(found, unlike_layers(np.array(alike), cap), rtol=1e-5)
    assert found.min() == pytest.approx(cap / 4 if alike[0] < 0.5 else cap)


def test_epicache_is_refused_where_it_cannot_run(tiny):
    llm = engine(tiny.model, "kvzip")
    settings = CompressionConfig("epicache", max_cache_tokens=CAP)
    with pytest.raises(UserError, match=r"^method epicache reads key_similarity, [^\n]*methods="):
        llm.add_request(PROMPT, greedy(2), settings)
    with pytest.raises(UserError, match=r"^method epicache with tensor_parallel 2: [^\n]*$"):
        check_on_devices(get_method("epicache"), 2)
    check_on_devices(get_method("speckv"), 2)
    with pytest.raises(UserError, match=r"^method epicache runs .*: 161 tokens .* is 160; "):
        engine(tiny.model, "epicache").add_request(PROMPT, greedy(61))
