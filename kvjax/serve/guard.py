"""Around every request: its id, who asks, how much is sent, and one line in the log."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.checks import shown
from kvjax.serve.errors import ApiError
from kvjax.serve.logs import log
from kvjax.serve.service import Service
from kvjax.serve.streams import CLOSED

OPEN_PATHS = ("/", "/health", "/ready", "/version")
"""What needs no key, beside the files of the page: nothing of it is a client's."""
BODY_SECONDS = 60.0
"""Within which a body has to come."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gone(Exception):
    """The client left while it was sending."""


class Guard:
    """ASGI middleware; the outermost, so that nothing gets past it."""

    def __init__(self, app: ASGIApp, service: Service, paths: Collection[str]):
        """Stand before an application that has these paths."""
        self._app, self._service, self._paths = app, service, paths
        self._keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = _request_id(headers.get(b"x-request-id"))
        fields: dict[str, Any] = {}
        scope.setdefault("state", {})["note"] = fields.update
        began, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [*_HEADERS, (b"x-request-id", name.encode())]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        metrics = self._service.metrics
        metrics.open.inc()
        try:
            try:
                self._check_host(headers)
                self._check_key(scope, headers)
                body = await body_of(scope, headers, receive, self._service.settings.max_body_bytes)
                await self._app(scope, _replayed(body, receive), answer)
            except ApiError as error:
                fields["error"] = error.code or error.message
                await error.response()(scope, receive, answer)
        except Gone:
            status = CLOSED
        except Exception as error:
            # An answer has been sent already, if any could be.
            log.error("a request failed", exc_info=error, extra={"fields": {"request_id": name}})
            status = status or 500
        finally:
            metrics.open.dec()
            seconds = time.perf_counter() - began
            # What is refused here has no route yet, but may name one.
            asked = scope["path"] if scope["path"] in self._paths else "other"
            path = getattr(scope.get("route"), "path", asked)
            metrics.answered(path, status or CLOSED, seconds)
            line = {
                "request_id": name,
                "method": scope["method"],
                "path": path,
                "status": status or CLOSED,
                "seconds": round(seconds, 4),
                **fields,
            }
            if path not in ("/health", "/ready", "/metrics", "/kvjax/status"):
                log.info("request", extra={"fields": line})

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse who asks for another machine: a page of another site whose name leads here.

        Raises:
            ApiError: the name is not one of the settings' `hosts`.
        """
        hosts = self._service.settings.hosts
        if hosts is None:
            return
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        if name not in hosts:
            raise ApiError(
                403,
                f"host {name[:100]!r}: this server is asked for as {', '.join(hosts)}; start it "
                "with --allowed-hosts for other names",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse who has no key.

        Raises:
            ApiError: there is none, or it is wrong.
        """
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith("/page/"):
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        # All are compared, each in the same time whatever was given.
        found = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if kind.lower() != b"bearer" or not any(found):
            raise ApiError(
                401,
                "this server needs an API key: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def host_name(given: str) -> str:
    """The name in a Host header, in small letters, without a port, the brackets of IPv6 and the
    dot that a full name may end in."""
    if given.startswith("["):
        return given[1:].partition("]")[0].lower()
    return given.partition(":")[0].removesuffix(".").lower()


_CLOSE = {"Connection": "close"}
"""For an answer before the whole body was read."""


async def body_of(scope: Scope, headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
    """The whole body, if it is not too long and comes in time.

    Raises:
        ApiError: it is not; or a body that is no JSON, as other sites' pages may send them, or is
            compressed.
    """
    # No route takes a body by another method: the application says which it does take.
    if scope["method"] != "POST":
        return b""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "the body is not declared as JSON: send 'Content-Type: "
                       "application/json'", code="not_json", headers=_CLOSE)  # fmt: skip
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"", b"identity"):
        raise ApiError(415, f"Content-Encoding {shown(coding.decode('latin-1'))}: send the body as "
                       "it is", param="Content-Encoding", headers=_CLOSE)  # fmt: skip
    told = headers.get(b"content-length", b"0")
    if told.isdigit() and int(told[:20]) > most:
        raise _too_long(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise _too_long(most)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s",
                       headers=_CLOSE) from None  # fmt: skip


def _too_long(most: int) -> ApiError:
    return ApiError(
        413, f"the body is longer than {most} bytes: send less", code="too_large", headers=_CLOSE
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and after it whatever comes."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _request_id(given: bytes | None) -> str:
    """The client's name for its request, if it is a name that a log can have; else a new one."""
    if given and len(given) <= 128:
        text = given.decode("latin-1")
        if text.isascii() and all(c.isalnum() or c in "-_.:" for c in text):
            return text
    return uuid.uuid4().hex
