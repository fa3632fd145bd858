"""Between replicas of a server: which of them is asked, and how its answer gets through.

What runs the replicas is another's (`examples/ray_serve.py`). Here is what that needs of HTTP: a
request that was read, the conversation that it belongs to, and an ASGI application behind an
asynchronous generator, which can be closed where a client has left.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.serve.errors import ApiError
from kvjax.serve.guard import Gone, body_of
from kvjax.serve.streams import until_gone

SESSION_HEADER = b"x-session-id"
"""By which a client says itself what belongs together."""
HEAD = 1024
"""Characters of a message by which conversations are told apart: questions about one long document
have the same."""
PROMPT_HEAD = 256
"""The same of a prompt, in characters or tokens. It grows with each turn: fewer than an engine
retains."""
_PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
          "root_path", "headers", "client", "server")  # fmt: skip
_AHEAD = 64
"""Messages that an application may be ahead of who reads them."""

Asked = Callable[[str | None, dict[str, Any], bytes], AsyncGenerator[Message, None]]
"""(conversation, scope, body) -> the messages of an answer; it is closed early where nobody wants
the rest."""


def conversation_of(scope: Scope, body: bytes) -> str | None:
    """What tells a conversation from others, the same in each of its turns.

    Args:
        scope: of the request.
        body: all of it.

    Returns:
        What the client calls it in `x-session-id`, else a digest of how it opens: messages up to
        the first of a user, of each the first `HEAD` characters; or the first `PROMPT_HEAD`
        characters or tokens of a prompt. None where there is neither: any replica may answer.
    """
    given = dict(scope["headers"]).get(SESSION_HEADER)
    if given:
        return given.decode("latin-1")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    opening: list[Any] = []
    messages, prompt = asked.get("messages"), asked.get("prompt")
    for message in messages if isinstance(messages, list) else []:
        told = message if isinstance(message, dict) else {}
        role = told.get("role") if isinstance(told.get("role"), str) else None
        opening.append([role, _head(told.get("content"), HEAD)])
        if role == "user":
            break
    if not opening and isinstance(prompt, str | list):
        opening = [_head(prompt, PROMPT_HEAD)]
    if not opening:
        return None
    return hashlib.sha256(json.dumps(opening).encode()).hexdigest()


def _head(content: Any, most: int) -> str | list[int] | None:
    """The beginning of a text, of token ids, or of the first of several."""
    if isinstance(content, list) and content and not isinstance(content[0], int):
        content = content[0]
        content = content.get("text") if isinstance(content, dict) else content
    if isinstance(content, list):
        return [token for token in content[:most] if isinstance(token, int)]
    return content[:most] if isinstance(content, str) else None


class Front:
    """ASGI application before the replicas: reads a request, and passes on what one of them says.

    Keys, limits and the log are the replicas'; here is only how long a body may be.
    """

    def __init__(self, ask: Asked, max_body_bytes: int):
        self._ask, self._most = ask, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            ended = False
            while not ended:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                ended = kind == "lifespan.shutdown"
            return
        if scope["type"] != "http":
            raise RuntimeError(f"ASGI {scope['type']} is not served")
        headers = dict(scope["headers"])
        try:
            body = await body_of(scope, headers, receive, self._most)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except Gone:
            return
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        told = self._ask(conversation_of(scope, body), plain, body)

        async def pass_on() -> None:
            async for message in told:
                await send(message)

        async with contextlib.aclosing(told):
            with contextlib.suppress(OSError):  # the client left while something was being sent
                await until_gone(pass_on(), receive)


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """What an ASGI application sends in answer to a request; closing it is a client that leaves.

    Args:
        app: the application.
        scope: of a request, as `Front` hands it on.
        body: all of it.
    """
    told: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
    left, read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if left.is_set():
            raise OSError("the client has left")
        await told.put(message)

    async def run() -> None:
        try:
            await app({**scope, "headers": [tuple(pair) for pair in scope["headers"]]}, receive,
                      send)  # fmt: skip
        finally:
            if not left.is_set():
                await told.put(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await told.get()) is not None:
            yield message
        await running
    finally:
        left.set()
        while not told.empty():  # the application may wait for room
            told.get_nowait()
        with contextlib.suppress(OSError):
            await running
