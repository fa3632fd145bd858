"""Chat templates: published ones, the sandbox and its limits, and beginning tokens."""

import collections
import contextlib
import gzip
import os
import shutil
import signal
import sys
import threading

import pytest

from kvjax.errors import UserError
from kvjax.models import chat
from kvjax.models.chat import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from tests.models.tokenizer_builders import write_byte_gguf

HI = [{"role": "user", "content": "Hi"}]


def test_smollm2_template(smollm2_path):
    tokenizer = Tokenizer.from_path(smollm2_path)
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *HI])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.chat(HI)
    assert ids[0] == tokenizer.bos_id
    assert ids[1] != tokenizer.bos_id
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert not tokenizer.render_chat(HI, add_generation_prompt=False).endswith("assistant\n")


def test_llama3_template(data_dir, tmp_path):
    source = data_dir / "tokenizers" / "llama3"
    packed = (source / "tokenizer.json.gz").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress(packed))
    shutil.copyfile(source / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.render_chat(HI) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.chat(HI)
    assert ids == [128000, 128006, 882, 128007, 271, 13347, 128009, 128006, 78191, 128007, 271]
    spelled_out = [{"role": "user", "content": "Hi"}]
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"
    )
    assert Tokenizer.from_path(tmp_path).chat(spelled_out) == [128000, 13347]


def test_without_a_template_contents_follow_the_beginning_token(tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf", pre="llama-bpe"))
    assert tokenizer.decode(tokenizer.chat([*HI, *HI])) == "Hi\n\nHi"
    assert tokenizer.chat(HI)[0] == tokenizer.bos_id
    silent = write_byte_gguf(tmp_path / "w.gguf", pre="llama-bpe", add_bos_token=False)
    assert tokenizer.bos_id not in Tokenizer.from_path(silent).chat(HI)


def test_a_template_alone_decides_on_the_beginning_token(tmp_path):
    for source in ("{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"):
        path = write_byte_gguf(tmp_path / "v.gguf", pre="llama-bpe", chat_template=source)
        tokenizer = Tokenizer.from_path(path)
        assert tokenizer.chat(HI).count(tokenizer.bos_id or 0) == ("bos_token" in source)


def test_roles_are_usual_or_of_the_template(tmp_path):
    named = '{% for m in messages %}{% if m.role != "ipython" %}{{ m.role }}{% endif %}{% endfor %}'
    path = write_byte_gguf(tmp_path / "v.gguf", pre="llama-bpe", chat_template=named)
    tokenizer = Tokenizer.from_path(path)

    def said(role):
        return tokenizer.render_chat(
            [{"role": "user", "content": ""}, {"role": role, "content": ""}]
        )

    assert said("tool") == "usertool"
    assert said("ipython") == "user"
    for role in ("usr", "User", "", None, 5, "m.role"):
        with pytest.raises(
            UserError, match=rf"^messages\[1\].role {role!r}: give system, developer, "
        ):
            said(role)


def test_environment_of_templates():
    def render(source, **variables):
        return ChatTemplate(source, {"bos_token": "<s>"}).render(HI, **variables)

    assert render("{% for m in messages %}\n  {% break %}\n{% endfor %}\nx") == "x"
    assert render("{% generation %}{{ 1 + 1 }}{% endgeneration %}!") == "2!"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ bos_token }}{{ tools is none }}") == "<s>True"
    assert render("{{ tools | length }}", tools=[1, 2]) == "2"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ messages[0]['role'] }} {{ messages[0].content }}") == "user Hi"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No system\nturns!') }}", "refuses these messages: No system turns!"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "the chat template fails"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ missing.name }}", "'missing' is undefined"),
    ],
)
def test_a_failing_template_gives_one_line(source, message):
    with pytest.raises(UserError, match="chat template") as caught:
        ChatTemplate(source).render(HI)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Each of these would run for hours or take all memory: that they come back is the test.
TOO_MUCH_TIME = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "constants": "{% set x = 2 ** (10 ** 10) %}",
    "rounding": "{{ 2.5 | round(10 ** 9, 'ceil') }}",
    "slices": "{{ [1] | slice(10 ** 9) | list }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
    "comparing what holds itself": (
        "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}"
        "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
    ),
}
TOO_MUCH_MEMORY = {
    "product": "{{ 'x' * 10 ** 10 }}",
    "list": "{{ [0] * 10 ** 10 }}",
    "percent": "{{ '%2000000000d' % 1 }}",
    "format": "{{ '{:>2000000000}'.format(1) }}",
    "filter": "{{ 'a' | center(10 ** 10) }}",
    "method": "{{ 'a'.ljust(10 ** 11) }}",
    "indent": "{{ ('a\n' * 1000) | indent(10 ** 9) }}",
    "json": "{{ [1] | tojson(indent=10 ** 10) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "doubling": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}"
    ),
    "batches": "{{ [1] | batch(10 ** 10, 'x') | list }}",
}
TOO_DEEP = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in [1] %}" * 300 + "{% endfor %}" * 300,
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "macros": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
}


def _failure(source):
    with pytest.raises(UserError, match=r"^the chat template ") as caught:
        ChatTemplate(source).render(HI)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    # Whatever became of the process: the next template renders.
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"
    return str(caught.value)


@pytest.mark.parametrize("name", TOO_MUCH_TIME)
def test_processor_time_is_limited(name, monkeypatch):
    monkeypatch.setattr(chat, "CPU_SECONDS", 0.2)
    assert "takes more than 0.2 s" in _failure(TOO_MUCH_TIME[name])


def test_memory_is_limited():
    """Or time, where a machine takes that long to hand the memory out."""
    for name, source in TOO_MUCH_MEMORY.items():
        said = _failure(source)
        assert any(word in said for word in ("memory", "ended the process", "takes more")), name


def test_depth_is_limited():
    for name, source in TOO_DEEP.items():
        assert "nested too deeply" in _failure(source), name


def test_the_text_is_limited():
    """By what went in: a long conversation is written whole, a short one not for ever."""
    assert "writes more than" in _failure("{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}")
    assert "writes more than" in _failure("{{ 'x' * 2000000 }}")
    long = [{"role": "user", "content": "é€\n" * 1_000_000}]
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}!")
    assert template.render(long) == long[0]["content"] + "!"


def test_numbers_too_long_to_write():
    assert "digits" in _failure("{{ " + "9" * 100_000 + " }}")
    assert "digits" in _failure("{{ 10 ** 5000 }}")


def test_a_template_cannot_reach_the_process():
    """What the sandbox refuses, and what there is nothing of."""
    for source in (
        "{{ messages.__class__.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.kill(1, 9) }}",
        "{{ ''.format.__self__.__class__.__base__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ):
        # The sandbox refuses some of it; of the rest there is nothing, which writes as nothing.
        with contextlib.suppress(UserError):
            assert ChatTemplate(source).render(HI) == "", source


def test_variables_of_every_kind_arrive():
    class Turns(collections.UserDict):
        pass

    def render(source, **variables):
        return ChatTemplate(source).render(HI, **variables)

    assert render("{{ t[0].b }}{{ t | length }}", t=({"b": "x"}, 2)) == "x2"
    assert render("{{ t.a }}", t=Turns(a="é\u2028\ud800")) == "é\u2028\ud800"
    assert render("{{ t is none }}{{ f }}{{ n }}", t=None, f=False, n=1.5) == "TrueFalse1.5"
    for odd in (object(), b"x", {"a": {1: [object()]}}):
        with pytest.raises(UserError, match="give texts, numbers, lists and mappings"):
            render("{{ t }}", t=odd)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="cannot be given to the chat template"):
        render("{{ t }}", t=deep)


def test_templates_may_be_rendered_from_threads():
    template = ChatTemplate("{{ messages[0].content }}")
    wrong: list[str] = []

    def render(name):
        for number in range(50):
            text = f"{name} {number}"
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interruption_leaves_no_answer_behind(monkeypatch):
    """Ctrl-C while a template renders: the next rendering is not given the one before."""
    template = ChatTemplate("{{ messages[0].content }}")
    real = chat._Worker._read
    with monkeypatch.context() as patch:

        def interrupted(*arguments):
            raise KeyboardInterrupt

        patch.setattr(chat._Worker, "_read", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "first"}])
    assert chat._Worker._read is real
    assert template.render(HI) == "Hi"


def test_the_process_ends_and_is_replaced(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(HI)
    process = chat._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGINT)  # a terminal's Ctrl-C goes to every process: not to this
    assert template.render(HI) == "Hi"
    assert chat._worker._process is process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match="ended the process that renders it"):
        template.render(HI)
    assert template.render(HI) == "Hi"
    assert chat._worker.stop() == 0  # by itself, when its stdin ends
    assert chat._worker.stop() is None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(UserError, match="cannot start /nonexistent/python"):
            template.render(HI)
    assert template.render(HI) == "Hi"


def test_a_malformed_template_is_refused():
    with pytest.raises(UserError, match="chat template is malformed"):
        ChatTemplate("{% for %}")


def test_a_message_without_content_is_refused(tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf"))
    with pytest.raises(ValueError, match=r"messages\[0\] lacks 'content'"):
        tokenizer.chat([{"role": "user"}])
