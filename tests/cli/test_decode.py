"""`kvjax decode` as its user meets it: what it prints, and what it says of bad input."""

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvjax.cache import get_method
from kvjax.cache.calibration import Calibration
from kvjax.cache.config import CALIBRATED, UNCALIBRATED
from kvjax.cli import Progress, main_of
from kvjax.cli.main import run_command
from kvjax.cli.models import chosen_calibration, chosen_method
from kvjax.engine.calibrate import shelf
from kvjax.engine.worker import Worker
from kvjax.models import load_model
from tests.scripts.conftest import SCRIPTS
from tests.tiny import TINY

HEADS = TINY.num_layers * TINY.num_kv_heads
TEXT = "It was the best of times, it was the worst of times. " * 12
DECODE = functools.partial(run_command, "decode")


def decode(capsys, *arguments):
    """Exit code, stdout and stderr of a run."""
    code = main_of(DECODE, [str(a) for a in arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def tiny(tiny_folder, capsys):
    """Runs the command on the tiny checkpoint."""

    def run(*arguments, prompt=TEXT):
        given = ("--weights", tiny_folder, "--max-new-tokens", 12, "--ignore-eos")
        text = () if prompt is None else ("--prompt", prompt)
        return decode(capsys, *given, *text, *arguments)

    return run


def test_json_says_all_there_is_to_say(tiny, tmp_path):
    picture = tmp_path / "kept.png"
    code, out, err = tiny("--max-cache-tokens", 64, "--json", "--plot", picture)
    assert code == 0, err
    result = json.loads(out)
    length = len(TEXT.encode())
    assert result["prompt_tokens"] == length
    assert result["generated_tokens"] == 12
    assert result["finish_reason"] == "length"
    assert result["kvs_before"] == HEADS * length
    assert result["blocks_before"] == HEADS * -(-length // 16)
    assert result["blocks_after"] == HEADS * 64 // 16
    block = 16 * (2 * TINY.head_dim * 4 + 8)
    assert result["bytes_after"] == result["blocks_after"] * block
    assert sum(map(sum, result["kept_per_layer_head"])) == result["kvs_after"]
    assert result["achieved_rate"] == result["kvs_before"] / result["kvs_after"]
    assert set(result["seconds"]) == {"load", "compile", "prefill", "compress", "decode"}
    for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        assert result[key] > 0
    assert result["text"] in err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_another_model_drafts(tiny, tiny_folder):
    given = ("--method", "speckv", "--max-cache-tokens", 64, "--json")
    code, out, err = tiny(*given, "--draft", tiny_folder)
    assert code == 0, err
    assert json.loads(out)["seconds"]["probe"] > 0
    code, _, err = tiny(*given, "--draft", "nowhere")
    assert code == 2
    assert "nowhere" in err.strip().splitlines()[-1]


def test_fewer_bits_are_fewer_bytes_of_as_many_kvs(tiny):
    found = []
    for stored in ("float32", "int8"):
        code, out, err = tiny("--max-cache-tokens", 64, "--json", "--kv-dtype", stored)
        assert code == 0, err
        assert f"KVs in {stored}" in err
        found.append(json.loads(out))
    plain, coded = found
    assert (plain["dtype"], coded["dtype"]) == ("float32", "int8")
    assert plain["kvs_after"] == coded["kvs_after"]
    assert plain["bytes_before"] == coded["bytes_before"]
    # 8 numbers of a byte and a scale, twice, beside metric and position.
    each = 2 * (8 + 2) + 8, 2 * 8 * 4 + 8
    assert coded["bytes_after"] * each[1] == plain["bytes_after"] * each[0]


def test_text_alone_goes_to_stdout(tiny):
    code, out, err = tiny("--rate", 4)
    assert code == 0
    assert out.endswith("\n")
    assert "smaller by" in err
    assert "smaller by" not in out


def test_a_prompt_file_and_stdin_are_the_prompt(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    from_option = tiny("--json")[1]
    from_file = tiny("--json", "--prompt-file", file, prompt=None)[1]
    assert json.loads(from_file)["text"] == json.loads(from_option)["text"]
    file.write_text(TEXT, encoding="utf-8-sig")
    marked = json.loads(tiny("--json", "--prompt-file", file, prompt=None)[1])
    assert marked["prompt_tokens"] == json.loads(from_option)["prompt_tokens"]


def test_the_same_seed_gives_the_same_text(tiny):
    runs = [
        json.loads(tiny("--json", "--temperature", 1, "--seed", seed)[1])["text"]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.slow
def test_chunks_and_triggers_can_be_combined(tiny):
    code, out, err = tiny(
        *("--json", "--max-cache-tokens", 64, "--prefill-chunk", 128, "--compress-every", 4),
        *("--method", "kv-compress-continual", "--sinks", 4, "--block-size", 8),
        *("--window", 16, "--max-new-tokens", 40),
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["blocks_evicted_decoding"] > 0
    assert result["peak_blocks"] < result["blocks_before"]


def test_a_pool_that_would_run_full_is_refused_with_the_size_that_does(tiny):
    arguments = ("--max-cache-tokens", 64, "--max-new-tokens", 200)
    code, _, err = tiny(*arguments, "--pool-tokens", 64)
    assert code == 2
    size = re.search(r"give a pool of (\d+) tokens", err.splitlines()[-1])
    assert size is not None
    code, out, _ = tiny(*arguments, "--pool-tokens", size[1], "--json")
    assert code == 0
    assert json.loads(out)["generated_tokens"] == 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "lama3-8b"), "llama3-8b"),
        (("--method", "kv-compres"), "kv-compress"),
        (("--rate", "0.5"), "rate 0.5"),
        (("--rate", "nan"), "rate nan"),
        (("--rate", "x"), "'x'"),
        (("--rate", "8", "--max-cache-tokens", "64"), "give one of them"),
        (("--max-cache-tokens", "0"), "max_cache_tokens 0"),
        (("--method", "kv-compress", "--max-cache-tokens", "4"), "smaller than the 8 tokens"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "x", "--prompt-file", "y"), "give one of them"),
        (("--prompt", "x" * 3000), "is 2048: shorten the prompt to 2036 tokens"),
        (("--max-new-tokens", "100000000"), "is 2048: give at most --max-new-tokens 1412 or give"),
        (
            ("--max-new-tokens", "100000000", "--prompt", "x" * 3000),
            "shorten the prompt and give fewer --max-new-tokens or give --context-length",
        ),
        (("--pool-tokens", "16", "--rate", "2"), "needs"),
        (("--pool-tokens", "0"), "pool_tokens 0"),
        (("--block-size", "12"), "power of two"),
        (("--max-new-tokens", "0"), "max_tokens 0"),
        (("--temperature", "-1"), "temperature -1.0"),
        (("--top-p", "2"), "top_p 2.0"),
        (("--prefill-chunk", "8"), "prefill_chunk of 8"),
        (
            ("--method", "kvzip", "--prefill-chunk", "256"),
            "--prefill-chunk is 256; give a larger one",
        ),
        (("--plot", "/no/such/folder/kept.png"), "no such folder"),
        (("--plot", "kept.nonsense"), "--plot 'kept.nonsense': there are no such pictures"),
        (("--draft", "x", "--method", "h2o"), "--draft 'x': no method here looks ahead"),
        (("--draft", "x"), "--draft 'x': no method here looks ahead"),
        (("--compress-every", "0"), "compress_every 0"),
        (
            ("--kv-dtype", "int3"),
            "cache_dtype 'int3': give one of bfloat16, float16, float32, int8",
        ),
        (
            ("--kv-dtype", "gear4"),
            "cache_dtype gear4 stores a prompt as a whole, which only kvjax ",
        ),
        (("--tensor-parallel", "0"), "tensor_parallel 0"),
        (("--kv-replicas", "2"), "kv_replicas 2 with tensor_parallel 1"),
        (("--kv-replicas", "0"), "kv_replicas 0"),
        (("--tensor-parallel", "2"), "this process has 1 of kind cpu; give at most 1"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_input_gets_one_line(tiny, arguments, says):
    prompt = None if "--prompt" in arguments else TEXT
    code, out, err = tiny(*arguments, prompt=prompt)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in err


HOSTILE = [
    ("--top-k", "3000000000"),
    ("--prefill-chunk", "1000000000000"),
    ("--stop", "\udcff"),
    ("--top-k", "-1"),
    ("--top-k", "9" * 5000),
    ("--max-cache-tokens", "10000000000"),
    ("--max-cache-tokens", "-1"),
    ("--protected", "1000000000000"),
    ("--protected", "-1"),
    ("--sinks", "1000000000000"),
    ("--sinks", "-1"),
    ("--window", "1000000000000"),
    ("--window", "0"),
    ("--compress-every", "1000000000000"),
    ("--context-length", "0"),
    ("--context-length", "-5"),
    ("--context-length", "100"),
    ("--context-length", "10000000000000"),
    ("--block-size", "0"),
    ("--block-size", "-16"),
    ("--block-size", "1099511627776"),
    ("--prefill-chunk", "0"),
    ("--prefill-chunk", "-1"),
    ("--pool-tokens", "-1"),
    ("--pool-tokens", "1000000000000000000000"),
    ("--max-new-tokens", "-1"),
    ("--max-new-tokens", "1000000000000"),
    ("--rate", "nan"),
    ("--rate", "inf"),
    ("--rate", "-8"),
    ("--rate", "1e400"),
    ("--temperature", "nan"),
    ("--temperature", "inf"),
    ("--top-p", "nan"),
    ("--top-p", "0"),
    ("--min-p", "nan"),
    ("--min-p", "-0.5"),
    ("--seed", "-1"),
    ("--seed", "1000000000000"),
    ("--stop", ""),
    ("--model", ""),
    ("--model", "\udcff"),
    ("--model", "a\nb"),
    ("--weights", ""),
    ("--weights", "\udcff"),
    ("--weights", "x" * 5000),
    ("--weights", "x/" * 3000),
    ("--weights", "a\0b"),
    ("--weights", "/dev/null"),
    ("--method", ""),
    ("--method", "\udcff\n"),
    ("--dtype", "float8"),
    ("--prompt", "\udcff"),
    ("--prompt", "a\0b"),
    ("--question", "\udcff"),
    ("--system", "\udcff"),
    ("--prompt-file", "a\0b"),
    ("--prompt-file", "x" * 5000),
    ("--prompt-file", "\udcff"),
    ("--prompt-file", "/dev/zero"),
    ("--plot", "x" * 5000 + ".png"),
    ("--plot", "/dev/null/kept.png"),
    ("\udcff",),
    ("--no\nsense",),
]


def test_a_system_message_needs_a_chat(tiny):
    code, out, err = tiny("--no-chat", "--system", "Be brief.")
    assert (code, out) == (2, "")
    assert "--system is a part of a chat" in err


@pytest.mark.parametrize(
    "arguments", HOSTILE, ids=lambda a: " ".join(a)[:30].encode("unicode_escape").decode()
)
def test_no_argument_is_worth_a_traceback(tiny, arguments):
    prompt = None if arguments[0] in ("--prompt", "--prompt-file") else TEXT
    code, out, err = tiny(*arguments, prompt=prompt)
    assert code == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) < 1100
    assert "Traceback" not in err


def test_a_rate_that_is_not_reached_is_told(tiny):
    """A prompt of 636 tokens keeps 128 at least: 5 times fewer, whatever is asked for."""
    for rate, told in ((32, True), (5, False)):
        code, out, err = tiny("--rate", rate, "--json")
        assert code == 0
        result = json.loads(out)
        reached = max(1.0, len(TEXT) / result["max_cache_tokens"])
        assert result["reached_rate"] == pytest.approx(reached)
        lines = [line for line in err.splitlines() if line.startswith("warning: ")]
        assert len(lines) == (1 if told else 0)
        if told:
            assert "compressed 5.0 times" in lines[0]
            assert f"not {rate}" in lines[0]
            assert lines[0].endswith("; --floor says less")
            assert "(5.0 reached)" in err
    code, out, err = tiny("--rate", 20, "--floor", 8, "--json", "--max-new-tokens", 2)
    assert (code, "warning: " in err) == (0, False)
    assert json.loads(out)["block_size"] == 8
    assert 20 <= json.loads(out)["reached_rate"] < 22
    assert "warning" not in tiny("--max-cache-tokens", 64)[2]
    code, _, err = tiny("--rate", 8, "--method", "full")
    assert code == 0
    assert "warning: rate 8: method full evicts nothing: leave one of them out\n" in err
    assert "budget" not in err


@pytest.mark.parametrize("step", ["begin", "decode"])
def test_an_engine_that_fails_is_no_small_pool(tiny, monkeypatch, step):
    def fails(*_, **__):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(Worker, step, fails)
    code, out, err = tiny("--max-cache-tokens", 64)
    assert code == 2
    line = err.splitlines()[-1]
    assert "the answer ended after " in line
    assert "as the engine failed: " in line
    assert "no memory is left" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--window", "1"),
        ("--window", "1000000000"),
        ("--max-cache-tokens", "1000000000"),
        ("--top-k", "1000000000"),
        ("--method", "kv-compress", "--window", "1"),
        ("--rate", "1"),
        ("--rate", "1000000000"),
        ("--context-length", "1000000000"),
        ("--compress-every", "1000000000"),
        ("--prefill-chunk", "1000000000"),
        ("--block-size", "1024"),
    ],
)
def test_large_and_small_numbers_work_or_are_refused(tiny, arguments):
    code, out, err = tiny(*arguments)
    assert "Traceback" not in err
    if code == 0:
        assert out.strip()
    else:
        assert code == 2
        assert err.strip().splitlines()[-1].startswith("error: ")


def test_bad_files_get_one_line(tiny, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\xe9".encode("latin-1"))
    for name, says in (
        (tmp_path / "missing.txt", "No such file"),
        ("", "cannot read '': No such file"),
        (tmp_path, "is a folder"),
        (latin, "not UTF-8"),
    ):
        code, _, err = tiny("--prompt-file", name, prompt=None)
        assert code == 2
        assert says in err.strip().splitlines()[-1]


def test_without_weights_the_ways_to_get_them_are_named(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = decode(capsys, "--model", "llama3.1-8b", "--rate", 32, "--prompt", "x")
    assert code == 2
    last = err.strip().splitlines()[-1]
    for way in ("--weights", "hub", "--dummy-weights"):
        assert way in last


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_text_and_table(tiny_folder, number, code):
    command = [sys.executable, SCRIPTS / "decode.py", "--weights", tiny_folder, "--prompt", TEXT]
    process = subprocess.Popen(
        [*map(str, command), "--max-new-tokens", "1200", "--ignore-eos", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prefill"):
            break
    process.stderr.read(1)  # the first character of the answer
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if process.returncode == code and out:
        result = json.loads(out)
        assert result["finish_reason"] == "interrupted"
        assert 1 <= result["generated_tokens"] < 1200
    else:
        # A fast machine may be done, a slow one may still be at the prompt.
        assert process.returncode in (0, code)


@pytest.mark.parametrize("there", [True, False])
def test_the_calibration_of_the_usual_method_is_looked_up_once(tiny_folder, monkeypatch, there):
    model = load_model(weights=tiny_folder)
    wanted = get_method(CALIBRATED).calibrated
    arrays = {name: np.zeros((TINY.num_layers, 1, 1), np.float32) for name in wanted}
    found = Calibration(arrays, model.fingerprint) if there else None
    asked = []
    monkeypatch.setattr(shelf, "find", lambda of: asked.append(of) or found)
    options = argparse.Namespace(calibration="auto", dummy_weights=False)
    with Progress() as progress:
        name = chosen_method(options, model, progress)
        assert name == (CALIBRATED if there else UNCALIBRATED)
        given = chosen_calibration(options, model, [get_method(name)], progress)
        assert given is found
        assert len(asked) == 1
        choice = argparse.Namespace(calibration="none", dummy_weights=False)
        assert chosen_method(choice, model, progress) == UNCALIBRATED
        assert len(asked) == 1


@pytest.mark.parametrize("dummy", [False, True])
def test_a_model_without_a_calibration_is_calibrated_at_first_use(
    tiny_folder, monkeypatch, capsys, dummy
):
    model = load_model(weights=tiny_folder)
    arrays = dict.fromkeys(get_method(CALIBRATED).calibrated, np.zeros((TINY.num_layers, 1, 1)))
    made = Calibration(arrays, model.fingerprint)
    asked = []
    monkeypatch.setattr(shelf, "find", lambda of: asked.append(of))
    monkeypatch.setattr(shelf, "make", lambda of, progress: made)
    monkeypatch.setattr("kvjax.cli.models.CALIBRATES_ITSELF", (10**3, 10**9))
    options = argparse.Namespace(calibration="auto", dummy_weights=dummy)
    with Progress() as progress:
        assert chosen_method(options, model, progress) == (UNCALIBRATED if dummy else CALIBRATED)
    assert len(asked) == 1
    said = capsys.readouterr().err
    assert ("is calibrated once, on texts of this package" in said) is not dummy
    # A toy is not.
    monkeypatch.setattr("kvjax.cli.models.CALIBRATES_ITSELF", (10**7, 10**9))
    options = argparse.Namespace(calibration="auto", dummy_weights=False)
    with Progress() as progress:
        assert chosen_method(options, model, progress) == UNCALIBRATED
