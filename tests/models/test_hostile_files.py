"""Weights, vocabularies and paths made to do harm: one line that names the file, nothing else."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.cli import main_of
from kvjax.errors import UserError
from kvjax.models import Tokenizer, load_model
from kvjax.models.hub import resolve_weights
from kvjax.models.tokenizer_files import read_tokenizer
from kvjax.models.weights import load_params
from tests.models.checkpoints import random_tensors, write_gguf
from tests.models.hostile import DEEP, LONG, TINY, refusal, without_whole, write_tiny
from tests.models.tokenizer_builders import write_byte_gguf, write_sentencepiece_gguf


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


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
    without_whole(folder, index.name)
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
