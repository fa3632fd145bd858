"""Slow readers, logs, health, draining, and crowds."""

import asyncio
import json
import logging
import socket
import threading

import httpx
import pytest

from kvjax.cache import CompressionConfig
from kvjax.serve.logs import write_logs
from tests.serve.conftest import ONE, events_of, until
from tests.serve.test_clients import COMPLETE, LONG, idle, raw


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(serve):
    body = {**LONG, "max_tokens": 400, "stream": True}
    with serve() as server, server.client() as client:
        quick = {**LONG, "max_tokens": 400}
        text = client.post(COMPLETE, json=quick).json()["choices"][0]["text"]
        connection = raw(server, body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        for _ in range(3):
            assert client.post(COMPLETE, json=quick).json()["choices"][0]["text"] == text
        until(lambda: server.metric('requests_ended_total{reason="length"}') == 5)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(4096)
        connection.close()
        lines = data.split(b"\r\n\r\n", 1)[1].decode().split("data: ")[1:]
        found = ""
        for line in lines[:-1]:
            found += json.loads(line[: line.index("\n\n")])["choices"][0]["text"]
        assert found == text
        until(lambda: idle(server))


def test_silence_is_filled_with_comments(serve):
    with serve(**ONE, keep_alive_seconds=0.01) as server:
        with server.client() as client:
            client.post(COMPLETE, json={**LONG, "max_tokens": 2})
            blocker = raw(server, LONG)
            until(lambda: server.metric("requests_running") == 1)
            body = {**LONG, "max_tokens": 2, "stream": True}
            with client.stream("POST", COMPLETE, json=body) as response:
                data = response.read().decode()
            blocker.close()
        first = data.index("data: ")
        assert ": the answer goes on\n\n" in data[:first]


def test_the_log_has_ids_and_numbers_and_no_prompt(serve, caplog):
    secret = "the quick brown secret"
    with serve() as server, server.client() as client:
        headers = {"X-Request-Id": "mine-17"}
        body = {"prompt": secret, "max_tokens": 3, "ignore_eos": True, "stop": ["stop-secret"]}
        found = client.post(COMPLETE, json=body, headers=headers)
        assert found.headers["x-request-id"] == "mine-17"
        client.post(COMPLETE, json={**body, "temperature": "stop-secret"})
        strange = client.post(COMPLETE, json=body, headers={"X-Request-Id": 'a\tb"c'})
        assert strange.headers["x-request-id"] not in ("", 'a\tb"c')
        text = found.json()["choices"][0]["text"]
    from kvjax.serve.logs import JsonLines

    records = [r for r in caplog.records if r.name.startswith(("kvjax.serve", "uvicorn"))]
    lines = [JsonLines().format(record) for record in records]
    (line,) = [json.loads(line) for line in lines if '"mine-17"' in line]
    assert (line["status"], line["path"], line["method"]) == (200, COMPLETE, "POST")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(secret), 3)
    assert line["ended_by"] == ["length"]
    assert line["kvs_before"] >= line["kvs_after"] > 0
    assert not any("secret" in line for line in lines)
    assert json.dumps(text)[1:-1] not in "".join(lines)


def test_prompts_and_answers_are_logged_where_an_operator_asks_for_them(serve, caplog):
    body = {"prompt": "a word", "max_tokens": 3, "ignore_eos": True}
    with serve(log_prompts=True) as server, server.client() as client:
        text = client.post(COMPLETE, json=body).json()["choices"][0]["text"]
        with client.stream("POST", COMPLETE, json={**body, "stream": True}) as response:
            streamed = "".join(e["choices"][0]["text"] for e in events_of(response)[:-1])
    whole, stream = [
        r.fields for r in caplog.records if hasattr(r, "fields") and "answer" in r.fields
    ]
    assert whole["prompts"] == stream["prompts"] == ["a word"]
    assert whole["answer"]["choices"][0]["text"] == text
    assert stream["answer"] == [streamed]


def test_an_ordinary_request_is_no_reason_for_a_warning(serve, tmp_path):
    """Answers say what rate they reached; a short prompt never reaches it."""
    loggers = [logging.getLogger(name) for name in (
        "kvjax", "kvjax.engine.tell", "kvjax.serve", "uvicorn", "uvicorn.access")]  # fmt: skip
    before = [(one, one.level, one.propagate, one.handlers) for one in loggers]
    path = tmp_path / "log"
    usual = CompressionConfig(method="kv-compress", rate=8)
    with path.open("w") as lines:
        write_logs(lines)
        try:
            # The log's line comes after the answer: the server has to end first.
            with serve(usual) as server, server.client() as client:
                found = client.post(COMPLETE, json={"prompt": "a word", "max_tokens": 2}).json()
        finally:
            for one, level, propagate, handlers in before:
                one.setLevel(level)
                one.propagate, one.handlers = propagate, handlers
    assert found["kvjax"]["achieved_rate"] == 1
    levels = [json.loads(line)["level"] for line in path.read_text().splitlines()]
    assert levels
    assert set(levels) == {"info"}


def test_exceptions_are_logged_without_what_they_say():
    from kvjax.serve.logs import JsonLines

    try:
        raise ValueError("the prompt was: secret")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kvjax.serve", logging.ERROR, "", 0, "it failed", (), info)
    line = JsonLines().format(record)
    assert "secret" not in line
    assert json.loads(line)["exception"] == "ValueError"
    assert "secret" in JsonLines(messages=True).format(record)


def test_health_and_readiness(serve):
    with serve() as server, server.client() as client:
        until(lambda: client.get("/ready").status_code == 200)
        assert client.head("/health").status_code == 200
        server.llm.llm.recovery.die("somebody pulled the plug")
        health = client.get("/health")
        assert health.status_code == 503
        assert "plug" in health.json()["reason"]
        assert client.get("/ready").status_code == 503
        error = client.post(COMPLETE, json={"prompt": "a"})
        assert (error.status_code, error.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", [False, True])
def test_draining_lets_answers_end(serve, stream):
    results: list = []
    with serve(drain_seconds=60.0) as server, server.client() as client:
        client.post(COMPLETE, json={**LONG, "max_tokens": 2})

        def ask():
            if stream:
                with client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as response:
                    results.append(events_of(response)[-2:])
            else:
                results.append(client.post(COMPLETE, json=LONG).json())

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.metric("requests_running") == 1)
        server.stop()
        thread.join()
        with pytest.raises(httpx.ConnectError), server.client() as late:
            late.get("/health")
    if stream:
        last, done = results[0]
        assert done == "[DONE]"
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert results[0]["usage"]["completion_tokens"] == 440
    assert server.cut == 0


def test_draining_has_an_end(serve):
    with serve(**ONE, drain_seconds=0.0) as server, server.client() as client:
        client.post(COMPLETE, json={**LONG, "max_tokens": 2})
        connections = [raw(server, {**LONG, "stream": stream}) for stream in (False, True)]
        until(lambda: server.metric("requests_running") == server.metric("requests_waiting") == 1)
        server.stop()
        answers = []
        for connection in connections:
            data = b""
            while part := connection.recv(4096):
                data += part
            answers.append(data)
            connection.close()
    assert server.cut == 2
    assert answers[0].startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in answers[0].lower()
    assert b"data: [DONE]" in answers[1]
    for data in answers:
        assert b'"code":"shutting_down"' in data


def test_what_was_warmed_up_is_shown(serve):
    """Before anybody has asked for anything."""
    with serve(**ONE) as server:
        assert server.metric("compiled_steps") == 0
        warm = server.llm.warm_up([16])
        asyncio.run_coroutine_threadsafe(warm, server._loop).result(300)
        assert server.metric("compiled_steps") >= 4


def test_what_cannot_be_served_is_not_warmed_up_and_all_else_is(serve, caplog):
    """A pool for compressed caches holds no whole one of a long prompt."""
    usual = CompressionConfig(method="kv-compress", rate=8, floor=8, window=4)
    sizes = {**ONE, "pool_tokens": 160, "prefill_scratch": 512}
    with serve(usual, methods=("streaming-llm",), **sizes) as server, server.client() as client:
        warm = server.service.warm_up([16, 400])
        asyncio.run_coroutine_threadsafe(warm, server._loop).result(300)
        steps = server.metric("compiled_steps")
        for method in ("kv-compress", "full", "streaming-llm"):
            for length in (16, 400):
                if (method, length) == ("full", 400):
                    continue
                body = {"prompt": "a" * length, "max_tokens": 2, "compression": {"method": method}}
                assert client.post(COMPLETE, json=body).status_code == 200
        assert server.metric("compiled_steps") == steps
    (told,) = [r.fields for r in caplog.records if r.message == "not warmed up for"]
    assert (told["method"], told["prompt_len"]) == ("full", 400)


def test_what_cannot_be_served_is_told_once(serve, caplog):
    with serve(CompressionConfig(method="full"), **{**ONE, "pool_tokens": 160}) as server:
        warm = server.service.warm_up([400], logprobs=True)
        asyncio.run_coroutine_threadsafe(warm, server._loop).result(300)
    assert [r.message for r in caplog.records].count("not warmed up for") == 1
