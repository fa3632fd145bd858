"""Results on disk: what a killed run leaves, settings, and rows that are no results."""

import pytest

from kvjax.errors import UserError
from kvjax.eval.results import ResultsFile, key_of, read_results

SETTINGS = {"model": "tiny", "block_size": 16}


def result(index: int, **values):
    answer = "two\u2028lines\nand a tab\t"
    return {"id": f"r{index}", "protocol": "prompt", "method": "full", "rate": 1, **values} | {
        "answer": answer
    }


def test_rows_survive_and_are_known_again(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0), result(1)])
        assert file.has(("r1", "prompt", "full", 1.0))
        assert not file.has(("r1", "question", "full", 1.0))
    with ResultsFile(path, SETTINGS) as file:
        assert [key_of(row)[0] for row in file.results] == ["r0", "r1"]
        file.add([result(2)])
    assert [row["id"] for row in read_results(path)] == ["r0", "r1", "r2"]
    assert read_results(path)[0]["answer"] == result(0)["answer"]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_half_written_last_row_is_computed_again(tmp_path, kept):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0), result(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    # Cut in the row, in its last character, or just before its line end.
    path.write_bytes(lines[0] + lines[1][:kept])
    with ResultsFile(path, SETTINGS) as file:
        assert not file.has(("r1", "prompt", "full", 1.0))
        file.add([result(1)])
    assert path.read_bytes() == b"".join(lines)


def test_a_broken_row_in_the_middle_is_not_guessed_at(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0)])
    text = path.read_text()
    path.write_text(text + "{}\n" + text)
    with pytest.raises(UserError, match="line 2 is no result"):
        ResultsFile(path, SETTINGS)


def test_other_settings_do_not_mix(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0)])
    with pytest.raises(UserError, match="block_size 16, and this run has 8"):
        ResultsFile(path, {**SETTINGS, "block_size": 8})
    with pytest.raises(UserError, match="without"):
        ResultsFile(tmp_path / "r.jsonl.gz", SETTINGS)
    with pytest.raises(UserError, match="cannot write"):
        ResultsFile(tmp_path / "nowhere" / "r.jsonl", SETTINGS)
