"""What is refused: one line of JSON in OpenAI's form, and a server that goes on."""

import inspect
import json
import socket
import threading
import time
import types

import httpx
import pytest

from kvjax.cache import CompressionConfig
from kvjax.errors import UserError
from kvjax.models.chat import ChatTemplate
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.serve import ServerSettings, bind
from tests.serve.conftest import ONE, chat_tokenizer, events_of

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TURN = {"messages": [{"role": "user", "content": "hi"}]}
TAKEN = sorted(
    {
        name
        for function in (Tokenizer.chat, Tokenizer.render_chat, ChatTemplate.render)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
)
"""Names that a variable of a template cannot have beside them."""


def called_with(arguments) -> dict:
    """A conversation in which a tool was called."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def refused(response: httpx.Response, status: int) -> dict:
    """The error of an answer, whose form is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert len(error["message"]) < 400
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETE, {}, "prompt", "missing"),
        (COMPLETE, {"prompt": ""}, "prompt", "empty"),
        (COMPLETE, {"prompt": []}, "prompt", "empty"),
        (COMPLETE, {"prompt": ["a", ""]}, "prompt", "empty"),
        (COMPLETE, {"prompt": [300]}, "prompt", "300"),
        (COMPLETE, {"prompt": [97, 10**30]}, "prompt", f"token id {10**30} of the prompt"),
        (COMPLETE, {"prompt": [[97], [2**63, -1]]}, "prompt", f"token id {2**63} of"),
        (COMPLETE, {"prompt": "a\ud800"}, "prompt", "surrogate"),
        (COMPLETE, {"prompt": "a", "max_tokens": 0}, "max_tokens", "0"),
        (COMPLETE, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "'5'"),
        (COMPLETE, {"prompt": "a", "max_tokens": True}, "max_tokens", "True"),
        (COMPLETE, {"prompt": "a", "max_tokens": 512}, "max_tokens", "512"),
        (COMPLETE, {"prompt": "a" * 512}, "prompt", "512"),
        (COMPLETE, {"prompt": "a", "temperature": -1}, "temperature", "-1"),
        (COMPLETE, {"prompt": "a", "temperature": 1e39}, "temperature", "1e+39"),
        (COMPLETE, {"prompt": "a", "top_k": 10**12}, "top_k", "10"),
        (COMPLETE, {"prompt": "a", "top_p": 0}, "top_p", "0"),
        (COMPLETE, {"prompt": "a", "top_p": 1.5}, "top_p", "1.5"),
        (COMPLETE, {"prompt": "a", "n": 65}, "n", "65"),
        (COMPLETE, {"prompt": ["a"] * 65}, "prompt", "65"),
        (COMPLETE, {"prompt": ["a"] * 33, "n": 2}, "n", "2"),
        (COMPLETE, {"prompt": "a", "stop": ["x"] * 10_000}, "stop", "64"),
        (COMPLETE, {"prompt": "a", "stop": ""}, "stop", "''"),
        (COMPLETE, {"prompt": "a", "stop": [""]}, "stop", "''"),
        (COMPLETE, {"prompt": "a", "stop": "x" * 5000}, "stop", "xxx"),
        (COMPLETE, {"prompt": "a", "logprobs": 21}, "logprobs", "21"),
        (COMPLETE, {"prompt": "a", "echo": True}, "echo", "not offer"),
        (COMPLETE, {"prompt": "a", "best_of": 3}, "best_of", "not offer"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix", "not offer"),
        (COMPLETE, {"prompt": "a", "frequency_penalty": 1}, "frequency_penalty", "not offer"),
        (COMPLETE, {"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias", "not offer"),
        (COMPLETE, {"prompt": "a", "temprature": 1}, "temprature", "no such field"),
        (COMPLETE, {"prompt": "a", "stream_options": {}}, "stream_options", "stream=true"),
        (COMPLETE, {"prompt": "a", "compression": {"rate": 0.5}}, "compression", "rate"),
        (COMPLETE, {"prompt": "a", "compression": {"rate": 2, "max_cache_tokens": 9}},
         "compression", "give one"),
        (COMPLETE, {"prompt": "a", "compression": {"method": "h2o"}}, "compression", "offers"),
        (COMPLETE, {"prompt": "a", "compression": {"window": 2}}, "compression", "no such field"),
        (COMPLETE, {"prompt": "a", "kvjax": {"deadline": 0}}, "kvjax", "0"),
        (COMPLETE, {"prompt": "a", "kvjax": {"deadline": 10**400}}, "kvjax", "1000000000"),
        (COMPLETE, {"prompt": [{}] * 100_000}, "prompt", "valid"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", "missing"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages", "text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
         "messages", "4096"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "5"),
        (CHAT, {"messages": [{"role": "usr", "content": "a"}]}, "messages",
         "messages[0].role 'usr': give system, developer, user, "),
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "surrogate"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 512}]}, "messages", "context"),
        (CHAT, called_with("{"), "messages", "'{': give a JSON object"),
        (CHAT, called_with("[" * 200_000), "messages", "give a JSON object"),
        (CHAT, called_with("5"), "messages",
         "messages.0.tool_calls.0.function.arguments '5': give a JSON object, {} for"),
        (CHAT, called_with([5]), "messages", "arguments [5]: give a JSON object"),
        (CHAT, {"messages": [{"role": "a", "tool_calls": 5}]}, "messages",
         "messages.0.tool_calls 5: give a list"),
        (CHAT, {"messages": [{"role": "a", "tool_calls": [5]}]}, "messages",
         "messages.0.tool_calls.0 5: give an object"),
        (CHAT, {"messages": [{"role": "a", "tool_calls": [{"function": 5}]}]}, "messages",
         "messages.0.tool_calls.0.function 5: give its name"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt", "surrogate"),
        ("/tokenize", called_with("5"), "messages", "'5'"),
        (CHAT, {**TURN, "top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        (CHAT, {**TURN, "response_format": {"type": "json_object"}}, "response_format", "offer"),
        (CHAT, {**TURN, "response_format": {"json_schema": {}}}, "response_format", "offer"),
        (CHAT, {**TURN, "tool_choice": "required"}, "tool_choice", "offer"),
        (CHAT, {**TURN, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "own"),
        *((CHAT, {**TURN, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs", repr(name))
          for name in TAKEN),
    ],
)  # fmt: skip
def test_bad_values_are_named(client, path, body, param, says):
    response = client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    error = refused(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b'{"prompt": "a", "temperature": NaN}',
     b'{"prompt": "a", "temperature": 1e999}'],
)  # fmt: skip
def test_bodies_that_are_no_request(client, content):
    headers = {"Content-Type": "application/json"}
    refused(client.post(COMPLETE, content=content, headers=headers), 400)


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000,
     b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
     b'{"prompt": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_cannot_be_read(client, content):
    headers = {"Content-Type": "application/json"}
    error = refused(client.post(COMPLETE, content=content, headers=headers), 400)
    assert error["code"] == "invalid_json"
    assert error["message"] == "the body is no JSON: send one JSON object"


def test_other_paths_methods_and_types(client):
    assert refused(client.get("/nowhere"), 404)["type"] == "not_found_error"
    for method, path in (("GET", COMPLETE), ("PUT", COMPLETE), ("PATCH", CHAT),
                         ("DELETE", "/v1/models"), ("DELETE", "/health")):  # fmt: skip
        assert "Method Not Allowed" in refused(client.request(method, path), 405)["message"]
    refused(client.put(COMPLETE, json={"prompt": "a"}), 405)
    # What another site's page could send without asking first.
    form = {"Content-Type": "text/plain"}
    refused(client.post(COMPLETE, content=b'{"prompt": "a"}', headers=form), 415)
    body = {"prompt": "a", "max_tokens": 1}
    for coding, status in (("identity", 200), ("Identity", 200), ("gzip", 415), ("br, gzip", 415)):
        response = client.post(COMPLETE, json=body, headers={"Content-Encoding": coding})
        assert response.status_code == status
        if status != 200:
            assert f"Content-Encoding '{coding}'" in refused(response, status)["message"]
    wrong = client.post(COMPLETE, json={"prompt": "a", "model": "gpt-9"})
    assert refused(wrong, 404)["code"] == "model_not_found"


def test_templates_without_tools_refuse_them(serve):
    tokenizer = chat_tokenizer("{{ messages[0].content }}")
    with serve(tokenizer=tokenizer) as server, server.client() as client:
        body = {**TURN, "tools": [{"type": "function"}]}
        assert refused(client.post(CHAT, json=body), 400)["param"] == "tools"
        twice = {"messages": [{"role": "user", "content": "x"}] * 2}
        assert client.post("/tokenize", json=twice).json()["count"] == 1


def test_bodies_that_are_too_long(serve):
    with serve(max_body_bytes=1000) as server, server.client() as client:
        error = refused(client.post(COMPLETE, json={"prompt": "a" * 1000}), 413)
        assert error["code"] == "too_large"

        def parts():
            for _ in range(20):
                yield b"x" * 100

        headers = {"Content-Type": "application/json"}
        refused(client.post(COMPLETE, content=parts(), headers=headers), 413)
        assert client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_keys(serve):
    with serve(api_keys=("alpha", "beta")) as server, server.client() as client:
        for path in ("/health", "/ready", "/version", "/", "/page/page.js"):
            assert client.get(path).status_code == 200
        for given in ({}, {"Authorization": "Bearer gamma"}, {"Authorization": "alpha"},
                      {"Authorization": "Basic alpha"}, {"Authorization": "Bearer"},
                      {"Authorization": b"Bearer \xff"}):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/kvjax/status", "/openapi.json"):
                error = refused(client.get(path, headers=given), 401)
                assert error["code"] == "invalid_api_key"
            assert refused(client.post(COMPLETE, json={"prompt": "a"}, headers=given), 401)
        for key in ("alpha", "beta"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_limits_of_tokens(serve):
    with serve(max_tokens=20, default_max_tokens=7) as server, server.client() as client:
        body = {"prompt": "a", "ignore_eos": True}
        found = client.post(COMPLETE, json=body).json()
        assert found["usage"]["completion_tokens"] == 7
        found = client.post(COMPLETE, json={**body, "max_tokens": 20}).json()
        assert found["usage"]["completion_tokens"] == 20
        for name, path, rest in (("max_tokens", COMPLETE, body),
                                 ("max_completion_tokens", CHAT, TURN)):  # fmt: skip
            response = client.post(path, json={**rest, name: 21})
            assert refused(response, 400)["param"] == name


def test_a_request_that_no_pool_holds(serve):
    with serve(pool_tokens=64) as server, server.client() as client:
        body = {"prompt": "a" * 100, "max_tokens": 4, "compression": {"method": "full"}}
        error = refused(client.post(COMPLETE, json=body), 400)
        assert "blocks" in error["message"]
        assert error["param"] == "prompt"


def test_an_answer_without_a_limit_gets_what_there_is_room_for(serve):
    """A client that asked for no number is not told to ask for fewer."""
    full = CompressionConfig(method="full")
    with serve(full, pool_tokens=64) as server, server.client() as client:
        body = {"prompt": "a" * 30, "ignore_eos": True}
        found = client.post(COMPLETE, json=body).json()
        assert 20 <= found["usage"]["completion_tokens"] <= 34
        assert found["choices"][0]["finish_reason"] == "length"
        most = found["usage"]["completion_tokens"]
        assert client.post(COMPLETE, json={**body, "max_tokens": most}).status_code == 200
        refused(client.post(COMPLETE, json={**body, "max_tokens": most + 1}), 400)
        assert "blocks" in refused(client.post(COMPLETE, json={"prompt": "a" * 80}), 400)["message"]


def test_sites_whose_names_lead_here_are_refused(serve):
    with serve(hosts=("localhost", "127.0.0.1")) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 1}
        for name in ("localhost", "127.0.0.1:99", "LOCALHOST:1", "localhost."):
            assert client.post(COMPLETE, json=body, headers={"Host": name}).status_code == 200
        for path in (COMPLETE, "/metrics", "/"):
            method = "POST" if path == COMPLETE else "GET"
            sent = client.request(method, path, json=body, headers={"Host": "evil.example:8000"})
            error = refused(sent, 403)
            assert error["code"] == "host_not_allowed"
            assert "'evil.example'" in error["message"]
            assert "--allowed-hosts" in error["message"]
        # What is refused before it has a route is counted where it was sent.
        server.counts('http_requests_total{path="/v1/completions",status="403"}', 1)
        client.post("/no/such/path", json=body, headers={"Host": "evil.example"})
        server.counts('http_requests_total{path="other",status="403"}', 1)
        server.counts('http_request_seconds_count{path="/v1/completions"}', 5)


def test_free_slots_are_no_queue(serve):
    with serve(max_batch=4, max_waiting=1) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 2}
        for _ in range(3):
            assert client.post(COMPLETE, json={**body, "n": 5}).status_code == 200
        error = refused(client.post(COMPLETE, json={**body, "n": 6}), 400)
        assert "5: ask" in error["message"]
        assert error["param"] == "n"
        error = refused(client.post(COMPLETE, json={**body, "prompt": ["a"] * 6}), 400)
        assert error["param"] == "prompt"


def test_a_choice_that_had_not_begun_in_time_leaves_the_others_theirs(serve):
    body = {"prompt": [letter * 3 for letter in "abcdefgh"], "max_tokens": 300, "ignore_eos": True}
    with serve(**ONE) as server, server.client() as client:
        client.post(COMPLETE, json={**body, "prompt": "aaa"})
        began = time.monotonic()
        client.post(COMPLETE, json={**body, "prompt": "aaa"})
        # The time of one: the last of eight has not begun then, also on a machine that became idle.
        soon = {"kvjax": {"deadline": time.monotonic() - began}}
        found = client.post(COMPLETE, json={**body, **soon}).json()
        assert len(found["choices"]) == 8
        assert found["choices"][0]["text"]
        assert found["choices"][7]["text"] == ""
        assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
        assert found["kvjax"]["ended_by"][7] == "deadline"
        with client.stream("POST", COMPLETE, json={**body, **soon, "stream": True}) as response:
            events = events_of(response)
        assert events[-1] == "[DONE]"
        assert not any("error" in event for event in events[:-1])
        ended = [e["choices"][0] for e in events[:-1] if e["choices"][0]["finish_reason"]]
        assert sorted(choice["index"] for choice in ended) == list(range(8))


def test_what_is_too_long_says_so_in_the_words_that_clients_know(client):
    """They look for these in the message, and shorten the conversation."""
    for more in ({"prompt": "a" * 3000}, {"prompt": "a" * 40, "max_tokens": 3000}):
        error = refused(client.post(COMPLETE, json=more), 400)
        assert "this model's maximum context length is " in error["message"]
        assert f"({error['code']})" in error["message"]
        assert error["code"] == "context_length_exceeded"


def test_a_full_queue_says_when_to_come_back(serve, monkeypatch):
    body = {"prompt": "a" * 40, "max_tokens": 400, "ignore_eos": True}
    later = 0.0
    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + later, time=time.time, perf_counter=time.perf_counter
    )
    monkeypatch.setattr("kvjax.serve.service.time", clock)
    with serve(**ONE, max_waiting=1) as server:
        # An hour in which nobody asks is no sign of a slow server.
        with server.client() as client:
            for _ in range(2):
                assert client.post(COMPLETE, json={**body, "max_tokens": 1}).status_code == 200
        later = 3600.0
        answers: list[httpx.Response] = []

        def ask():
            with server.client() as client:
                answers.append(client.post(COMPLETE, json=body))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        busy = [answer for answer in answers if answer.status_code == 429]
        assert busy
        for answer in busy:
            assert refused(answer, 429)["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) < 60
        done = [answer for answer in answers if answer.status_code == 200]
        assert len(done) + len(busy) == 6
        # A request of several prompts is taken whole or not at all.
        with server.client() as client:
            blocked = threading.Thread(target=ask)
            blocked.start()
            while not server.metric("requests_running"):
                time.sleep(0.01)
            refused(client.post(COMPLETE, json={**body, "prompt": ["a", "b"]}), 429)
            blocked.join()
            # What was taken of it is let go in the next round.
            one = {**body, "max_tokens": 1}
            end = time.monotonic() + 60
            while client.post(COMPLETE, json=one).status_code != 200:
                assert time.monotonic() < end
        assert server.metric("requests_running") <= 1


def test_a_deadline_cuts_an_answer_short(serve):
    body = {"prompt": "a" * 40, "max_tokens": 450, "ignore_eos": True}
    with serve(**ONE, deadline=0.3) as server, server.client() as client:
        # By then something has been compiled.
        assert client.post(COMPLETE, json={**body, "max_tokens": 2}).status_code in (200, 504)
        found = client.post(COMPLETE, json=body)
        if found.status_code == 200:
            ended = found.json()["kvjax"]["ended_by"]
            assert ended == ["deadline"]
            assert found.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert refused(found, 504)["code"] == "deadline"
        soon = client.post(COMPLETE, json={**body, "kvjax": {"deadline": 1e-9}})
        assert refused(soon, 504)["code"] == "deadline"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_body_bytes", 0), ("api_keys", ("",)), ("api_keys", ("a b",)), ("drain_seconds", -1),
     ("deadline", 0.0), ("max_choices", 0), ("hosts", ("",)), ("hosts", ("A.example",)),
      ("served_name", ""), ("default_max_tokens", 0)],
)  # fmt: skip
def test_settings_are_checked(name, value):
    with pytest.raises(UserError):
        ServerSettings(**{name: value})


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1: it is taken"):
            bind("127.0.0.1", port)
    with pytest.raises(UserError, match="no such address"):
        bind("no.such.host.invalid", 80)
    with bind("127.0.0.1", port) as again:
        assert again.type == socket.SOCK_STREAM


def test_too_many_prompts_are_refused_before_they_are_tokens(client, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    error = refused(client.post(COMPLETE, json={"prompt": ["a"] * 1000}), 400)
    assert error["param"] == "prompt"
    assert error["message"] == "prompt has 1000 prompts: give at most 64"
