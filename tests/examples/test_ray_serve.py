"""Two replicas under a real, local Ray: conversations stay where they began, streams pass, and who
leaves frees what was held."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from examples import ray_serve

REPOSITORY = Path(__file__).parent.parent.parent
OPTIONS = ["--method", "key-norm", "--rate", "2", "--floor", "8", "--share-prefix", "auto"]
OPTIONS += ["--max-batch", "2", "--max-len", "2048", "--block-size", "4", "--prefill-chunk", "128"]
OPTIONS += ["--prefill-scratch", "512", "--pool-tokens", "8192", "--warm-up", "0"]
OPTIONS += ["--max-body-bytes", "20000", "--drain", "1", "--api-key", "mine"]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
COUNT = 6
"""Conversations: all of them on one of two replicas is as likely as 1 in 32."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'"),
]


@pytest.fixture(scope="module")
def url(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    home = tmp_path_factory.mktemp("ray")
    said = home / "said"
    command = [sys.executable, str(REPOSITORY / "examples" / "ray_serve.py"), *OPTIONS]
    # Ray keeps a token of the cluster there.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(home)}
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    with said.open("w") as file:
        running = subprocess.Popen(
            [*command, "--weights", str(tiny_folder), "--port", str(port)],
            env=environment, stdout=file, stderr=file,
        )  # fmt: skip
    with running:
        end = time.monotonic() + 600
        while f"2 replicas at http://127.0.0.1:{port}/v1" not in said.read_text():
            assert running.poll() is None, said.read_text()[-5000:]
            assert time.monotonic() < end, said.read_text()[-5000:]
            time.sleep(0.2)
        try:
            yield f"http://127.0.0.1:{port}"
            running.send_signal(signal.SIGTERM)
            assert running.wait(120) == 0, said.read_text()[-5000:]
        finally:
            running.kill()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer mine"}
    with httpx.Client(base_url=url, trust_env=False, timeout=600, headers=headers) as client:
        yield client


def replica(response: httpx.Response) -> str:
    return response.headers["x-kvjax-replica"]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_stays_with_the_replica_that_holds_it(client):
    """Each turn is sent as a whole, and only what is new of it runs."""
    texts = [f"The secret of conversation {n} is {n * 7919 % 1000}. " * 9 for n in range(COUNT)]
    where: list[set[str]] = [set() for _ in texts]
    for turn in range(3):
        for n, text in enumerate(texts):
            body = {"prompt": text, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            answer = client.post(COMPLETE, json=body)
            assert answer.status_code == 200, answer.text
            where[n].add(replica(answer))
            assert (cached(answer) > 0) == (turn > 0)
            texts[n] += answer.json()["choices"][0]["text"] + " What is it? " * 30
    assert all(len(one) == 1 for one in where)
    assert len(set.union(*where)) == 2, "one in 32 times, or conversations are not told apart"


def test_a_client_may_choose_by_a_name(client):
    found = set()
    for number in range(8):
        headers = {"x-session-id": "mine"}
        answer = client.post(COMPLETE, json={"prompt": f"{number}", "max_tokens": 1},
                             headers=headers)  # fmt: skip
        found.add(replica(answer))
    assert len(found) == 1


def test_streams_pass_as_they_come(client):
    body = {"prompt": "a stream", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    whole = client.post(COMPLETE, json=body).json()["choices"][0]["text"]
    text, times = "", []
    with client.stream("POST", COMPLETE, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                text += json.loads(line[6:])["choices"][0]["text"]
    assert line_count(times) > 10
    assert text == whole


def line_count(times: list[float]) -> int:
    """Parts that did not come in one piece."""
    return 1 + sum(after - before > 0.001 for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_what_was_held(client, url, stream):
    session = {"x-session-id": "leaves"}

    def metric(name: str) -> float:
        answer = client.get("/metrics", headers=session)
        found = re.search(rf"^{name} (.*)$", answer.text, re.M)
        assert found is not None
        return float(found[1])

    before = metric("kvjax_http_clients_gone_total")
    tokens = metric("kvjax_output_tokens_total")
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Authorization: Bearer mine\r\nx-session-id: leaves\r\n"
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 60
        while metric("kvjax_requests_running") == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
    end = time.monotonic() + 60
    while metric("kvjax_requests_running") > 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert metric("kvjax_http_clients_gone_total") == before + 1
    assert metric("kvjax_output_tokens_total") - tokens < 2000


def test_what_is_refused_passes_too(client):
    assert client.post(COMPLETE, json={"prompt": 3}).status_code == 400
    refused = client.post(COMPLETE, json={"prompt": "x"}, headers={"Authorization": "Bearer no"})
    assert refused.status_code == 401
    assert replica(refused)
    long = client.post(COMPLETE, json={"prompt": "x" * 20000})
    assert long.status_code == 413
    assert "x-kvjax-replica" not in long.headers
    assert client.get("/ready").json() == {"status": "ready"}


def test_options_that_replicas_cannot_have(capsys):
    for given, said in (
        (["--replicas", "0"], "--replicas 0: give a whole number from 1"),
        (["--coordinator", "auto"], "--coordinator: a replica is one process"),
        (["--rate", "0"], "rate"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "examples.ray_serve", *given],
            cwd=REPOSITORY, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
    assert ray_serve.parse_arguments([]).replicas == 2
