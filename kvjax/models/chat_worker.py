"""The process that renders chat templates for `kvjax.models.chat`; it imports no more than Jinja.

It reads requests from stdin and answers on stdout, each a length of eight bytes (little endian)
and that much JSON:

    {"source": …, "variables": {…} | null, "seconds": …, "as_of": "2024-07-26" | null}
        ->  {"text": …} | {"malformed": …} | {"refused": …} | {"failed": …}

Without variables it only compiles. The first message is the parent's ``sys.path``. A request that
takes more processor time than it was given ends the process by SIGPROF, and that is the answer.
"""

import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, NoReturn

MEMORY_BYTES = 1 << 30
"""Address space in all; a rendering takes a few times the length of its text."""
MOST_CHARACTERS = 1 << 20
"""Of a rendered conversation, beside 8 times what went in."""


class _Refusal(Exception):
    """Raised by a template through `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


_as_of: str | None = None
"""The day that templates take for today, where the request says one."""


def _strftime_now(pattern: str) -> str:
    if _as_of is not None:
        return datetime.datetime.fromisoformat(_as_of).strftime(pattern)
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> Any:
    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """Renders the content of `{% generation %} … {% endgeneration %}` as if unmarked."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.LoopControlExtension, GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _answer(source: str, variables: dict[str, Any] | None, most: int) -> dict[str, str]:
    import jinja2

    stage = "malformed"
    try:
        template = _compiled(source)
        if variables is None:
            return {"text": ""}
        stage = "failed"
        parts: list[str] = []
        size = 0
        for part in template.generate(**variables):
            size += len(part)
            if size > most:
                return {"failed": f"it writes more than {most} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except _Refusal as refusal:
        return {"refused": _one_line(refusal)}
    except RecursionError:
        return {stage: "it is nested too deeply"}
    except MemoryError:
        return {stage: f"it needs more than {MEMORY_BYTES >> 20} MB of memory"}
    except jinja2.TemplateError as error:
        return {stage: _one_line(error)}
    except Exception as error:  # a template is a foreign program: it can fail in any way
        return {stage: _one_line(error)}


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return stream.read(int.from_bytes(head, "little"))


def message_of(text: str) -> bytes:
    """JSON as it is sent; it is ASCII, in which lone surrogates are escapes."""
    return len(text).to_bytes(8, "little") + text.encode("ascii")


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    with contextlib.suppress(OSError, ValueError):  # not every system has every limit
        resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


def main() -> None:
    """Serves until stdin ends."""
    global _as_of
    # Ctrl-C is the parent's: this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library might print would be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = json.loads(read_message(sys.stdin.buffer) or b"[]")
    _environment()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    while (message := read_message(sys.stdin.buffer)) is not None:
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        most = MOST_CHARACTERS + 8 * len(message)
        _as_of = request.get("as_of")
        answer = json.dumps(_answer(request["source"], request["variables"], most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(message_of(answer))
        answers.flush()


if __name__ == "__main__":
    main()
