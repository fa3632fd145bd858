"""What a test run begins with."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import drop_oldest, pytest_collection_modifyitems


def part(given: str) -> tuple[list[str], list[str]]:
    """Names of the tests of a part of two hundred, and of those that are left out."""
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption=lambda _: given, hook=hook)
    items: list[Any] = [
        SimpleNamespace(nodeid=f"tests/test_a.py::test_b[{i}]", path=Path("tests/test_a.py"))
        for i in range(200)
    ]
    pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items], [item.nodeid for item in left]


def test_parts_are_the_whole_and_about_as_large():
    whole, none = part("1/1")
    assert len(whole) == 200
    assert not none
    ran = []
    for i in range(1, 4):
        mine, others = part(f"{i}/3")
        assert sorted(mine + others) == sorted(whole)
        assert 40 < len(mine) < 90
        ran += mine
    assert sorted(ran) == sorted(whole)


@pytest.mark.parametrize("given", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_other_parts_are_refused(given):
    with pytest.raises(pytest.UsageError, match=f"--part {given}: give for instance 1/2"):
        part(given)


def test_compiled_programs_are_kept_up_to_a_size_the_newest_first(tmp_path):
    for age, name in enumerate(("new", "older", "oldest")):
        path = tmp_path / name
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "newest").symlink_to(tmp_path / "gone already")
    drop_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir() if path.exists()) == ["new", "older"]
    drop_oldest(tmp_path, 99)
    assert not [path for path in tmp_path.iterdir() if path.exists()]
