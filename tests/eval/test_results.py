"""Results on disk: what a killed run leaves, settings, and rows that are no results."""

import functools
import gzip
import json

import numpy as np
import pytest

from kvjax.cache import get_method
from kvjax.cache.calibration import Calibration
from kvjax.errors import UserError
from kvjax.eval.prompt_codecs import PROMPT_CODECS
from kvjax.eval.results import FIELDS, ResultsFile, key_of, read_results
from kvjax.eval.run import settings_of

SETTINGS = {"model": "tiny", "block_size": 16}


def result(index: int, **values):
    answer = "two\u2028lines\nand a tab\t"
    numbers = dict.fromkeys(("rate", "length", "em", "kvs", "kvs_full", "bytes"), 1)
    seconds = dict.fromkeys(("prefill", "select", "score", "decode"), 0.5)
    names = {"protocol": "prompt", "method": "full", "task": "kv", "metric": "em", "digest": "0"}
    row = {"id": f"r{index}", **names, **numbers, "depth": None, "seconds": seconds}
    return {**row, "answer": answer, **values}


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


def test_a_last_row_that_ends_within_a_letter_is_passed_over(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0), result(1)])
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex("\u2028".encode()) + 1])
    assert [row["id"] for row in read_results(path)] == ["r0"]


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
    for whole in (text + "{}\n" + text, text + "{}\n"):
        path.write_text(whole)
        with pytest.raises(UserError, match=r"line 2 is no result .*: mend or remove it"):
            ResultsFile(path, SETTINGS)
        assert path.read_text() == whole


@pytest.mark.parametrize("text", ['{"id": "mine"}\n', '{"id": "mine"}', "a letter\nof two lines"])
def test_what_others_wrote_stays(tmp_path, text):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"no results? of kvjax evaluate.*give another"):
        ResultsFile(path, SETTINGS)
    assert path.read_text() == text


def test_rows_that_say_too_little_are_named(tmp_path):
    path = tmp_path / "r.jsonl.gz"

    def said(line):
        path.write_bytes(gzip.compress(f"{json.dumps(result(0))}\n{line}\n".encode()))
        with pytest.raises(UserError, match=r"r\.jsonl\.gz line 2 is no result") as caught:
            read_results(path)
        return str(caught.value)

    for name in FIELDS:
        row = {key: value for key, value in result(0).items() if key != name}
        assert f"{name} is missing" in said(json.dumps(row))
        assert f"({name} [])" in said(json.dumps({**row, name: []}))
    assert "seconds {'prefill': 1}" in said(json.dumps(result(0, seconds={"prefill": 1})))
    for name in ("kvs", "kvs_full", "bytes", "bytes_full"):
        assert f"({name} 0 is not more than 0)" in said(json.dumps(result(0, **{name: 0})))
    assert "(score 'x')" in said(json.dumps(result(0, score="x")))
    seconds = result(0)["seconds"] | {"prefill": 0}
    assert "seconds of the prefill: 0" in said(json.dumps(result(0, seconds=seconds)))
    assert "settings 'none'" in said(json.dumps(result(0, settings="none")))
    assert "no JSON object" in said("[1]")
    # What Python's JSON has no room for: a number of many digits, lists of lists of lists.
    for value in ("9" * 5000, "[" * 100_000):
        assert "mend or remove it" in said(value)


def test_a_file_has_one_run_at_a_time(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        with pytest.raises(UserError, match=r"r\.jsonl is in use: another run writes into it"):
            ResultsFile(path, SETTINGS)
        file.add([result(0)])
    with ResultsFile(path, SETTINGS) as file:
        assert len(file.results) == 1


def test_settings_of_methods_count_where_they_are_read(tmp_path):
    names = (*get_method("predicted-reads").calibrated, *PROMPT_CODECS["kvquant4c"].calibrated)

    def calibrated(value, **more):
        return Calibration({n: np.full(2, value, np.float32) for n in (*names, *more)}, "0" * 16)

    a, b = calibrated(1), calibrated(2)
    for label in ("full", "snapkv at 128 tokens in int8", "a method of one's own"):
        assert settings_of(label, a, "small") == {}
    read = settings_of("predicted-reads at 64 tokens in int8", a, None)
    # By what the method reads, whatever else the file has.
    assert read == settings_of("predicted-reads", calibrated(1, other=3), "small")
    assert read["calibration"] != settings_of("predicted-reads", b, None)["calibration"]
    assert {*settings_of("full in kvquant4c", a, None)} == {"levels"}
    assert settings_of("speckv", None, "small") == {"draft": "small"}
    path = tmp_path / "r.jsonl"

    def run(method, calibration=None, draft=None, **given):
        own = functools.partial(settings_of, calibration=calibration, draft=draft)
        with ResultsFile(path, {**SETTINGS, **given}, own) as file:
            file.add([result(len(file.results), method=method)])
            return file.results[-1]["settings"]

    # Added to one another in any order.
    assert run("full") == SETTINGS
    for _ in range(2):
        assert run("predicted-reads", a) == {**SETTINGS, **read}
        assert run("snapkv", a) == SETTINGS
        assert run("speckv") == SETTINGS
    # What such a row was made with is what its method goes on with.
    for method, given, said in (
        ("h2o", {"calibration": b}, f"calibration {read['calibration']}, and this run has "),
        ("speckv", {"draft": "small"}, "draft None, and this run has small"),
        ("h2o", {"paper": "mine"}, "paper None, and this run has mine"),
    ):
        with pytest.raises(UserError, match=said):
            run(method, **given)
    # Of rows from before, which had all settings of their run.
    path.write_text(json.dumps(result(0, settings={**SETTINGS, "calibration": "a"})) + "\n")
    assert run("predicted-reads", b)["calibration"]


def test_weights_of_one_name_are_told_apart(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, {**SETTINGS, "fingerprint": "a"}) as file:
        file.add([result(0)])
    with pytest.raises(UserError, match="fingerprint a, and this run has b"):
        ResultsFile(path, {**SETTINGS, "fingerprint": "b"})
    # Rows from before do not say.
    path.write_text(json.dumps(result(0, settings=SETTINGS)) + "\n")
    with ResultsFile(path, {**SETTINGS, "fingerprint": "b"}) as file:
        assert len(file.results) == 1


@pytest.mark.parametrize("size", [1, 20, 200])
def test_what_is_left_of_a_first_row_is_computed_again(tmp_path, size):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0)])
    whole = path.read_text()
    path.write_text(whole[:size])
    with ResultsFile(path, SETTINGS) as file:
        assert file.results == []
        file.add([result(0)])
    assert path.read_text() == whole


def test_a_row_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text((json.dumps(result(0)) + "\n") * 2)
    with pytest.raises(UserError, match=r"line 2 .*\(line 1 has the same prompt, protocol, method"):
        read_results(path)


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
