"""Orbax checkpoints: round trips, casts, shardings, atomic writing, bad folders."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.architectures import config_from_hf, config_to_hf
from kvjax.models.config import MODELS, RopeScaling
from kvjax.models.decoder import abstract_params, init_params, logical_axes
from kvjax.models.fingerprint import model_hash
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weights import checkpoint_hash, load_params, orbax, orbax_save, save_orbax
from tests.models.checkpoints import (
    CONFIG,
    QWEN3,
    assert_params,
    expected_params,
    num_params,
    random_tensors,
    write_folder,
    write_gguf,
)
from tests.models.tokenizer_builders import tiny_tokenizer


@pytest.fixture(scope="module")
def original() -> nnx.State:
    return init_params(CONFIG, "float32", seed=3)


@pytest.fixture(scope="module")
def saved(original: nnx.State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_orbax(tmp_path_factory.mktemp("orbax") / "model", CONFIG, original)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def failure(path: Path, **arguments: Any) -> str:
    """The message of the UserError that loading gives, one line."""
    with pytest.raises(UserError) as caught:
        load_params(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("config", [entry.config for entry in MODELS.values()], ids=list(MODELS))
def test_config_round_trip(config: Any) -> None:
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


QWEN2 = dataclasses.replace(
    CONFIG, attention_bias=True, rope_scaling=RopeScaling(8.0), tie_word_embeddings=True
)


@pytest.mark.parametrize(
    ("config", "stacked", "saved_stacked"),
    [
        (QWEN2, True, True),
        (QWEN2, True, False),
        (QWEN2, False, True),
        (QWEN2, False, False),
        (QWEN3, True, False),
    ],
)
def test_round_trip(tmp_path: Path, config: Any, stacked: bool, saved_stacked: bool) -> None:
    params = init_params(config, "float32", seed=1, stacked=saved_stacked)
    path = save_orbax(tmp_path / "deep" / "model", config, params)
    assert [p.name for p in path.parent.iterdir()] == ["model"]
    found, loaded = load_params(path, stacked=stacked)
    assert found == config
    expected = init_params(config, "float32", seed=1, stacked=stacked)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts(saved: Path, original: nnx.State, dtype: str, stacked: bool) -> None:
    seen: list[tuple[str, int, int]] = []
    _, params = load_params(saved, None, dtype, lambda *step: seen.append(step), stacked=stacked)
    expected = init_params(CONFIG, "float32", seed=3, stacked=stacked)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), params, expected)
    total = 2 * num_params(CONFIG)
    assert seen[-1] == ("load", total, total)


def test_in_several_groups(
    saved: Path, original: nnx.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "GROUP_BYTES", 300_000)
    _, params = load_params(saved)
    jax.tree.map(np.testing.assert_array_equal, params, original)


def test_the_hash_is_that_of_the_model_and_reads_a_few_arrays_at_a_time(
    saved: Path, original: nnx.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, most = orbax._read_arrays, []

    def reading(*given: Any) -> Any:
        found = read(*given)
        most.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(orbax, "_read_arrays", reading)
    monkeypatch.setattr(orbax, "GROUP_BYTES", 300_000)
    assert checkpoint_hash(saved, CONFIG, "float32") == model_hash(CONFIG, original)
    assert sum(most) == 4 * num_params(CONFIG)
    assert max(most) < sum(most) / 2


@pytest.mark.parametrize("stacked", [True, False])
def test_onto_devices(saved: Path, stacked: bool) -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings: dict[Any, jax.sharding.Sharding] = {
        path: jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*("x" if a == "kv_heads" else None for a in axes))
        )
        for path, axes in logical_axes(CONFIG, stacked).items()
    }
    _, params = load_params(saved, stacked=stacked, shardings=shardings)
    expected = init_params(CONFIG, "float32", seed=3, stacked=stacked)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    for path, leaf in nnx.to_flat_state(params):
        assert leaf[...].sharding.is_equivalent_to(shardings[path], leaf[...].ndim)


def test_from_safetensors_with_tokenizer_files(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    source = write_folder(tmp_path / "source", CONFIG, tensors)
    tiny_tokenizer().save(source)
    (source / "generation_config.json").unlink()
    told = json.loads((source / "config.json").read_text()) | {"eos_token_id": [3, 95]}
    (source / "config.json").write_text(json.dumps(told))
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("tools")
    (source / "README.md").write_text("not this")
    config, params = load_params(source)
    path = save_orbax(tmp_path / "orbax", config, params, source)
    # What ends an answer stands in the config.json alone, which is not copied.
    assert Tokenizer.from_path(path).eos_ids == Tokenizer.from_path(source).eos_ids >= {3, 95}
    assert Tokenizer.from_path(path).tool_template == "tools"
    assert sorted(p.name for p in path.iterdir()) == [
        "additional_chat_templates",
        "config.json",
        "files.json",
        "generation_config.json",
        "params",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    _, loaded = load_params(path)
    assert_params(loaded, expected_params(CONFIG, tensors))


def test_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    """The metadata of a GGUF file, without its tensors, carry the tokenizer."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": ["<0> <1>"],
        "tokenizer.ggml.token_type": [4] * CONFIG.vocab_size,
        "tokenizer.ggml.eos_token_id": 2,
    }
    source = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=metadata)
    config, params = load_params(source)
    path = save_orbax(tmp_path / "orbax", config, params, source)
    original, copied = Tokenizer.from_path(source), Tokenizer.from_path(path)
    text = "<3><4><5><6><7><8>"
    assert copied.encode(text) == original.encode(text) == list(range(3, 9))
    assert copied.eos_ids == original.eos_ids
    # And it is passed on from checkpoint to checkpoint.
    config, params = load_params(path)
    again = save_orbax(tmp_path / "again", config, params, path)
    assert (again / "tokenizer.gguf").read_bytes() == (path / "tokenizer.gguf").read_bytes()


# --- writing --------------------------------------------------------------------------------


def test_no_overwriting_unless_asked(folder: Path, original: nnx.State) -> None:
    other = init_params(CONFIG, "float32", seed=4)
    with pytest.raises(UserError, match="exists already"):
        save_orbax(folder, CONFIG, other)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder)[1], original)
    save_orbax(folder, CONFIG, other, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder)[1], other)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_failed_write_keeps_what_was_there(
    folder: Path, original: nnx.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_in_the_array_library(*_: Any) -> NoReturn:
        raise ValueError("RESOURCE_EXHAUSTED: write: [OS error 28: ENOSPC No space left on device]")

    for broken in (full, full_in_the_array_library):
        with monkeypatch.context() as patch:
            patch.setattr(orbax_save, "_write_arrays", broken)
            with pytest.raises(UserError, match="No space left on device") as caught:
                save_orbax(folder, CONFIG, original, overwrite=True)
        assert str(folder) in str(caught.value)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    jax.tree.map(np.testing.assert_array_equal, load_params(folder)[1], original)


def test_full_disk_is_seen_before(
    folder: Path, original: nnx.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with pytest.raises(UserError, match=r"takes 21 MB and 5 MB are free") as caught:
        save_orbax(folder, CONFIG, original, overwrite=True)
    assert str(folder) in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder)[1], original)


def test_leftovers_of_killed_processes_go(tmp_path: Path, original: nnx.State) -> None:
    dead = tmp_path / ".model.part-999999999"
    (dead / "params").mkdir(parents=True)
    alive = tmp_path / f".model.part-{os.getppid()}"
    alive.mkdir()
    assert "no config.json" in failure(dead)
    save_orbax(tmp_path / "model", CONFIG, original)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "model"]


def test_unwritable_folder(tmp_path: Path, original: nnx.State) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save_orbax(tmp_path / "file" / "model", CONFIG, original)


# --- bad folders ----------------------------------------------------------------------------


def rewrite_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_shapes_that_disagree(folder: Path) -> None:
    rewrite_config(folder, intermediate_size=256)
    message = failure(folder)
    assert "layers.0.down has shape [512, 256], but the configuration says [256, 256]" in message
    rewrite_config(folder, intermediate_size=512, num_hidden_layers=3)
    assert "layers.2.attn_norm is missing" in failure(folder)
    rewrite_config(folder, num_hidden_layers=1)
    assert "no place for the array layers.1." in failure(folder)
    rewrite_config(folder, num_hidden_layers=10**9)
    assert "layers" in failure(folder)


def test_another_model_than_asked_for(folder: Path) -> None:
    asked = dataclasses.replace(CONFIG, name="asked", vocab_size=41)
    assert "vocab_size is 40, and asked has 41" in failure(folder, config=asked)
    assert load_params(folder, dataclasses.replace(CONFIG, name="asked"))[0].name == "asked"


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in failure(folder)


def large_files(folder: Path) -> list[Path]:
    files = [path for path in (folder / "params").rglob("*") if path.is_file()]
    return [path for path in files if path.stat().st_size > 10_000]


def test_truncated(folder: Path) -> None:
    for file in large_files(folder):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert f"has {len(whole) // 2} of {len(whole)} bytes" in failure(folder)
        assert file.name in failure(folder)
        file.unlink()
        assert f"{file.name} is missing" in failure(folder)
        file.write_bytes(whole)
    load_params(folder)
    (folder / "files.json").unlink()
    assert "no files.json" in failure(folder)


def test_one_bit_changed(folder: Path) -> None:
    """In any file, of metadata or arrays: the file is named, and Orbax does not see it."""
    params = folder / "params"
    files = [path for path in sorted(params.rglob("*")) if path.is_file() and path.stat().st_size]
    assert set(large_files(folder)) < set(files)
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        changed = bytes([whole[middle] ^ 1])
        file.write_bytes(whole[:middle] + changed + whole[middle + 1 :])
        message = failure(folder)
        assert f"{file} is damaged" in message
        assert "convert the checkpoint again" in message
        file.write_bytes(whole)
    load_params(folder)


def test_several_processes_share_the_comparing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large files each compares its share, and every file is compared by one; of small all."""
    monkeypatch.setattr(orbax, "LARGE_BYTES", 10_000)
    sums, compared = orbax._sums, list[str]()

    def summing(params: Path, names: Any) -> dict[str, int]:
        found = sums(params, names)
        compared.extend(found)
        return found

    monkeypatch.setattr(orbax, "_sums", summing)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        orbax._check_files(folder)
    params = folder / "params"
    large = {path.relative_to(params).as_posix() for path in large_files(folder)}
    assert large
    listed = json.loads((folder / "files.json").read_text())
    expected = [name for name in listed for _ in range(1 if name in large else 2)]
    assert sorted(compared) == sorted(expected)


def test_sizes_alone(folder: Path) -> None:
    """What checkpoints of earlier versions list."""
    (folder / "files.json").write_text(json.dumps(orbax.file_sizes(folder / "params")))
    load_params(folder)
    file = large_files(folder)[0]
    file.write_bytes(file.read_bytes()[1:])
    assert "truncated" in failure(folder)


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("_CHECKPOINT_METADATA", DEEP),
        ("_CHECKPOINT_METADATA", '{"a": ' + "9" * 100_000 + "}"),
        ("state/_METADATA", DEEP),
        ("state/_METADATA", '{"tree_metadata": Infinity}'),
        ("state/_sharding", "[]"),
    ],
)
def test_metadata_made_up(name: str, content: str, folder: Path, capfd: Any) -> None:
    """Listed as it is, so that Orbax finds it: one line says it, and no other does."""
    (folder / "params" / name).write_text(content)
    (folder / "files.json").write_text(json.dumps(orbax.list_files(folder / "params")))
    message = failure(folder)
    assert "is damaged" in message or "is missing" in message
    assert capfd.readouterr().err == ""


def test_pipes_and_devices_below_params(folder: Path) -> None:
    pipe = folder / "params" / "state" / "pipe"
    os.mkfifo(pipe)
    assert "neither a file nor a folder" in failure(folder)
    pipe.unlink()
    pipe.symlink_to("/dev/zero")
    assert "neither a file nor a folder" in failure(folder)


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        "[]",
        '{"x": {"bytes": {}, "crc32": []}}',
        '{"_CHECKPOINT_METADATA": {}}',
        '{"a\\u0000b": 1}',
        '{"\\ud800": Infinity}',
        '{"x": {}}',
        "3",
        "\xff",
    ],
)
def test_list_of_files(content: str, folder: Path) -> None:
    (folder / "files.json").write_text(content, encoding="latin-1")
    assert failure(folder).isprintable()


def test_without_arrays(folder: Path) -> None:
    shutil.rmtree(folder / "params")
    (folder / "params").mkdir()
    assert "is missing" in failure(folder)
    (folder / "files.json").write_text("{}")
    assert "no readable Orbax checkpoint" in failure(folder)


def test_nan_is_named(tmp_path: Path) -> None:
    params = init_params(CONFIG, "float32")
    norm = dict(nnx.to_flat_state(params))[("final_norm",)]
    norm[...] = norm[...].at[3].set(jnp.nan)
    path = save_orbax(tmp_path / "model", CONFIG, params)
    assert "final_norm holds NaN" in failure(path)


def test_structure_is_that_of_the_model(saved: Path) -> None:
    for stacked in (True, False):
        _, params = load_params(saved, stacked=stacked)
        abstract = abstract_params(CONFIG, jnp.float32, stacked)
        assert jax.tree.structure(params) == jax.tree.structure(abstract)


def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path, monkeypatch) -> None:
    config, params = load_params(write_folder(tmp_path / "a", CONFIG, random_tensors(CONFIG)))
    write, target = orbax_save._write_arrays, tmp_path / "out"

    def meanwhile(*args: Any) -> None:
        monkeypatch.setattr(orbax_save, "_write_arrays", write)
        save_orbax(target, config, jax.tree.map(lambda leaf: leaf + 1, params))
        write(*args)

    monkeypatch.setattr(orbax_save, "_write_arrays", meanwhile)
    # Of another process, whose folder beside it has another name.
    monkeypatch.setattr(orbax_save.os, "getpid", iter(range(10**6, 10**7)).__next__)
    with pytest.raises(UserError, match="exists already"):
        save_orbax(target, config, params)
    _, found = load_params(target)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), found, params)
