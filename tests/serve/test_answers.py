"""What clients get: every field of the interface, alone and as a stream, against the engine's."""

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine import LLM, EngineConfig, SamplingParams
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from kvjax.serve.jobs import render
from kvjax.serve.schema import Message
from tests.serve.conftest import EOS, SIZES, USUAL, chat_tokenizer, events_of
from tests.tiny import TINY

LONG = "In the beginning there was a cache, and it was without form. " * 2
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def llm():
    """The engine by itself, with the sizes of the servers."""
    model = LoadedModel(TINY, init_params(TINY, "float32", seed=3), chat_tokenizer(), "random")
    return LLM(model, USUAL, EngineConfig(**SIZES))


def expected(llm, prompt, **sampling):
    (output,) = llm.generate([prompt], SamplingParams(**sampling))
    return output


def complete(client, path="/v1/completions", status=200, **body):
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def chat(client, status=200, **body):
    body = {"messages": MESSAGES, "temperature": 0, **body}
    return complete(client, "/v1/chat/completions", status, **body)


def test_a_completion_is_what_the_engine_gives(client, llm):
    output = expected(llm, LONG, max_tokens=12)
    found = complete(client, prompt=LONG, temperature=0, max_tokens=12, model="tiny")
    (choice,) = found["choices"]
    assert choice["text"] == output.text
    assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[output.finish_reason]
    assert found["usage"] == {
        "prompt_tokens": len(LONG),
        "completion_tokens": len(output.token_ids),
        "total_tokens": len(LONG) + len(output.token_ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    kept = found["kvjax"]
    assert kept["kvs_before"] == 4 * len(LONG)
    assert kept["kvs_after"] == output.stats.kept.sum()
    assert kept["blocks"] == output.stats.blocks_after
    assert kept["bytes"] == kept["blocks"] * llm.plan.spec.block_bytes
    assert kept["achieved_rate"] == pytest.approx(kept["kvs_before"] / kept["kvs_after"], abs=1e-3)
    assert kept["achieved_rate"] > 1.8
    assert kept["ended_by"] == [output.finish_reason]
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"


def test_a_chat_goes_through_the_template(client, llm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x", "type": "function",
             "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = (
        '<tools>[{"type": "function", "function": {"name": "f"}}]</tools><system>Be brief.'
        "<user>a\nb<assistant>Oslo<user>go on<assistant>glad"
    )
    output = expected(llm, text, max_tokens=6)
    found = chat(
        client, messages=messages, tools=tools, max_completion_tokens=6,
        chat_template_kwargs={"mood": "glad"},
    )  # fmt: skip
    assert found["usage"]["prompt_tokens"] == len(text)
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.text, "refusal": None}
    assert found["object"] == "chat.completion"
    without = chat(client, messages=messages, tools=tools, tool_choice="none", max_tokens=1)
    assert without["usage"]["prompt_tokens"] == len(text) - len("glad") - text.index("<system>")


@pytest.mark.parametrize("arguments", ["", " \n", None, "{}", {}])
def test_a_call_may_have_had_no_arguments(arguments):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    tokens = render(chat_tokenizer(template), [turn], None)
    assert bytes(tokens) == b"{}"


def test_fields_that_change_no_answer_are_taken(client):
    body = {"prompt": LONG, "temperature": 0, "max_tokens": 4}
    idle = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    }  # fmt: skip
    assert complete(client, **body, **idle)["choices"] == complete(client, **body)["choices"]


def test_a_stream_is_the_answer_in_parts(client):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = chat(client, **body)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert usage["kvjax"] == whole["kvjax"]
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert len(events) > 3, "it came in one piece"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == whole["choices"][0]["finish_reason"]
    assert not any(reasons[:-1])
    # The first part with text says what the cache holds, before the answer is done.
    assert events[1]["kvjax"]["kvs_after"] == whole["kvjax"]["kvs_after"]


def test_a_streamed_completion_has_no_usage_unless_asked(client):
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 9}
    whole = complete(client, **body)
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        events = events_of(response)
    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_many_choices_have_seeds_of_their_own(client, stream):
    body = {"prompt": ["abc", "xyz"], "n": 3, "temperature": 2.0, "seed": 7, "max_tokens": 8}
    body |= {"ignore_eos": True}
    if stream:
        texts = [""] * 6
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for event in events_of(response)[:-1]:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        found = complete(client, **body)
        assert [choice["index"] for choice in found["choices"]] == list(range(6))
        texts = [choice["text"] for choice in found["choices"]]
        assert found["usage"]["prompt_tokens"] == 6
        assert found["usage"]["completion_tokens"] == 48
    for number, text in enumerate(texts):
        alone = {**body, "prompt": ["abc", "xyz"][number // 3], "n": 1, "seed": 7 + number % 3}
        assert complete(client, **alone)["choices"][0]["text"] == text
    assert len(set(texts)) == 6


def test_seeds_are_drawn_where_none_is_given(client):
    body = {"prompt": "abc", "temperature": 2.0, "max_tokens": 12}
    texts = {complete(client, **body)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4
    # The usual temperature is 1, not greedy.
    del body["temperature"]
    assert len({complete(client, **body)["choices"][0]["text"] for _ in range(4)}) > 1
    # Seeds may be any number that JSON has.
    for seed in (-1, 2**63):
        assert complete(client, **body, seed=seed) != complete(client, **body, seed=seed + 1)
        texts = {complete(client, **body, seed=seed)["choices"][0]["text"] for _ in range(2)}
        assert len(texts) == 1


def test_stop_texts_end_an_answer(client):
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = complete(client, **body)["choices"][0]["text"]
    stop = text[10:13]
    for given in (stop, ["never to be seen", stop]):
        found = complete(client, **body, stop=given)["choices"][0]
        assert found["text"] == text[: text.index(stop)]
        assert found["finish_reason"] == "stop"


def test_an_end_token_ends_an_answer(client, llm):
    body = {"prompt": "hm", "temperature": 3.0, "max_tokens": 300}
    for seed in range(20):
        found = complete(client, **body, seed=seed)
        if found["kvjax"]["ended_by"] == ["eos"]:
            break
    else:
        pytest.fail(f"the model never draws {EOS}")
    assert found["choices"][0]["finish_reason"] == "stop"
    assert chr(EOS) not in found["choices"][0]["text"]
    longer = complete(client, **body, seed=seed, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == 300
    assert longer["choices"][0]["text"].startswith(found["choices"][0]["text"])


def test_log_probabilities_of_a_chat(client, llm):
    text = f"<user>{LONG}<assistant>"
    output = expected(llm, text, max_tokens=12, logprobs=3, ignore_eos=True)
    body = {"max_tokens": 12, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    entries = chat(client, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[token] for token in output.token_ids]
    for entry, true in zip(entries, output.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(true.logprob, abs=1e-4)
        assert [top["bytes"][0] for top in entry["top_logprobs"]] == [t for t, _ in true.top]
    streamed = {"messages": MESSAGES, "temperature": 0, **body, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=streamed) as response:
        parts = [e["choices"][0]["logprobs"] for e in events_of(response)[:-1]]
    assert sum(part is not None for part in parts) > 1
    assert [entry for part in parts if part for entry in part["content"]] == entries
    (alone,) = chat(client, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert alone["top_logprobs"] == []


def test_log_probabilities_of_a_completion(client):
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 12, "logprobs": 2}
    whole = complete(client, **body)["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == len(whole["token_logprobs"]) == 12
    assert whole["text_offset"][0] == 0
    for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"]):
        assert logprob == pytest.approx(max(top.values()))
        assert token in top
    joined = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for event in events_of(response)[:-1]:
            for name, values in event["choices"][0]["logprobs"].items():
                joined[name] += values
    assert joined == whole


def test_settings_of_the_cache_are_each_request_s_own(client, llm):
    body = {"prompt": LONG, "temperature": 0, "max_tokens": 4}
    usual = complete(client, **body)["kvjax"]
    more = complete(client, **body, compression={"rate": 4})["kvjax"]
    capped = complete(client, **body, compression={"max_cache_tokens": 20})["kvjax"]
    full = complete(client, **body, compression={"method": "full"})["kvjax"]
    one = complete(client, **body, compression={"rate": 1})["kvjax"]
    assert more["achieved_rate"] > 1.7 * usual["achieved_rate"]
    assert capped["kvs_after"] <= 20 * 4
    assert full["kvs_after"] == full["kvs_before"] == one["kvs_after"]
    other = complete(client, **body, compression={"method": "streaming-llm"})["kvjax"]
    assert other["achieved_rate"] > 1.8


@pytest.mark.parametrize("stream", [False, True])
def test_detail_says_which_head_kept_which_token(client, llm, stream):
    name = llm.add_request(LONG, SamplingParams(max_tokens=1), report_kept=True)
    output = next(o for o in iter(lambda: llm.step(), None) for o in o if o.request_id == name)
    body = {"prompt": LONG, "temperature": 0, "max_tokens": 4, "kvjax": {"detail": True}}
    if stream:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            events = events_of(response)
        details = [e["kvjax"]["detail"] for e in events[:-1] if "detail" in e.get("kvjax", {})]
        (detail,) = details
    else:
        detail = complete(client, **body)["kvjax"]["detail"]
    assert "".join(detail["tokens"]) == LONG
    assert (detail["layers"], detail["kv_heads"]) == (2, 2)
    bits = [[np.unpackbits(np.frombuffer(bytes.fromhex(h), np.uint8)) for h in layer]
            for layer in detail["heads"]]  # fmt: skip
    found = np.asarray(bits)[:, :, : len(LONG)].astype(bool)
    assert (found == output.stats.kept_tokens).all()
    assert (found.sum(-1) == np.asarray(detail["kept"])).all()
    assert "detail" not in complete(client, prompt=LONG, max_tokens=1)["kvjax"]


def test_models_and_versions(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert client.get("/v1/models/tiny").json() == model
    missing = client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/version").json() == {"version": "0.1.0"}


def test_tokens_there_and_back(client):
    found = client.post("/tokenize", json={"prompt": "é!"}).json()
    assert found == {"tokens": [195, 169, 33], "count": 3, "max_model_len": 512}
    text = client.post("/detokenize", json={"tokens": [195, 169, 33]}).json()
    assert text == {"prompt": "é!"}
    body = {"messages": [{"role": "user", "content": "x"}]}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert bytes(tokens) == b"<user>x<assistant>"
    for wrong in ({}, {"prompt": "x", **body}):
        assert client.post("/tokenize", json=wrong).status_code == 400
    assert client.post("/detokenize", json={"tokens": [256]}).status_code == 400


def test_status_and_metrics(client, shared):
    complete(client, prompt=LONG, max_tokens=6, temperature=0, ignore_eos=True)
    status = client.get("/kvjax/status").json()
    assert [m["name"] for m in status["methods"]] == ["kv-compress", "full", "streaming-llm"]
    assert status["blocks_used"] + status["blocks_free"] == status["blocks"]
    assert (status["layers"], status["kv_heads"], status["rate"]) == (2, 2, 2)
    assert status["compiling"] == 0
    lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["kvjax_http_time_to_first_token_seconds_count"]) >= 1
    assert float(values["kvjax_http_inter_token_latency_seconds_count"]) >= 4
    path = 'kvjax_http_requests_total{path="/v1/completions",status="200"}'
    assert float(values[path]) >= 1
    for name in (
        "compile_stalls_total",
        "compile_stall_seconds_total",
        "background_compilations_total",
        "requests_compiling",
        "requests_waiting",
        "blocks_free",
        "evicted_blocks_total",
        "time_to_first_token_seconds_count",
    ):
        assert f"kvjax_{name}" in values  # fmt: skip


def test_a_next_turn_goes_on_from_what_is_left_of_the_first(serve):
    usual = CompressionConfig(method="keydiff", rate=2, floor=8)
    sizes = {"share_prefix": "auto", "retained_prefixes": 4, "share_grain": 16}
    with serve(usual, **sizes) as server, server.client() as client:
        first = chat(client, max_tokens=6)
        turn = first["choices"][0]["message"]
        more = {"role": "user", "content": "And what came after that?"}
        second = chat(client, max_tokens=6, messages=[*MESSAGES, turn, more])
        found = [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in (first, second)]
        assert found[0] == 0
        assert 16 <= found[1] < second["usage"]["prompt_tokens"]
        assert server.metric("prefix_hits_total") == 1
        # Without a word in common nothing is shared.
        other = chat(client, max_tokens=2, messages=[more])
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_drawn_token_is_told_beside_the_likeliest(client):
    body = {"prompt": "abc", "temperature": 3.0, "seed": 1, "max_tokens": 24, "ignore_eos": True}
    for wanted in (0, 1):
        found = complete(client, **body, logprobs=wanted)["choices"][0]["logprobs"]
        rows = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]))
        assert all(token in top for token, _, top in rows)
        assert max(len(top) for *_, top in rows) == wanted + 1


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_fields_of_a_turn_that_are_null_are_not_there(calls):
    """As `model_dump` of the package's messages has them; Llama 3.1's template asks like this."""
    given = {"role": "assistant", "content": "b", "refusal": None, "function_call": None, **calls}
    template = (
        "{% if 'tool_calls' in messages[0] %}{% if not messages[0].tool_calls | length == 1 %}"
        "{{ raise_exception('single tool-calls') }}{% endif %}{% endif %}{{ messages[0] | tojson }}"
    )
    tokens = render(chat_tokenizer(template), [Message.model_validate(given)], None)
    assert bytes(tokens) == b'{"role": "assistant", "content": "b"}'
