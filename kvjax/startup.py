"""Ctrl-C and SIGTERM end a command at any moment, also while it is still importing.

A KeyboardInterrupt in the wrong place does not arrive: raised while an extension module is set up
it ends the process with a dump, raised in a callback of the garbage collector (JAX has one) it is
printed and forgotten. So `kvjax` calls `guard` before all else, and a script's first lines are

    from kvjax.startup import guard

    guard(__name__)

From then on a signal ends the process at once, with one word and the exit code that shells give
it, until `started` says that there may be something to lose. After that it raises
KeyboardInterrupt, again where nobody was told of it. What is compiled or computed in one call, for
minutes maybe, hears of no signal before it returns: there a second one ends the process at once.
Imports nothing that takes time.
"""

import _thread
import os
import signal
import sys
import time
import warnings
from types import FrameType
from typing import NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

PATIENCE_SECONDS = 1.0
"""Signals that follow each other faster are one: a shell and a parent may both send it."""

_raised = 0
"""The signal that has raised an exception; 0 for none."""
_handled = 0
"""Signals that the main thread has come to."""
at_once = False
"""Whether a command that goes wrong ends without what libraries do at exit."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def guard(name: str = "__main__") -> None:
    """Take over the signals, in a process whose main module has this name."""
    if name != "__main__":
        return
    for number in WORDS:
        # What runs in the background of a shell script ignores Ctrl-C, and goes on to.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)
    sys.unraisablehook = _raise_again


def started() -> None:
    """Slow imports are done: from now on a signal raises KeyboardInterrupt or `Terminated`."""
    if _leave in map(signal.getsignal, WORDS):
        _listen()
    _replace(_leave, _raise)


def leaves_at_once() -> None:
    """From now on a command that goes wrong ends as soon as it has said so: at exit libraries would
    wait for other processes."""
    global at_once
    at_once = True


def ending() -> None:
    """All is said: a signal while the interpreter shuts down would only print a traceback."""
    for known in (_leave, _raise):
        _replace(known, signal.SIG_IGN)


def broken_off() -> None:
    """A signal has ended the command, and that is said: what it left half made or never awaited is
    freed without a word."""
    if _raised:
        sys.unraisablehook = lambda report: None
        warnings.simplefilter("ignore")


def exit_code(code: int) -> int:
    """A command's exit code, or that of the signal that interrupted it."""
    return 128 + _raised if _raised and code in (0, 128 + signal.SIGINT) else code


def _replace(old, new) -> None:
    for number in WORDS:
        if signal.getsignal(number) is old:
            signal.signal(number, new)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, f"{WORDS[signal.Signals(number)]}\n".encode())
    finally:
        os._exit(128 + number)


def _listen() -> None:
    """Have a thread hear of signals, too, when the main one does not come to its handler."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    # A child's signals are its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    _thread.start_new_thread(_hear, (heard,))


def _hear(heard: int) -> None:
    first, handled = float("-inf"), -1
    while number := os.read(heard, 1):
        # Whoever has put another handler in the place of this module's hears in its own time.
        if signal.getsignal(number[0]) is not _raise:
            continue
        now = time.monotonic()
        if now - first >= PATIENCE_SECONDS and handled == _handled:
            # The main thread may be about to.
            time.sleep(PATIENCE_SECONDS / 2)
            if handled == _handled:
                _leave(number[0], None)
        if handled != _handled:
            first, handled = now, _handled


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    global _raised, _handled
    _raised, _handled = number, _handled + 1
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _raise_again(report) -> None:
    """Bring back an interruption that came where exceptions are only printed."""
    if not _raised or not issubclass(report.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(report)
        return

    main = _thread.get_ident()

    def soon() -> None:
        time.sleep(0.01)
        # A signal of its own: `interrupt_main` would wait for what the thread waits for.
        signal.pthread_kill(main, _raised)

    _thread.start_new_thread(soon, ())
