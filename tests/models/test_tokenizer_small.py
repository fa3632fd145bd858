"""Vocabularies of this test's own making, in every form of file, against the libraries' encoders.

They are trained here on this project's texts, so that every clone runs what
tests/models/test_tokenizer.py runs with published vocabularies where these are at hand.
"""

import base64
import functools
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvjax.models import vocabulary
from kvjax.models.tokenizer import Tokenizer
from tests.models.tokenizer_builders import write_gguf
from tests.models.tokenizer_texts import own_texts

SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As the families publish them in their tokenizer.json.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


RULES = {
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return own_texts()


@functools.cache
def trained(name: str) -> tokenizers.Tokenizer:
    """A byte-level BPE of 700 tokens that was trained with a rule."""
    oracle = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        oracle.normalizer = normalizers.NFC()
    oracle.pre_tokenizer = RULES[name]()
    oracle.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    oracle.train_from_iterator(own_texts(), trainer)
    oracle.add_special_tokens(SPECIAL)
    bos = SPECIAL[0]
    if name == "llama-bpe":
        oracle.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, oracle.token_to_id(bos))]
        )
    return oracle


def _write(form: str, name: str, folder: Path) -> Path:
    """The vocabulary as a checkpoint of that form has it."""
    oracle = trained(name)
    state = json.loads(oracle.to_str())
    ids = state["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    bos, eos = oracle.token_to_id(SPECIAL[0]), oracle.token_to_id("<|eot_id|>")
    if form == "gguf":
        merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
        types = [vocabulary.NORMAL] * len(tokens) + [vocabulary.CONTROL] * len(SPECIAL)
        return write_gguf(
            folder / "v.gguf",
            tokens + SPECIAL,
            types,
            merges=merges,
            pre=name,
            bos_token_id=bos,
            eos_token_id=eos,
            chat_template=TEMPLATE,
        )
    config: dict[str, Any] = {
        "bos_token": SPECIAL[0],
        "eos_token": {"content": "<|eot_id|>", "special": True},
        "chat_template": TEMPLATE,
    }
    if form == "folder":
        oracle.save(str(folder / "tokenizer.json"))
    else:
        bytes_of = {character: byte for byte, character in enumerate(vocabulary.byte_characters())}
        lines = [
            f"{base64.b64encode(bytes(bytes_of[c] for c in token)).decode()} {rank}"
            for rank, token in enumerate(tokens)
        ]
        (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
        config["added_tokens_decoder"] = {
            str(len(tokens) + index): {"content": token, "special": True}
            for index, token in enumerate(SPECIAL)
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((form, name) for form in ("folder", "gguf") for name in RULES),
        ("tiktoken", "llama-bpe"),  # no other family comes in that form
    ],
)
def test_byte_level_vocabularies(form, name, texts, tmp_path):
    oracle = trained(name)
    tokenizer = Tokenizer.from_path(_write(form, name, tmp_path))
    assert len(texts) == 400
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        said = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert tokenizer.decode(ids) == said
    assert tokenizer.vocab_size == 700 + len(SPECIAL)
    assert tokenizer.special_ids == set(range(700, 705))
    assert tokenizer.bos_id == 700
    assert tokenizer.eos_ids == {701, 704}
    assert tokenizer.adds_bos == (name == "llama-bpe")
    marked = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    ids = tokenizer.encode(marked)
    assert ids == oracle.encode(marked, add_special_tokens=False).ids
    assert [index for index in ids if index >= 700] == [702, 703, 704]
    assert tokenizer.decode(ids) == "user\n\nHi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == marked


@pytest.mark.parametrize("form", ["folder", "gguf", "tiktoken"])
def test_chats_of_llama3(form, tmp_path):
    """The beginning token comes once: from the template, not from the rule for plain text."""
    oracle = trained("llama-bpe")
    tokenizer = Tokenizer.from_path(_write(form, "llama-bpe", tmp_path))
    messages = [{"role": "user", "content": " Hi "}]
    text = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert tokenizer.render_chat(messages) == text
    closed = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert closed == text[: text.rindex("<|start_header_id|>")]
    assert tokenizer.chat(messages) == oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.chat(messages).count(700) == 1
    assert tokenizer.adds_bos
    plain = oracle.encode("Hi there").ids  # as the published files put it before plain text
    assert plain[0] == 700
    assert tokenizer.encode("Hi there", add_bos=tokenizer.adds_bos) == plain


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("smaug-bpe", 3)])
def test_whole_words_need_no_merges(pre, count, tmp_path):
    """Llama 3 takes a word that is a token as it is, even where no merges lead to it."""
    tokens = [*vocabulary.byte_characters(), "ab", "xyz"]
    types = [vocabulary.NORMAL] * len(tokens)
    path = write_gguf(tmp_path / "v.gguf", tokens, types, merges=["a b"], pre=pre)
    tokenizer = Tokenizer.from_path(path)
    assert len(tokenizer.encode("xyz")) == count
    assert len(tokenizer.encode("ab")) == 1


@pytest.fixture(scope="module")
def sentencepiece_model(texts: list[str]) -> bytes:
    """A BPE model as Llama 2's: byte fallback, no normalisation, a space before the first word."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in texts),
        model_writer=out,
        vocab_size=900,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return out.getvalue()


@pytest.mark.parametrize("form", ["tokenizer.model", "gguf"])
def test_sentencepiece_vocabularies(form, sentencepiece_model, texts, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    oracle = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    path = tmp_path / form
    if form == "tokenizer.model":
        path.write_bytes(sentencepiece_model)
    else:
        ids = range(oracle.vocab_size())
        write_gguf(
            path,
            [oracle.id_to_piece(i) for i in ids],
            [
                vocabulary.UNKNOWN
                if oracle.is_unknown(i)
                else vocabulary.CONTROL
                if oracle.is_control(i)
                else vocabulary.BYTE
                if oracle.is_byte(i)
                else vocabulary.NORMAL
                for i in ids
            ],
            model="llama",
            scores=[oracle.get_score(i) for i in ids],
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
        )
    tokenizer = Tokenizer.from_path(path)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.vocab_size == oracle.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, {2}, True)
    assert tokenizer.encode("Hi", add_bos=True) == [1, *oracle.encode("Hi")]
