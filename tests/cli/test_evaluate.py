"""`kvjax evaluate` as its user meets it."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvjax.cache.calibration import Calibration
from kvjax.cache.config import UNCALIBRATED
from kvjax.cache.methods.duo_heads import HEAD_BUDGET
from kvjax.cli import evaluate, main_of
from kvjax.cli.main import run_command
from kvjax.eval import run as runs
from kvjax.models import load_model
from tests.scripts.conftest import SCRIPTS
from tests.tiny import TINY

EVALUATE = functools.partial(run_command, "evaluate")
SMALL = ("--length", 300, "--rows", 2, "--rates", "2,4", "--methods", "kv-compress", "--batch", 4)


@pytest.fixture
def tiny(tiny_folder, capsys, tmp_path):
    """Runs the command on the tiny checkpoint; returns exit code, stdout and stderr."""

    def run(*arguments):
        given = ("--weights", tiny_folder, "--out", tmp_path / "r.jsonl", *SMALL, *arguments)
        code = main_of(EVALUATE, [str(argument) for argument in given])
        return code, *capsys.readouterr()

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path):
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = {
        "id": "a",
        "task": "mine",
        "length": 50,
        "head": "",
        "context": "one two three " * 4,
        "question": "which?",
        "suffix": ".",
        "answer_prefix": "",
        "target": " four",
    }
    path.write_text("\n".join([json.dumps(row), "nonsense", json.dumps({**row, "id": "b"})]))
    return path


def test_tasks_give_one_row_each_and_a_table(tiny, tmp_path):
    code, out, err = tiny("--tasks", "needle,kv")
    assert code == 0, err
    rows = read(tmp_path / "r.jsonl")
    keys = {(r["id"], r["protocol"], r["method"], r["rate"]) for r in rows}
    assert len(keys) == len(rows) == 2 * 2 * 3
    assert rows[0]["method"] == "full"
    for row in rows:
        assert row["kvs"] <= row["kvs_full"]
        assert row["settings"]["block_size"] == 16
        assert {"em", "nll", "kl", "agree", "recall", "bytes", "seconds"} <= set(row)
        # What a server gets, unless another protocol is asked for.
        assert row["protocol"] == "chat"
        assert row["compressed_tokens"] < row["prompt_tokens"]
        assert isinstance(row["free_answer"], str)
        assert row["free"] in (0.0, 1.0)
        assert row["settings"]["free_tokens"] == 32
    page = (tmp_path / "r.md").read_text()
    assert "## The full cache" in out
    assert "## Every line" in page
    assert page.count("| needle") >= 3
    detailed = [row for row in rows if "kept" in row]
    assert len(detailed) == len(rows) / 2


def test_prompt_files_are_read_and_bad_rows_counted(tiny, prompts, tmp_path):
    given = ("--protocols", "prompt,agnostic,chat", "--free-tokens", 3)
    code, out, err = tiny("--prompts", prompts, *given)
    assert code == 0, err
    rows = read(tmp_path / "r.jsonl")
    assert {(row["id"], row["protocol"]) for row in rows} == {
        (name, protocol) for name in "ab" for protocol in ("prompt", "agnostic", "chat")
    }
    # Nothing is given of these answers: also `prompt` has one of its own. A token is a byte.
    assert all(len(row["free_answer"].encode()) <= 3 * len("\ufffd".encode()) for row in rows)
    order = [
        name for line in out.splitlines() for name in re.findall(r"\| mine \S* *\| (\w+)", line)
    ]
    assert list(dict.fromkeys(order)) == ["chat", "agnostic", "prompt"]
    assert {row["task"] for row in read(tmp_path / "r.jsonl")} == {"mine"}
    assert "skipped mine.jsonl row 2: no JSON" in err
    assert "1 rows skipped" in err
    assert "rows skipped: 1" in (tmp_path / "r.md").read_text()


def test_a_run_goes_on_where_it_was(tiny, prompts, tmp_path):
    assert tiny("--prompts", prompts)[0] == 0
    out = tmp_path / "r.jsonl"
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    code, _, err = tiny("--prompts", prompts)
    assert code == 0
    assert f"{len(lines) - 2} results" in err
    assert "2 from before" in err
    rows = {(r["id"], r["method"], r["rate"]): r for r in read(out)}
    first = {(r["id"], r["method"], r["rate"]): r for r in map(json.loads, lines)}
    assert {k: without_times([r]) for k, r in rows.items()} == {
        k: without_times([r]) for k, r in first.items()
    }
    code, _, err = tiny("--prompts", prompts)
    assert "0 results" in err


@pytest.mark.slow
def test_types_of_keys_and_values_are_compared_by_their_bytes(tiny, prompts, tmp_path):
    code, out, err = tiny("--prompts", prompts, "--rates", "2", "--kv-dtype", "float32,int8")
    assert code == 0, err
    rows = {(r["id"], r["method"], r["rate"]): r for r in read(tmp_path / "r.jsonl")}
    names = [("full", 1.0)]
    names += [
        (f"{m} in {t}", r)
        for t in ("float32", "int8")
        for m, r in (("full", 1.0), ("kv-compress", 2.0))
    ]
    assert set(rows) == {(row, *name) for row in "ab" for name in names}
    full, coded = rows["a", "full", 1.0], rows["a", "full in int8", 1.0]
    assert rows["a", "full in float32", 1.0]["nll"] == pytest.approx(full["nll"], abs=1e-5)
    # 8 numbers of a byte and a scale, twice, beside metric and position.
    assert coded["bytes"] * (2 * 8 * 4 + 8) == full["bytes"] * (2 * (8 + 2) + 8)
    assert coded["bytes_full"] == full["bytes_full"] == full["bytes"]
    assert coded["kvs"] == full["kvs"]
    assert 0 < abs(coded["nll"] - full["nll"]) < 0.1
    assert (
        rows["a", "kv-compress in int8", 2.0]["kvs"]
        == rows["a", "kv-compress in float32", 2.0]["kvs"]
    )
    assert "## Fewer bytes" in out
    fewer = re.findall(
        r"^\| (full in int8) \| ([\d.]+) ", out.split("## Fewer bytes")[1], re.MULTILINE
    )
    assert fewer == [("full in int8", f"{72 / 28:.1f}")]
    code, _, err = tiny("--prompts", prompts, "--rates", "2", "--kv-dtype", "int8,float32")
    assert code == 0
    assert "0 results" in err


@pytest.mark.slow
def test_another_model_drafts(tiny, tiny_folder, prompts, tmp_path):
    given = ("--prompts", prompts, "--rates", 1.5, "--methods", "speckv,kvzip")
    code, _, err = tiny(*given, "--draft", tiny_folder)
    assert code == 0, err
    found = read(tmp_path / "r.jsonl")
    assert {one["method"] for one in found} == {"full", "speckv", "kvzip"}
    drafts = {one["method"]: one["settings"].get("draft") for one in found}
    assert drafts == {"full": None, "speckv": str(tiny_folder), "kvzip": None}


@pytest.mark.slow
def test_prompts_stored_whole_are_compared_by_their_bytes(tiny, prompts, tmp_path):
    given = ("--prompts", prompts, "--methods", "full", "--free-tokens", 0)
    code, out, err = tiny(*given, "--kv-dtype", "int8,xkv,kcvt4")
    assert code == 0, err
    rows = {(r["id"], r["method"]): r for r in read(tmp_path / "r.jsonl")}
    names = ["full", *(f"full in {name}" for name in ("int8", "xkv", "kcvt4"))]
    assert set(rows) == {(row, name) for row in "ab" for name in names}
    row = rows["a", "full in xkv"]
    tokens = row["compressed_tokens"]
    # Ranks 4 and 6 of the 32 columns of both layers, beside eight bytes of numbers per KV.
    assert row["bytes"] == 2 * (tokens + 32) * (4 + 6) + 8 * row["kvs"]
    assert row["kvs"] == row["kvs_full"] == 4 * tokens
    assert row["rate"] == 1.0
    assert "| full in kcvt4 |" in out.split("## Fewer bytes")[1]


def test_the_usual_method_is_that_of_decode(tiny, prompts, tmp_path, monkeypatch):
    """What a calibration decides, once the model is there."""
    given = ("--prompts", prompts, "--rates", "2", "--methods", "auto")
    assert evaluate.USUAL["methods"] == "auto"
    assert tiny(*given)[0] == 0
    monkeypatch.setattr(evaluate, "chosen_method", lambda *_: "tova")
    assert tiny(*given)[0] == 0
    methods = {row["method"] for row in read(tmp_path / "r.jsonl")}
    assert methods == {"full", UNCALIBRATED, "tova"}


def test_more_methods_and_rates_are_added_to_a_file(tiny, prompts, tmp_path):
    assert tiny("--prompts", prompts, "--rates", "2")[0] == 0
    assert tiny("--prompts", prompts, "--rates", "2,8")[0] == 0
    rows = read(tmp_path / "r.jsonl")
    assert sorted((r["id"], r["rate"]) for r in rows) == [
        (name, rate) for name in "ab" for rate in (1.0, 2.0, 8.0)
    ]


def test_calibrated_methods_are_added_to_a_file_of_others_and_the_reverse(
    tiny, tiny_folder, prompts, tmp_path
):
    fingerprint = load_model(weights=str(tiny_folder), dtype="float32").fingerprint

    def run(method, data):
        file = tmp_path / f"{data}.safetensors"
        budget = np.full((2, 2), {"mine": 1, "yours": 2}[data], np.float32)
        Calibration({HEAD_BUDGET: budget}, fingerprint, {"data": "the same texts"}).save(file)
        given = ("--prompts", prompts, "--rates", 2, "--methods", method, "--calibration", file)
        return tiny(*given, "--free-tokens", 0)

    for method, data in (("kv-compress", "mine"), ("duo-heads", "mine"), ("snapkv", "yours")):
        assert run(method, data)[0] == 0
    found = {row["method"]: row["settings"] for row in read(tmp_path / "r.jsonl")}
    assert set(found) == {"full", "kv-compress", "duo-heads", "snapkv"}
    assert [name for name in found if "calibration" in found[name]] == ["duo-heads"]
    mine, yours = (
        Calibration.load(tmp_path / f"{x}.safetensors").digest() for x in ("mine", "yours")
    )
    assert found["duo-heads"]["calibration"] == mine
    code, _, err = run("duo-heads", "yours")
    assert (code, f"calibration {mine}, and this run has {yours}" in err) == (2, True)


def test_prompts_that_are_scored_otherwise_are_others(tiny, prompts, tmp_path):
    given = ("--prompts", prompts, "--rates", 2, "--methods", "tova", "--free-tokens", 0)
    assert tiny(*given)[0] == 0
    code, _, err = tiny(*given, "--weight-dtype", "int8")
    assert (code, "weight_dtype None, and this run has int8" in err) == (2, True)
    rows = [json.loads(line) for line in prompts.read_text().splitlines() if line[:1] == "{"]
    prompts.write_text("\n".join(json.dumps({**row, "answers": ["five"]}) for row in rows))
    code, _, err = tiny(*given, "--rates", "2,4")
    assert (code, "results of a with another metric, other answers" in err) == (2, True)
    code, _, err = tiny(*given, "--block-size", 10**8)
    assert (code, "block_size 100000000: give a whole number from 1 to 4096" in err) == (2, True)


def test_too_long_prompts_are_shortened_and_say_so(tiny, tmp_path):
    code, _, err = tiny("--tasks", "needle", "--context-length", 150)
    assert code == 0, err
    for row in read(tmp_path / "r.jsonl"):
        assert row["removed_tokens"] > 0
        assert row["prompt_tokens"] + row["target_tokens"] == 150
    assert "middle cut out: 2" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tasks", "nedle"), "did you mean needle"),
        (("--methods", "kv-compres"), "did you mean kv-compress"),
        (("--rates", "0.5"), "rate 0.5"),
        (("--rates", "x"), "give numbers"),
        (("--rates", ","), "give at least one"),
        (("--protocols", "promt"), "no protocol 'promt'"),
        (("--length", "8"), "lengths (8,)"),
        (("--rows", "0"), "rows 0"),
        (("--batch", "0"), "--batch 0: give a whole number from 1"),
        (("--free-tokens", "-1"), "free_tokens -1"),
        (("--data", "/no/such/folder"), "no such folder"),
        (("--haystack", "/no/such/text"), "there is no /no/such/text"),
        (("--data", "/dev", "--tasks", "longbench"), "no /dev/longbench, which the task longbench"),
        (
            ("--data", "/dev", "--tasks", "ruler-vt"),
            "no /dev/needle, which the task ruler-vt needs",
        ),
        (("--data", "/dev", "--tasks", "five"), "no /dev/needle, which the task five needs"),
        (("--tasks", "xsum"), "give --xsum or --data"),
        (("--prompts", "/no/such/prompts"), "No such file"),
        (("--out", "/no/such/folder/r.jsonl"), "no such folder"),
        (("--out", "/dev"), "--out '/dev': it is there and cannot be written"),
        (("--out", "/dev/null"), "--out '/dev/null': give a file"),
        (("--table", "/dev"), "--table '/dev': it is there and cannot be written"),
        (("--details", "-1"), "--details -1"),
        (("--length", "99999999999"), "lengths (99999999999,): give numbers from 32 to"),
        (("--draft", "small"), "--draft 'small': no method here looks ahead"),
        (("--model", "lama3-8b"), "llama3-8b"),
        (("--context-length", "10"), "no row is left"),
        (("--tensor-parallel", "0"), "tensor_parallel 0"),
        (("--tensor-parallel", "2"), "this process has 1 of kind cpu; give at most 1"),
        (
            ("--tensor-parallel", "2", "--methods", "snapkv,tova"),
            "method tova with tensor_parallel",
        ),
        (("--kv-replicas", "2"), "kv_replicas 2 with tensor_parallel 1"),
        (("--kv-dtype", "int8,gear4"), "gear4 stores all KVs of a prompt, and kv-compress leaves"),
        (
            ("--kv-dtype", "gear4", "--methods", "full", "--tensor-parallel", "2"),
            "gear4 looks at all heads of a prompt, which 2 devices share",
        ),
        (("--kv-dtype", "gear5"), "cache_dtype 'gear5': give one of"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_input_gets_one_line(tiny, arguments, says):
    code, _, err = tiny(*arguments)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in err


def test_no_file_of_a_run_is_lost_to_another(tiny, prompts, tmp_path):
    page, kept = tmp_path / "r.md", prompts.read_text()
    page.write_text("a haystack")
    (tmp_path / "x").mkdir()
    for given, option, other in (
        (("--out", page), "--out", "the Markdown page (--table)"),
        (("--table", tmp_path / "x" / ".." / "r.jsonl"), "--out", "the Markdown page (--table)"),
        (("--out", prompts), "--out", "--prompts"),
        (("--table", prompts), "--table", "--prompts"),
        (("--haystack", page), "--table", "--haystack"),
    ):
        code, _, err = tiny("--prompts", prompts, *given)
        assert (code, err.startswith(f"error: {option} '/")) == (2, True)
        assert err.endswith(f": that is {other}, too; give another name\n")
        assert (prompts.read_text(), page.read_text()) == (kept, "a haystack")
    code, _, err = tiny("--prompts", prompts)
    assert (code, "r.md, which holds something else: give --table" in err) == (2, True)
    assert page.read_text() == "a haystack"


def test_the_page_is_told_even_where_it_cannot_be_written(tiny, prompts, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "r.md")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = tiny("--prompts", prompts, "--free-tokens", 0)
    assert (code, "error: r.md: No space left" in err) == (2, True)
    assert "## The full cache" in out


def test_blocks_are_small_where_little_is_kept_and_stay_what_they_were(tiny, prompts, tmp_path):
    def blocks():
        return {row["settings"]["block_size"] for row in read(tmp_path / "r.jsonl")}

    def run(*arguments):
        assert tiny("--prompts", prompts, "--free-tokens", 0, *arguments)[0] == 0

    # Of prompts of some sixty tokens.
    run("--rates", 1.2)
    assert blocks() == {16}
    run("--rates", 4)
    assert blocks() == {16}
    (tmp_path / "r.jsonl").unlink()
    run("--rates", "1.2,4")
    assert blocks() == {8}
    (tmp_path / "r.jsonl").unlink()
    run("--rates", "1.2,4", "--floor", 48)
    assert blocks() == {16}


def test_other_settings_and_other_prompts_are_refused(tiny, prompts):
    assert tiny("--prompts", prompts)[0] == 0
    code, _, err = tiny("--prompts", prompts, "--block-size", 4)
    assert code == 2
    assert "block_size 8, and this run has 4" in err
    code, _, err = tiny("--prompts", prompts, "--free-tokens", 0)
    assert code == 2
    assert "free_tokens 32, and this run has 0" in err
    prompts.write_text(prompts.read_text().replace("one two", "two one"))
    code, _, err = tiny("--prompts", prompts)
    assert code == 2
    assert "another prompt with the id a" in err


def test_of_several_methods_those_run_whose_arrays_there_are(
    tiny, tiny_folder, prompts, tmp_path, monkeypatch
):
    few = "kv-compress,duo-heads,triattention"
    monkeypatch.setattr(evaluate, "SEVERAL", ("all", few))
    fingerprint = load_model(weights=str(tiny_folder), dtype="float32").fingerprint
    file = tmp_path / "heads.safetensors"
    Calibration({HEAD_BUDGET: np.ones((2, 2), np.float32)}, fingerprint).save(file)
    given = ("--prompts", prompts, "--rates", 2, "--methods", few, "--free-tokens", 0)
    for calibration, run, left in (
        ("auto", {"full", "kv-compress"}, "duo-heads, triattention"),
        (file, {"full", "kv-compress", "duo-heads"}, "triattention"),
    ):
        code, _, err = tiny(*given, "--calibration", calibration)
        assert code == 0, err
        assert {row["method"] for row in read(tmp_path / "r.jsonl")} == run
        (told,) = [line for line in err.splitlines() if line.startswith("left out, as they need")]
        assert told.endswith(f"makes: {left}")
    # One that is named is never left out.
    code, _, err = tiny(*given, "--methods", "triattention", "--calibration", file)
    assert (code, "triattention" in err) == (2, True)


@pytest.mark.slow
def test_dummy_weights_run(capsys, tmp_path, monkeypatch):
    from kvjax.models import config

    entry = config.MODELS["smollm2-135m"]
    small = type(entry)(**{**entry.__dict__, "config": TINY})
    monkeypatch.setitem(config.MODELS, "smollm2-135m", small)
    arguments = ("--dummy-weights", "--tasks", "kv", "--out", tmp_path / "r.jsonl", *SMALL)
    assert main_of(EVALUATE, [str(argument) for argument in arguments]) == 0, capsys
    assert len(read(tmp_path / "r.jsonl")) == 2 * 3


def test_an_interruption_that_arrives_as_another_error_is_one(tiny, prompts, monkeypatch, tmp_path):
    """As JAX gives it that comes while it compares arguments."""
    run_all = runs.run

    def interrupted(*arguments):
        run_all(*arguments)
        raise ValueError("Exception raised while checking equality") from KeyboardInterrupt()

    monkeypatch.setattr(runs, "run", interrupted)
    code, out, err = tiny("--prompts", prompts)
    assert code == 130
    assert "goes on from here" in err
    assert "# Cache compression compared" in out
    assert read(tmp_path / "r.jsonl")


def test_an_interruption_keeps_what_there_is(tiny_folder, tmp_path):
    out = tmp_path / "r.jsonl"
    command = [sys.executable, SCRIPTS / "evaluate.py", "--weights", tiny_folder, "--out", out]
    command += ["--tasks", "needle", *SMALL[:2], "--rows", 500, "--rates", "2", "--batch", 2]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    # Before the work it is tried whether there can be such a file, and the trial is removed.
    while process.poll() is None and not written(out):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "goes on from here" in err
    assert read(out)
