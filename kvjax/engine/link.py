"""A process's connection to the coordination service of the first one, by way of itself.

JAX's client ends its process, in words of its own, in the moment in which the connection to the
service breaks; nothing in Python can catch that. So the client connects to a port of this process,
from which bytes go on to the service and back, and the break is seen here first.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_PART = 1 << 16
_CONNECT_SECONDS = 30.0


class Link:
    """A port of this process that stands for an address elsewhere."""

    def __init__(self, there: tuple[str, int]):
        """Listen; what connects is connected to `there`."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called by a thread once the other end is gone, before who is connected here notices."""
        self._there = there
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="kvjax link", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            threading.Thread(target=self._connect, args=(here,), daemon=True).start()

    def _connect(self, here: socket.socket) -> None:
        try:
            there = socket.create_connection(self._there, timeout=_CONNECT_SECONDS)
        except OSError:
            here.close()  # who connects tries again
            return
        there.settimeout(None)
        for one in (here, there):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left = threading.Event()

        def leave() -> None:
            left.set()
            _close(there)

        def gone() -> None:
            if not left.is_set():
                self.on_gone()
            _close(here)

        threading.Thread(target=_pass_on, args=(here, there, leave), daemon=True).start()
        _pass_on(there, here, gone)


def _pass_on(one: socket.socket, other: socket.socket, ended: Callable[[], None]) -> None:
    """Send on what comes from one, until it ends or the other takes no more."""
    with contextlib.suppress(OSError):
        while part := one.recv(_PART):
            other.sendall(part)
    ended()


def _close(one: socket.socket) -> None:
    """Also for a thread that waits for something to read."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
