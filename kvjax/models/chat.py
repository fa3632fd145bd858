"""Chat templates: the checkpoint's own Jinja source, rendered in a sandbox and in a process apart.

A template comes from a file that a stranger made, and is a program. Jinja's immutable sandbox
keeps it from what it could reach, but not from running for ever: nested loops, ``9**9**9``,
``'%2000000000d' % 1``, comparing lists that hold one another. Counting its steps would have to
know what each operator, filter and method of every type costs, and a thread inside one of C's
loops cannot be stopped. So one worker process (`kvjax.models.chat_worker`) renders all templates
under limits that the kernel keeps: processor time, memory, and the length of the text. It starts
with the first template (0.1 s), and a rendering takes a fraction of a millisecond more for it.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models import chat_worker
from kvjax.models.files import shown_error

Message = Mapping[str, Any]

ANY_DAY = "2024-07-26"
"""What evaluation and calibration take for today: a run that goes on tomorrow has the same prompts.
It is the day that Llama's templates have where they are told none."""
CPU_SECONDS = 3.0
"""Processor time of one rendering; published templates take milliseconds."""
_WALL_SECONDS = 120.0
"""Until the worker is taken for dead; the limit of its processor time comes long before."""


class ChatTemplate:
    """A chat template.

    Args:
      source: the Jinja text.
      special_tokens: variables such as `bos_token` and `eos_token` with their text.

    Raises UserError where the source is not a valid template.

    Example:
      >>> template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
      >>> template.render([{"role": "user", "content": "Hi"}])
      'Hi'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        _ask(source, None)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        as_of: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the text the model reads.

        Args:
          messages: mappings with `role` and `content`.
          add_generation_prompt: whether to open the assistant's next turn.
          as_of: the day that is today to the template, such as `ANY_DAY`; the real one by default.
          variables: further names the template may use, such as `tools`; what JSON can hold.

        Raises UserError where the template refuses the conversation, fails, or takes more time,
        memory or characters than any conversation does.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        given |= variables
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return _ask(self.source, given, as_of)


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Those of turns, as OpenAI names them."""


def check_role(name: str, role: Any, source: str | None) -> None:
    """Refuse a role that is neither usual nor named by a template: most write any role into the
    text, where the model has never seen it, and some leave out its turn.

    Raises:
        UserError: it is none of them.
    """
    if role in ROLES or any(f"{quote}{role}{quote}" in (source or "") for quote in "'\""):
        return
    raise UserError(
        f"{name} {shown(role)}: give {', '.join(ROLES)}, or one that the chat template names"
    )


def _plain(value: Any) -> Any:
    """What JSON has no form for, in one that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _ask(source: str, variables: dict[str, Any] | None, as_of: str | None = None) -> str:
    request = {"source": source, "variables": variables, "seconds": CPU_SECONDS, "as_of": as_of}
    try:
        message = json.dumps(request, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"the messages cannot be given to the chat template: {shown_error(error)}; give texts, "
            "numbers, lists and mappings"
        ) from error
    answer = _worker.ask(message)
    if "text" in answer:
        return answer["text"]
    if "malformed" in answer:
        raise UserError(f"the chat template is malformed: {answer['malformed']}")
    if "refused" in answer:
        raise UserError(f"the chat template refuses these messages: {answer['refused']}")
    raise UserError(f"the chat template fails: {answer['failed']}")


class _Worker:
    """The process that renders, started when first needed and again after it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: list[Any] = []

    def ask(self, request: str) -> dict[str, str]:
        """The answer to one request, both JSON."""
        with self._lock:
            process = self._started()
            try:
                self._write(process, request)
                deadline = time.monotonic() + _WALL_SECONDS
                size = int.from_bytes(self._read(process, 8, deadline), "little")
                return json.loads(self._read(process, size, deadline))
            except (EOFError, BrokenPipeError):
                code = self.stop()
                if code == -signal.SIGPROF:
                    return {"failed": f"it takes more than {CPU_SECONDS:g} s"}
                return {"failed": "it ended the process that renders it"}
            except BaseException:
                # An interruption half way: the next answer would be this request's.
                self.stop()
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", str(Path(chat_worker.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                )
            except OSError as error:
                raise UserError(
                    f"cannot start {sys.executable} to render the chat template: {error.strerror}"
                ) from error
            with contextlib.suppress(BrokenPipeError):  # the first request will find the same
                self._write(self._process, json.dumps(sys.path))
        return self._process

    @staticmethod
    def _write(process: subprocess.Popen[bytes], text: str) -> None:
        assert process.stdin is not None
        view = memoryview(chat_worker.message_of(text))
        while view:
            view = view[os.write(process.stdin.fileno(), view) :]

    @staticmethod
    def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        parts = bytearray()
        while len(parts) < count:
            ready = poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            part = os.read(process.stdout.fileno(), count - len(parts)) if ready else b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def stop(self) -> int | None:
        """Ends the process if there is one; its exit status, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            # It ends by itself when its stdin does; a signal that ends it now is worth knowing.
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def forget(self) -> None:
        """In a fork: the process is the parent's, and whoever held the lock is not there."""
        self._inherited.append(self._process)
        self._lock, self._process = threading.Lock(), None


_worker = _Worker()
atexit.register(_worker.stop)
os.register_at_fork(after_in_child=_worker.forget)
