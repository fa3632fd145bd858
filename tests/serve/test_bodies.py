"""Parts of the server by themselves: what bodies say, and what answers are made of."""

import argparse
import dataclasses

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kvjax.cache import CompressionConfig
from kvjax.cache.config import AUTO
from kvjax.cli.serve import KEY_VARIABLE, add_options, server_settings
from kvjax.engine import RequestOutput, TokenLogprobs
from kvjax.engine.request import FinishReason, RequestStats
from kvjax.errors import UserError
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.serve.answers import ChatAnswer, CompletionAnswer, usage_of
from kvjax.serve.errors import ApiError, of_validation
from kvjax.serve.guard import host_name
from kvjax.serve.jobs import compression_of, samplings_of
from kvjax.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from tests.models.tokenizer_builders import write_sentencepiece_gguf

MANY = 1000
TURN = {"role": "user", "content": "x"}


def errors_of(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[{}] * MANY] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", **{f"field{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"messages": [{**TURN, "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [TURN], "tools": [1] * MANY}),
        (ChatRequest, {"messages": [TURN], "modalities": [1] * MANY}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
    ],
)
def test_a_body_full_of_mistakes_is_refused_for_the_first(kind, body):
    """Telling all takes seconds and gigabytes, in which the server answers nobody."""
    assert errors_of(kind, body).error_count() <= 70
    if "stop" not in body:
        assert errors_of(kind, body).error_count() <= 4


def test_a_refusal_names_the_field_that_is_wrong_however_deep():
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    error = errors_of(ChatRequest, {"messages": [{**TURN, "content": [part]}]})
    found = of_validation(RequestValidationError(error.errors())).message
    assert found.startswith("messages.0.content.cache_control ")
    assert "no such field" in found


def output(tokens, *, prompt=3, cached=0, ended: FinishReason | None = "length"):
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
    return RequestOutput(
        "one", np.ones(prompt, np.int32), tuple(tokens), "", "", ended, None, logprobs,
        RequestStats(cached_tokens=cached),
    )  # fmt: skip


def test_of_cached_tokens_each_prompt_is_told_once():
    prompts = [[1] * 300, [1] * 40]
    # Two choices of each: the second of the first prompt found what the first one had just run.
    last = [output([5], cached=n) for n in (0, 128, 16, 32)]
    found = usage_of(prompts, last)
    assert found["prompt_tokens_details"]["cached_tokens"] == 16
    assert (found["prompt_tokens"], found["completion_tokens"]) == (340, 4)
    assert usage_of(prompts, [])["prompt_tokens_details"]["cached_tokens"] == 0


def test_offsets_are_of_the_text_where_letters_are_several_tokens():
    tokens = list("aé…b".encode())
    whole = CompletionAnswer("m", ByteTokenizer())
    one = whole._logprobs(0, output(tokens), 0)
    assert one is not None
    assert one["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    parts = CompletionAnswer("m", ByteTokenizer())
    found = []
    for end in range(len(tokens)):
        part = parts._logprobs(0, output(tokens[: end + 1], ended=None), end)
        assert part is not None
        found += part["text_offset"]
        # Another choice has a text of its own.
        other = parts._logprobs(1, output([97], ended=None), 0 if end == 0 else 1)
        assert other is not None
        assert other["text_offset"] == ([0] if end == 0 else [])
    assert found == one["text_offset"]


def test_completions_go_on_from_their_prompts_and_turns_stand_by_themselves(tmp_path):
    (one,) = samplings_of(CompletionRequest.model_validate({"prompt": "a"}), 5, 1)
    (turn,) = samplings_of(ChatRequest.model_validate({"messages": [TURN]}), 5, 1)
    assert (one.goes_on, turn.goes_on) == (True, False)
    tokenizer = Tokenizer.from_path(write_sentencepiece_gguf(tmp_path / "pieces.gguf"))
    found = CompletionAnswer("m", tokenizer)._logprobs(0, output(tokenizer.encode("hello l")), 0)
    assert found is not None
    assert found["text_offset"] == [0, len(" hello"), len(" hello ")]


def test_the_end_of_a_turn_has_no_log_probability_unless_it_is_ignored():
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset({7})
    for ignored, told in ((False, 0), (True, 1)):
        answer = ChatAnswer("m", tokenizer, ignore_eos=ignored)
        # Handed over before it is known that nothing follows.
        first = answer.chunk(0, output([7], ended=None), 0)
        assert len(first["choices"][0]["logprobs"]["content"]) == told


def test_a_size_on_a_server_that_keeps_all_chooses_a_method():
    full = CompressionConfig(method="full")
    body = CompletionRequest.model_validate

    def asked(**given):
        return compression_of(body({"prompt": "a", "compression": given}), full, ["full", "h2o"])

    assert asked(max_cache_tokens=8).method == AUTO
    assert asked(rate=8, floor=8).method == AUTO
    assert asked(rate=1).method == asked(floor=8).method == asked(method="full").method == "full"
    assert asked(method="full", rate=1).method == "full"
    assert asked(method="h2o", rate=2).method == "h2o"
    with pytest.raises(ApiError, match=r"compression.rate 4: method full evicts nothing"):
        asked(method="full", rate=4)


def test_the_window_of_a_server_is_of_methods_that_observe_one():
    usual = CompressionConfig(method="kv-compress", rate=2, window=4)
    for method, window in (("snapkv", 4), ("key-norm", None), ("predicted-reads-blind", None)):
        body = CompletionRequest.model_validate({"prompt": "a", "compression": {"method": method}})
        found = compression_of(body, usual, [method])
        assert (found.method, found.window, found.rate) == (method, window, 2)


def settings(monkeypatch, *given, key=None):
    parser = argparse.ArgumentParser()
    add_options(parser)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    return server_settings(parser.parse_args(given))


def test_who_a_server_is_asked_for_as(monkeypatch):
    own = ("localhost", "127.0.0.1", "::1")
    assert settings(monkeypatch).hosts == own
    assert settings(monkeypatch, "--host", "127.0.0.2").hosts == (*own, "127.0.0.2")
    assert settings(monkeypatch, "--allowed-hosts", "A.example").hosts == (*own, "a.example")
    # Whoever reaches it from elsewhere has other names for it, or a key.
    assert settings(monkeypatch, "--host", "0.0.0.0").hosts is None
    assert settings(monkeypatch, key="secret").hosts is None
    for given in ("*", "a.example, *"):
        assert settings(monkeypatch, "--allowed-hosts", given).hosts is None
    # As they may stand in a URL.
    given = "a.example:80,B.example.,[fe80::1]:80,[::1],fe80::2,"
    found = settings(monkeypatch, "--allowed-hosts", given).hosts
    assert found == (*own, "a.example", "b.example", "fe80::1", "fe80::2")
    for given in ("http://a.example", "a.example/v1", ":80", "[]:80", "*.example", "a b"):
        with pytest.raises(UserError, match=r"--allowed-hosts '.*': give names as in"):
            settings(monkeypatch, "--allowed-hosts", f"b.example,{given}")
    with pytest.raises(UserError, match="--allowed-hosts is empty"):
        settings(monkeypatch, "--allowed-hosts", ",")
    # A variable that somebody forgot to fill is no open server.
    with pytest.raises(UserError, match=f"{KEY_VARIABLE} is empty"):
        settings(monkeypatch, key="")


@pytest.mark.parametrize(
    ("given", "name"),
    [("localhost:8000", "localhost"), ("LOCALHOST", "localhost"), ("[::1]:8000", "::1"),
     ("[::1]", "::1"), ("evil.example:8000", "evil.example"), ("b.example.", "b.example"),
     ("b.example.:80", "b.example"), ("", "")],
)  # fmt: skip
def test_names_in_a_host_header(given, name):
    assert host_name(given) == name


def test_a_number_of_calls_may_be_one():
    tags = (
        '{% for m in messages %}{% if tools %}<tool_call>{"name"</tool_call>{% endif %}{% endfor %}'
    )
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = tags
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for most, told in ((None, 2), (1, 1)):
        answer = ChatAnswer("m", tokenizer, ["look"], most)
        one = dataclasses.replace(output([65], ended="stop"), text=call * 2)
        choice = answer.whole([one], {"prompt_tokens": 1, "completion_tokens": 1,
                                      "total_tokens": 2}, {})["choices"][0]  # fmt: skip
        assert len(choice["message"]["tool_calls"]) == told
