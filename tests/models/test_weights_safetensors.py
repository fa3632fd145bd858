"""Checkpoint folders: single and sharded files, casts, tied embeddings, bad files."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.decoder import abstract_params, logical_axes
from kvjax.models.weights import fill, load_params
from tests.models.checkpoints import (
    CONFIG,
    QWEN3,
    assert_params,
    expected_params,
    num_params,
    random_tensors,
    write_folder,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny", CONFIG, random_tensors(CONFIG))


def failure(path: Path, **arguments: Any) -> str:
    """The message of the UserError that loading gives, one line."""
    with pytest.raises(UserError) as caught:
        load_params(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
def test_single_and_sharded(tmp_path: Path, shards: int) -> None:
    tensors = random_tensors(CONFIG)
    path = write_folder(tmp_path / "model", CONFIG, tensors, shards)
    config, params = load_params(path)
    assert config == dataclasses.replace(CONFIG, name="model")
    assert_params(params, expected_params(CONFIG, tensors))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_casts(tmp_path: Path, stored: str, wanted: str) -> None:
    tensors = {k: v.astype(jnp.dtype(stored)) for k, v in random_tensors(CONFIG).items()}
    path = write_folder(tmp_path / "model", CONFIG, tensors)
    _, params = load_params(path, dtype=wanted)
    expected = expected_params(CONFIG, {k: v.astype(wanted) for k, v in tensors.items()})
    assert {leaf[...].dtype for _, leaf in nnx.to_flat_state(params)} == {jnp.dtype(wanted)}
    assert_params(params, {path: value.astype(wanted) for path, value in expected.items()})


def test_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of real models are read some rows at a time; these are small enough for one piece."""
    config = dataclasses.replace(CONFIG, attention_bias=True)
    tensors = random_tensors(config)
    path = write_folder(tmp_path / "model", config, tensors)
    monkeypatch.setattr(fill, "_PIECE", 1000)
    assert_params(load_params(path)[1], expected_params(config, tensors))


def test_tied_and_untied(tmp_path: Path) -> None:
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    tensors = random_tensors(tied)
    # Some tied checkpoints repeat the embedding, old ones carry the rotary frequencies.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    _, params = load_params(write_folder(tmp_path / "tied", tied, tensors))
    assert_params(params, expected_params(tied, tensors))
    for head in (tensors["lm_head.weight"] + 1, tensors["lm_head.weight"][:-1]):
        other = write_folder(tmp_path / f"{len(head)}", tied, {**tensors, "lm_head.weight": head})
        assert "lm_head.weight is not the embedding" in failure(other)
    tensors = random_tensors(tied)
    of_head = {k.replace("model.embed_tokens", "lm_head"): v for k, v in tensors.items()}
    _, params = load_params(write_folder(tmp_path / "head", tied, of_head))
    assert_params(params, expected_params(tied, tensors))
    untied = random_tensors(CONFIG)
    of_head = {k: v for k, v in untied.items() if k != "model.embed_tokens.weight"}
    path = write_folder(tmp_path / "no-embedding", CONFIG, of_head)
    assert "model.embed_tokens.weight is missing" in failure(path)
    del untied["lm_head.weight"]
    path = write_folder(tmp_path / "untied", CONFIG, untied)
    assert "lm_head.weight is missing" in failure(path)


def test_a_whole_file_counts_and_not_an_index_beside_it(tmp_path: Path) -> None:
    """As of a fine-tune that was saved where the sharded original lay."""
    old, new = (random_tensors(CONFIG, seed=seed) for seed in (0, 1))
    folder = write_folder(tmp_path / "model", CONFIG, old, shards=2)
    shutil.copy(write_folder(tmp_path / "new", CONFIG, new) / "model.safetensors", folder)
    assert_params(load_params(folder)[1], expected_params(CONFIG, new))


def test_biases(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, attention_bias=True)
    tensors = random_tensors(config)
    path = write_folder(tmp_path / "qwen", config, tensors)
    _, params = load_params(path)
    assert_params(params, expected_params(config, tensors))
    # Biases without a place would change the model if they were left out.
    (path / "config.json").write_text(
        (path / "config.json").read_text().replace("Qwen2For", "LlamaFor").replace("qwen2", "llama")
    )
    assert "no place for the tensor model.layers" in failure(path)


def test_norms_of_heads(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    path = write_folder(tmp_path / "qwen3", QWEN3, tensors)
    config, params = load_params(path)
    assert config == dataclasses.replace(QWEN3, name="qwen3")
    assert_params(params, expected_params(QWEN3, tensors))
    # The same shapes without the norms are another model.
    other = dataclasses.replace(QWEN3, family="llama")
    assert "its family is qwen3, and tiny has llama" in failure(path, config=other)
    write_folder(path, other, tensors)
    assert "no place for the tensor model.layers.0.self_attn." in failure(path)


def test_named_model(folder: Path) -> None:
    """The name is the caller's, what the checkpoint knows better is the checkpoint's."""
    asked = dataclasses.replace(CONFIG, name="asked", rope_theta=5.0, max_position_embeddings=7)
    config, _ = load_params(folder, asked)
    assert config == dataclasses.replace(CONFIG, name="asked")
    assert "num_layers is 2" in failure(folder, config=dataclasses.replace(asked, num_layers=3))
    (folder / "config.json").unlink()
    assert "has no config.json" in failure(folder)
    config, _ = load_params(folder, asked)
    assert config == asked


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is called as its folder, or as the hub has it: not by a commit."""
    folder = write_folder(tmp_path / "any-llama", CONFIG, random_tensors(CONFIG))
    assert load_params(folder)[0].name == "any-llama"
    monkeypatch.chdir(folder)
    assert load_params(".")[0].name == "any-llama"
    cached = tmp_path / "models--Org--Tiny-0.5B.v1" / "snapshots" / "7ae557604adf"
    write_folder(cached, CONFIG, random_tensors(CONFIG))
    assert load_params(cached)[0].name == "Tiny-0.5B.v1"


def test_progress(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load_params(folder, dtype="bfloat16", progress=lambda *step: seen.append(step))
    assert seen[-1] == ("load", 2 * num_params(CONFIG), 2 * num_params(CONFIG))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("stacked", [True, False])
def test_onto_devices(folder: Path, stacked: bool) -> None:
    """The path for accelerators and meshes gives what the path for the CPU gives."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings: dict[Any, jax.sharding.Sharding] = {
        path: jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*("x" if a == "kv_heads" else None for a in axes))
        )
        for path, axes in logical_axes(CONFIG, stacked).items()
    }
    _, params = load_params(folder, stacked=stacked, shardings=shardings)
    _, plain = load_params(folder, stacked=stacked)
    assert jax.tree.structure(params) == jax.tree.structure(
        abstract_params(CONFIG, jnp.float32, stacked)
    )
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    for path, leaf in nnx.to_flat_state(params):
        assert leaf[...].sharding.is_equivalent_to(shardings[path], leaf[...].ndim)


def test_dtype_is_checked(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        load_params(folder, dtype="int8")


# --- bad files ------------------------------------------------------------------------------


def test_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        message = failure(folder)
        assert "model.safetensors" in message
        assert "truncated" in message
    file.write_bytes(b"\xff" * 64)
    assert "truncated or no safetensors file" in failure(folder)


def test_damaged_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def rewritten(entry: dict[str, Any]) -> str:
        changed = json.dumps({**header, "model.norm.weight": entry}).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + length :])
        return failure(folder)

    good = header["model.norm.weight"]
    assert "damaged" in rewritten({**good, "shape": [255]})
    assert "damaged" in rewritten({**good, "shape": [-1]})
    assert "damaged" in rewritten({**good, "shape": "many"})
    assert "damaged" in rewritten({"dtype": "F32"})
    assert "damaged" in rewritten({**good, "data_offsets": [0, 1024]})
    assert "damaged" in rewritten({**good, "data_offsets": [10**12, 10**12 + 1024]})
    assert "dtype I32" in rewritten({**good, "dtype": "I32"})
    file.write_bytes(whole[:8] + b"{" * length + whole[8 + length :])
    assert "damaged" in failure(folder)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    path = write_folder(tmp_path / "model", CONFIG, tensors, shards=1)
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    assert_params(load_params(path)[1], expected_params(CONFIG, tensors))
    (path / "model-00001-of-00001.safetensors").rename(path / "model-00001-of-00002.safetensors")
    assert "model.safetensors.index.json; get it as well" in failure(path)


def test_missing_shard(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG), shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in failure(path)
    (path / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in failure(path)


def test_bad_index(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG), shards=2)
    index = path / "model.safetensors.index.json"
    for text, word in (
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file of its folder"),
    ):
        index.write_text(text)
        assert word in failure(path)


def test_missing_tensor_and_other_shapes(folder: Path) -> None:
    tensors = random_tensors(CONFIG)
    name = "model.layers.1.self_attn.v_proj.weight"
    removed = tensors.pop(name)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    assert f"{name} is missing" in failure(folder)
    tensors[name] = removed[:32].copy()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    message = failure(folder)
    assert f"{name} has shape [32, 256]" in message
    assert "configuration says [64, 256]" in message
    # One layer more than the configuration has.
    larger = random_tensors(dataclasses.replace(CONFIG, num_layers=3))
    safetensors.numpy.save_file(larger, folder / "model.safetensors")
    assert "no place for the tensor model.layers.2" in failure(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_is_named(folder: Path, dtype: str, value: float) -> None:
    tensors = {k: v.astype(jnp.dtype(dtype)) for k, v in random_tensors(CONFIG).items()}
    tensors["model.layers.0.mlp.gate_proj.weight"][-1, -1] = value
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    message = failure(folder, dtype="bfloat16")
    assert "model.layers.0.mlp.gate_proj.weight holds NaN or infinite values" in message


def test_config_of_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["GPTNeoXForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    message = failure(folder)
    assert "GPTNeoXForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_paths_that_are_no_checkpoint(tmp_path: Path, folder: Path) -> None:
    assert "no such file or folder" in failure(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in failure(tmp_path / "empty")
    assert "give the folder" in failure(folder / "model.safetensors")
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "PyTorch" in failure(tmp_path / "model.bin")
    shutil.copy(folder / "model.safetensors", tmp_path / "empty" / "a.gguf")
    assert "not a GGUF file" in failure(tmp_path / "empty")
    shutil.copy(folder / "model.safetensors", tmp_path / "empty" / "b.gguf")
    assert "2 GGUF files" in failure(tmp_path / "empty")
