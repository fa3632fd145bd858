"""Streamed text: whole characters only, and together what decoding at once gives."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from tests.models.tokenizer_builders import write_byte_gguf, write_sentencepiece_gguf


@pytest.fixture(scope="module", params=["bytes", "byte-level", "sentencepiece", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "byte-level":
        return Tokenizer.from_path(write_byte_gguf(folder / "v.gguf", ["a b", "Ã ©"]))
    if request.param == "sentencepiece":
        return Tokenizer.from_path(write_sentencepiece_gguf(folder / "v.gguf"))
    return Tokenizer.from_path(request.getfixturevalue("smollm2_path"))


def _stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.push(index) for index in ids), stream.flush()]


several = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@several
@given(data=st.data())
def test_any_tokens(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    parts = _stream(tokenizer, ids, skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@several
@given(text=st.text())
def test_text_never_shows_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    parts = _stream(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(parts) == whole
    if whole == text:  # SmolLM2 has no token for some bytes and drops them
        assert parts[-1] == ""
        assert "".join(parts).count("\ufffd") == text.count("\ufffd")


def test_a_character_appears_with_its_last_byte():
    assert _stream(ByteTokenizer(), list("😀a".encode())) == ["", "", "", "😀", "a", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement():
    assert _stream(ByteTokenizer(), [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_a_broken_character_does_not_hold_up_the_text():
    assert _stream(ByteTokenizer(), [0xE2, 0x61]) == ["", "\ufffda", ""]
