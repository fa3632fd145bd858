"""Damaged checkpoints, drawn at random: they load, or one line of UserError says why not."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.errors import UserError
from kvjax.models import vocabulary
from kvjax.models.chat import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weights.fill import check_source
from kvjax.models.weights.gguf import GGUFSource
from kvjax.models.weights.gguf_header import read_gguf_header
from kvjax.models.weights.safetensors import SafetensorsSource
from tests.models.checkpoints import CONFIG, config_json, random_tensors, write_gguf
from tests.models.tokenizer_builders import tiny_tokenizer

several = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
VALUES = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 2**31, 2**64, 10**40, 1e300, float("inf"), float("nan"), "", "\ud800"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    tiny_tokenizer(chat_template="{{ messages }}").save(folder)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = {**config_json(CONFIG), "rope_scaling": scaling, "eos_token_id": [2]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(CONFIG)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def attempt(folder: Path) -> None:
    """Reads all but the tensors themselves; UserErrors of one line are as good as success."""
    for read in (Tokenizer.from_path, lambda folder: _headers(SafetensorsSource(folder))):
        _try(read, folder)


def _headers(source: Any) -> None:
    try:
        check_source(source, source.config)
    finally:
        source.close()


def _try(read: Any, path: Path) -> None:
    try:
        read(path)
    except UserError as error:
        said = str(error)
    else:
        return
    assert said.isprintable()
    assert len(said) < 1000


def damaged(data: Any, whole: bytes, end: int) -> bytes:
    """Some bytes below `end` written over, left out, put in, or the rest cut off."""
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, min(end, len(changed)) - 1)))
        kind = data.draw(st.sampled_from(["over", "out", "in", "cut"]))
        some = data.draw(st.binary(min_size=1, max_size=6))
        if kind == "over":
            changed[at : at + len(some)] = some
        elif kind == "out":
            del changed[at : at + len(some)]
        elif kind == "in":
            changed[at:at] = some
        else:
            del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
@several
@given(data=st.data())
def test_bytes_of_a_folder(name: str, folder: Path, original: Path, data: Any) -> None:
    whole = (original / name).read_bytes()
    end = len(whole)
    if name == "model.safetensors":
        end = 8 + int.from_bytes(whole[:8], "little")
    (folder / name).write_bytes(damaged(data, whole, end))
    attempt(folder)


@pytest.mark.parametrize("name", [name for name in FILES if name != "model.safetensors"])
@several
@given(data=st.data())
def test_fields_of_a_folder(name: str, folder: Path, original: Path, data: Any) -> None:
    tree = json.loads((original / name).read_text())
    node: Any = tree
    while True:  # down to some depth
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys[:40]))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        node = inner
    node[key] = data.draw(VALUES)
    (folder / name).write_text(json.dumps(tree))
    attempt(folder)


@several
@given(data=st.data())
def test_fields_of_safetensors(folder: Path, original: Path, data: Any) -> None:
    whole = (original / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        header[name] = data.draw(VALUES)
    else:
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[name][field] = data.draw(VALUES | st.lists(VALUES, min_size=2, max_size=2))
    changed = json.dumps(header).encode()
    content = len(changed).to_bytes(8, "little") + changed + whole[8 + length :]
    (folder / "model.safetensors").write_bytes(content)
    attempt(folder)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    characters = vocabulary.byte_characters()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": [f"{characters[60]} {characters[48]}"],
        "tokenizer.ggml.token_type": [1] * CONFIG.vocab_size,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    return write_gguf(path, CONFIG, random_tensors(CONFIG), metadata=metadata)


@settings(several, max_examples=200)
@given(data=st.data())
def test_bytes_of_a_gguf_header(gguf_file: Path, tmp_path: Path, data: Any) -> None:
    whole = gguf_file.read_bytes()
    end = min(tensor.offset for tensor in read_gguf_header(gguf_file).tensors.values())
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged(data, whole, end))
    _try(Tokenizer.from_path, path)
    _try(lambda path: _headers(GGUFSource(path)), path)


PIECES = st.sampled_from(
    ["{{", "}}", "{%", "%}", "for a in range(9)", "endfor", "if", "endif", "set x =", "x", "[0]",
     "messages", ".content", "|", "tojson", "trim", "+", "*", "9", "'s'", "(", ")", "[", "]", "~",
     "loop.", "macro m()", "endmacro", "m()", "-", "{#", "#}", "\n", "é", "raise_exception('x')"]
)  # fmt: skip


@settings(several, max_examples=100)
@given(pieces=st.lists(PIECES, max_size=25))
def test_templates(pieces: list[str]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with contextlib.suppress(UserError):
        assert isinstance(ChatTemplate(" ".join(pieces)).render(messages), str)
