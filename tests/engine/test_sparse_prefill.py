"""Prompts whose queries see some keys alone: prefill, engine and evaluation, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.methods.speckv import SparseLookahead
from kvjax.cache.policy import Observer, SparsePrefill
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.needs import needs_of
from kvjax.engine.parallel import check_on_devices
from kvjax.engine.prefill import prefill
from kvjax.engine.sparse import prefill_sparse
from kvjax.errors import UserError
from kvjax.eval import cuts
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.rows import Row
from kvjax.eval.sizes import EvaluatorConfig, Variant
from tests.cache.pair import heads_of
from tests.engine.serving import assert_empty, greedy
from tests.engine.test_probe import SMALLER, Checkpoint
from tests.models.decoder_helpers import params_from
from tests.oracle.behind import lookahead_scores, said_behind
from tests.oracle.scores import Prompt
from tests.oracle.selection import keeps
from tests.oracle.sparse import kept_scores, prefilled
from tests.tiny import TINY

LENGTH, CAP, B, DRAFTED, VERTICALS, LOCAL = 200, 48, 4, 8, 12, 64
PROMPT = np.random.default_rng(33).integers(0, 256, LENGTH).astype(np.int32)
SCORER = SparseLookahead(drafted=DRAFTED, sparse=SparsePrefill(VERTICALS, LOCAL))
METHOD = dataclasses.replace(get_method("speckv-sparse"), scorer=SCORER)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("smaller"), SMALLER)


def said_by(checkpoint, prompt=PROMPT) -> list[int]:
    return said_behind(checkpoint.hf, checkpoint.weights, prompt, DRAFTED)


@functools.cache
def compiled(scorer):
    return jax.jit(functools.partial(prefill_sparse, TINY, scorer))


def run(params, scorer, prompt, said, width=256, room=64):
    """A prompt with what was said behind it, both padded with tokens that must not matter."""
    tokens, looking = np.full(width, 7, np.int32), np.full(room, 9, np.int32)
    tokens[: len(prompt)] = prompt
    last = [*prompt[-scorer.window :], *said]
    looking[: len(last)] = last
    overlap = np.int32(min(scorer.window, len(prompt)))
    given = tokens, np.int32(len(prompt)), looking, np.int32(len(last)), overlap
    return compiled(scorer)(params, *given)


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "count"), [(256, 5), (LENGTH, DRAFTED), (224, 0)])
def test_every_layer_sees_verticals_and_what_is_near(tiny, width, count, stacked):
    params = tiny.model.params
    if stacked:
        params = params_from(TINY, tiny.weights.__getitem__)
    said = said_by(tiny)[:count]
    prompt, logits = run(params, SCORER, PROMPT, said, width)
    given = tiny.hf, tiny.weights, PROMPT, said, VERTICALS, LOCAL
    want, projected, chosen = prefilled(*given)
    assert int(prompt.length) == LENGTH
    assert prompt.k.shape[1] == width
    for layer, (_, k, v) in enumerate(projected):
        np.testing.assert_allclose(prompt.k[layer, :LENGTH], k, atol=5e-4)
        np.testing.assert_allclose(prompt.v[layer, :LENGTH], v, atol=5e-4)
    np.testing.assert_allclose(logits, want, atol=5e-4)
    scores = np.nan_to_num(kept_scores(chosen, LENGTH))
    np.testing.assert_allclose(prompt.scores.metric[..., :LENGTH], scores, rtol=2e-3, atol=1e-5)
    # Else all of this would hold of dense attention.
    whole, dense = whole_prompt(params, width)
    assert np.abs(np.asarray(dense) - want).max() > 1e-2
    assert np.array_equal(prompt.k[0, :LENGTH], whole.k[0, :LENGTH])
    assert not np.allclose(prompt.k[1, :LENGTH], whole.k[1, :LENGTH], atol=1e-2)


def whole_prompt(params, width=256):
    """The prompt, and the logits behind it, where every query sees all keys."""
    tokens = np.zeros(width, np.int32)
    tokens[:LENGTH] = PROMPT
    step = jax.jit(functools.partial(prefill, TINY, Observer(None)))
    return step(params, {}, tokens, np.int32(LENGTH))


def test_more_verticals_than_tokens_are_dense_attention(tiny):
    scorer = dataclasses.replace(SCORER, sparse=SparsePrefill(4096, LOCAL))
    said = said_by(tiny)
    prompt, logits = run(tiny.model.params, scorer, PROMPT, said)
    whole, dense = whole_prompt(tiny.model.params)
    # Keys of the window are no verticals; its queries, and those behind, have them in the band.
    np.testing.assert_allclose(prompt.k[:, :LENGTH], whole.k[:, :LENGTH], atol=1e-4)
    np.testing.assert_allclose(logits, dense, atol=1e-4)
    scores = np.nan_to_num(lookahead_scores(tiny.hf, tiny.weights, PROMPT, said))
    np.testing.assert_allclose(prompt.scores.metric[..., :LENGTH], scores, rtol=1e-3, atol=1e-6)


def test_a_prompt_within_the_window_has_no_verticals(tiny):
    """All of its queries score, and there is nothing before them."""
    scorer = dataclasses.replace(SCORER, window=LENGTH)
    prompt, logits = run(tiny.model.params, scorer, PROMPT, [3, 4], room=LENGTH + DRAFTED)
    assert not np.asarray(prompt.scores.metric).any()
    given = tiny.hf, tiny.weights, PROMPT, [3, 4], 0, LOCAL
    want, *_ = prefilled(*given)
    np.testing.assert_allclose(logits, want, atol=5e-4)


@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    before=st.integers(0, 24),
    count=st.integers(1, 30),
)
def test_verticals_are_the_best_and_of_equal_ones_the_older(values, before, count):
    metric, before = np.array([values, values[::-1]], np.float32), min(before, len(values))
    found = SparsePrefill(count, LOCAL).chosen(jnp.asarray(metric), jnp.int32(before))
    for row, chosen in zip(metric, np.asarray(found), strict=True):
        best = sorted(sorted(range(before), key=lambda t: (-row[t], t))[:count])
        assert chosen.tolist() == best + [len(values)] * (len(chosen) - len(best))
        assert len(chosen) == min(count, len(values))


def engine(model, method=METHOD, drafts=None, **sizes) -> LLM:
    given = {"prefill_scratch": 256, "prefill_chunk": 128, "decode_steps_per_sync": 1, **sizes}
    config = EngineConfig(max_batch=2, max_len=512, block_size=B, pool_tokens=800, **given)
    return LLM(model, CompressionConfig(method, max_cache_tokens=CAP), config, draft=drafts)


def drafting(model) -> LLM:
    sizes = EngineConfig(max_batch=1, max_len=512, block_size=B, pool_tokens=512)
    return LLM(model, CompressionConfig("full"), sizes)


@pytest.mark.parametrize(
    ("other", "chunk"),
    [(False, 128), (True, 128), pytest.param(False, 256, marks=pytest.mark.slow)],
    ids=["by itself in parts", "by another", "by itself whole"],
)
def test_an_engine_keeps_what_the_draft_reads_of_such_a_prefill(tiny, smaller, other, chunk):
    said = said_by(smaller if other else tiny)
    llm = engine(
        tiny.model, METHOD, drafting(smaller.model) if other else None, prefill_chunk=chunk
    )
    one = llm.add_request(PROMPT, greedy(4))
    outputs = []
    while not outputs:
        outputs = [out for out in llm.step() if out.token_ids]
    logits, _, chosen = prefilled(tiny.hf, tiny.weights, PROMPT, said, VERTICALS, LOCAL)
    assert (
        outputs[0].token_ids[0] == logits.argmax() != np.argmax(whole_prompt(tiny.model.params)[1])
    )
    scores = kept_scores(chosen, LENGTH)
    shape = (TINY.num_layers, LENGTH, TINY.num_kv_heads, 1)
    prompt = Prompt(np.zeros(shape), np.zeros(shape), np.zeros(shape), CAP, B)
    rows = {(i, j): row for i, layer in enumerate(scores) for j, row in enumerate(layer)}
    want = keeps(lambda _: rows, protected=33)(prompt)
    for (slot, *at), kvs in heads_of(llm.worker.cache).items():
        if slot == 0:
            assert sorted(x.position for x in kvs if x.position < LENGTH) == want[at[0], at[1]]
    steps = {key.step for key in llm.worker.compiled.seconds}
    assert ("draft" in steps) != other
    assert any(step.startswith("prefill in scratch") for step in steps) == (
        not other and chunk < LENGTH
    )
    found = llm.metrics.as_dict()
    assert found["kvjax_prompt_tokens_total"] == LENGTH
    assert found["kvjax_probe_tokens_total"] == (0 if other else 33 + DRAFTED)
    llm.abort(one)
    while llm.has_unfinished():
        llm.step()
    assert_empty(llm)


@pytest.mark.parametrize("length", [VERTICALS + LOCAL, VERTICALS + LOCAL + 1])
def test_prompts_that_the_keys_cover_are_prefilled_as_ever(tiny, smaller, length):
    assert SCORER.sparse.applies(length) == (length > VERTICALS + LOCAL)
    llm = engine(tiny.model, METHOD, drafting(smaller.model))
    llm.generate(PROMPT[:length], greedy(2))
    steps = {key.step for key in llm.worker.compiled.seconds}
    assert ("prefill sparse" in steps) == (length > VERTICALS + LOCAL)
    assert ("prefill" in steps) == ("probe" in steps) == (length == VERTICALS + LOCAL)


def test_nothing_is_left_out_where_nothing_has_to_go(tiny):
    llm = engine(tiny.model)
    whole = CompressionConfig(METHOD, rate=1)
    out = llm.generate(PROMPT, greedy(2), whole)[0]
    assert out.token_ids[0] == np.argmax(whole_prompt(tiny.model.params)[1])
    assert not any("sparse" in key.step for key in llm.worker.compiled.seconds)


@pytest.mark.parametrize("other", [False, True], ids=["by itself", "by another"])
def test_what_it_needs_is_known_before_it_runs(tiny, smaller, other):
    llm = engine(tiny.model, METHOD, drafting(smaller.model) if other else None)
    seen = []
    begin = llm.worker.begin

    def begun(request):
        llm.worker.begin = begin
        seen.extend(need.key for need in needs_of(llm.worker, request))
        return begin(request)

    llm.worker.begin = begun
    llm.generate(PROMPT, greedy(2))
    assert set(llm.worker.compiled.seconds) <= set(seen)
    assert any(key.step == "prefill sparse" for key in seen)
    assert ("draft" in {key.step for key in seen}) != other


@pytest.mark.slow
def test_warming_up_compiles_it(tiny):
    llm = engine(tiny.model)
    llm.warm_up([LENGTH])
    steps = set(llm.worker.compiled.seconds)
    assert any(key.step == "prefill sparse" for key in steps)
    llm.generate(PROMPT, greedy(2))
    assert set(llm.worker.compiled.seconds) == steps


@pytest.mark.parametrize("other", [False, True], ids=["by itself", "by another"])
def test_evaluation_runs_the_sparse_prefill(tiny, smaller, other, monkeypatch):
    from kvjax.engine.draft import Draft

    text = np.random.default_rng(5).integers(97, 123, LENGTH).astype(np.int32)
    said = said_by(smaller if other else tiny, text)
    want, *_ = prefilled(tiny.hf, tiny.weights, text, said, VERTICALS, LOCAL)
    methods = {"speckv-sparse": METHOD, "full": get_method("full")}
    monkeypatch.setattr(cuts, "get_method", methods.__getitem__)
    draft = Draft(drafting(smaller.model), tiny.model.tokenizer) if other else None
    evaluator = Evaluator(
        tiny.model, EvaluatorConfig(block_size=B, num_slots=2, free_tokens=0), draft=draft
    )
    given, found = evaluator.probing.sparse, []

    def kept(*args):
        found.append(given(*args))
        return found[-1]

    monkeypatch.setattr(evaluator.probing, "sparse", kept)
    row = Row("one", "task", LENGTH, "", bytes(text.tolist()).decode(), "", "", "", "x")
    variants = [Variant("full", 1.0), Variant("speckv-sparse", 2.0), Variant("speckv-sparse", 4.0)]
    results = {
        (result["method"], result["rate"]): result
        for batch in evaluator.evaluate(row, evaluator.tokenise(row), {"prompt": variants})
        for result in batch
    }
    # Once for both rates, on the prompt and nothing else.
    ((prompt, logits, seconds, drafted),) = found
    np.testing.assert_allclose(logits, want, atol=5e-4)
    assert int(prompt.length) == LENGTH
    assert seconds > 0 < drafted
    sparse = results["speckv-sparse", 2.0]
    assert sparse["seconds"]["prefill"] == pytest.approx(seconds, abs=1e-3)
    assert sparse["seconds"]["select"] >= round(drafted, 3)
    assert 1.9 < sparse["kvs_full"] / sparse["kvs"] < 2.2


@pytest.mark.usefixtures("unchecked_signatures")
def test_bad_numbers_are_named():
    with pytest.raises(UserError, match=r"^verticals 0: "):
        SparsePrefill(verticals=0)
    with pytest.raises(UserError, match=r"^local 100: wanted a multiple of 64$"):
        SparsePrefill(local=100)
    with pytest.raises(UserError, match=r"^sparse 3: wanted a SparsePrefill$"):
        SparseLookahead(sparse=3)  # type: ignore[arg-type]


def test_what_it_cannot_run_on_is_refused(tiny):
    llm = engine(tiny.model, prefill_scratch=128)
    says = r"^method speckv-sparse runs [^\n]*: 203 tokens [^\n]*, prefill_scratch is 128; [^\n]*$"
    with pytest.raises(UserError, match=says):
        llm.add_request(PROMPT, greedy(3))
    says = r"^method speckv-sparse with tensor_parallel 2: its sparse prefill runs [^\n]*$"
    with pytest.raises(UserError, match=says):
        check_on_devices(METHOD, 2)


def test_the_authors_numbers_stand_for_long_prompts():
    sparse = get_method("speckv-sparse").sparse
    assert sparse is not None
    assert sparse == SparsePrefill(2048, 2048)
    assert [sparse.applies(n) for n in (4096, 4097)] == [False, True]
    assert get_method("speckv-sparse-256").sparse == SparsePrefill(256, 256)
    assert get_method("speckv").sparse is None
    assert get_method("h2o").sparse is None
