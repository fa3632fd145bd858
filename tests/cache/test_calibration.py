"""Calibrated arrays: saved whole, refused where they are of another model or damaged."""

import concurrent.futures
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.cache import files
from kvjax.cache.calibration import Calibration
from kvjax.errors import UserError
from kvjax.models.decoder import init_params
from kvjax.models.fingerprint import model_hash
from tests.engine.conftest import TINY

# One that does not lie in memory in the order of its axes.
ARRAYS = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3).T, "bias": np.ones(3, np.float16)}


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "one.safetensors"
    Calibration(ARRAYS, "abc", {"data": "a book"}).save(path)
    found = Calibration.load(path)
    assert found.model_hash == "abc"
    assert found.recipe == {"data": "a book"}
    assert {name: x.tolist() for name, x in found.arrays.items()} == {
        name: x.tolist() for name, x in ARRAYS.items()
    }
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    found.check("abc", 3)


def test_a_file_is_for_whom_other_files_are(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    Calibration(ARRAYS, "abc").save(tmp_path / "one")
    assert (tmp_path / "one").stat().st_mode == plain.stat().st_mode


def test_two_may_write_the_same_file(tmp_path, monkeypatch):
    """Another process that is half way through loses nothing by it."""
    path, save = tmp_path / "one", files.save_file

    def meanwhile(arrays, part, metadata):
        save(arrays, part, metadata)
        monkeypatch.setattr(files, "save_file", save)
        with concurrent.futures.ThreadPoolExecutor() as other:
            other.submit(Calibration(ARRAYS, "def").save, path).result()

    monkeypatch.setattr(files, "save_file", meanwhile)
    Calibration(ARRAYS, "abc").save(path)
    assert Calibration.load(path).model_hash == "abc"
    assert list(tmp_path.iterdir()) == [path]


def test_another_model_is_refused_in_one_line():
    one = Calibration(ARRAYS, "abc")
    with pytest.raises(UserError, match=r"^the calibration is of model 'abc', not of def: [^\n]*$"):
        one.check("def", 3)
    with pytest.raises(UserError, match=r"^calibrated array 'weight' has 3 layers, the model 4"):
        one.check("abc", 4)


def damaged(folder):
    """Files that are none, each with what is said of it."""
    good = folder / "good"
    Calibration(ARRAYS, "abc").save(good)
    yield folder / "missing", "No such file"
    yield folder, "[Ii]s a directory|[Pp]ermission|[Nn]o such|device"
    (folder / "empty").write_bytes(b"")
    yield folder / "empty", "header"
    (folder / "cut").write_bytes(good.read_bytes()[:-3])
    yield folder / "cut", "[Mm]eta|[Ii]ncomplete|buffer"
    (folder / "noise").write_bytes(os.urandom(999))
    yield folder / "noise", "header"
    save_file(ARRAYS, folder / "weights")
    yield folder / "weights", "wanted metadata of format"
    told = {"format": "kvjax-calibration-1", "model_hash": "abc", "recipe": "{"}
    save_file(ARRAYS, folder / "other", {**told, "format": "kvjax-calibration-0", "recipe": "{}"})
    yield folder / "other", "wanted metadata of format"
    save_file(ARRAYS, folder / "recipe", told)
    yield folder / "recipe", "its recipe is no JSON"
    save_file(ARRAYS, folder / "list", {**told, "recipe": "[]"})
    yield folder / "list", "its recipe is no JSON object"
    bad = {"weight": np.array([1.0, np.nan], np.float32)}
    save_file(bad, folder / "nan", {**told, "recipe": "{}"})
    yield folder / "nan", "'weight': wanted finite numbers by layer"


def test_damaged_files_are_refused_in_one_line(tmp_path):
    for path, says in damaged(tmp_path):
        with pytest.raises(UserError, match=rf"^calibration [^\n]*({says})[^\n]*$") as found:
            Calibration.load(path)
        assert str(path) in str(found.value)


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    path = tmp_path / "one"
    Calibration(ARRAYS, "abc").save(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax.cache.files.os.replace", full)
    with pytest.raises(UserError, match=r"^calibration .*No space left"):
        Calibration({"weight": np.zeros(1)}, "def").save(path)
    assert Calibration.load(path).model_hash == "abc"
    assert [x.name for x in tmp_path.iterdir()] == ["one"]
    with pytest.raises(UserError, match="without arrays"):
        Calibration({}, "abc")


def test_a_model_is_known_by_its_weights():
    """Whatever its layout and dtype; another seed, shape or a single changed tensor is another."""
    params = init_params(TINY, jnp.bfloat16, seed=3)
    known = model_hash(TINY, params)
    assert known == model_hash(dataclasses.replace(TINY, name="other"), params)
    assert known == model_hash(TINY, init_params(TINY, jnp.bfloat16, seed=3, stacked=False))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    assert known == model_hash(TINY, wide)
    other = init_params(TINY, jnp.bfloat16, seed=4)
    scaled = dataclasses.replace(TINY, rope_theta=TINY.rope_theta * 2)
    hashes = {known, model_hash(TINY, other), model_hash(scaled, params)}
    for name in ("down", "qkv"):
        changed = init_params(TINY, jnp.bfloat16, seed=3)
        leaf: Any = changed["layers"][name]  # type: ignore[index]
        leaf.set_value(leaf[...].at[TINY.num_layers - 1].multiply(2))
        hashes.add(model_hash(TINY, changed))
    assert len(hashes) == 5
    assert all(len(x) == 16 for x in hashes)
