"""The evaluator against plain passes: a dense one for the full cache, token by token for others."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvjax.cache import get_method, init_cache, rate_blocks, write_survivors
from kvjax.engine.decode import decode_step as decode_one
from kvjax.engine.prefill import prefill as run_prompt
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.probing import Probes
from kvjax.eval.rows import PROTOCOLS, Turn
from kvjax.eval.sizes import EvaluatorConfig, Variant, padded_size, slots_for
from tests.eval.conftest import TINY, make_row
from tests.models.decoder_helpers import dense_scores

CONFIG = EvaluatorConfig(block_size=4, num_slots=4)
HEADS = TINY.num_layers * TINY.num_kv_heads


PADDED = 160
"""Every plain pass runs so many tokens, so that each is compiled once."""


def padded(tokens) -> np.ndarray:
    out = np.zeros(PADDED, np.int32)
    out[: len(tokens)] = tokens
    return out


_dense = jax.jit(functools.partial(dense_scores, TINY))


def scores_of(model, tokens) -> np.ndarray:
    """Logits after every token, by attention written out."""
    return np.asarray(_dense(model.params, padded(tokens)))[: len(tokens)]


def run_row(evaluator, row, protocols, variants) -> dict[tuple[str, str, float], dict]:
    tokens = evaluator.tokenise(row)
    batches = evaluator.evaluate(row, tokens, dict.fromkeys(protocols, variants))
    results = [result for batch in batches for result in batch]
    keyed = {(r["protocol"], r["method"], r["rate"]): r for r in results}
    assert len(keyed) == len(results) == len(protocols) * len(variants)
    return keyed


@pytest.fixture(scope="module")
def evaluator(tiny_model):
    return Evaluator(tiny_model, CONFIG)


def test_a_method_without_its_calibration_is_refused(evaluator):
    with pytest.raises(UserError, match=r"^method duo-heads reads .* head_budget: [^\n]*$"):
        run_row(evaluator, make_row(), ["chat"], [Variant("full", 1.0), Variant("duo-heads", 4.0)])


def test_prompts_are_repeated_once_per_method_and_cut(evaluator, monkeypatch):
    """Whatever the rates; what is kept are as many KVs as with any method, and others by each."""
    asked = []
    scores = Probes.scores

    def noted(self, timed, method, dense, prompt):
        asked.append((method.name, len(prompt)))
        return scores(self, timed, method, dense, prompt)

    monkeypatch.setattr(Probes, "scores", noted)
    row = make_row(context="It was the age of wisdom, it was the age of foolishness. " * 6)
    names = ("kvzip", "kvzip-plus", "wide-pool")
    variants = [Variant(name, rate) for name in names for rate in (1.5, 2.0)]
    results = run_row(evaluator, row, ["chat", "question"], variants)
    tokens = evaluator.tokenise(row)
    cuts = [tokens.cut(protocol) for protocol in ("chat", "question")]
    assert sorted(asked) == sorted((name, cut) for name in names[:2] for cut in cuts)
    for protocol in ("chat", "question"):
        for rate in (1.5, 2.0):
            first, second, other = (results[protocol, name, rate] for name in names)
            assert first["kvs"] == second["kvs"] == other["kvs"] < first["kvs_full"]
            assert len({first["nll"], second["nll"], other["nll"]}) == 3
            assert first["seconds"]["select"] > 0


def log_softmax(x):
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("target", [pytest.param(" the age", marks=pytest.mark.slow), "x"])
def test_rate_1_and_the_full_cache_equal_a_plain_pass(evaluator, tiny_model, target):
    row = make_row(target=target)
    tokens = evaluator.tokenise(row)
    scores = scores_of(tiny_model, np.concatenate([tokens.prompt, tokens.target]))
    scores = log_softmax(scores[len(tokens.prompt) - 1 : -1])
    nll = -scores[np.arange(len(tokens.target)), tokens.target]
    variants = [Variant("full", 1.0), Variant("kv-compress", 1.0)]
    for result in run_row(evaluator, row, PROTOCOLS, variants).values():
        assert result["em"] == np.array_equal(scores.argmax(-1), tokens.target)
        assert result["kvs"] == result["kvs_full"] == HEADS * result["compressed_tokens"]
        if len(target) == 1:
            assert result["nll"] is None
            continue
        np.testing.assert_allclose(result["nll"], nll[1:].mean(), rtol=1e-4)
        assert abs(result["kl"]) < 1e-6
        assert result["agree"] == 1
        assert result["recall"] == pytest.approx(1, abs=1e-4)


def test_an_answer_that_the_model_gives_counts_as_exact(evaluator, tiny_model):
    """The full cache's own greedy continuation is matched under every protocol."""
    tokens = list(evaluator.tokenise(make_row()).prompt)
    start = len(tokens)
    for _ in range(4):
        tokens.append(int(scores_of(tiny_model, np.asarray(tokens))[-1].argmax()))
    text = bytes(tokens[start:]).decode()
    results = run_row(evaluator, make_row(target=text), PROTOCOLS, [Variant("full", 1.0)])
    assert [result["em"] for result in results.values()] == [1] * len(PROTOCOLS)


@functools.cache
def decode_step():
    return jax.jit(functools.partial(decode_one, TINY, None))


@functools.cache
def prefill(method):
    return jax.jit(functools.partial(run_prompt, TINY, get_method(method).observer))


@functools.cache
def admit(method):
    def write(cache, slot, prompt, keep):
        given = (cache, slot, prompt.k, prompt.v, prompt.scores, prompt.length, keep)
        return write_survivors(*given, get_method(method))

    return jax.jit(write)


def empty_cache():
    return init_cache(
        num_slots=1,
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        num_blocks=400,
        max_blocks_per_head=64,
        block_size=4,
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("method", ["kv-compress", "kv-compress-full-l2"])
def test_compressed_scores_equal_decoding_token_by_token(evaluator, tiny_model, method, protocol):
    row, rate = make_row(), 2.0
    tokens = evaluator.tokenise(row)
    cut, full = tokens.cut(protocol), np.concatenate([tokens.prompt, tokens.target])
    result = run_row(evaluator, row, [protocol], [Variant(method, rate)])[protocol, method, rate]

    prompt, scores = prefill(method)(tiny_model.params, {}, padded(full[:cut]), np.int32(cut))
    cache = empty_cache()
    keep = rate_blocks(cut, rate, HEADS, 4)
    cache, _, ok = admit(method)(cache, np.int32(0), prompt, np.int32(keep))
    assert ok
    assert result["kept"] == np.asarray(cache.context_len[0]).tolist()
    assert result["kvs"] == np.asarray(cache.context_len[0]).sum() < result["kvs_full"]
    predicted = [log_softmax(np.asarray(scores))]
    for token in full[cut:-1]:
        cache, scores, ok = decode_step()(
            tiny_model.params, cache, np.asarray([token], np.int32), np.asarray([True])
        )
        predicted.append(log_softmax(np.asarray(scores[0])))
    ours = np.stack(predicted)[-len(tokens.target) :]
    reference = scores_of(tiny_model, full)[len(tokens.prompt) - 1 : -1]
    reference = log_softmax(reference)
    nll = -ours[np.arange(len(tokens.target)), tokens.target]
    kl = (np.exp(reference) * (reference - ours)).sum(-1)
    np.testing.assert_allclose(result["nll"], nll[1:].mean(), rtol=1e-3)
    np.testing.assert_allclose(result["kl"], kl[1:].mean(), rtol=1e-2, atol=1e-5)
    assert result["agree"] == pytest.approx(
        (ours.argmax(-1) == reference.argmax(-1))[1:].mean(), abs=1e-4
    )
    assert 0 < result["recall"] < 1
    assert result["recall"] == pytest.approx(np.mean(result["recall_by_layer"]), abs=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_generated_answers_are_greedy(evaluator, tiny_model, protocol):
    row = make_row(metric="f1", max_new_tokens=11)
    tokens = list(evaluator.tokenise(row).prompt)
    for _ in range(11):
        tokens.append(int(scores_of(tiny_model, np.asarray(tokens))[-1].argmax()))
    expected = tiny_model.tokenizer.decode(tokens[-11:]).lstrip("\n")
    variants = [Variant("full", 1.0), Variant("kv-compress", 2.0)]
    results = run_row(evaluator, row, [protocol], variants)
    assert results[protocol, "full", 1.0]["answer"] == expected
    assert results[protocol, "full", 1.0]["metric"] == "f1"
    assert isinstance(results[protocol, "kv-compress", 2.0]["answer"], str)


def plain_answer(model, tokens, count: int) -> str:
    """So many greedy tokens of the full cache behind these, as text."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(scores_of(model, np.asarray(tokens))[-1].argmax()))
    return bytes(tokens[-count:]).decode()


def opened(row) -> list[int]:
    """What a server gets of a row: up to where the assistant's turn opens."""
    return list((row.head + row.context + row.question + row.suffix).encode())


def test_free_answers_of_the_full_cache_begin_where_the_turn_opens(tiny_model):
    """No word of the answer is given, whatever the protocol; `prompt` has it compressed already."""
    evaluator = Evaluator(tiny_model, dataclasses.replace(CONFIG, free_tokens=7))
    row = make_row()
    expected = plain_answer(tiny_model, opened(row), 7)
    # The answer's given beginning would make another one.
    assert plain_answer(tiny_model, evaluator.tokenise(row).prompt, 7) != expected
    for target, holds in ((f" {expected[2:5].upper()}", 1), (row.target, 0), ("It was", 0)):
        asked = make_row(target=target)
        results = run_row(evaluator, asked, PROTOCOLS, [Variant("full", 1.0)])
        for (protocol, *_), result in results.items():
            if protocol == "prompt":
                assert (result["free"], result["free_answer"]) == (None, None)
                continue
            assert result["free_answer"] == expected
            assert result["free"] == holds
            assert result["score"] == result["em"] == 0
    text = run_row(evaluator, make_row(metric="nll"), ["chat"], [Variant("full", 1.0)])
    assert text["chat", "full", 1.0]["free_answer"] is None
    # Without a given beginning `prompt` is what a server does.
    bare = run_row(evaluator, make_row(answer_prefix=""), ["prompt"], [Variant("full", 1.0)])
    assert bare["prompt", "full", 1.0]["free_answer"] == expected


def compressed_steps(model, method, rate, cut, fed) -> list[np.ndarray]:
    """Log-probabilities after the cut and after each token that is fed one by one behind it."""
    prompt, scores = prefill(method)(model.params, {}, padded(fed[:cut]), np.int32(cut))
    keep = np.int32(rate_blocks(cut, rate, HEADS, 4))
    cache, _, _ = admit(method)(empty_cache(), np.int32(0), prompt, keep)
    out = [log_softmax(np.asarray(scores).reshape(-1))]
    for token in fed[cut:]:
        cache, scores, ok = decode_step()(
            model.params, cache, np.asarray([token], np.int32), np.asarray([True])
        )
        assert ok
        out.append(log_softmax(np.asarray(scores[0])))
    return out


TURNS = (Turn(" Who?<end>", "It was", " he"), Turn("<user> Age?<end>", "The", " age"))


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_turns_are_scored_one_by_one_behind_one_compression(tiny_model, rate):
    """Teacher-forced and freely, each behind the true answers before it."""
    method, count = ("full" if rate == 1 else "kv-compress"), 5
    evaluator = Evaluator(tiny_model, dataclasses.replace(CONFIG, free_tokens=count))
    begin = make_row().head + make_row().context

    def expected(turns) -> tuple[list[bool], np.ndarray, np.ndarray, list[str]]:
        text, spans, opened = begin, [], []
        for turn in turns:
            opened.append(len(text + turn.asked))
            text += turn.asked + turn.answer_prefix
            spans.append((len(text), len(text + turn.target)))
            text += turn.target
        tokens = list(text.encode())
        if rate == 1:
            steps = log_softmax(scores_of(tiny_model, tokens))[len(begin) - 1 :]
        else:
            steps = compressed_steps(tiny_model, method, rate, len(begin), tokens)

        def at(position: int) -> np.ndarray:
            return steps[position - len(begin)]

        right = [all(at(p).argmax() == tokens[p] for p in range(*span)) for span in spans]
        later = [p for start, end in spans for p in range(start + 1, end)]
        nll = np.asarray([-at(p)[tokens[p]] for p in later])
        full = log_softmax(scores_of(tiny_model, tokens))
        kl = np.asarray([(np.exp(full[p - 1]) * (full[p - 1] - at(p))).sum() for p in later])
        said = []
        for place in opened:
            fed = tokens[:place]
            for _ in range(count):
                if rate == 1:
                    step = scores_of(tiny_model, fed)[-1]
                else:
                    step = compressed_steps(tiny_model, method, rate, len(begin), fed)[-1]
                fed.append(int(step.argmax()))
            said.append(bytes(fed[place:]).decode())
        return right, nll, kl, said

    # The first answer is what the model says, so that one of the two is right.
    said = expected(TURNS)[-1][0]
    turns = (dataclasses.replace(TURNS[0], answer_prefix="", target=said[:3]), TURNS[1])
    right, nll, kl, said = expected(turns)
    assert right == [True, False]
    assert said[0] != said[1]
    row = make_row(question="", suffix="", answer_prefix="", target="", turns=turns)
    variants = [Variant(method, rate)]
    results = run_row(evaluator, row, ["chat", "agnostic"], variants)
    result = results["agnostic", method, rate]
    assert result == {**results["chat", method, rate], "protocol": "agnostic"}
    assert (result["em"], result["score"], result["turns"]) == (0.5, 0.5, [1, 0])
    assert (result["free"], result["free_answer"]) == (0.5, said)
    assert result["nll"] == pytest.approx(nll.mean(), rel=1e-3)
    assert result["kl"] == pytest.approx(kl.mean(), rel=1e-2, abs=1e-5)
    assert result["kvs"] < result["kvs_full"] or rate == 1


@pytest.mark.parametrize("protocol", ["chat", "agnostic"])
def test_what_the_full_cache_says_by_itself_is_the_target(tiny_model, protocol):
    evaluator = Evaluator(tiny_model, CONFIG)
    row = make_row(metric="own", target="", answer_prefix="", max_new_tokens=6)
    expected = plain_answer(tiny_model, opened(row), 6)
    variants = [Variant("full", 1.0), Variant("kv-compress", 4.0)]
    results = run_row(evaluator, row, [protocol], variants)
    full, other = (results[protocol, v.method, v.rate] for v in variants)
    assert full["free_answer"] == expected
    assert (full["em"], full["agree"], full["target_tokens"]) == (1, 1, 6)
    assert full["kl"] == pytest.approx(0, abs=1e-6)
    assert other["target_tokens"] == 6
    assert other["kl"] > 1e-4
    assert len(other["free_answer"]) == 6
    given = run_row(evaluator, make_row(answer_prefix="", target=expected), [protocol], variants)
    same = given[protocol, "kv-compress", 4.0]
    assert [other[name] for name in ("nll", "kl", "agree")] == [
        same[name] for name in ("nll", "kl", "agree")
    ]
    for result in (full, other):
        assert (result["metric"], result["score"], result["free"]) == ("own", None, None)


def test_what_the_full_cache_says_by_itself_is_as_short_as_is_asked_for(tiny_model):
    evaluator = Evaluator(tiny_model, dataclasses.replace(CONFIG, max_new_tokens=3))
    row = make_row(metric="own", target="", answer_prefix="", max_new_tokens=6)
    (result,) = run_row(evaluator, row, ["chat"], [Variant("full", 1.0)]).values()
    assert (result["target_tokens"], len(result["free_answer"])) == (3, 3)


@pytest.mark.parametrize("protocol", ["chat", "agnostic"])
@pytest.mark.parametrize("metric", ["em", "f1"])
def test_free_answers_come_from_the_compressed_cache(tiny_model, protocol, metric):
    """Beside an answer behind its given beginning where the metric wants one (f1)."""
    method, rate, count = "kv-compress", 8.0, 9
    evaluator = Evaluator(tiny_model, dataclasses.replace(CONFIG, free_tokens=count))
    row = make_row(metric=metric, max_new_tokens=5)
    cut = {"chat": len(opened(row)), "agnostic": len(row.head + row.context)}[protocol]
    result = run_row(evaluator, row, [protocol], [Variant(method, rate)])[protocol, method, rate]

    def decoded(given: list[int], count: int) -> str:
        prompt, scores = prefill(method)(tiny_model.params, {}, padded(given[:cut]), np.int32(cut))
        cache = empty_cache()
        keep = np.int32(rate_blocks(cut, rate, HEADS, 4))
        cache, _, _ = admit(method)(cache, np.int32(0), prompt, keep)
        fed, out = list(given[cut:]), []
        while len(out) < count:
            if not fed:
                # The first one from the prefill if nothing is fed, as in generation.
                out.append(int(np.asarray(scores).reshape(-1).argmax()))
            token = fed.pop(0) if fed else out[-1]
            cache, scores, ok = decode_step()(
                tiny_model.params, cache, np.asarray([token], np.int32), np.asarray([True])
            )
            assert ok
        return bytes(out).decode()

    expected = decoded(opened(row), count)
    assert result["free_answer"] == expected
    # What is compared tells the compressed cache from the full one, and from a given beginning.
    assert expected != plain_answer(tiny_model, opened(row), count)
    begun = opened(row) + list(row.answer_prefix.encode())
    assert decoded(begun, count) != expected
    if metric == "f1":
        assert result["answer"] == decoded(begun, 5)


def test_a_free_answer_ends_with_the_models_context(tiny_model):
    row = make_row()
    length = len(opened(row)) + len(row.answer_prefix + row.target)
    config = dataclasses.replace(CONFIG, free_tokens=500, context_length=length)
    result = run_row(Evaluator(tiny_model, config), row, ["chat"], [Variant("full", 1.0)])
    assert len(result["chat", "full", 1.0]["free_answer"]) == len(row.answer_prefix + row.target)
    none = dataclasses.replace(CONFIG, free_tokens=0)
    result = run_row(Evaluator(tiny_model, none), row, ["chat"], [Variant("full", 1.0)])
    assert result["chat", "full", 1.0]["free"] is None


def test_stop_texts_end_an_answer_early(tiny_model):
    evaluator = Evaluator(tiny_model, CONFIG)
    row = make_row(metric="f1", max_new_tokens=40)
    variants = [Variant("full", 1.0)]
    whole = run_row(evaluator, row, ["prompt"], variants)["prompt", "full", 1.0]["answer"]
    stop = whole[3:5]
    stopped = make_row(metric="f1", max_new_tokens=40, stop=(stop,))
    answer = run_row(evaluator, stopped, ["prompt"], variants)["prompt", "full", 1.0]["answer"]
    assert answer == whole[: whole.index(stop)]


@pytest.mark.slow
def test_one_slot_suffices(tiny_model):
    """The pool of a single slot holds a full cache and its answer."""
    row = make_row(context="word" * 25, answer_prefix="", target=" ", metric="f1")
    # As long as a padded prompt can be, so that nothing is to spare.
    alone = Evaluator(tiny_model, dataclasses.replace(CONFIG, num_slots=1))
    assert len(alone.tokenise(row).prompt) == padded_size(128, 128) == 128
    result = run_row(alone, row, ["prompt"], [Variant("full", 1.0)])["prompt", "full", 1.0]
    assert len(result["answer"]) == 64
    assert result["kvs"] == HEADS * 128
    assert slots_for(tiny_model, 100) == 16


def test_finer_codes_are_held_and_counted(tiny_model):
    """Variants that would take them from each other come one after the other."""
    variants = [Variant("full", 1.0, kind) for kind in ("int4", "int4+")]
    variants += [Variant("random", 1.0 + i / 8, "int4+") for i in range(7)]
    results = run_row(Evaluator(tiny_model, CONFIG), make_row(), ["chat"], variants)
    block = 4 * (2 * (TINY.head_dim // 2 + 2) + 8)
    for (_, method, _), result in results.items():
        assert result["bytes"] == result["blocks"] * block * (1 + ("+" in method))


@pytest.mark.slow
def test_more_variants_than_slots_and_equal_cuts(evaluator):
    """Batches of four; a row without question, suffix and prefix has one cut for all protocols."""
    row = make_row(question="", suffix="", answer_prefix="", metric="nll")
    variants = [Variant("full", 1.0)]
    # One of each kind; every method runs end to end in tests/cache.
    few = ("random", "kv-compress", "snapkv", "kvcrush:snapkv")
    variants += [Variant(method, rate) for method in few for rate in (2.0, 4.0)]
    results = run_row(evaluator, row, PROTOCOLS, variants)
    for (_, method, rate), result in results.items():
        assert result == {**results["prompt", method, rate], "protocol": result["protocol"]}
        assert result["score"] is None
        if rate > 1:
            assert result["kvs"] < result["kvs_full"]
            assert result["bytes"] == result["blocks"] * 4 * (2 * TINY.head_dim * 4 + 8)
    first = results["prompt", variants[1].method, 2.0]
    assert set(first["seconds"]) == {"prefill", "select", "score", "decode"}


def test_blocks_that_no_padded_size_divides_into_have_room(tiny_model):
    config = EvaluatorConfig(block_size=256, num_slots=2, free_tokens=4)
    (result,) = run_row(
        Evaluator(tiny_model, config), make_row(context="x" * 300), ["chat"], [Variant("full", 1.0)]
    ).values()
    assert result["kvs"] == result["kvs_full"]


def test_rates_mean_what_they_say():
    assert rate_blocks(1024, 4, 90, 16) == 1024 * 90 // 64
    assert rate_blocks(1000, 64, 90, 16) == 90  # a block for every head
    assert rate_blocks(1000, 64, 90, 16, floor=128) == 8 * 90
    assert rate_blocks(1000, 1, 90, 16) == 63 * 90
    for rate in (0.5, float("nan"), float("inf")):
        with pytest.raises(UserError, match="rate"):
            rate_blocks(1000, rate, 90, 16)


def test_padding_is_at_most_a_quarter():
    for size in range(1, 5000, 7):
        padded = padded_size(size, 16)
        assert size <= padded <= max(size + 15, 1.25 * size)
    assert len({padded_size(size, 128) for size in range(1, 8192)}) < 30


def test_sizes_that_cannot_be():
    for name, value in (
        *(("num_slots", 0), ("floor", -1), ("context_length", 0), ("max_new_tokens", 0)),
        ("free_tokens", -1),
    ):
        values = {name: value}
        with pytest.raises(UserError):
            EvaluatorConfig(**values)  # pyright: ignore[reportArgumentType]
