"""Running the application: its socket, its signals, and an end that lets answers end."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn

from kvjax.errors import UserError
from kvjax.serve.app import make_app
from kvjax.serve.logs import log
from kvjax.serve.service import Service

GRACE_SECONDS = 5.0
"""After the drain limit, for answers that were ended to be sent and read."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else listens on.

    Raises:
        UserError: the port is taken or not allowed, or there is no such address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r}: there is no such address") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of a server that has ended need not be waited for.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two that are bound and do not listen would not notice each other.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "it is taken: stop what uses it or give another --port"
        elif error.errno == errno.EACCES:
            why = "it is not allowed: give one from 1024 on"
        else:
            why = error.strerror or str(error)
        raise UserError(f"port {port} of {host}: {why}") from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn's, whose first signal drains and whose second ends at once."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]):
        super().__init__(config)
        self._on_signal = on_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self._on_signal()


async def run_server(
    service: Service,
    listener: socket.socket,
    *,
    warm_up: Sequence[int] = (),
    warm_up_logprobs: bool = False,
    started: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until a signal comes, then drain.

    Args:
        service: what is served.
        listener: a socket of `bind`; closed in the end.
        warm_up: lengths of prompts that everything is compiled for; `/ready` waits for it.
        warm_up_logprobs: also with log-probabilities.
        started: called when connections are taken.
        stop: ends the server like a signal.

    Returns:
        How many requests the end has cut short.
    """
    loop, settings = asyncio.get_running_loop(), service.settings
    draining: list[asyncio.Task[int]] = []

    def begin_to_drain() -> None:
        if not draining:
            log.info("draining", extra={"fields": {"seconds": settings.drain_seconds}})
            draining.append(loop.create_task(service.drain(settings.drain_seconds)))

    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.drain_seconds + GRACE_SECONDS + 1),
    )

    def on_signal() -> None:
        loop.call_soon_threadsafe(begin_to_drain)

    server = _Server(config, on_signal)

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if started is not None:
            started()
        try:
            await service.warm_up(warm_up, warm_up_logprobs)
            log.info("ready")
        except Exception as error:
            log.error("the warm-up failed", exc_info=error)
            service.ready = service.dead is None and not service.draining

    async def watch_stop() -> None:
        assert stop is not None
        await stop.wait()
        server.should_exit = True
        begin_to_drain()

    watching = [loop.create_task(watch())]
    if stop is not None:
        watching.append(loop.create_task(watch_stop()))
    try:
        await server.serve([listener])
        cut = await draining[0] if draining else 0
    finally:
        for task in (*watching, *draining):
            task.cancel()
        await asyncio.gather(*watching, *draining, return_exceptions=True)
        service.close()
        await service.llm.aclose()
    log.info("stopped", extra={"fields": {"cut_short": cut}})
    return cut
