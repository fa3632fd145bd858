"""Clients as they are: OpenAI's own package, and those that vanish."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest

from tests.serve.conftest import ONE, until

COMPLETE = "/v1/completions"
LONG = {"prompt": "a" * 60, "max_tokens": 440, "ignore_eos": True, "temperature": 0}


def idle(server) -> bool:
    """Nothing runs, and no block is held."""
    return (
        server.metric("requests_running") == server.metric("requests_waiting") == 0
        and server.metric("blocks_used") == 0
        and not server.llm.llm.has_unfinished()
    )


def raw(server, body: dict, path: str = COMPLETE) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def test_openai_s_package(shared):
    with openai.DefaultHttpxClient(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="any", http_client=http)
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "hello"}]
        asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
        asked |= {"extra_body": {"compression": {"rate": 4}}}
        whole = client.chat.completions.create(**asked)
        assert whole.usage.completion_tokens <= 9
        assert whole.usage.prompt_tokens_details.cached_tokens >= 0
        assert whole.model_extra["kvjax"]["kvs_before"] > 0
        text, usage = "", None
        options: Any = {"include_usage": True}
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage == whole.usage
        done = client.completions.create(model="tiny", prompt="abc", max_tokens=3, temperature=0)
        assert done.object == "text_completion"
        for wrong, error in (
            ({"model": "other"}, openai.NotFoundError),
            ({"temperature": -1}, openai.BadRequestError),
        ):
            with pytest.raises(error) as raised:
                client.chat.completions.create(**{**asked, **wrong})
            body: Any = raised.value.body
            assert body["message"]


def test_openai_s_package_in_asyncio(shared):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{shared.url}/v1", api_key="any",
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:  # fmt: skip
            asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 300, "temperature": 0}
            asked |= {"extra_body": {"ignore_eos": True}}
            before = shared.metric("http_clients_gone_total")
            stream = await client.completions.create(**asked, stream=True)
            async for _ in stream:
                break
            await stream.close()
            ended = [client.completions.create(**{**asked, "max_tokens": 5}) for _ in range(8)]
            texts = {one.choices[0].text for one in await asyncio.gather(*ended)}
            assert len(texts) == 1
            await asyncio.to_thread(
                until, lambda: shared.metric("http_clients_gone_total") == before + 1
            )

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "while it is written"])
def test_who_leaves_ends_the_request(serve, stream, when):
    with serve(**ONE) as server:
        with server.client() as client:
            client.post(COMPLETE, json={**LONG, "max_tokens": 2})
        generated = server.metric("output_tokens_total")
        blocker = raw(server, LONG) if when == "before the first token" else None
        connection = raw(server, {**LONG, "stream": stream})
        if blocker:
            until(lambda: server.metric("requests_waiting") == 1)
        else:
            until(lambda: server.metric("output_tokens_total") > generated + 3)
        connection.close()
        if blocker:
            until(lambda: server.metric("requests_waiting") == 0)
            blocker.close()
        until(lambda: idle(server))
        assert server.metric("http_clients_gone_total") == 1 + (blocker is not None)
        assert server.metric("output_tokens_total") < generated + 440
        aborted = server.metric('requests_ended_total{reason="abort"}')
        assert aborted == 1 + (blocker is not None)
