"""No import runs back up: each layer of the package knows the ones below it, and no other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvjax

ROOT = Path(kvjax.__file__).parent
LAYERS = ("kernels", "cache", "models", "engine", "eval", "serve", "cli")
"""From the lowest to the highest."""
BASE = {"checks", "errors", "extras", "startup"}
"""Modules that anyone may import, and which import nothing but each other."""
TOP = {"__init__", "__main__"}
"""They stand above all: what the package offers, and what it does."""


def imported(path: Path) -> Iterator[str]:
    """Second parts of the names of kvjax's modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "kvjax" and rest:
                yield rest.partition(".")[0]


def test_every_module_has_its_place():
    parts = {path.stem if path.is_file() else path.name for path in ROOT.iterdir()}
    assert parts - {"__pycache__"} == {*LAYERS, *BASE, *TOP}


def test_no_import_runs_back_up():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        if own in TOP:
            continue
        allowed = set(BASE)
        if own in LAYERS:
            allowed |= set(LAYERS[: LAYERS.index(own) + 1])
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in set(imported(path)) - allowed]
    assert wrong == []


def test_benchmarks_and_examples_are_not_imported():
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert "import benchmarks" not in text
        assert "from benchmarks" not in text
