"""Calls of tools: what a model writes in the form of its template comes as `tool_calls`."""

import json

import openai
import pytest

from kvjax.models.tokenizer import ByteTokenizer
from kvjax.serve.tools import CallReader, form_of, names_of
from tests.serve.conftest import TEMPLATE, chat_tokenizer

TAGS = "{# <tool_call> #}" + TEMPLATE
OBJECT = '{# {"name": function name, "parameters": {}} #}' + TEMPLATE
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
NOW = '{"name": "time", "arguments": {}}'
MARKED = f"<tool_call>\n{OSLO}\n</tool_call>"


def read(form, text, size):
    """Text and calls, where the text comes in parts of one size."""
    reader = CallReader(form, names_of(TOOLS))
    parts = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(reader.flush())
    shown = "".join(part for part, _ in parts)
    return shown, [(call.name, json.loads(call.arguments)) for _, calls in parts for call in calls]


CALLED = ("weather", {"city": "Oslo"})
CASES = [
    ("tags", "none at all", "none at all", []),
    ("tags", MARKED, "", [CALLED]),
    ("tags", f"I look.\n{MARKED} and {MARKED}.", "I look.\n and .", [CALLED, CALLED]),
    ("tags", f"<tool_call>[{OSLO}, {NOW}]</tool_call>", "", [CALLED, ("time", {})]),
    # A mark within a string ends nothing, one behind a string that is never closed does.
    (
        "tags",
        MARKED.replace("Oslo", "a </tool_call> b"),
        "",
        [("weather", {"city": "a </tool_call> b"})],
    ),
    ("tags", f'<tool_call>{{"oh</tool_call> {MARKED}', '<tool_call>{"oh</tool_call> ', [CALLED]),
    ("tags", f'<tool_call>{{"oh</tool_call>\n{MARKED}', '<tool_call>{"oh</tool_call>\n', [CALLED]),
    ("tags", f'<tool_call>{{"\\" </tool_call>{MARKED}', '<tool_call>{"\\" </tool_call>', [CALLED]),
    # The end mark may be an end of turn, which is not printed.
    ("tags", f"<tool_call>{OSLO}", "", [CALLED]),
    ("tags", "a < b, <tool>, <tool_cal", "a < b, <tool>, <tool_cal", []),
    ("tags", "<tool_call>{oh</tool_call> no", "<tool_call>{oh</tool_call> no", []),
    ("tags", '<tool_call>{"name": "weath', '<tool_call>{"name": "weath', []),
    ("tags", "<tool_call>" + "[" * 9999, "<tool_call>" + "[" * 9999, []),
    ("object", '{"name": "weather", "parameters": {"city": "Oslo"}}', "", [CALLED]),
    ("object", f"\n {NOW}\n", "", [("time", {})]),
    ("object", 'See: {"name": "time"}', 'See: {"name": "time"}', []),
    ("object", '{"answer": 3}', '{"answer": 3}', []),
    ("object", '{"name": "time", ', '{"name": "time", ', []),
    ("object", " \n", " \n", []),
]
WRONG = ['{"name": "rob"}', '{"name": ["time"]}', '{"name": "time", "arguments": [1]}', "3",
         '{"name": "time", "arguments": {"x": NaN}}', f"[{NOW}, 3]"]  # fmt: skip
CASES += [(form, text, text, []) for form in ("object",) for text in WRONG]
CASES += [("tags", t, t, []) for t in (f"<tool_call>{text}</tool_call>" for text in WRONG)]


@pytest.mark.parametrize("size", [1, 5, 100_000])
@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_text_is_parted_into_text_and_calls(form, text, shown, calls, size):
    if len(text) > 1000 and size == 1:
        size = 500
    assert read(form, text, size) == (shown, calls)


def test_the_template_says_the_form():
    assert (form_of(TAGS), form_of(OBJECT), form_of(TEMPLATE)) == ("tags", "object", None)
    assert names_of([*TOOLS, {"name": "plain"}, {"function": 3}, {}]) == [
        "weather",
        "time",
        "plain",
    ]


class Said:
    """A stream of tokens that reads as a text that was known before, whatever they are."""

    def __init__(self, text):
        self._text = text

    def push(self, token):
        part, self._text = self._text[:3], self._text[3:]
        return part

    def flush(self):
        return ""


@pytest.fixture(scope="module")
def server():
    """Says what `server.says` is."""
    from kvjax.serve import ServerSettings
    from tests.serve.conftest import ServerThread

    tokenizer = chat_tokenizer(TAGS)
    tokenizer.eos_ids = frozenset()
    with ServerThread(ServerSettings(drain_seconds=1), tokenizer=tokenizer) as server:
        yield server


@pytest.fixture
def ask(server, monkeypatch):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(text, **given):
        monkeypatch.setattr(ByteTokenizer, "stream", lambda *_, **__: Said(text + "<end>"))
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS}
        asked |= {"stop": ["<end>"], "max_tokens": 100}
        return client.chat.completions.create(**{**asked, **given})

    yield ask
    client.close()


def test_calls_for_the_openai_client(ask):
    (choice,) = ask(f"I look. {MARKED}").choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    (choice,) = ask(MARKED).choices
    assert choice.message.content is None
    # Cut short, or with nothing called.
    (choice,) = ask(MARKED + " and so on", max_tokens=26).choices
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("length", 1)
    (choice,) = ask("I know.").choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "I know.")
    assert choice.message.tool_calls is None
    (choice,) = ask(MARKED, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content) == ("stop", MARKED)


def test_calls_in_a_stream(ask):
    with ask(f"I look. {MARKED}{MARKED}", stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == "I look."
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(choice.finish_reason for choice in choices[:-1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MARKED}\n{MARKED}", None),
        (f"Sure.\n{MARKED}\n{MARKED}\n", "Sure."),
        (f"\n{MARKED}\n So.\n{MARKED} Done.", "So.\n Done."),
        ("\n No call. \n", "\n No call. \n"),
    ],
)
def test_white_space_around_calls_is_not_said_whole_or_streamed(ask, text, said):
    (choice,) = ask(text).choices
    assert choice.message.content == said
    with ask(text, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == (said or "")
