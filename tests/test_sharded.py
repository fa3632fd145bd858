"""Runs tests/sharded in processes whose CPU looks like several devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "sharded"
DEVICES = 8
ALL_SLOW = {"test_smollm2"}
PARTLY_SLOW = {"test_engine", "test_budget", "test_passes", "test_calibration", "test_weights"}
LONGER = {"test_budget", "test_calibration", "test_collectives", "test_weights"}
"""What of them is not slow by itself takes a minute or two together."""
FILES = {path.stem for path in FOLDER.glob("test_*.py")}


def marked(names: set[str], slow: set[str]) -> list:
    """Names as parameters, those of `slow` with its mark."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in slow else [])
        for name in sorted(names)
    ]


def run(which: str, mark: str) -> None:
    """The tests of a file with a marker expression."""
    # Programs are small: compiling them is what takes the time.
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES} "
        "--xla_llvm_disable_expensive_passes=true"
    )
    environment = {**os.environ, "XLA_FLAGS": flags, "KVJAX_FAKE_DEVICES": str(DEVICES)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", mark]
    done = subprocess.run(
        [*command, str(FOLDER / f"{which}.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("which", marked(FILES - ALL_SLOW, LONGER))
def test_on_several_devices(which):
    run(which, "not slow")


@pytest.mark.parametrize("which", marked(ALL_SLOW | PARTLY_SLOW, FILES))
def test_more_on_several_devices(which):
    run(which, "slow")
