"""Methods that run something behind the prompt: in the engine and in evaluation, against NumPy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.policy import Scores
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.dense import dense_pass
from kvjax.engine.draft import Draft, check_same
from kvjax.engine.prefill import PromptKV
from kvjax.engine.probe import draft
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.sizes import EvaluatorConfig
from kvjax.models import load_model
from tests.cache.pair import heads_of
from tests.engine.serving import assert_empty, greedy
from tests.models.tokenizer_builders import tiny_tokenizer
from tests.oracle.behind import lookahead_scores, said_behind
from tests.oracle.scores import Prompt
from tests.oracle.selection import keeps
from tests.tiny import TINY, write_tiny

LENGTH, CHUNK, CAP, B, DRAFTED = 100, 64, 48, 4, 32
PROMPT = np.random.default_rng(8).integers(0, 256, LENGTH).astype(np.int32)
SMALLER = dataclasses.replace(TINY, name="smaller", num_layers=1, intermediate_size=16)


class Checkpoint:
    """A tiny model, and its tensors for the oracle."""

    def __init__(self, folder, config):
        write_tiny(folder, config)
        self.model = load_model(weights=folder)
        self.hf = json.loads((folder / "config.json").read_text())
        self.hf |= {"rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps}
        self.hf["tie_word_embeddings"] = config.tie_word_embeddings
        self.weights = load_file(folder / "model.safetensors")

    @functools.cached_property
    def said(self) -> list[int]:
        return said_behind(self.hf, self.weights, PROMPT, DRAFTED)


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


def check_kept(llm, scores, keeps_of) -> None:
    """What the first slot holds of the prompt is what these scores keep, with these metrics."""
    shape = (TINY.num_layers, LENGTH, TINY.num_kv_heads, 1)
    prompt = Prompt(np.zeros(shape), np.zeros(shape), np.zeros(shape), CAP, B)
    rows = {at: scores[at] for at in np.ndindex(scores.shape[:2])}
    want = keeps_of(lambda _: rows)(prompt)
    for (slot, *at), kvs in heads_of(llm.worker.cache).items():
        if slot == 0:
            held = {x.position: x.metric for x in kvs if x.position < LENGTH}
            assert sorted(held) == want[tuple(at)]
            found = scores[tuple(at)][list(held)]
            np.testing.assert_allclose(
                list(held.values()), np.nan_to_num(found), rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize("chunk", [CHUNK, 128], ids=["in parts", "whole"])
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


def test_a_draft_that_cannot_draft_is_refused(tiny, smaller):
    sizes = EngineConfig(max_batch=1, max_len=LENGTH + 20, block_size=B, pool_tokens=512)
    drafts = LLM(smaller.model, CompressionConfig("full"), sizes)
    llm = engine(tiny.model, "speckv", drafts)
    with pytest.raises(UserError, match=r"^draft: the prompt has 100 tokens [^\n]*$"):
        llm.add_request(PROMPT, greedy(8))
    # Whose method looks not ahead needs none.
    llm.abort(llm.add_request(PROMPT, greedy(8), CompressionConfig("kvzip", max_cache_tokens=CAP)))
    with pytest.raises(UserError, match=r"^draft 'smollm2': give an LLM$"):
        engine(tiny.model, "speckv", "smollm2")


def test_a_draft_of_another_tokenizer_is_refused(tiny):
    same, other = tiny.model.tokenizer, tiny_tokenizer()
    check_same(same, same)
    with pytest.raises(UserError, match=r"^draft: its tokenizer differs .* at token \d+: [^\n]*$"):
        check_same(same, other)


def test_a_draft_that_says_nothing_leaves_the_window(tiny, monkeypatch):
    llm = engine(tiny.model, "speckv")
    llm.worker.draft = lambda tokens, most: ()
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


@pytest.mark.parametrize("length", [1, 20, 40])
def test_short_prompts_keep_everything_that_is_protected(tiny, length):
    llm = engine(tiny.model, "speckv")
    prompt = PROMPT[:length]
    one = llm.generate([prompt], greedy(2), CompressionConfig("speckv", max_cache_tokens=8))[0]
    assert one.error is None
    assert len(one.token_ids) == 2
    assert one.stats.kept is not None
    assert (one.stats.kept >= min(length, 33)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speckv"])
def test_warming_up_compiles_what_runs_behind_prompts(tiny, name):
    llm = engine(tiny.model, name)
    llm.warm_up([LENGTH])
    steps = set(llm.worker.compiled.seconds)
    assert {"draft", "probe"} <= {key.step for key in steps}
    llm.generate([PROMPT], greedy(2))
    assert set(llm.worker.compiled.seconds) == steps


@pytest.mark.parametrize("drafts", [False, True], ids=["by itself", "by another"])
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
