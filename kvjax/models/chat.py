"""Chat templates: the checkpoint's own Jinja source, rendered in a sandbox.

A template comes from a file that a stranger made, so it runs in Jinja's immutable sandbox.
The environment offers what templates of published checkpoints rely on: trimmed blocks,
`break`/`continue`, `raise_exception`, `strftime_now`, a `tojson` that leaves Unicode as it is,
and `{% generation %}` blocks (a training mark, rendered as their content).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from kvjax.errors import UserError

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """Renders the content of `{% generation %} … {% endgeneration %}` as if unmarked."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _TemplateRefusal(Exception):
    """Raised by a template through `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
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


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template.

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
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is malformed: {_one_line(error)}") from error

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text the model reads.

        Args:
          messages: mappings with `role` and `content`.
          add_generation_prompt: whether to open the assistant's next turn.
          variables: further names the template may use, such as `tools`.

        Raises UserError where the template refuses the conversation or fails.
        """
        try:
            return self._template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **variables},
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except _TemplateRefusal as refusal:
            raise UserError(
                f"the chat template refuses these messages: {_one_line(refusal)}"
            ) from refusal
        except Exception as error:  # a template is a foreign program: it can fail in any way
            raise UserError(f"the chat template fails: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
