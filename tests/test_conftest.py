"""What a test run begins with."""

import os

from tests.conftest import drop_oldest


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
