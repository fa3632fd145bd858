"""Checkpoints made to do harm: one line that names the file and the field, and no other exception.

Every case puts one thing wrong into a checkpoint that loads. Cases that once ran for ever or took
all memory need no clock: they would not come back.
"""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kvjax.cli import main_of
from kvjax.errors import UserError
from kvjax.models import Tokenizer, load_model
from kvjax.models.config import LlamaConfig
from kvjax.models.hub import resolve_weights
from kvjax.models.tokenizer_files import read_tokenizer
from kvjax.models.weights import load_params
from tests.models.checkpoints import random_tensors, write_gguf
from tests.models.tokenizer_builders import (
    tiny_tokenizer,
    write_byte_gguf,
    write_sentencepiece_gguf,
)

CONFIG_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY = LlamaConfig(
    name="tiny",
    vocab_size=97,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEEP = "[" * 200_000 + "]" * 200_000
LONG = "9" * 100_000
SURROGATE = '"\\ud800"'


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny_tokenizer(chat_template="{{ messages[0].content }}").save(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    safetensors.numpy.save_file(random_tensors(TINY), folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def refusal(path: Any) -> str:
    """The one line that loading the checkpoint gives."""
    with pytest.raises(UserError) as caught:
        load_model(weights=path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


def field(name: str, value: str, text: str) -> str:
    """The JSON object `text` with one more field, as raw text."""
    return text.rstrip()[:-1] + f', "{name}": {value}}}'


def test_the_untouched_checkpoint_loads(folder: Path) -> None:
    model = load_model(weights=folder)
    assert model.config == LlamaConfig(**{**vars(TINY), "name": "tiny"})
    assert model.tokenizer.chat([{"role": "user", "content": "hi"}]) == [7, 8]


# --- JSON -----------------------------------------------------------------------------------


JSON_FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)


NO_OBJECTS = (
    "",
    "{",
    "[]",
    "3",
    '"text"',
    "null",
    '{"a": 1',
    "\ufeff{}x",
    DEEP,
    f'{{"a": {DEEP}}}',
)


@pytest.mark.parametrize("name", JSON_FILES)
def test_no_json_object(name: str, folder: Path) -> None:
    for content in NO_OBJECTS:
        (folder / name).write_text(content)
        assert name in refusal(folder)


@pytest.mark.parametrize("name", JSON_FILES)
def test_bytes_that_are_no_text_and_files_without_end(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b'{"a": "\xff\xfe"}')
    assert name in refusal(folder)
    # A hole of 1 GB: it takes no place on the disk, and nobody should read it.
    with open(folder / name, "wb") as stream:
        stream.write(b'{"a": "')
        stream.truncate(1 << 30)
    assert name in refusal(folder)


@pytest.mark.parametrize("name", JSON_FILES)
def test_pipes_devices_and_folders_in_place_of_files(name: str, folder: Path) -> None:
    file = folder / name
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")
    assert folder.name in refusal(folder)
    file.unlink()
    file.mkdir()
    assert folder.name in refusal(folder)
    if name != "tokenizer.json":  # without it another tokenizer is looked for, and none is there
        file.rmdir()
        os.mkfifo(file)
        assert name in refusal(folder)


NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
    "partial_rotary_factor",
)


NO_NUMBERS = (
    *("Infinity", "-Infinity", "NaN", "1e999", '"5"', "[4]", "{}", "true", "0", "-1"),
    *(LONG, SURROGATE),
)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_config_json(name: str, folder: Path) -> None:
    file = folder / "config.json"
    text = file.read_text()
    for value in NO_NUMBERS:
        file.write_text(field(name, value, text))
        message = refusal(folder)
        assert str(file) in message
        assert f"{name} " in message, value


def test_sizes_are_whole_and_within_limits(folder: Path) -> None:
    file = folder / "config.json"
    text = file.read_text()
    for name in ("vocab_size", "num_hidden_layers", "head_dim"):
        for value in ("2.5", "1e3", str(2**31), str(10**30)):
            file.write_text(field(name, value, text))
            # The class of configurations says num_layers.
            assert f"{name.replace('hidden_', '')} " in refusal(folder).replace("hidden_", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", "5"),
        ("architectures", "{}"),
        ("architectures", "[5]"),
        ("architectures", '["\\u001b[2J\\n"]'),
        ("rope_scaling", '"llama3"'),
        ("rope_scaling", "[8]"),
        ("rope_parameters", "3"),
        ("tie_word_embeddings", '"yes"'),
        ("attention_bias", "1"),
        ("use_sliding_window", "[]"),
        ("sliding_window", '"wide"'),
        ("hidden_act", "[]"),
        ("hidden_act", SURROGATE),
        ("eos_token_id", "{}"),
        ("eos_token_id", "[[]]"),
        ("eos_token_id", "1.5"),
        ("eos_token_id", LONG),
        ("eos_token_id", "-1"),
    ],
)
def test_other_fields_of_config_json(name: str, value: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(field(name, value, file.read_text()))
    message = refusal(folder)
    assert str(file) in message
    assert name.removesuffix("s") in message


def test_rope_scaling(folder: Path) -> None:
    file = folder / "config.json"
    infinities = (float("inf"), float("nan"))
    no_number = (-1, 0, None, "8", [8], {}, True, *infinities)
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        for value in no_number:
            scaling = {**LLAMA3_ROPE, name: value}
            file.write_text(json.dumps({**CONFIG_JSON, "rope_scaling": scaling}))
            message = refusal(folder)
            assert str(file) in message
            assert name in message
    for value in (0, -5, 2.5, 10**30, "64", None, {}, *infinities):
        scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": value}
        file.write_text(json.dumps({**CONFIG_JSON, "rope_scaling": scaling}))
        assert "original_max_position_embeddings" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("tokenizer_config.json", "bos_token", SURROGATE),
        ("tokenizer_config.json", "eos_token", '{"content": "a\\udfff"}'),
        ("tokenizer_config.json", "bos_token", "5"),
        ("tokenizer_config.json", "unk_token", '{"content": ["x"]}'),
        ("tokenizer_config.json", "add_bos_token", '"true"'),
        ("tokenizer_config.json", "chat_template", "7"),
        ("tokenizer_config.json", "chat_template", SURROGATE),
        ("tokenizer_config.json", "chat_template", '[{"name": "default", "template": 4}]'),
        ("tokenizer_config.json", "chat_template", json.dumps("x" * (1 << 21))),
        ("generation_config.json", "eos_token_id", '"end"'),
        ("generation_config.json", "eos_token_id", "[1, NaN]"),
        ("generation_config.json", "eos_token_id", "4294967296"),
    ],
)
def test_fields_of_tokenizer_files(file: str, name: str, value: str, folder: Path) -> None:
    path = folder / file
    path.write_text(field(name, value, path.read_text()))
    message = refusal(folder)
    assert str(path) in message
    assert name in message


def test_rules_that_fail_on_some_text(folder: Path) -> None:
    """A splitting rule that takes for ever on some text: the library panics, and one line says so.

    Such an exception is none of Exception's and would end whoever asked.
    """
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    state["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    file.write_text(json.dumps(state))
    tokenizer = Tokenizer.from_path(folder)
    assert len(tokenizer.encode("aaa")) == 3
    with pytest.raises(UserError, match="cannot encode this text"):
        tokenizer.encode("a" * 200 + "!")


def test_numbers_nobody_asks_for_do_no_harm(folder: Path) -> None:
    """Published files hold Infinity and 1e30 in fields of other programs."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        text = (folder / name).read_text()
        text = field("time_step_limit", "[0.0, Infinity, NaN]", text)
        (folder / name).write_text(field("model_max_length", LONG, text))
    load_model(weights=folder)


def test_template_files(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    for content in (b"\xff\xfe", b"x" * (1 << 21)):
        file.write_bytes(content)
        assert str(file) in refusal(folder)
    file.unlink()
    os.mkfifo(file)
    assert str(file) in refusal(folder)


# --- weights --------------------------------------------------------------------------------


def with_header(folder: Path, header: str) -> None:
    data = header.encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


HEADERS = [
    DEEP,
    f'{{"a": {DEEP}}}',
    "[]",
    "3",
    '{"a": 3}',
    '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [NaN, 4]}}',
    '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
    f'{{"a": {{"dtype": "F32", "shape": [{LONG}], "data_offsets": [0, 4]}}}}',
    f'{{"a": {{"dtype": "F32", "shape": [{"1," * 9000}1], "data_offsets": [0, 4]}}}}',
    '{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    '{"a\\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "\\u001b[2J", "shape": [1], "data_offsets": [0, 4]}}',
]


def test_safetensors_headers(folder: Path) -> None:
    for header in HEADERS:
        with_header(folder, header)
        message = refusal(folder)
        assert str(folder / "model.safetensors") in message
        assert "damaged safetensors header" in message


def test_names_in_an_index(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    index = folder / "model.safetensors.index.json"
    texts = ["a\0b", "", ".", "..", "\ud800", "a\nb", "x" * 5000, "pipe", "zero", "absent"]
    for name in (*texts, "../tiny/model.safetensors", "/dev/zero", 5, None, ["x"]):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"general.name": [1.5, 2.5]},
        {"llama.rope.freq_base": float("nan")},
        {"llama.rope.freq_base": float("inf")},
        {"llama.rope.freq_base": 1e-30},
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        {"llama.context_length": 0},
        {"llama.block_count": 2**32 - 1},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": 2.5},
        {"llama.attention.key_length": 0},
        {"llama.rope.scaling.factor": float("nan")},
        {"llama.rope.scaling.type": [1], "llama.rope.scaling.factor": 2.0},
        {"general.alignment": 3},
        {"general.architecture": "\x1b[2Jgrok\n"},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_gguf_metadata(fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), metadata={})
    plain, _ = load_params(path)
    assert plain.hidden_size == TINY.hidden_size
    rewrite_metadata(path, fields)
    if fields.keys() == {"general.name"}:  # a label: what is no text is not taken for one
        assert load_params(path)[0].name == "m"
        return
    with pytest.raises(UserError) as caught:
        load_params(path)
    message = str(caught.value)
    assert message.isprintable()
    assert "m.gguf" in message


def rewrite_metadata(path: Path, fields: dict[str, Any]) -> None:
    """Writes a GGUF file anew with metadata changed or added."""
    import gguf

    reader = gguf.GGUFReader(path)
    known = {name: part.contents() for name, part in reader.fields.items() if "." in name}
    known = {name: value for name, value in known.items() if not name.startswith("GGUF.")}
    architecture = fields.get("general.architecture", known.pop("general.architecture"))
    tensors = [(tensor.name, np.array(tensor.data)) for tensor in reader.tensors]
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    for name, value in {**known, **fields}.items():
        if name in ("general.architecture",):
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, value in tensors:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path.with_suffix(".new"), path)


def test_gguf_vocabularies(tmp_path: Path) -> None:
    """Arrays and flags of other types than a vocabulary has, and tokens of absurd length."""

    def failure(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_tokenizer(path)
        assert str(caught.value).isprintable()
        assert str(path) in str(caught.value)
        return str(caught.value)

    from kvjax.models import vocabulary
    from tests.models.tokenizer_builders import write_gguf as write_vocabulary

    path = tmp_path / "v.gguf"
    write_byte_gguf(path, add_bos_token=3)
    assert "add_bos_token 3 is neither true nor false" in failure(path)
    write_sentencepiece_gguf(path, add_space_prefix="yes")
    assert "add_space_prefix 'yes'" in failure(path)
    write_byte_gguf(path, pre=4)
    assert "pre-tokenizer 4" in failure(path)
    write_byte_gguf(path, chat_template=5)
    assert "chat_template 5" in failure(path)
    tokens = ["<unk>", "a" * 200_000, "a"]
    types = [vocabulary.UNKNOWN, vocabulary.NORMAL, vocabulary.NORMAL]
    for scores, words in (
        ([0.0, float("nan"), 0.0], "scores is no array"),
        ([0.0, 0.0, 0.0], "200000 characters"),
    ):
        write_vocabulary(path, tokens, types, model="llama", scores=scores, unknown_token_id=0)
        assert words in failure(path)


def test_ranks_and_added_tokens_of_tiktoken_files(tmp_path: Path) -> None:
    import base64

    file = tmp_path / "tokenizer.model"
    tokens = [bytes([byte]) for byte in range(256)]

    def write(tokens: list[bytes], last: str = "") -> None:
        lines = [f"{base64.b64encode(t).decode()} {rank}" for rank, t in enumerate(tokens)]
        file.write_text("\n".join([*lines, last]))

    def failure() -> str:
        with pytest.raises(UserError) as caught:
            Tokenizer.from_path(file)
        assert str(caught.value).isprintable()
        return str(caught.value)

    write(tokens, f"QUI= {LONG}")
    assert "line 257 is not a base64 token and its rank" in failure()
    config = tmp_path / "tokenizer_config.json"
    write(tokens)
    for key in ("x", "-1", LONG, "٢٥٦"):
        config.write_text(json.dumps({"added_tokens_decoder": {key: {"content": "<x>"}}}))
        assert "added_tokens_decoder" in failure()
    config.write_text('{"added_tokens_decoder": {"256": {"content": "\\ud800"}}}')
    assert "256" in failure()
    config.write_text('{"added_tokens_decoder": {"257": {"content": "<x>"}}}')
    write([*tokens, b"a" * 200_000])
    assert "200000 characters" in failure()


# --- paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/dev/zero", "/dev/null", "/dev/stdin/x", "a" * 5000, "a/" * 3000, "x\0y", "\ud800",
     "~nobody-of-that-name/x", "new\nline", "\x1b[2J"],
    ids=range(10),
)  # fmt: skip
def test_paths(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for load in (
        lambda: resolve_weights("smollm2-135m", path),
        lambda: load_params(path),
        lambda: Tokenizer.from_path(path),
        lambda: load_model(weights=path),
    ):
        with pytest.raises(UserError) as caught:
            load()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


def test_pipes_and_sockets(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert "neither a file nor a folder" in refusal(tmp_path / "socket")
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refusal(tmp_path / "loop")


def test_paths_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's answer is put in its place."""
    real = os.open

    def denied(path: Any, *arguments: Any) -> int:
        if str(path).endswith("config.json") and "tokenizer" not in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        assert "config.json: Permission denied" in refusal(folder)

    def hidden(path: Any, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("kvjax.models.files.os.stat", hidden)
        with pytest.raises(UserError, match="Permission denied"):
            load_params(folder)


def test_a_line_stays_one_line_whatever_the_name(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two\nlines \x1b[31m"
    shutil.copytree(original, folder)
    (folder / "config.json").write_text("[]")
    assert main_of(lambda _: load_model(weights=folder) and 0) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "two lines" in err
