"""Methods that have the prompt repeated: in the engine and in evaluation, against NumPy."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.methods.kvzip import repetitions
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.dense import dense_pass
from kvjax.engine.probe import request_tokens
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.sizes import EvaluatorConfig
from kvjax.models import load_model
from kvjax.models.tokenizer import Tokenizer
from tests.cache.pair import heads_of
from tests.engine.serving import assert_empty, greedy
from tests.oracle.repetition import repetition_scores
from tests.oracle.scores import Prompt
from tests.oracle.selection import keeps_globally
from tests.tiny import TINY

LENGTH, CHUNK, CAP, B = 100, 64, 32, 4
PROMPT = np.random.default_rng(8).integers(0, 256, LENGTH).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=tiny_folder)


@pytest.fixture(scope="module")
def oracle(tiny_folder, model):
    """Scores of the prompt, plain and weighted, repeated in parts of at most so many tokens."""
    hf = json.loads((tiny_folder / "config.json").read_text())
    hf |= {"rope_theta": TINY.rope_theta, "rms_norm_eps": TINY.rms_norm_eps}
    hf["tie_word_embeddings"] = TINY.tie_word_embeddings
    weights = load_file(tiny_folder / "model.safetensors")
    request = np.array(request_tokens(model.tokenizer))

    @functools.cache
    def scores(size):
        runs = [part[len(request) :] for part in repetitions(request.tolist(), PROMPT, size)]
        found = [repetition_scores(hf, weights, PROMPT, request, part) for part in runs]
        assert np.array_equal(np.concatenate(runs), PROMPT)
        return tuple(np.max([one[n] for one in found], axis=0) for n in (0, 1))

    return scores


def engine(model, name, **sizes) -> LLM:
    given = {"prefill_scratch": 128, "prefill_chunk": CHUNK, "decode_steps_per_sync": 1, **sizes}
    config = EngineConfig(max_batch=2, max_len=512, block_size=B, pool_tokens=600, **given)
    return LLM(model, CompressionConfig(name, max_cache_tokens=CAP), config)


@pytest.mark.parametrize("chunk", [CHUNK, 128], ids=["in parts", "whole"])
@pytest.mark.parametrize("name", ["kvzip", "kvzip-plus"])
def test_the_engine_keeps_what_is_read_when_the_prompt_is_repeated(model, oracle, name, chunk):
    llm = engine(model, name, prefill_chunk=chunk)
    one = llm.add_request(PROMPT, greedy(8))
    while not any(output.request_id == one and output.token_ids for output in llm.step()):
        pass
    scores = oracle(chunk)[name == "kvzip-plus"]
    shape = (TINY.num_layers, LENGTH, TINY.num_kv_heads, 1)
    prompt = Prompt(np.zeros(shape), np.zeros(shape), np.zeros(shape), CAP, B)
    rows = {at: scores[at] for at in np.ndindex(scores.shape[:2])}
    want = keeps_globally(lambda _: rows, protected=1, sinks=4)(prompt)
    for (slot, *at), kvs in heads_of(llm.worker.cache).items():
        if slot == 0:
            held = {x.position: x.metric for x in kvs if x.position < LENGTH}
            layer, head = at
            assert sorted(held) == want[layer, head]
            np.testing.assert_allclose(
                list(held.values()), scores[layer, head][list(held)], rtol=1e-3, atol=1e-6
            )
    assert len({len(kept) for kept in want.values()}) > 1
    found = llm.metrics.as_dict()
    request = len(request_tokens(model.tokenizer))
    assert found["kvjax_probe_tokens_total"] == LENGTH + request * (2 if chunk == CHUNK else 1)
    assert found["kvjax_prompt_tokens_total"] == LENGTH
    assert found['kvjax_seconds_total{phase="probe"}'] > 0
    llm.abort(one)
    while llm.has_unfinished():
        llm.step()
    assert_empty(llm)


def test_prompts_that_are_not_compressed_are_not_repeated(model):
    llm = engine(model, "kvzip")
    outputs = llm.generate([PROMPT], greedy(2), CompressionConfig("kvzip", rate=1))
    assert len(outputs[0].token_ids) == 2
    assert llm.metrics.as_dict()["kvjax_probe_tokens_total"] == 0


def test_a_prompt_that_does_not_fit_the_scratch_is_refused(model):
    llm = engine(model, "kvzip")
    with pytest.raises(UserError, match=r"^method kvzip runs .*: 129 tokens .* is 128; [^\n]*$"):
        llm.add_request(PROMPT, greedy(29))
    llm.add_request(PROMPT, greedy(28))
    # Methods that do not repeat take chunk after chunk to the pool.
    other = llm.add_request(PROMPT, greedy(29), CompressionConfig("h2o", max_cache_tokens=CAP))
    llm.abort(other)


@pytest.mark.slow
def test_warming_up_compiles_the_repetition(model):
    llm = engine(model, "kvzip-plus")
    llm.warm_up([LENGTH])
    steps = set(llm.worker.compiled.seconds)
    assert any(key.step == "probe" for key in steps)
    llm.generate([PROMPT], greedy(2))
    assert set(llm.worker.compiled.seconds) == steps


@pytest.mark.parametrize("name", ["kvzip", "kvzip-plus"])
def test_evaluation_repeats_what_is_compressed(model, oracle, name):
    evaluator = Evaluator(model, EvaluatorConfig(block_size=B))
    everything = np.concatenate([PROMPT, np.full(28, 9, np.int32)])
    dense = jax.jit(dense_pass, static_argnums=0)(
        model.config, model.params, everything, np.zeros(1, np.int32)
    )
    scores, seconds = evaluator.probing.scores(evaluator._timed, get_method(name), dense, PROMPT)
    want = oracle(LENGTH)[name == "kvzip-plus"]
    np.testing.assert_allclose(scores.metric[..., :LENGTH], want, rtol=1e-3, atol=1e-6)
    assert not np.asarray(scores.metric[..., LENGTH:]).any()
    assert seconds > 0


class Alternating(Tokenizer):
    """Its chat template takes turns of one role after the other only."""

    def __init__(self, refuses):
        self.refuses = refuses

    def render_chat(self, messages, add_generation_prompt=True, **variables):
        roles = [m["role"] for m in messages]
        if self.refuses or any(a == b for a, b in itertools.pairwise(roles)):
            raise UserError("turns must alternate")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def encode(self, text, *, goes_on=False):
        return list(text.encode())


def test_the_request_is_a_turn_of_its_own():
    text = bytes(request_tokens(Alternating(refuses=False))).decode()
    assert text == "<assistant><user>Repeat the previous context exactly.<assistant>"
    text = bytes(request_tokens(Alternating(refuses=True))).decode()
    assert text == "\n\nRepeat the previous context exactly.\n\n"
