"""A skip that nobody expects makes a run fail where it must: in continuous integration."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TESTS = """
import pytest

@pytest.fixture
def gpu():
    pytest.skip("needs a GPU of compute capability 9")

@pytest.mark.skipif(True, reason="development data absent: /data")
def test_expected_mark():
    pass

def test_expected_fixture(gpu):
    pass

@pytest.mark.xfail(strict=True)
def test_expected_failure():
    assert False

def test_that_runs():
    pass
"""
WITH_SKIPS = """
@pytest.fixture
def weights():
    pytest.skip("SmolLM2-135M-Instruct GGUF not cached (python -m kvjax fetch smollm2-135m)")

def test_fixture(weights):
    pass

@pytest.mark.skip(reason="later")
def test_mark():
    pass
"""
MODULE = """
import pytest

pytest.importorskip("no_such_library")

def test_nothing():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs a suite of these modules with this repository's conftest.py; exit code and output."""
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests" / "conftest.py").read_text())

    def run_suite(environment: dict[str, str], *modules: str) -> tuple[int, str]:
        for old in tmp_path.glob("test_*.py"):
            old.unlink()
        for i, text in enumerate(modules):
            (tmp_path / f"test_{i}.py").write_text(text)
        given = {k: v for k, v in os.environ.items() if k not in ("CI", "KVJAX_NO_SKIPS")}
        given |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rf"]
        done = subprocess.run(
            [*command, f"--rootdir={tmp_path}", "-c", os.devnull, str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=given,
        )
        return done.returncode, done.stdout

    return run_suite


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"KVJAX_NO_SKIPS": "1"}])
def test_unexpected_skips_fail(run, environment):
    code, out = run(environment, TESTS + WITH_SKIPS)
    assert code == 1
    assert "1 passed, 2 skipped, 1 xfailed, 2 errors" in out
    assert "skipped: SmolLM2-135M-Instruct GGUF not cached" in out
    assert "skipped: later" in out


def test_an_unexpected_skip_of_a_whole_module_fails(run):
    code, out = run({"CI": "true"}, TESTS, MODULE)
    assert code != 0
    assert "no_such_library" in out


def test_expected_skips_pass(run):
    code, out = run({"CI": "true"}, TESTS)
    assert code == 0
    assert "1 passed, 2 skipped, 1 xfailed" in out


def test_elsewhere_skips_are_only_told(run):
    for environment in ({}, {"CI": "false", "KVJAX_NO_SKIPS": "0"}):
        assert run(environment, TESTS + WITH_SKIPS, MODULE)[0] == 0
