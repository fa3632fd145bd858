"""Interruptions wait while the host's books and the device's state must not come apart.

A step gives the pool away (donation) and takes it back as the call's result. A KeyboardInterrupt
between the two would lose it, and one between the device's tokens and the host's note of them would
lose those. So SIGINT and SIGTERM are kept back for the length of a round and let through at its
end, or earlier where nothing is under way and much time passes (`released`: compilation, prefill).
A second signal of the same kind is let through at once.

Handlers of signals belong to the process and run in its main thread; in other threads these
contexts do nothing.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_KEPT = (signal.SIGINT, signal.SIGTERM)

_depth = 0
_open = False
"""Whether `released` is open."""
_previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
_pending: dict[int, None] = {}


def _keep(number: int, frame: FrameType | None) -> None:
    if number in _pending:
        del _pending[number]
        _previous[number](number, frame)
    else:
        _pending[number] = None


def _install() -> None:
    _previous.clear()
    for number in _KEPT:
        handler = signal.getsignal(number)
        # What Python does not handle is not ours to keep back: default actions, C handlers.
        if callable(handler) and handler is not _keep:
            _previous[number] = handler
            signal.signal(number, _keep)


def _restore() -> None:
    for number in _KEPT:
        if number in _previous:
            signal.signal(number, _previous[number])


def _let_through() -> None:
    while _pending:
        number, _ = _pending.popitem()
        _previous[number](number, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class held:
    """Keeps interruptions back while it is open. May be nested."""

    def __enter__(self) -> None:
        global _depth
        self._mine = _in_main_thread()
        if self._mine:
            try:
                if _depth == 0:
                    _install()
                _depth += 1
            except BaseException:
                _restore()
                raise

    def __exit__(self, *_: object) -> None:
        global _depth
        if self._mine:
            _depth -= 1
            if _depth == 0:
                _restore()
                _let_through()


class released:
    """Lets interruptions through inside `held`: at once what was kept, and what comes meanwhile.

    Only for stretches in which nothing is half done.
    """

    interrupted = False
    """Whether the last interruption came through here; whoever handles it sets this back."""

    def __enter__(self) -> None:
        global _open
        self._mine = _in_main_thread() and _depth > 0 and not _open
        if self._mine:
            try:
                _restore()
                _let_through()
            except BaseException:
                released.interrupted = True
                _install()
                raise
            _open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _open
        if self._mine:
            _open = False
            if kind is not None and not issubclass(kind, Exception):
                released.interrupted = True
            try:
                _install()
            except BaseException:
                released.interrupted = True
                _install()
                raise
