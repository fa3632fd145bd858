"""Files that benchmarks write in the end are looked at before they do anything."""

import pytest

from benchmarks import choice, codecs, documents, long_generation
from kvjax.cli import main_of


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (choice, "--out"),
        (codecs, "--out"),
        (documents, "--out"),
        (documents, "--rows"),
        (long_generation, "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.split(".")[-1],
)
def test_a_file_that_cannot_be_written_is_refused_first(command, option, tmp_path, capsys):
    for name, why in (("/no/such/x.jsonl", "no such folder"), (str(tmp_path), "cannot be written")):
        assert main_of(command.main, [option, name]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {option} ")
        assert why in error
        assert error.count("\n") == 1
