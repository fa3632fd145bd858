"""`kvjax convert`: what it writes, what it refuses, and what a killed run leaves."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.cli import main_of
from kvjax.cli.main import run_command
from kvjax.errors import UserError
from kvjax.models import hub, load_model
from kvjax.models.weights import checkpoint_hash, load_params
from tests.models.checkpoints import (
    CONFIG,
    assert_params,
    expected_params,
    random_tensors,
    write_folder,
    write_gguf,
)
from tests.models.tokenizer_builders import tiny_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert.py"
CONVERT = functools.partial(run_command, "convert")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", CONFIG, random_tensors(CONFIG))


def test_folder_to_orbax(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main_of(CONVERT, [str(source), str(out), "--dtype", "float32"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith(f"{out}: source, float32, ")
    assert stderr == "load …\nwrite …\n"
    config, params = load_params(out)
    assert config.name == "source"
    assert_params(params, expected_params(CONFIG, random_tensors(CONFIG)))


def test_default_dtype_is_bfloat16(source: Path, tmp_path: Path) -> None:
    assert main_of(CONVERT, [str(source), str(tmp_path / "out"), "--quiet"]) == 0
    _, params = load_params(tmp_path / "out")
    _, rounded = load_params(source, dtype="bfloat16")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), params, rounded
    )


def test_calibrations_know_what_was_converted(tmp_path: Path) -> None:
    """Also where float16 has rounded small weights otherwise than bfloat16 does."""
    tensors = {name: x * 1e-6 for name, x in random_tensors(CONFIG).items()}
    source, out = write_folder(tmp_path / "source", CONFIG, tensors), tmp_path / "out"
    tiny_tokenizer().save(source)
    assert main_of(CONVERT, [str(source), str(out), "--dtype", "float16", "--quiet"]) == 0
    found = [load_model(weights=folder, dtype="float32").fingerprint for folder in (source, out)]
    assert found[0] == found[1] == checkpoint_hash(out, CONFIG, "float16")


def test_gguf_to_orbax(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    source = write_gguf(tmp_path / "model.gguf", CONFIG, tensors)
    out = tmp_path / "out"
    assert main_of(CONVERT, [str(source), str(out), "--dtype", "float32", "--quiet"]) == 0
    _, params = load_params(out)
    assert_params(params, expected_params(CONFIG, tensors))
    assert (out / "tokenizer.gguf").is_file()


def test_named_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known name stands for its own weights, which then have to be that model's."""
    asked: list[object] = []

    def resolve(name: str, weights: str | None, progress: object) -> Path:
        asked.append((name, weights))
        return source

    monkeypatch.setattr(hub, "resolve_weights", resolve)
    assert main_of(CONVERT, ["smollm2-135m", str(tmp_path / "out"), "--quiet"]) == 2
    assert asked == [("smollm2-135m", None)]
    assert not (tmp_path / "out").exists()


def test_force(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    assert main_of(CONVERT, [str(source), str(out)]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith(f"error: {out} exists already")
    assert "--force" in stderr
    assert (out / "precious").exists()
    # What this command did not write is not its to replace; nothing is loaded before that is said.
    for kept in (out, out / "precious"):
        assert main_of(CONVERT, ["/no/source", str(kept), "--force"]) == 2
        assert f"error: {kept} is no checkpoint that kvjax wrote" in capsys.readouterr().err
    assert (out / "precious").read_text() == "data"
    (out / "precious").unlink()
    for _ in ("an empty folder", "a checkpoint"):
        assert main_of(CONVERT, [str(source), str(out), "--force", "--quiet"]) == 0
        load_params(out)


def test_bad_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0")
    for source in ("bad.gguf", "absent"):
        assert main_of(CONVERT, [str(tmp_path / source), str(tmp_path / "out"), "--quiet"]) == 2
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert stderr.startswith("error: ")
        assert stderr.count("\n") == 1
        assert source in stderr
        assert not (tmp_path / "out").exists()


def test_command_line(source: Path, tmp_path: Path) -> None:
    """As a person runs it: exit codes, one line of error, no traceback."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    help_text = run("--help")
    assert help_text.returncode == 0
    assert "python scripts/convert.py smollm2-135m" in help_text.stdout
    bad = run(str(tmp_path / "absent"), str(tmp_path / "out"))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: ")
    assert bad.stderr.count("\n") == 1


def test_killed_run_leaves_nothing_that_loads(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "result" / "out"
    code = textwrap.dedent(
        f"""
        import runpy, sys, time
        from kvjax.models.weights import orbax_save as orbax

        write = orbax._write_arrays
        def slow(*arguments):
            write(*arguments)
            print("written", flush=True)
            time.sleep(60)
        orbax._write_arrays = slow
        sys.argv = ["convert.py", {str(source)!r}, {str(out)!r}]
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    (left,) = out.parent.iterdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_params(left)
    time.sleep(0.05)
    assert main_of(CONVERT, [str(source), str(out), "--quiet"]) == 0
    assert list(out.parent.iterdir()) == [out]
    load_params(out)
