"""The package as installed."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kvjax

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvjax.__version__)


def test_records_are_quiet_until_somebody_listens():
    say = "import logging, kvjax; {}; logging.getLogger('kvjax.engine').error('a record')"
    for setting, expected in (
        ("pass", ""),
        ("logging.basicConfig(format='%(message)s')", "a record\n"),
    ):
        command = [sys.executable, "-c", say.format(setting)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == expected


def test_a_wheel_has_every_module_and_its_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["kvjax"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    # What setuptools takes for packages.
    assert project["tool"]["setuptools"]["packages"]["find"] == {"include": ["kvjax*"]}
    folders = {path.parent for path in (ROOT / "kvjax").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_pictures_and_evaluation_come_with_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = " ".join(project["dependencies"])
    for extra, packages in (("plots", ["matplotlib"]), ("eval", ["rouge"])):
        held = " ".join(project["optional-dependencies"][extra])
        for package in packages:
            assert package in held
            assert package not in needed
