"""Token ids against the official tokenizers, and the Tokenizer's own behaviour."""

import gzip
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers

from kvjax.errors import UserError
from kvjax.models import vocabulary
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from tests.models.tokenizer_builders import (
    SPECIAL,
    tiny_tokenizer,
    write_byte_gguf,
    write_gguf,
    write_sentencepiece_gguf,
)
from tests.models.tokenizer_texts import varied_texts


@pytest.fixture(scope="module")
def texts(data_dir: Path) -> list[str]:
    return varied_texts(data_dir)


@pytest.fixture(scope="module")
def official(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders smollm2 and llama3 with the official tokenizer.json unpacked."""
    root = tmp_path_factory.mktemp("official")
    for name in ("smollm2", "llama3"):
        folder = root / name
        folder.mkdir()
        packed = (data_dir / "tokenizers" / name / "tokenizer.json.gz").read_bytes()
        (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    config = data_dir / "tokenizers" / "llama3" / "tokenizer_config.json"
    shutil.copyfile(config, root / "llama3" / "tokenizer_config.json")
    return root


def _assert_same(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, texts: list[str]) -> None:
    assert len(set(texts)) == 1000
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text


def _llama3_gguf(official: Path, path: Path) -> Path:
    """The Llama 3.1 vocabulary as llama.cpp's converter embeds it."""
    source = json.loads((official / "llama3" / "tokenizer.json").read_bytes())
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].__getitem__)
    special = [token["content"] for token in source["added_tokens"]]
    types = [vocabulary.NORMAL] * len(tokens) + [vocabulary.CONTROL] * len(special)
    return write_gguf(
        path,
        tokens + special,
        types,
        merges=source["model"]["merges"],
        pre="llama-bpe",
        bos_token_id=128000,
        eos_token_id=128009,
    )


def test_smollm2_gguf_equals_the_official_tokenizer(smollm2_path, official, texts):
    oracle = tokenizers.Tokenizer.from_file(str(official / "smollm2" / "tokenizer.json"))
    tokenizer = Tokenizer.from_path(smollm2_path)
    _assert_same(tokenizer, oracle, texts)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (1, False)
    assert 2 in tokenizer.eos_ids
    assert len(tokenizer.encode("48213")) == 5


@pytest.mark.parametrize("form", ["folder", "tokenizer.model", "gguf"])
def test_llama3_equals_the_official_tokenizer(form, official, data_dir, texts, tmp_path):
    oracle = tokenizers.Tokenizer.from_file(str(official / "llama3" / "tokenizer.json"))
    path = {
        "folder": official / "llama3",
        "tokenizer.model": data_dir / "tokenizers" / "llama3" / "tokenizer.model",
        "gguf": tmp_path / "llama3.gguf",
    }[form]
    if form == "gguf":
        _llama3_gguf(official, path)
    tokenizer = Tokenizer.from_path(path)
    _assert_same(tokenizer, oracle, texts)
    assert tokenizer.vocab_size == 128256
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (128000, True)
    assert {128001, 128009} <= tokenizer.eos_ids
    marked = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert tokenizer.encode(marked) == oracle.encode(marked, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(marked)) == "user\n\nHi"
    assert tokenizer.decode(tokenizer.encode(marked), skip_special_tokens=False) == marked


def test_llama3_ranks_without_a_configuration(data_dir, tmp_path):
    source = data_dir / "tokenizers" / "llama3" / "tokenizer.model"
    shutil.copyfile(source, tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.special_ids == set(range(128000, 128256))
    assert tokenizer.eos_ids == {128001, 128008, 128009}
    marked = "<|begin_of_text|><|end_of_text|><|start_header_id|><|end_header_id|><|eot_id|>"
    assert tokenizer.encode(marked) == [128000, 128001, 128006, 128007, 128009]


@pytest.mark.parametrize("name", ["v1_mistral-7b-v0.1-v0.2", "v3_mistral-7b-v0.3"])
def test_mistral_equals_sentencepiece(name, data_dir, texts):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = data_dir / "tokenizers" / "mistral" / f"{name}.model"
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.from_path(path)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.vocab_size == oracle.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset({2}))
    assert tokenizer.encode("Hi", add_bos=True)[0] == 1


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", ["123", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("gpt-2", ["1234", "5"]),
        ("default", ["123", "4", "5"]),
    ],
)
def test_the_named_pre_tokenizer_cuts_numbers(pre, expected, tmp_path):
    path = write_byte_gguf(tmp_path / "v.gguf", ["1 2", "12 3", "123 4"], pre=pre)
    tokenizer = Tokenizer.from_path(path)
    assert [tokenizer.decode([index]) for index in tokenizer.encode("12345")] == expected


@pytest.mark.parametrize("pre", vocabulary.PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre, tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf", ["a b"], pre=pre))
    for text in ("", "abab  I'LL pay $12,345.60!\r\n\n\t(ok)", "Ünï ١٢٣ 世界 😀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_gguf_that_names_no_pre_tokenizer_uses_the_default(tmp_path):
    path = write_byte_gguf(tmp_path / "v.gguf", ["1 2", "12 3", "123 4"])
    assert len(Tokenizer.from_path(path).encode("12345")) == 3


def test_sentencepiece_gguf(tmp_path):
    tokenizer = Tokenizer.from_path(write_sentencepiece_gguf(tmp_path / "v.gguf"))
    assert tokenizer.encode("hello") == [269]  # "▁hello"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.decode(tokenizer.encode("  hello é €")) == "  hello é €"
    assert tokenizer.encode("€") == [259, 3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    assert tokenizer.encode("<s>hello</s>") == [1, 269, 2]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, {2}, True)


def test_sentencepiece_gguf_without_space_prefix(tmp_path):
    path = write_sentencepiece_gguf(tmp_path / "v.gguf", add_space_prefix=False)
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.encode("hello") == [268]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_beginning_token_is_added_once(tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf", pre="llama-bpe"))
    bos = tokenizer.bos_id
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", add_bos=True) == [bos, 97]
    assert tokenizer.encode("<|begin_of_text|>a", add_bos=True) == [bos, 97]
    assert tokenizer.encode("", add_bos=True) == [bos]


def test_ids_beyond_the_vocabulary_read_as_nothing(tmp_path):
    tokenizer = Tokenizer.from_path(write_byte_gguf(tmp_path / "v.gguf"))
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, -1]) == ""


def test_saved_tokenizer_is_equal(tmp_path):
    for write in (write_byte_gguf, write_sentencepiece_gguf):
        path = write(tmp_path / f"{write.__name__}.gguf", chat_template="{{ bos_token }}hello")
        tokenizer = Tokenizer.from_path(path)
        tokenizer.save(tmp_path / "saved")
        again = Tokenizer.from_path(tmp_path / "saved")
        for name in ("vocab_size", "bos_id", "eos_ids", "adds_bos", "special_ids"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        message = [{"role": "user", "content": ""}]
        assert again.chat(message) == tokenizer.chat(message)
        for text in ("hello hello", " é€\n 123"):
            assert again.encode(text) == tokenizer.encode(text)
            assert again.decode(again.encode(text)) == text


def test_other_libraries_read_the_saved_file_as_it_stands(tmp_path):
    """transformers otherwise takes the class of the folder's model, which splits texts anew."""
    ByteTokenizer().save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_saving_to_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the tokenizer"):
        ByteTokenizer().save(tmp_path / "file")


def test_lone_surrogate_is_refused():
    with pytest.raises(UserError, match="surrogate stands at character 2"):
        ByteTokenizer().encode("ab\ud800")


def test_tiny_tokenizer():
    """What the engine's tests rely on: BOS, EOS, and tokens that are parts of characters."""
    tokenizer = tiny_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (97, 95, {96})
    assert tokenizer.adds_bos
    assert not tiny_tokenizer(adds_bos=False).adds_bos
    assert tokenizer.encode("Hi é€\n", add_bos=True) == [95, 72, 8, 32, 27, 28, 29, 30, 31, 26]
    assert tokenizer.encode("".join(SPECIAL)) == [95, 96]
    assert tokenizer.decode(range(97)) == (
        "abcdefghijklmnopqrstuvwxyz\né€" + "".join(map(chr, range(32, 95)))
    )
    assert tokenizer.decode([0, 27]) == "a\ufffd"


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 256
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, frozenset())
    assert tokenizer.encode("é!", add_bos=True) == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0xC3, 0xA9, 0x21, 300]) == "é!\ufffd"
    assert tokenizer.chat([{"role": "user", "content": "Hi"}]) == [0x48, 0x69]


def test_other_threads_go_on_while_a_long_text_becomes_tokens(official):
    tokenizer, ended, turns = Tokenizer.from_path(official / "smollm2"), threading.Event(), []

    def others() -> None:
        while not ended.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        begun = time.perf_counter()
        tokenizer.encode("hello wor" * 100_000)
        took = time.perf_counter() - begun
    finally:
        ended.set()
        thread.join()
    within = [turn for turn in turns if begun < turn < begun + took]
    longest = max(b - a for a, b in zip([begun, *within], [*within, begun + took]))
    assert longest < 0.5 * took
