"""The kernels' scripts: what they say about bad input, and a run at small sizes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.cli import main_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(name: str, *arguments: str) -> int:
    """The exit code of a script run in this process."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return main_of(module.main, list(arguments))
    finally:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("bench_kernels", ["--only", "speed"], "invalid choice: 'speed'"),
        ("bench_kernels", ["--out", "/no/such/folder/x.json"], "/no/such/folder does not exist"),
        ("compile_kernels", [], "required: --target"),
        ("compile_kernels", ["--target", "gtx"], "invalid choice: 'gtx'"),
    ],
)
def test_bad_input_is_one_line(script: str, arguments: list[str], message: str, capsys) -> None:
    assert run(script, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_missing_toolchain_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = (SCRIPTS / "compile_kernels.py").read_text()
    scope: dict = {"__name__": "compile_kernels"}
    exec(compile(source, "compile_kernels.py", "exec"), scope)
    assert main_of(scope["main"], ["--target", "v5e"]) == 2
    assert "needs libtpu: pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_check_runs_at_small_sizes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    command = [str(SCRIPTS / "gpu_check.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps = {step["step"]: step["exit_code"] for step in summary["steps"]}
    assert [steps[name] for name in ("check", "kernels", "decode_step")] == [0, 0, 0], done.stdout
    checks = json.loads((tmp_path / "out" / "check.json").read_text())["results"]
    assert checks
    assert all(check["good"] for check in checks)
