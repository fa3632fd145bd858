"""What is asked of the engine: taken, or refused in one line before anybody else suffers."""

import logging

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError
from kvjax.models.tokenizer import Tokenizer
from tests.engine.serving import (
    FULL,
    HEADS,
    SMALL,
    TIGHT,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
)
from tests.models.tokenizer_builders import TINY_BOS, write_sentencepiece_gguf


def test_texts_are_prompts_too(tiny_params):
    llm = make_llm(tiny_params)
    ids = [TINY_BOS, *llm.model.tokenizer.encode("Hello?", add_bos=False)]
    text, same, other = llm.generate(["Hello?", ids, ids[1:]], greedy(5))
    assert text.prompt_token_ids.tolist() == ids
    assert text.token_ids == same.token_ids
    assert text.token_ids != other.token_ids


@pytest.mark.parametrize(
    ("prompt", "asked", "goes_on"),
    [("Hello?", None, True), ([1, 2], None, False), ("Hello?", False, False), ([1], True, True)],
)
def test_a_text_goes_on_where_its_prompt_is_one(
    tiny_params, prompt, asked, goes_on, tmp_path, monkeypatch
):
    llm = make_llm(tiny_params)
    pieces = Tokenizer.from_path(write_sentencepiece_gguf(tmp_path / "pieces.gguf"))
    word = pieces.encode("hello")
    monkeypatch.setattr(llm.engine, "tokenizer", pieces)
    request = llm.enqueue(prompt, SamplingParams(max_tokens=9, goes_on=asked))
    _, text = llm.engine.intake.open[request.id]
    request.tokens += word
    assert text.emit(request, 0.0).text == ("hello" if not goes_on else " hello")


def test_one_prompt_may_stand_alone(tiny_params):
    llm = make_llm(tiny_params)
    (text,) = llm.generate("Hello?", greedy(5))
    (ids,) = llm.generate(text.prompt_token_ids, greedy(5))
    assert text.token_ids == ids.token_ids
    assert list(llm.stream("Hello?", greedy(5)))[-1].token_ids == text.token_ids


BAD = [
    ([], {}, "the prompt is empty"),
    ([5, 97], {}, "token id 97"),
    ([-1], {}, "token id -1"),
    ([10**30], {}, f"token id {10**30} of the prompt: give ids from 0 to 96"),
    ([2**63, -1], {}, f"token id {2**63} of"),
    ([10**5000], {}, "token id a value of type int of the prompt"),
    ([1] * 250, {"max_tokens": 7}, "the limit is 256"),
    (np.asarray([1.5]), {}, "the prompt is ndarray of float64: give a text or token ids"),
]


@pytest.mark.parametrize(("prompt", "sampling", "message"), BAD)
def test_a_bad_request_is_refused_and_the_others_go_on(tiny_params, prompt, sampling, message):
    llm = make_llm(tiny_params)
    good = prompts_of(10)[0]
    first, bad, last = llm.generate([good, prompt, good], greedy(**{"max_tokens": 4, **sampling}))
    assert message in (bad.error or "")
    assert bad.finish_reason == "error"
    assert first.token_ids == last.token_ids
    assert len(first.token_ids) == (7 if sampling else 4)
    assert_empty(llm)
    with pytest.raises(UserError, match=message):
        llm.add_request(prompt, greedy(**{"max_tokens": 4, **sampling}))


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tiny_params, caplog):
    caplog.set_level(logging.INFO, "kvjax")
    llm = make_llm(tiny_params, FULL, TIGHT)
    blocks = llm.plan.num_blocks
    with pytest.raises(UserError, match=rf"needs {HEADS * 30} blocks and the pool has {blocks}"):
        llm.add_request(prompts_of(90)[0], greedy(30))
    assert f"is refused: the request needs {HEADS * 30} blocks" in caplog.text
    output = llm.generate(prompts_of(90), greedy(30), SMALL)[0]
    assert len(output.token_ids) == 30
    assert_empty(llm)


def test_bad_batches(tiny_params):
    llm = make_llm(tiny_params)
    with pytest.raises(UserError, match="there are no prompts"):
        llm.generate([])
    with pytest.raises(UserError, match="2 sampling for 1 prompts"):
        llm.generate(prompts_of(10), [greedy(), greedy()])
    with pytest.raises(UserError, match="'nobody'"):
        llm.abort("nobody")
    llm.add_request(prompts_of(10)[0], greedy(), request_id="one")
    with pytest.raises(UserError, match="'one' is in use"):
        llm.add_request(prompts_of(10)[0], greedy(), request_id="one")
    with pytest.raises(UserError, match="'one' is in use"):
        llm.add_request(prompts_of(10)[0], greedy(), request_id="one")
    llm.add_request(prompts_of(10)[0], greedy(), request_id="request-2")
    names = {llm.add_request(prompts_of(10)[0], greedy()) for _ in range(4)}
    assert len(names | {"one", "request-2"}) == 6
    assert set(drain(llm)) == names | {"one", "request-2"}


BAD_SAMPLING = [
    {"max_tokens": 0},
    {"max_tokens": 2.5},
    {"max_tokens": 2**31},
    {"temperature": -0.5},
    {"temperature": float("nan")},
    {"temperature": 1e39},
    {"top_k": 10**12},
    {"top_k": 2.5},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": float("nan")},
    {"min_p": 1.5},
    {"seed": 1.5},
    {"seed": 2**32},
    {"seed": -1},
    {"logprobs": 21},
    {"logprobs": 1.5},
    {"logprobs": True},
    {"stop": (1, 2)},
    {"stop": b"ab"},
    {"stop": ("",)},
    {"stop": {"a": 1}},
    {"stop": ("a",) * 65},
    {"stop": "a" * 5000},
    {"stop": "\ud800"},
    {"ignore_eos": 1},
    {"detokenize": None},
]


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("settings", BAD_SAMPLING, ids=repr)
def test_bad_sampling_is_refused_when_it_is_made(settings):
    with pytest.raises(UserError, match=f"^{next(iter(settings))} ") as caught:
        SamplingParams(**settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    "prompt", [b"abc", {"a": 1}, None, 5, [b"abc"], [None], [[1, [2]]], [[[1]]], ["\ud800"], [True]]
)
def test_what_is_no_prompt_is_refused(tiny_params, prompt):
    llm = make_llm(tiny_params)
    try:
        (output,) = llm.generate(prompt, greedy(2))
        error = output.error or ""
    except UserError as caught:
        error = str(caught)
    assert "give" in error
    assert "\n" not in error
    assert_empty(llm)


@pytest.mark.usefixtures("unchecked_signatures")
def test_settings_of_another_kind_are_refused(tiny_params):
    llm = make_llm(tiny_params)
    prompt = prompts_of(10)[0]
    for settings, wanted in (
        ({"sampling": {"max_tokens": 3}}, "give a SamplingParams"),
        ({"compression": 8}, "give a CompressionConfig"),
        ({"deadline": -1}, "deadline -1"),
        ({"deadline": float("nan")}, "deadline nan"),
        ({"request_id": 5}, "request_id 5"),
        ({"on_output": "print"}, "give a function"),
    ):
        with pytest.raises(UserError, match=wanted):
            llm.add_request(prompt, **{"sampling": greedy(3), **settings})
    assert_empty(llm)


EXTREMES = [
    {"max_cache_tokens": 2**31 - 1},
    {"rate": 4.0, "floor": 2**31 - 1},
    {"max_cache_tokens": 2**31 - 1, "protected": 2**31 - 1},
    {"max_cache_tokens": 2**31 - 1, "sinks": 2**31 - 1},
    {"max_cache_tokens": 2**31 - 1, "protected": 2**31 - 1, "sinks": 2**31 - 1},
    {"max_cache_tokens": 16, "protected": 8, "compress_every": 2**31 - 1},
    {"max_cache_tokens": 16, "protected": 8, "max_kvs_per_step": 2**31 - 1},
    {"max_cache_tokens": 1, "protected": 0, "window": 1},
    {"rate": 1e308, "floor": 1, "protected": 0},
    {"rate": 1.0000001, "floor": 1},
]


@pytest.mark.parametrize("settings", EXTREMES, ids=repr)
@pytest.mark.filterwarnings("ignore::kvjax.RateWarning")
def test_extreme_settings_are_refused_or_served(tiny_params, settings):
    """Nothing that is accepted stops the engine, and none of it harms another request."""
    llm = make_llm(tiny_params)
    good, bad = prompts_of(10, 40)
    plain = alone(tiny_params, [good], greedy())
    sampling = SamplingParams(
        max_tokens=12, top_k=2**31 - 1, temperature=3e38, top_p=1e-300, seed=2**32 - 1
    )
    try:
        compression = CompressionConfig(**settings)
    except UserError:
        return
    outputs = llm.generate([good, bad], [greedy(), sampling], [FULL, compression])
    assert outputs[0].token_ids == plain[0]
    assert outputs[1].error is None or "give" in outputs[1].error or "raise" in outputs[1].error
    assert llm.dead is None
    assert llm.metrics.as_dict()["kvjax_rounds_failed_total"] == 0
    assert_empty(llm)
