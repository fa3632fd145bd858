"""Chat templates: published ones, the sandbox, and beginning tokens."""

import gzip
import shutil

import pytest

from kvjax.errors import UserError
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


def test_a_malformed_template_is_refused():
    with pytest.raises(UserError, match="chat template is malformed"):
        ChatTemplate("{% for %}")


def test_a_message_without_content_is_refused(tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf"))
    with pytest.raises(ValueError, match=r"messages\[0\] lacks 'content'"):
        tokenizer.chat([{"role": "user"}])
