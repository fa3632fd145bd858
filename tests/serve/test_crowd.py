"""Many conversations at once: none is lost, and none is taken for another."""

import concurrent.futures
import time

import httpx
import pytest

from tests.serve.conftest import until
from tests.serve.test_clients import idle


@pytest.mark.slow
def test_256_conversations_are_kept_apart(serve):
    """Each carries a number of its own, and answers every turn as it does when it is alone.

    Each has a client of its own, too: threads that share httpx's pool of connections can close one
    that another is about to read from.
    """
    turns, count = 3, 256

    def talk(client: httpx.Client, number: int) -> list[str]:
        messages, said = [], []
        for turn in range(turns):
            secret = (number * 7919 + turn * 104729) % 100_000
            messages.append({"role": "user", "content": f"My number is {secret}. Turn {turn}?"})
            body = {"messages": messages, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
            body |= {"compression": {"method": "full"}}
            for _ in range(1000):
                answer = client.post("/v1/chat/completions", json=body)
                if answer.status_code != 429:
                    break
                time.sleep(0.05)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["usage"]["completion_tokens"] == 10
            said.append(text)
            messages.append({"role": "assistant", "content": text})
        return said

    def all_of(server, workers: int) -> list[list[str]]:
        def conversation(number: int) -> list[str]:
            with server.client(verify=False) as client:
                return talk(client, number)

        with concurrent.futures.ThreadPoolExecutor(workers) as threads:
            return list(threads.map(conversation, range(count)))

    with serve(pool_tokens=16384, max_batch=32, max_waiting=64) as server:
        together = all_of(server, count)
        assert server.metric("batch_largest") > 8
        until(lambda: idle(server))
    with serve(max_batch=1) as server:
        alone = all_of(server, 1)
    assert together == alone
    assert len({tuple(said) for said in alone}) > count // 2
