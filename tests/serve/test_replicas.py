"""What stands between the replicas of a server: conversations, and answers that pass through.

`tests/examples/test_ray_serve.py` has real ones.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from kvjax.serve.replicas import HEAD, PROMPT_HEAD, Front, conversation_of, messages_of

CHAT = "/v1/chat/completions"


def scope_of(method: str = "POST", **headers: str) -> dict[str, Any]:
    given = {"content-type": "application/json", **headers}
    told = [(name.replace("_", "-").encode(), text.encode()) for name, text in given.items()]
    return {"type": "http", "method": method, "path": CHAT, "headers": told, "state": object()}


def name_of(body: Any, **headers: str) -> str | None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return conversation_of(scope_of(**headers), data)


def turns(*contents: Any, system: str = "be brief") -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": "system", "content": system}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, contents)]
    return {"model": "tiny", "messages": messages}


# Which conversation


def test_all_turns_of_a_conversation_have_one_name():
    first = name_of(turns("my name is Ada"))
    assert first is not None
    assert name_of(turns("my name is Ada", "hello", "who am I?")) == first
    assert name_of({**turns("my name is Ada"), "max_tokens": 9, "stream": True}) == first
    assert name_of(turns("my name is Bob", "hello", "who am I?")) != first
    assert name_of(turns("my name is Ada", system="be long")) != first


def test_questions_about_one_document_go_together():
    for document in ("x" * HEAD, [{"type": "text", "text": "x" * HEAD}]):
        asked: Any = turns(document)
        other: Any = json.loads(json.dumps(asked))
        if isinstance(document, str):
            other["messages"][1]["content"] += "who wrote it?"
        else:
            other["messages"][1]["content"][0]["text"] += "who wrote it?"
        assert name_of(asked) == name_of(other)


def test_a_prompt_that_grows_is_one_conversation():
    text = "".join(map(chr, range(1000, 1000 + PROMPT_HEAD)))
    one: Any
    for one in (text, list(range(PROMPT_HEAD))):
        same = {"prompt": one}, {"prompt": one + one}, {"prompt": [one, one]}
        assert len({name_of(body) for body in same}) == 1
        assert name_of({"prompt": one[1:]}) != name_of({"prompt": one})
        assert name_of({"prompt": one[:-1]}) != name_of({"prompt": one})


def test_a_client_may_say_what_belongs_together():
    for text in ("one", "two"):
        assert name_of(turns(text), x_session_id="mine") == "mine"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff", b"[" * 10**5, b"{}", b'{"messages": []}', b'{"messages": 3}',
     b'{"prompt": 3}', b'{"prompt": null}'],
)  # fmt: skip
def test_what_has_no_conversation(body):
    assert name_of(body) is None


@pytest.mark.parametrize(
    "body", [{"messages": [3]}, {"prompt": [[["a"]]]}, {"messages": [{"content": {"a": 1}}]},
             {"messages": [{"role": [1], "content": [3.5]}]}, {"prompt": []}],
)  # fmt: skip
def test_what_no_server_takes_still_has_a_replica_that_says_so(body):
    assert name_of(body)


# Answers


class App:
    """Answers with the parts that it is given, and notes what it was asked and who left."""

    def __init__(self, parts: list[asyncio.Event | bytes]):
        self.parts, self.seen, self.left = parts, b"", False
        self.scope: Any = None

    async def __call__(self, scope, receive, send):
        self.scope = scope
        while True:
            message = await receive()
            self.seen += message["body"]
            if not message["more_body"]:
                break
        watching = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 201, "headers": []})
        for part in self.parts:
            if isinstance(part, bytes):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                continue
            waiting = asyncio.ensure_future(part.wait())
            await asyncio.wait((waiting, watching), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if watching.done():
                assert watching.result() == {"type": "http.disconnect"}
                self.left = True
                return
        watching.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    """One that sends a body in two parts; `leave` ends its connection."""

    def __init__(self, body: bytes = b"{}"):
        half = len(body) // 2
        self.heard: list[Any] = []
        self._news, self._told = asyncio.Event(), asyncio.Queue[Any]()
        for part, more in ((body[:half], True), (body[half:], False)):
            self._told.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def leave(self) -> None:
        self._told.put_nowait({"type": "http.disconnect"})

    async def receive(self):
        return await self._told.get()

    async def send(self, message):
        self.heard.append(message)
        self._news.set()

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not found():
                self._news.clear()
                await self._news.wait()

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.heard)


def front_of(app: App, most: int = 100) -> tuple[Front, list[Any]]:
    asked: list[Any] = []

    async def ask(conversation, scope, body) -> AsyncGenerator[Any, None]:
        asked.append(conversation)
        async for message in messages_of(app, json_like(scope), body):
            yield message

    return Front(ask, most), asked


def json_like(scope: dict[str, Any]) -> dict[str, Any]:
    """As another process gets it: nothing of this one, and lists for tuples."""
    assert "state" not in scope
    return {**scope, "headers": [list(pair) for pair in scope["headers"]]}


def test_a_stream_passes_as_it_comes():
    async def main():
        go = asyncio.Event()
        app = App([b"one", go, b"two"])
        client, (front, asked) = Client(b'{"prompt": "a"}'), front_of(app)
        running = asyncio.ensure_future(front(scope_of(), client.receive, client.send))
        await client.until(lambda: client.text == b"one")
        assert not running.done()
        go.set()
        await running
        assert client.text == b"onetwo"
        assert client.heard[0]["status"] == 201
        assert client.heard[-1]["more_body"] is False
        assert app.seen == b'{"prompt": "a"}'
        assert app.scope["headers"] == [(b"content-type", b"application/json")]
        assert asked == [conversation_of(scope_of(), app.seen)]

    asyncio.run(main())


def test_who_leaves_leaves_the_replica_too():
    async def main():
        app = App([b"one", asyncio.Event(), b"two"])
        client, (front, _) = Client(), front_of(app)
        running = asyncio.ensure_future(front(scope_of(), client.receive, client.send))
        await client.until(lambda: client.text == b"one")
        client.leave()
        async with asyncio.timeout(20):
            await running
        assert app.left
        assert client.text == b"one"

    asyncio.run(main())


def test_who_reads_no_more_holds_up_no_replica():
    """An application that is far ahead of who reads it is told that nobody does."""

    async def main():
        app = App([b"x"] * 1000)
        told = messages_of(app, scope_of(), b"{}")
        for _ in range(3):
            await anext(told)
        await asyncio.sleep(0.01)  # until it waits for room
        async with asyncio.timeout(20):
            await told.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_an_application_that_fails_is_not_silent(error):
    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error("broken")

    async def main():
        told = messages_of(fails, scope_of(), b"{}")
        assert (await anext(told))["status"] == 200
        with pytest.raises(error, match="broken"):
            await anext(told)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [(b"{" + b" " * 99, {}, 413), (b"{}", {"content_type": "text/plain"}, 415)],
)
def test_what_a_front_refuses_reaches_no_replica(body, headers, status):
    async def main():
        client, (front, asked) = Client(body), front_of(App([]), most=99)
        await front(scope_of(**headers), client.receive, client.send)
        assert client.heard[0]["status"] == status
        assert asked == []

    asyncio.run(main())


def test_a_front_begins_and_ends_when_asked():
    async def main():
        front, asked = front_of(App([]))
        told = iter(["lifespan.startup", "lifespan.shutdown"])
        said = []

        async def receive():
            return {"type": next(told)}

        async def send(message):
            said.append(message["type"])

        await front({"type": "lifespan"}, receive, send)
        assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        with pytest.raises(RuntimeError, match="websocket is not served"):
            await front({"type": "websocket"}, receive, send)
        assert asked == []

    asyncio.run(main())
