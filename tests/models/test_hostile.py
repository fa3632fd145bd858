"""JSON files made to do harm: one line that names the file and the field, and no other exception.

Every case puts one thing wrong into a checkpoint that loads. Cases that once ran for ever or took
all memory need no clock: they would not come back.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from kvjax.errors import UserError
from kvjax.models import Tokenizer, load_model
from kvjax.models.config import ModelConfig
from tests.models.hostile import (
    CONFIG_JSON,
    DEEP,
    LLAMA3_ROPE,
    LONG,
    SURROGATE,
    TINY,
    field,
    refusal,
    without_whole,
    write_tiny,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def test_the_untouched_checkpoint_loads(folder: Path) -> None:
    model = load_model(weights=folder)
    assert model.config == ModelConfig(**{**vars(TINY), "name": "tiny"})
    assert model.tokenizer.chat([{"role": "user", "content": "hi"}]) == [7, 8]


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
    without_whole(folder, name)
    for content in NO_OBJECTS:
        (folder / name).write_text(content)
        assert name in refusal(folder)


@pytest.mark.parametrize("name", JSON_FILES)
def test_bytes_that_are_no_text_and_files_without_end(name: str, folder: Path) -> None:
    without_whole(folder, name)
    (folder / name).write_bytes(b'{"a": "\xff\xfe"}')
    assert name in refusal(folder)
    # A hole of 1 GB: it takes no place on the disk, and nobody should read it.
    with open(folder / name, "wb") as stream:
        stream.write(b'{"a": "')
        stream.truncate(1 << 30)
    assert name in refusal(folder)


@pytest.mark.parametrize("name", JSON_FILES)
def test_pipes_devices_and_folders_in_place_of_files(name: str, folder: Path) -> None:
    without_whole(folder, name)
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
