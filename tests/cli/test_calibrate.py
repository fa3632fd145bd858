"""`kvjax calibrate`: its file, its table, its picture, and what it refuses."""

import argparse
import functools
import gzip
import json
import re

import numpy as np
import pytest

from kvjax.cache.calibration import Calibration
from kvjax.cache.config import CALIBRATED, UNCALIBRATED
from kvjax.cli import main_of
from kvjax.cli.main import run_command
from kvjax.engine.calibrate import Fit
from kvjax.engine.calibrate.generated import generated_text
from kvjax.engine.calibrate.levels import KEY_RANGE
from kvjax.errors import UserError

CALIBRATE = functools.partial(run_command, "calibrate")
EVALUATE = functools.partial(run_command, "evaluate")
DECODE = functools.partial(run_command, "decode")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        text = generated_text(number, lines=40)
        (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.slow
def test_a_calibration_of_ones_own_texts(tiny_folder, data, tmp_path, capsys):
    out, plot = tmp_path / "own.safetensors", tmp_path / "fit.png"
    command = ["--weights", str(tiny_folder), "--data", str(data), "--tokens", "96"]
    command += ["--texts", "6", "--exercises", "2", "--trainings", "2", "--own-words", "--sheets"]
    command += ["--out", str(out), "--plot", str(plot)]
    assert main_of(CALIBRATE, command) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split()[:2] == ["layer", "R2"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "mean"]
    assert "6 texts, 552 tokens" in said.err
    gained = [
        re.fullmatch(r"KL of .* at +(\d+)x: ([\d.]+), trained ([\d.]+)", x) for x in lines[4:8]
    ]
    assert [int(row[1]) for row in gained if row] == [4, 8, 16, 32]
    assert np.mean([float(row[3]) - float(row[2]) for row in gained if row]) <= 0
    found = Calibration.load(out)
    assert found.recipe["source"] == "texts"
    made_with = ("tokens", "exercises", "trainings", "own_words", "sheets")
    assert [found.recipe[name] for name in made_with] == ["96", "2", "2", "True", "True"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    # Neither its state nor anything half written stays.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.png", "own.safetensors", "texts"]
    # What heads keep is counted anew from what the file has.
    loads = ["--weights", str(tiny_folder), "--loads", "--data", str(data), "--tokens", "96"]
    loads += ["--texts", "6", "--out", str(out)]
    old = dict(found.arrays)
    Calibration({**old, "head_load": 0 * old["head_load"]}, found.model_hash, found.recipe).save(
        out
    )
    assert main_of(CALIBRATE, loads) == 0
    assert "for --tensor-parallel" in capsys.readouterr().err
    again = Calibration.load(out)
    assert again.recipe == {**found.recipe, "loads": "texts"}
    assert sorted(again.arrays) == sorted(old)
    for name, array in again.arrays.items():
        np.testing.assert_array_equal(array, old[name], name)
    Calibration({"mine": np.ones((2, 3))}, found.model_hash).save(tmp_path / "mine.safetensors")
    assert main_of(CALIBRATE, [*loads[:-1], str(tmp_path / "mine.safetensors")]) == 2
    assert "has no array reads_weight" in capsys.readouterr().err
    (tmp_path / "mine.safetensors").unlink()
    # And the other commands take it.
    prompt = "once upon a time " * 20
    decode = ["--weights", str(tiny_folder), "--prompt", prompt, "--json"]
    decode += ["--max-cache-tokens", "64", "--max-new-tokens", "3", "--calibration", str(out)]
    capsys.readouterr()
    assert main_of(DECODE, decode) == 0
    assert json.loads(capsys.readouterr().out)["method"] == CALIBRATED
    # Of this model none is at hand, and none is made unless it is asked for.
    for choice in ("auto", "none"):
        assert main_of(DECODE, [*decode[:-1], choice]) == 0
        assert json.loads(capsys.readouterr().out)["method"] == UNCALIBRATED
    assert main_of(DECODE, [*decode[:-1], "none", "--method", "predicted-reads"]) == 2
    assert "reads the calibrated array" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no text"),
        (b"\xff\xfe\x00binary\x9c", "is not UTF-8"),
        (b"too short", "0 of 1 texts have 64 tokens or more"),
    ],
    ids=["empty", "binary", "short"],
)
def test_data_that_does_not_do_is_refused(tiny_folder, tmp_path, capsys, content, said):
    (tmp_path / "text.txt").write_bytes(content)
    out = tmp_path / "out.safetensors"
    command = ["--weights", str(tiny_folder), "--data", str(tmp_path / "text.txt")]
    assert main_of(CALIBRATE, [*command, "--out", str(out)]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "3"], "tokens"),
        (["--texts", "1"], "--texts"),
        (["--exercises", "-1"], "exercises"),
        (["--out", "/nowhere/at/all/x"], "--out '/nowhere/at/all/x': there is no such folder"),
        (["--out", "/dev"], "--out '/dev': it is there and cannot be written"),
        (["--plot", "/nowhere/x.png"], "--plot '/nowhere/x.png': there is no such folder"),
        (["--plot", "x.xyz"], "--plot 'x.xyz': there are no such pictures; give a name that ends"),
        (["--out", "x.png", "--plot", "./x.png"], "--plot 'x.png': that is --out, too"),
        (["--data", "/nowhere"], "there is no /nowhere"),
        (["--heads", "--data", "/nowhere"], "give no --data"),
        (["--heads", "--tokens", "99"], "--heads has prompts of its own: give no --tokens with it"),
        (["--heads", "--exercises", "9"], "--heads has prompts of its own: give no --exercises"),
        (["--heads", "--own-words"], "give no --own-words with it"),
        (["--import", "/nowhere", "--texts", "9"], "--import takes what is there: give no --texts"),
        (["--import", "/nowhere", "--trainings", "2"], "give no --trainings with it"),
        (["--loads", "--sheets"], "--loads fits nothing: give no --sheets with it"),
        (["--heads", "--import", "/nowhere"], "give one of them"),
        (["--loads", "--import", "/nowhere"], "--import and --loads write different arrays"),
        (["--loads", "--heads"], "--heads and --loads write different arrays"),
        (["--loads", "--plot", "x.png"], "--loads fits nothing"),
        (["--levels", "--loads"], "--loads and --levels write different arrays"),
        (["--levels", "--import", "/nowhere"], "--import and --levels write different arrays"),
        (["--levels", "--plot", "x.png"], "--levels fits nothing"),
        (["--tensor-parallel", "0"], "tensor_parallel 0"),
        (["--tensor-parallel", "2"], "this process has 1 of kind cpu; give at most 1"),
        (["--kv-replicas", "2"], "kv_replicas 2 with tensor_parallel 1"),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(capsys, options, said):
    assert main_of(CALIBRATE, ["--weights", "/no/weights", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.fixture
def fitted(monkeypatch):
    """What the command calls to calibrate is made up; the states that it was given."""
    states = []

    def fit(model, texts, settings, *, state, recipe, progress):
        for path in (state, state.with_name(f"{state.name}.choice")):
            path.touch()
        states.append(state)
        made = Calibration({"reads_weight": np.ones((2, 3))}, model.fingerprint, recipe)
        return Fit(made, np.ones((2, 3)), np.ones((2, 3)), {}, 3, 9)

    monkeypatch.setattr("kvjax.engine.calibrate.calibrate", fit)
    return states


def test_what_was_done_is_kept_until_it_is_saved(
    tiny_folder, tmp_path, monkeypatch, capsys, fitted
):
    out = tmp_path / "own.safetensors"
    command = ["--weights", str(tiny_folder), "--out", str(out)]

    def full(*_):
        raise UserError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(Calibration, "save", full)
        assert main_of(CALIBRATE, command) == 2
    assert not out.exists()
    kept = [".own.safetensors.state", ".own.safetensors.state.choice"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert main_of(CALIBRATE, command) == 0
    assert list(tmp_path.iterdir()) == [out]
    # A file that could not be written in the end is refused first, the usual one, too.
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{Calibration.load(out).recipe['model']}.safetensors").mkdir()
    fitted.clear()
    capsys.readouterr()
    assert main_of(CALIBRATE, command[:2]) == 2
    assert "it is there and cannot be written" in capsys.readouterr().err
    assert fitted == []


def test_a_calibration_beside_what_a_file_has(tiny_folder, tmp_path, capsys, fitted):
    out = tmp_path / "own.safetensors"
    command = ["--weights", str(tiny_folder), "--out", str(out)]
    assert main_of(CALIBRATE, command) == 0
    made = Calibration.load(out)
    made.with_arrays({"retrieval_head": np.zeros((2, 3))}, {"heads": "mine"}).save(out)
    assert main_of(CALIBRATE, command) == 0
    again = Calibration.load(out)
    assert sorted(again.arrays) == ["reads_weight", "retrieval_head"]
    assert again.recipe == {**made.recipe, "heads": "mine"}
    out.write_text("a letter")
    fitted.clear()
    capsys.readouterr()
    assert main_of(CALIBRATE, command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: calibration {out}: ")
    assert (out.read_text(), fitted) == ("a letter", [])


def test_heads_in_a_new_file_and_in_one_that_is_there(tiny_folder, tmp_path, monkeypatch):
    from kvjax.engine.calibrate import heads, semantic

    def found(name):
        return lambda *_: {name: np.ones((2, 3), np.float32)}

    monkeypatch.setattr(heads, "retrieval_heads", found("retrieval_head"))
    monkeypatch.setattr(semantic, "semantic_heads", found("semantic_head"))
    out = tmp_path / "heads.safetensors"
    command = ["--weights", str(tiny_folder), "--heads", "--out", str(out)]
    assert main_of(CALIBRATE, command) == 0
    made = Calibration.load(out)
    assert sorted(made.arrays) == ["retrieval_head", "semantic_head"]
    assert made.recipe.keys() == {"model", "dtype", "heads"}
    made.with_arrays({"mine": np.zeros((2, 3), np.float32)}, {"source": "mine"}).save(out)
    assert main_of(CALIBRATE, command) == 0
    again = Calibration.load(out)
    assert sorted(again.arrays) == ["mine", "retrieval_head", "semantic_head"]
    assert again.recipe == {**made.recipe, "source": "mine"}


@pytest.mark.slow
def test_retrieval_heads_beside_what_a_file_has(tiny_folder, tmp_path, capsys):
    out = tmp_path / "heads.safetensors"
    command = ["--weights", str(tiny_folder), "--heads", "--out", str(out)]
    assert main_of(CALIBRATE, command) == 0
    assert "razor-attention" in capsys.readouterr().err
    first = Calibration.load(out)
    heads = first.arrays["retrieval_head"]
    other = {"mine": np.ones((len(heads), 3), np.float32), "retrieval_head": 0 * heads}
    Calibration(other, first.model_hash, {"source": "mine"}).save(out)
    assert main_of(CALIBRATE, command) == 0
    found = Calibration.load(out)
    assert sorted(found.arrays) == ["mine", "retrieval_head"]
    assert np.array_equal(found.arrays["retrieval_head"], heads)
    assert found.recipe["source"] == "mine"
    decode = ["--weights", str(tiny_folder), "--prompt", "once upon a time " * 20, "--json"]
    decode += ["--max-cache-tokens", "64", "--max-new-tokens", "3", "--calibration", str(out)]
    capsys.readouterr()
    assert main_of(DECODE, [*decode, "--method", "razor-attention"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "razor-attention"
    # A file of another model is not added to.
    Calibration(other, "another", {}).save(out)
    assert main_of(CALIBRATE, command) == 2
    assert "calibrate this one" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_levels_beside_what_a_file_has(tiny_folder, data, tmp_path, capsys):
    out = tmp_path / "levels.safetensors"
    command = ["--weights", str(tiny_folder), "--levels", "--data", str(data), "--out", str(out)]
    assert main_of(CALIBRATE, [*command, "--tokens", "100", "--texts", "4"]) == 0
    assert "for kvquant4c" in capsys.readouterr().err
    first = Calibration.load(out)
    assert first.recipe["levels_tokens"] == "100"
    other = {"mine": np.ones((len(first.arrays[KEY_RANGE]), 3), np.float32)}
    Calibration(other, first.model_hash, {"source": "mine"}).save(out)
    assert main_of(CALIBRATE, [*command, "--tokens", "100", "--texts", "4"]) == 0
    found = Calibration.load(out)
    assert sorted(found.arrays) == sorted([*other, *first.arrays])
    for name, array in first.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=1e-4, atol=1e-5)
    assert found.recipe["source"] == "mine"
    assert found.recipe["levels_data"] == first.recipe["levels_data"]
    # What stores prompts by them takes it, and says what to do without it.
    rows = ["--weights", str(tiny_folder), "--tasks", "passkey", "--rows", "1", "--length", "300"]
    rows += ["--methods", "full", "--kv-dtype", "kvquant4c", "--no-answers", "--free-tokens", "0"]
    with_it, without = (["--out", str(tmp_path / f"{name}.jsonl")] for name in ("with", "without"))
    assert main_of(EVALUATE, [*rows, *with_it, "--calibration", str(out)]) == 0
    capsys.readouterr()
    assert main_of(EVALUATE, [*rows, *without, "--calibration", "auto"]) == 2
    assert "`kvjax calibrate --levels`" in capsys.readouterr().err.splitlines()[-1]


def test_long_texts_are_cut_into_pieces(data, monkeypatch):
    from kvjax.cli import calibrate as module

    options = argparse.Namespace(data=[data], tokens=50, texts=None)
    pieces = module._texts(options)
    assert {len(piece) for piece in pieces} == {250}
    options.texts = 4
    few = module._texts(options)
    assert len(few) == 4
    assert few == [pieces[i * len(pieces) // 4] for i in range(4)]
    assert np.all([piece in pieces for piece in few])
