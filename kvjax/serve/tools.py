"""Calls of tools in what a model writes, by the form that its chat template asks for.

Two forms are known: JSON between <tool_call> and </tool_call> (Hermes, Qwen, SmolLM), an object or
a list of them with `name` and `arguments`; and an answer that is nothing but a JSON object with
`name` and `parameters` (Llama 3.1). What is no such call of an offered tool stays text.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Collection, Iterable
from typing import Any, Literal, NoReturn

Form = Literal["tags", "object"]
BEGIN, END = "<tool_call>", "</tool_call>"


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None if it is neither."""
    if BEGIN in template:
        return "tags"
    # The words of Llama 3.1's template, and of those made after it.
    return "object" if '{"name": function name, "parameters":' in template else None


def names_of(tools: Iterable[dict[str, Any]] | None) -> list[str]:
    """The names of the tools that a request offers."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    return [name for name in names if isinstance(name, str)]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as the interface has it."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = dataclasses.field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    """Parts the text of one answer, as it comes, into text and calls.

    Nothing of a call is given out before it is whole.
    """

    def __init__(self, form: Form, names: Collection[str]):
        """Begin.

        Args:
            form: of the calls.
            names: of the tools that may be called.
        """
        self._form, self._names = form, frozenset(names)
        self._held = ""
        """What may be a call, or the beginning of its mark."""
        self._inside = form == "object"
        """Whether it may be a call; its mark is not part of it."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that have become certain."""
        self._held += text
        if self._form == "object":
            begun = self._held.lstrip()
            self._inside = self._inside and begun[:1] in ("", "{")
            return ("" if self._inside else self._taken(len(self._held))), []
        shown, calls = "", []
        while True:
            if not self._inside:
                at = self._held.find(BEGIN)
                shown += self._taken(at if at >= 0 else len(self._held) - _begun(self._held))
                if at < 0:
                    return shown, calls
                self._taken(len(BEGIN))
                self._inside = True
            if (closed := self._closed()) is None:
                return shown, calls
            shown, calls = shown + closed[0], calls + closed[1]

    def flush(self) -> tuple[str, list[Call]]:
        """What is left at the end: a call without its end mark counts if it is whole."""
        shown, calls = "", []
        while self._inside and (closed := self._closed(ended=True)) is not None:
            for text, found in (closed, self.push("")):
                shown, calls = shown + text, calls + found
        held = self._taken(len(self._held))
        if self._inside and (found := self._calls(held)):
            return shown, calls + found
        return shown + (BEGIN if self._inside and self._form == "tags" else "") + held, calls

    def _closed(self, ended: bool = False) -> tuple[str, list[Call]] | None:
        """What begins what is held, with an end mark, as text or as calls; None without one."""
        first = at = self._held.find(END)
        while at >= 0 and _in_string(self._held[:at]):
            at = self._held.find(END, at + len(END))
        if first < 0 or (at < 0 and not ended):
            return None
        found = self._calls(self._held[:at]) if at >= 0 else []
        inside = self._taken(at if found else first)
        self._taken(len(END))
        self._inside = False
        return "" if found else BEGIN + inside + END, found

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _calls(self, text: str) -> list[Call]:
        """The calls that a text is; none if it is anything else."""
        try:
            value = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return []
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else []

    def _call(self, value: Any) -> Call | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        given = value.get("arguments", value.get("parameters", {}))
        return Call(name, json.dumps(given)) if isinstance(given, dict) else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _in_string(text: str) -> bool:
    """Whether JSON ends within a string, which no end of a line can be in."""
    marks = re.findall(r'\\.|"', text.rpartition("\n")[2])
    return marks.count('"') % 2 == 1


def _begun(text: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next(size for size in range(len(BEGIN) - 1, -1, -1) if text.endswith(BEGIN[:size]))
