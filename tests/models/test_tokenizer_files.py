"""Tokenizer files: configurations beside them, and malformed ones refused in one line."""

import base64
import io
import json

import pytest
import tokenizers

from kvjax.errors import UserError
from kvjax.models import vocabulary
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.models.tokenizer_files import library_errors
from tests.models.tokenizer_builders import write_byte_gguf, write_gguf, write_sentencepiece_gguf


def _refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        Tokenizer.from_path(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def _saved(folder, **fields):
    Tokenizer.from_path(write_byte_gguf(folder / "v.gguf", **fields)).save(folder)
    (folder / "v.gguf").unlink()
    return folder


def _edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_configurations_of_a_folder(tmp_path):
    folder = _saved(tmp_path)
    (folder / "generation_config.json").unlink()
    config = folder / "tokenizer_config.json"
    _edit(config, bos_token={"content": "<|eot_id|>"}, eos_token=None, add_bos_token=True)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.bos_id == 258
    assert tokenizer.adds_bos
    assert tokenizer.eos_ids == {258}  # by its name
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.from_path(folder).eos_ids == {3, 4, 5}
    assert Tokenizer.from_path(folder / "tokenizer.json").eos_ids == {3, 4, 5}


def test_end_tokens_of_gguf(tmp_path):
    """The end of a text, of a turn and of a message, by what the file says of them."""
    marks = ["<s>", "</s>", "<turn>", "<message>"]
    tokens = [*vocabulary.byte_characters(), "ab", *marks]
    types = [vocabulary.NORMAL] * 257 + [vocabulary.CONTROL] * 4
    path = write_gguf(
        tmp_path / "v.gguf",
        tokens,
        types,
        merges=["a b"],
        bos_token_id=257,
        eos_token_id=258,
        eot_token_id=259,
        eom_token_id=260,
    )
    tokenizer = Tokenizer.from_path(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (257, {258, 259, 260})


def test_panics_of_the_library():
    """Rust's panics come as an exception of the library's own, which is none of Exception's."""

    class PanicException(BaseException):
        pass

    with pytest.raises(UserError, match="malformed: index out of bounds"), library_errors():
        raise PanicException("index out of\nbounds")
    with pytest.raises(KeyboardInterrupt), library_errors():
        raise KeyboardInterrupt


def test_named_templates_and_template_files(tmp_path):
    folder = _saved(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    _edit(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_path(folder).chat_template == "d"
    both = Tokenizer.from_path(folder)
    assert (both.render_chat([]), both.render_chat([], tools=[{}])) == ("d", "t")
    both.save(tmp_path / "again")
    assert Tokenizer.from_path(tmp_path / "again").tool_template == "t"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_path(folder).chat_template == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file of tools")
    assert Tokenizer.from_path(folder).tool_template == "file of tools"
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "tokenizer_config.json", chat_template=named[:1])
    assert "no template of the name default" in _refusal(folder)


def test_tokens_that_stand_beside_the_vocabulary_alone(tmp_path):
    """As of a fine-tune that has its own marks: by their ids, and what ends its answers."""
    folder = _saved(tmp_path)
    (folder / "generation_config.json").unlink()
    config = folder / "tokenizer_config.json"
    marks = {"259": {"content": "<|im_start|>", "special": True}, "260": {"content": "<think>"}}
    _edit(
        config,
        added_tokens_decoder={**marks, "257": {"content": "<other>"}},
        eos_token="<|im_start|>",
    )
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.encode("a<|im_start|><think>") == [*tokenizer.encode("a"), 259, 260]
    assert (tokenizer.vocab_size, 259 in tokenizer.eos_ids) == (261, True)
    assert tokenizer.decode([259, 260]) == "<think>"
    # One that has another name in the vocabulary is what the model was trained with.
    assert tokenizer.token_bytes(257) != b"<other>"
    _edit(config, added_tokens_decoder={}, eos_token=None)
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 259, "<think>": 260}')
    del (said := json.loads(config.read_text()))["eos_token"]
    config.write_text(json.dumps(said))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_start|>"}}')
    older = Tokenizer.from_path(folder)
    assert 259 in older.eos_ids
    assert older.special_ids == tokenizer.special_ids
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 999}')
    assert "'<|im_start|>' has the id 999, and the vocabulary ends at 259" in _refusal(folder)
    (folder / "added_tokens.json").unlink()
    (folder / "generation_config.json").write_text('{"max_length": 9}')
    assert "lacks the eos_token '<|im_start|>'" in _refusal(folder)


def test_a_token_that_is_appended_does_not_begin_texts(tmp_path):
    folder = _saved(tmp_path)
    for rule, bos in (("$A <|eot_id|>", None), ("<|eot_id|> $A", 258)):
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=rule, special_tokens=[("<|eot_id|>", 258)]
        )
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        tokenizer = Tokenizer.from_path(folder)
        assert (tokenizer.bos_id, tokenizer.adds_bos) == (bos, bos is not None)


def test_a_vocabulary_that_ends_the_library_is_refused(tmp_path):
    file = _saved(tmp_path) / "tokenizer.json"
    value = json.loads(file.read_text())
    value["model"]["continuing_subword_prefix"] = "x"
    file.write_text(json.dumps(value))
    assert "continuing_subword_prefix is not supported" in _refusal(file)


def test_the_gguf_of_a_folder_is_its_tokenizer(tmp_path):
    write_byte_gguf(tmp_path / "model.gguf")
    assert Tokenizer.from_path(tmp_path).vocab_size == 259


def test_nothing_there(tmp_path):
    assert "neither tokenizer.json nor tokenizer.model" in _refusal(tmp_path)
    assert "No such file" in _refusal(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b'{"model": 3}',
        b"\xff\xfe\x00",
        b"hello world\n",
        b"\x0a\xff\xff\xff",
        b"[]",
    ],
)
def test_malformed_files(content, tmp_path):
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(content)
        _refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_malformed_configurations(name, content, tmp_path):
    file = _saved(tmp_path) / f"{name}.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.json"):
        Tokenizer.from_path(tmp_path)


def test_unsupported_decoder(tmp_path):
    folder = _saved(tmp_path)
    _edit(folder / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    assert "decoder WordPiece is not supported" in _refusal(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "klingon"}, "pre-tokenizer 'klingon' (tokenizer.ggml.pre) is not supported"),
        ({"model": "bert"}, "vocabulary 'bert' (tokenizer.ggml.model) is not supported"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges[0] is not two tokens: 'a'"),
        ({"merges": ["a b", "ab zz"]}, "the vocabulary and its merges disagree"),
        ({"bos_token_id": 999}, "tokenizer.ggml.bos_token_id 999 is not among the 258 tokens"),
    ],
)
def test_malformed_gguf(fields, message, tmp_path):
    characters = vocabulary.byte_characters()
    arguments = {"merges": ["a b"], **fields}
    types = [vocabulary.NORMAL] * 258
    write_gguf(tmp_path / "v.gguf", [*characters, "ab", "<s>"], types, **arguments)
    assert message in _refusal(tmp_path / "v.gguf")


def test_gguf_with_arrays_of_different_length(tmp_path):
    write_gguf(tmp_path / "v.gguf", ["a", "b"], [1], merges=["a b"])
    assert "token_type is no array of 2 numbers" in _refusal(tmp_path / "v.gguf")
    write_gguf(tmp_path / "w.gguf", ["a", "b"], [1, 1], model="llama")
    assert "tokenizer.ggml.scores is missing" in _refusal(tmp_path / "w.gguf")
    write_gguf(tmp_path / "x.gguf", ["a", "b"], [1, 1])
    assert "tokenizer.ggml.merges is missing" in _refusal(tmp_path / "x.gguf")


@pytest.mark.parametrize("write", [write_byte_gguf, write_sentencepiece_gguf])
def test_truncated_gguf(write, tmp_path):
    whole = write(tmp_path / "v.gguf").read_bytes()
    for size in (4, 10, 23, 60, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        _refusal(tmp_path / "cut.gguf")


def test_tiktoken_ranks(tmp_path):
    file = tmp_path / "tokenizer.model"
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    lines = [base64.b64encode(t).decode() + f" {rank}" for rank, t in enumerate(tokens)]
    file.write_text("\n".join(lines))
    assert "258 tiktoken ranks without a tokenizer_config.json" in _refusal(file)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"added_tokens_decoder": {"258": {"content": "<|x|>"}}}')
    tokenizer = Tokenizer.from_path(file)
    assert tokenizer.encode("abcab<|x|>") == [257, 256, 258]
    assert tokenizer.decode([257, 256, 258]) == "abcab"
    config.write_text('{"added_tokens_decoder": {"300": {"content": "<|x|>"}}}')
    assert "does not follow 258 ranks" in _refusal(file)
    file.write_text("\n".join([*lines[:3], lines[4]]))
    assert "line 4 has rank 4, not 3" in _refusal(file)
    file.write_text("\n".join([*lines[:3], "=! 3"]))
    assert "line 4 is not a base64 token and its rank" in _refusal(file)
    config.unlink()
    file.write_text("\n".join(lines[:100]))
    assert "100 tiktoken ranks" in _refusal(file)


def test_sentencepiece_files(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello, the cat sat on the mat", "a dog ate the cat"] * 20),
        model_writer=out,
        vocab_size=300,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    whole = out.getvalue()
    file = tmp_path / "tokenizer.model"
    for size in (5, 1000, len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:size])
        assert "SentencePiece" in _refusal(file)
    file.write_bytes(whole)
    always = Tokenizer.from_path(file)
    assert always.encode("<s>Hello")[1:] == always.encode("Hello")
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    first = Tokenizer.from_path(file)
    assert first.encode("Hello") == always.encode("Hello")
    assert first.encode("<s> Hello") == always.encode("<s>Hello")


def test_other_sentencepiece_models_are_refused(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")

    def train(**options):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a dog ate the cat"] * 20),
            model_prefix=str(tmp_path / "m"),
            minloglevel=2,
            **options,
        )

    train(vocab_size=26, model_type="bpe", normalization_rule_name="nmt_nfkc")
    assert "normalises its text" in _refusal(tmp_path / "m.model")
    train(vocab_size=18, model_type="unigram", normalization_rule_name="identity")
    assert "type BPE" in _refusal(tmp_path / "m.model")
    train(
        vocab_size=280,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        hard_vocab_limit=False,
    )
    tokenizer = Tokenizer.from_path(tmp_path / "m.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    for text in ("the cat", "  the  dögs ate 7 cats\n"):
        assert tokenizer.encode(text) == oracle.encode(text)


def test_byte_tokenizer_saves_as_any_other(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert Tokenizer.from_path(tmp_path).decode(Tokenizer.from_path(tmp_path).encode("é")) == "é"
