"""Runs tests/sharded in processes whose CPU looks like several devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "sharded"
DEVICES = 4
SLOW = {"test_smollm2"}
FILES = [
    pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
    for path in sorted(FOLDER.glob("test_*.py"))
]


@pytest.mark.parametrize("which", FILES)
def test_on_several_devices(which):
    # Programs are small: compiling them is what takes the time.
    flags = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    environment = {**os.environ, "XLA_FLAGS": flags, "KVJAX_FAKE_DEVICES": str(DEVICES)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(
        [*command, str(FOLDER / f"{which}.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
