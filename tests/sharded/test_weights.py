"""Weights dealt to devices as they are read, and stored as they lie there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.engine import LLM, SamplingParams
from kvjax.engine.split import split_of
from kvjax.errors import UserError
from kvjax.models import ByteTokenizer, LoadedModel, load_model, parallel
from kvjax.models.config import MODELS, ModelEntry
from kvjax.models.decoder import is_stacked, logical_axes
from kvjax.models.fingerprint import model_hash
from kvjax.models.parallel import Dealing, Split, join_params, split_params
from kvjax.models.weights import checkpoint_hash, load_params, orbax, save_orbax
from tests.sharded.heads import dealt, mesh_of
from tests.sharded.tiny import SIZES, TINY, engine_settings
from tests.tiny import write_tiny

LAYERS, HEADS = TINY.num_layers, TINY.num_kv_heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    write_tiny(path, TINY)
    return path


def split_on(shards: int, seed: int, replicas: int = 1) -> Split:
    """Heads dealt at random, with an empty place in each shard."""
    places = -(-HEADS // shards) + 1
    number = dealt(np.random.default_rng(seed), LAYERS, HEADS, shards, places)
    return Split(Dealing(number, HEADS, shards, replicas), mesh_of(shards * replicas))


def same(found: nnx.State, want: nnx.State) -> None:
    """The same values, on the same devices."""
    other = dict(nnx.to_flat_state(want))  # type: ignore[arg-type]
    flat: Any = nnx.to_flat_state(found)
    assert len(flat) == len(other)
    for path, leaf in flat:
        value, wanted = leaf[...], other[path][...]
        assert value.sharding.is_equivalent_to(wanted.sharding, value.ndim), path
        assert value.dtype == wanted.dtype, path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted), str(path))


@pytest.mark.parametrize("weight_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (3, 2)])
def test_dealt_as_they_are_read(folder, shards, replicas, stacked, weight_dtype):
    """As if the whole model had been read, and was dealt then."""
    split = split_on(shards, 1, replicas)
    config, whole = load_params(folder, stacked=stacked, weight_dtype=weight_dtype)
    _, found = load_params(folder, stacked=stacked, weight_dtype=weight_dtype, shardings=split)
    same(found, split_params(whole, logical_axes(config, stacked), split))


@pytest.mark.parametrize("stacked", [True, False])
def test_any_mesh_to_any_other(folder, tmp_path, stacked):
    config, whole = load_params(folder, stacked=stacked)
    axes = logical_axes(config, stacked)
    first = split_on(3, 2)
    params = split_params(whole, axes, first)
    path = save_orbax(tmp_path / "three", config, params, dealing=first.dealing)
    same(load_params(path, stacked=stacked)[1], whole)
    assert checkpoint_hash(path, config, "float32") == model_hash(config, whole)
    for split in (first, split_on(3, 3), split_on(2, 4, 2), split_on(4, 5)):
        for other in (stacked, not stacked):
            _, found = load_params(path, stacked=other, shardings=split)
            _, plain = load_params(folder, stacked=other)
            same(found, split_params(plain, logical_axes(config, other), split))
    # Of one that was saved whole, and with fewer bits.
    single = save_orbax(tmp_path / "one", config, whole)
    same(load_params(single, stacked=stacked, shardings=first)[1], params)
    _, narrow = load_params(path, stacked=stacked, weight_dtype="int8", shardings=first)
    config, whole = load_params(folder, stacked=stacked, weight_dtype="int8")
    same(narrow, split_params(whole, logical_axes(config, stacked), first))


@pytest.mark.parametrize(("shards", "replicas"), [(3, 1), (2, 2)])
def test_every_device_reads_its_own_part(folder, tmp_path, monkeypatch, shards, replicas):
    config, whole = load_params(folder, stacked=False)
    first = split_on(shards, 2, replicas)
    params = split_params(whole, logical_axes(config, False), first)
    path = save_orbax(tmp_path / "three", config, params, dealing=first.dealing)

    def refused(*args):
        raise AssertionError("a whole parameter was there")

    with monkeypatch.context() as patch:
        patch.setattr(orbax, "undealt", refused)
        patch.setattr(parallel, "dealt", refused)
        _, found = load_params(path, stacked=False, shardings=first)
    same(found, params)
    other = Dealing(first.dealing.number, HEADS, shards, 3 - replicas)
    assert not first.dealing.same_as(other)
    same(load_params(path, stacked=False)[1], whole)


def test_a_dealing_of_another_model_is_refused(folder, tmp_path):
    config, whole = load_params(folder)
    split = split_on(2, 6)
    params = split_params(whole, logical_axes(config), split)
    path = save_orbax(tmp_path / "two", config, params, dealing=split.dealing)
    good = json.loads((path / "dealing.json").read_text())
    twice = [[0] * len(row) for row in good["number"]]
    for bad in (
        {**good, "number": twice},
        {**good, "number": good["number"][:1]},
        {**good, "number": "x"},
        {**good, "devices": 4},
        {**good, "devices": 0},
        {**good, "replicas": 0},
        {**good, "devices": 6, "replicas": 3},
        {**good, "devices": -2, "replicas": -1},
        {**good, "devices": 3, "replicas": 2},
        {"number": good["number"]},
    ):
        (path / "dealing.json").write_text(json.dumps(bad))
        with pytest.raises(UserError, match="deals other heads than the model has"):
            load_params(path)


def test_an_engine_deals_what_it_loads(folder, monkeypatch):
    """By the load of a calibration that is known before weights are read."""
    monkeypatch.setitem(MODELS, "tiny", ModelEntry(TINY, "nowhere/tiny"))
    load = np.random.default_rng(4).random((LAYERS, HEADS)).astype(np.float32)
    plain = load_model("tiny", weights=folder)
    calibration = Calibration({HEAD_LOAD: load}, plain.fingerprint)
    config = dataclasses.replace(SIZES, tensor_parallel=2)
    model = load_model("tiny", weights=folder, split=split_of(2, calibration))
    assert model.split is not None
    dealing = Dealing.by_load(load.astype(np.float64), 2)
    np.testing.assert_array_equal(model.split.dealing.number, dealing.number)
    assert model.fingerprint == plain.fingerprint
    llm = LLM(model, engine_settings("key-norm"), config, calibration=calibration)
    assert jax.tree.leaves(llm.worker.params)[0] is jax.tree.leaves(model.params)[0]
    other = LLM(plain, engine_settings("key-norm"), config, calibration=calibration)
    same(llm.worker.params, other.worker.params)
    axes = logical_axes(TINY, is_stacked(plain.params))
    same(model.whole().params, plain.params)
    jax.tree.map(
        np.testing.assert_array_equal,
        join_params(model.params, axes, TINY, dealing),
        plain.params,
    )
    with pytest.raises(UserError, match="tensor_parallel 1: the weights were dealt to 2 devices"):
        LLM(model, engine_settings("key-norm"), SIZES)
    twice = dataclasses.replace(config, kv_replicas=2)
    with pytest.raises(UserError, match="kv_replicas 2: the weights were dealt with 1 of each"):
        LLM(model, engine_settings("key-norm"), twice)


def test_a_published_calibration_of_weights_that_are_dealt_as_they_are_read(folder, tmp_path):
    """KVzap's file says nothing of the load of heads, and has arrays by head."""
    rng = np.random.default_rng(6)
    shapes = {"weight": (HEADS, TINY.hidden_size), "bias": (HEADS,)}
    tensors = {
        f"layers.{layer}.{name}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    zap = tmp_path / "zap"
    zap.mkdir()
    save_file(tensors, zap / "model.safetensors")
    found = []
    for devices in (1, 2):
        model = load_model(weights=folder, split=split_of(devices, str(zap)))
        config = dataclasses.replace(SIZES, tensor_parallel=devices)
        llm = LLM(model, engine_settings("kvzap-linear"), config, calibration=str(zap))
        (out,) = llm.generate([np.arange(60)], SamplingParams(max_tokens=4, ignore_eos=True))
        assert out.error is None
        found.append((out.token_ids, np.asarray(out.stats.kept).tolist()))
    assert found[0] == found[1]
    assert len({n for layer in found[0][1] for n in layer}) > 1


@pytest.mark.parametrize("weight_dtype", [None, "float8_e4m3fn"])
def test_random_weights_are_those_of_one_device(monkeypatch, weight_dtype):
    monkeypatch.setitem(MODELS, "tiny", ModelEntry(TINY, "nowhere/tiny"))
    given: dict[str, Any] = {"dummy_weights": True, "seed": 5, "weight_dtype": weight_dtype}
    model = load_model("tiny", split=split_of(4), **given)
    whole = load_model("tiny", **given)
    same(model.whole().params, whole.params)
    assert isinstance(model, LoadedModel)
    assert isinstance(model.tokenizer, ByteTokenizer)
