"""`kvjax throughput` as its user meets it: results, tables, traces, bad input."""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import json
import sys
import time
import types

import numpy as np
import pytest

from kvjax.cli import ArgumentParser, main_of
from kvjax.cli import throughput as command
from kvjax.cli.main import run_command
from kvjax.cli.throughput import measure, peer, remote, work
from kvjax.engine import LLM
from kvjax.errors import UserError
from tests.tiny import TINY

SMALL = ("--num-prompts", 6, "--output-len", 8, "--max-batch", 4, "--no-limits", "--no-warmup")


@pytest.fixture
def throughput(capsys, tiny_folder):
    """Runs the command on the tiny checkpoint: exit code, the JSON lines of stdout, stderr."""
    command = functools.partial(run_command, "throughput")

    def run(*arguments, weights=tiny_folder):
        model = () if "--server" in arguments else ("--weights", weights)
        code = main_of(command, [str(a) for a in (*model, *arguments)])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rate .* is .* for a prompt of:kvjax.RateWarning")
def test_rates_and_lengths_give_a_line_each(throughput, tmp_path):
    code, rows, err = throughput(
        *SMALL, "--rate", "v", "8", "--input-len", 60, 200, "--pool-tokens", 480,
        "--out", tmp_path / "rows.jsonl", "--plot-dir", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert [(row["input_len"], row["rate"]) for row in rows] == [
        (60, None), (60, 8.0), (200, None), (200, 8.0),
    ]  # fmt: skip
    for row in rows:
        assert row["floor"] == 128
        assert row["total_tokens_per_second"] == pytest.approx(
            6 * (row["input_len"] + 8) / row["seconds"]
        )
        assert row["output_tokens_per_second"] == pytest.approx(6 * 8 / row["seconds"])
        assert 0 < row["mean_batch"] <= row["max_batch"] <= 4
        assert sum(row["seconds_by_phase"].values()) == pytest.approx(row["seconds"], rel=0.2)
        assert row["num_blocks"] == 480 // 16 * TINY.num_layers * TINY.num_kv_heads
        assert row["preemptions"] == 0
        # A rate of 8 keeps the floor of 128 tokens.
        reached = 1 if row["rate"] is None else max(1, row["input_len"] / 128)
        assert row["reached_rate"] == pytest.approx(reached)
    vanilla, compressed = rows[2:]
    assert vanilla["max_batch"] == vanilla["expected_batch"] == 2
    assert compressed["max_batch"] == compressed["expected_batch"] == 3
    assert vanilla["evicted_blocks"] == 0 < compressed["evicted_blocks"]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    for name in ("total_tokens_per_second_by_rate", "max_batch_by_rate"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert (tmp_path / "total_tokens_per_second_by_length.png").exists()
    assert "expected" in err


@pytest.mark.slow
def test_the_machine_bounds_what_was_done(throughput):
    arguments = [a for a in SMALL if a != "--no-limits"]
    code, (row,), err = throughput(*arguments, "--rate", "1", "--input-len", 60)
    assert code == 0, err
    assert row["limits"]["copy_bytes_per_s"] > 1e8
    assert row["limits"]["flop_per_s"] > 1e8
    assert row["roofline_share"] == pytest.approx(row["roofline_seconds"] / row["seconds"])
    assert 0 < row["roofline_share"] < 1


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,37,4\n2023-11-16 18:15:46.9805900,39,5\n",
    "mooncake.jsonl": '{"timestamp": 9000, "input_length": 37, "output_length": 4}\n'
    '{"timestamp": 9300, "input_length": 39, "output_length": 5}\n',
    "lengths.csv": "prompt_tokens,output_tokens,turns\n37,4,1\n39,5,1\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_traces(throughput, tmp_path, name):
    trace = tmp_path / f"{name}.gz"
    trace.write_bytes(gzip.compress(TRACES[name].encode()))
    first, second = work.read_trace(str(trace), 10)
    assert (first.input_len, first.output_len) == (37, 4)
    assert (second.input_len, second.output_len) == (39, 5)
    assert second.seconds == pytest.approx(0 if name == "lengths.csv" else 0.3)
    assert work.at_rate([first, second], 2.0, seed=0)[1].seconds > 0
    if name != "azure.csv":
        return
    code, (row,), err = throughput(*SMALL, "--trace", trace, "--request-rate", 20, "--rate", "v")
    assert code == 0, err
    assert row["trace"] == trace.name
    assert row["num_prompts"] == 2
    assert row["time_to_first_token"]["p50"] <= row["time_to_first_token"]["p99"]
    assert row["time_per_output_token"]["p50"] > 0


def test_a_request_of_a_trace_waits_from_its_arrival(throughput, tmp_path, monkeypatch):
    """Not from when the round that ran then had ended."""
    step, pauses = LLM.step, [1.5]

    def slow(llm):
        time.sleep(pauses.pop() if pauses else 0)
        return step(llm)

    monkeypatch.setattr(LLM, "step", slow)
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 37, "output_length": 2}\n'
        '{"timestamp": 50, "input_length": 37, "output_length": 2}\n'
    )
    code, (row,), err = throughput(*SMALL, "--trace", trace, "--rate", "v")
    assert code == 0, err
    # The second waits for the rest of the first round, as long as the first one.
    found = row["time_to_first_token"]
    assert found["p50"] > 0.8 * found["p99"] > 1
    assert row["expected_batch"] <= 2


@pytest.mark.parametrize(
    "arguments",
    [("--trace", "t", "--plot-dir", "d"), ("--trace", "t", "--input-len", 9),
     ("--server", "http://127.0.0.1:9", "--pool-tokens", 9),
     ("--server", "http://127.0.0.1:9", "--kv-dtype", "int8"),
     ("--server", "http://127.0.0.1:9", "--model", "llama3.1-8b"),
     ("--server", "http://127.0.0.1:9", "--peer-python", sys.executable),
     ("--repeated-word", "--no-limits", "--prompt-file", "f")],
)  # fmt: skip
def test_options_that_say_nothing_are_refused(throughput, arguments):
    code, _, err = throughput(*arguments)
    assert (code, f"error: {arguments[2]} with {arguments[0]}: " in err) == (2, True)


def test_a_scaled_trace_has_the_rate_asked_for():
    arrivals = [work.Arrival(t, 10, 5) for t in (0.0, 1.0, 4.0, 9.0)]
    assert [row.seconds for row in work.at_rate(arrivals, 3.0, 0)] == pytest.approx(
        [0, 1 / 9, 4 / 9, 1]
    )
    assert work.at_rate(arrivals, None, 0) == arrivals


PEER = """
import json, sys
load = json.loads(sys.argv[1])
print("a warning of some library")
print(json.dumps({"peer": True, "total_tokens_per_second": 5.0, "load": load}))
"""


def test_a_peer_is_asked_for_the_same_load(throughput, tmp_path):
    (tmp_path / "peer.py").write_text(PEER)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/peer.py" "$2"\n')
    program.chmod(0o755)
    given = ("--rate", "v", "--input-len", 60, "--pool-tokens", 240, "--peer-python", program)
    code, (ours, theirs), err = throughput(*SMALL, *given, "--kv-dtype", "bfloat16")
    assert code == 0, err
    load = theirs["load"]
    assert (load["num_prompts"], load["input_len"], load["output_len"]) == (6, 60, 8)
    assert (load["vocab_size"], load["hidden_size"], load["intermediate_size"]) == (256, 32, 48)
    assert (load["num_hidden_layers"], load["num_attention_heads"]) == (2, 4)
    assert (load["num_key_value_heads"], load["head_dim"]) == (2, 8)
    # As many as the pool holds whole.
    assert load["batch"] == 240 // 68
    assert load["warmup"] is ("--no-warmup" not in SMALL)
    # As wide as the model itself.
    assert (load["dtype"], theirs["dtype"], ours["dtype"]) == ("float32", "float32", "bfloat16")
    same = ("model", "input_len", "output_len", "num_prompts", "pool_tokens", "device")
    assert [theirs[name] for name in same] == [ours[name] for name in same]
    assert "peer" in err


class Torch:
    """As much of torch and transformers as a peer on a CPU calls; what it generates is noted."""

    __version__, float32 = "0", np.float32
    cuda = types.SimpleNamespace(is_available=lambda: False)
    device = staticmethod(contextlib.nullcontext)
    inference_mode = contextlib.nullcontext
    set_num_threads = manual_seed = staticmethod(lambda value: None)
    randint = staticmethod(lambda least, most, shape: np.zeros(shape))
    ones_like = staticmethod(np.ones_like)

    def __init__(self):
        self.calls, self.LlamaConfig = [], dict

    def LlamaForCausalLM(self, config):
        return self

    def to(self, dtype):
        return self

    def eval(self):
        return self

    def generate(self, rows, min_new_tokens, **settings):
        self.calls.append((len(rows), min_new_tokens))


@pytest.mark.parametrize(("warmup", "first"), [(True, [(4, 2)]), (False, [])])
def test_a_peer_is_warmed_as_the_engine_is(monkeypatch, capsys, warmup, first):
    fake = Torch()
    load = {"dtype": "float32", "num_prompts": 6, "input_len": 5, "output_len": 3, "batch": 4}
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    load |= {"vocab_size": 9, "warmup": warmup}
    monkeypatch.setattr(sys, "argv", ["peer.py", json.dumps(load)])
    peer.main()
    assert fake.calls == [*first, (4, 3), (2, 3)]
    assert json.loads(capsys.readouterr().out)["max_batch"] == 4


BAD = [
    (("--rate", "fast"), "--rate 'fast'"),
    (("--rate", "0.5"), "rate 0.5"),
    (("--input-len", "0"), "--input-len 0"),
    (("--num-prompts", "0"), "--num-prompts 0"),
    (("--output-len", "-3"), "--output-len -3"),
    (("--emulate", "l4", "--pool-tokens", "5"), "--emulate and --pool-tokens"),
    (("--method", "kv-compres", "--rate", "8"), "did you mean kv-compress"),
    (("--trace", "nowhere.csv"), "cannot read --trace nowhere.csv"),
    (("--out", "nowhere/rows.jsonl"), "--out 'nowhere/rows.jsonl'"),
    (("--prompt-file", "nowhere.txt"), "cannot read --prompt-file nowhere.txt"),
    (("--rate", "v", "--input-len", "200", "--pool-tokens", "64"), "give a pool of 208 tokens"),
    (("--rate", "nan"), "rate nan"),
    (("--rate", "\udcff"), "--rate"),
    (("--input-len", "1000000000000"), "--input-len 1000000000000"),
    (("--num-prompts", "1000000000000"), "--num-prompts"),
    (("--max-batch", "-1"), "--max-batch -1"),
    (("--pool-tokens", "0"), "pool_tokens 0"),
    (("--prefill-chunk", "0"), "prefill_chunk 0"),
    (("--decode-steps-per-sync", "0"), "decode_steps_per_sync 0"),
    (("--temperature", "nan"), "temperature nan"),
    (("--request-rate", "nan"), "--request-rate nan"),
    (("--request-rate", "0"), "--request-rate 0"),
    (("--request-rate", "0.5"), "--request-rate 0.5: prompts of --input-len are submitted all at"),
    (("--seed", "-1"), "--seed -1"),
    (("--plot-dir", "x" * 5000), "File name too long"),
    (("--plot-dir", __file__), "cannot make the folder: it is a file"),
    (("--plot-dir", "/dev/null/plots"), "cannot make the folder: Not a directory"),
    (
        ("--input-len", "60", "100000"),
        "a prompt of 100000 tokens and its answer of 8 are longer than the context of tiny",
    ),
    (("--input-len", "2041"), "give at most --input-len 2040 or give --context-length"),
    (("--output-len", "3000"), "give an --output-len below 2048"),
    (("--input-len", "60", "--context-length", "67"), "which is 67: give at most --input-len 59"),
    (("--context-length", "0"), "--context-length 0"),
    (("--prompt-file", ""), "cannot read --prompt-file '': No such file"),
    (("--trace", ""), "cannot read --trace '': No such file"),
    (("--server", "foo"), "give an address such as http://127.0.0.1:8000"),
    (("--server", "ftp://foo"), "give an address such as http://127.0.0.1:8000"),
    (("--server", "http://127.0.0.1:x"), "give an address such as http://127.0.0.1:8000"),
    (("--server", "http://127.0.0.1:9", "--api-key", "schlüssel"), "--api-key (or KVJAX_API_KEY)"),
    (("--server", "http://127.0.0.1:9", "--api-key", "a\nb"), "--api-key (or KVJAX_API_KEY)"),
    (("--out", "x" * 5000), "File name too long"),
    (("--out", "."), "--out '.'"),
    (("--trace", "x" * 5000), "File name too long"),
    (("--prompt-file", "/dev/null"), "too short"),
    (("--peer-python", "/no/python"), "--peer-python '/no/python': there is no such program"),
    (("--peer-python", sys.executable, "--trace", "a.csv"), "leave --trace out"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_input_gets_one_line(throughput, arguments, says):
    code, rows, err = throughput(*SMALL, *arguments)
    assert code == 2
    assert rows == []
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in err


LENGTHS = "prompt_tokens,output_tokens\n10,5\n"
JSON = '{"timestamp": 0, "input_length": 37, "output_length": 4}\n'


@pytest.mark.parametrize(("context", "lengths"), [(2048, [500, 1000]), (64, [500])])
def test_usual_lengths_are_those_that_the_context_holds(context, lengths):
    options = argparse.Namespace(input_len=None, output_len=100, context_length=None)
    config = dataclasses.replace(TINY, max_position_embeddings=context)
    assert measure.lengths_of(options, config) == lengths
    options.context_length = 100_000
    assert measure.lengths_of(options, config) == command.LENGTHS
    options.input_len = [7]
    assert measure.lengths_of(options, config) == [7]


def test_requests_of_a_trace_fit_the_context(throughput, tmp_path):
    trace = tmp_path / "a.csv"
    trace.write_text(LENGTHS + "2040,9\n")
    code, _, err = throughput(*SMALL, "--trace", trace)
    assert code == 2
    assert "a prompt of 2040 tokens and its answer of 9" in err
    assert "shorten prompts to 2039 tokens or give --context-length" in err


def test_the_folder_of_pictures_is_made(tmp_path):
    parser = ArgumentParser()
    command.add_options(parser)
    folder = tmp_path / "new" / "plots"
    command.check(parser.parse_args(["--plot-dir", str(folder)]))
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("option", "variable", "sent"),
    [(None, "k1,k2", "k1"), ("k3", "k1,k2", "k3"), ("k3,k4", "", "k3"), (None, None, None)],
)
def test_one_of_several_keys_is_sent(throughput, monkeypatch, option, variable, sent):
    seen = []

    def stop(remote, url, key):
        seen.append(key)
        raise UserError("enough")

    monkeypatch.setattr(remote.Remote, "__init__", stop)
    if variable is None:
        monkeypatch.delenv("KVJAX_API_KEY", raising=False)
    else:
        monkeypatch.setenv("KVJAX_API_KEY", variable)
    given = () if option is None else ("--api-key", option)
    assert throughput("--server", "http://127.0.0.1:9", *given)[0] == 2
    assert seen == [sent]


def test_files_of_another_encoding_are_told(throughput, tmp_path):
    binary = tmp_path / "a.csv"
    binary.write_bytes(b"\x7fELF\xff\xfe" * 90)
    code, _, err = throughput(*SMALL, "--trace", binary)
    assert code == 2
    (line,) = err.splitlines()
    assert line.endswith("a.csv is not UTF-8: give a CSV or JSONL file as text (or .gz)")
    code, _, err = throughput(*SMALL, "--prompt-file", binary)
    assert code == 2
    last = err.splitlines()[-1]
    assert last.endswith("a.csv is not UTF-8: convert it, for instance with iconv")


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path):
    trace = tmp_path / "a.csv"
    trace.write_text(LENGTHS, encoding="utf-8-sig")
    assert work.read_trace(str(trace), 10) == [work.Arrival(0.0, 10, 5)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"length": 5, "at": 1}\n', "it has length, at, which says no lengths: give "),
        ("a.jsonl", "{}\n", "it has no fields, which says no lengths: give TIMESTAMP, Con"),
        ("a.jsonl", '"input_length"\n', "'input_length' is no JSON object"),
        ("a.jsonl", "x\n", "row 1: Expecting value"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 3}\n', "it has no output_length: give TIM"),
        ("a.csv", LENGTHS.replace("10", "ten"), "prompt_tokens 'ten': give a whole number"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1,2\n", "it has no TIMESTAMP: give"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n",
            "TIMESTAMP 'now': give a date and a time",
        ),
    ],
)
def test_what_a_trace_has_instead_is_told(tmp_path, name, text, says):
    trace = tmp_path / name
    trace.write_text(text)
    with pytest.raises(UserError) as caught:
        work.read_trace(str(trace), 10)
    said = str(caught.value)
    assert "row 1: " in said
    assert says in said
    assert "Error(" not in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", LENGTHS + "ten,5\n"),
        ("a.csv", LENGTHS + "0,5\n"),
        ("a.csv", LENGTHS + "5,-1\n"),
        ("a.csv", LENGTHS + "5,9999999999999\n"),
        ("a.csv", LENGTHS + "5\n"),
        ("a.csv", LENGTHS + "9" * 200_000 + ",5\n"),
        ("a.jsonl", JSON + "[]\n"),
        ("a.jsonl", JSON + "[" * 100_000 + "\n"),
        ("a.jsonl", JSON + JSON.replace("0", "NaN")),
        ("a.jsonl", JSON + JSON.replace("37", "Infinity")),
        ("a.jsonl", JSON + JSON.replace("37", "9" * 5000)),
    ],
)
def test_a_malformed_trace_names_the_row(throughput, tmp_path, name, text):
    trace = tmp_path / name
    trace.write_text(text)
    code, _, err = throughput(*SMALL, "--trace", trace)
    assert code == 2
    (line,) = err.splitlines()
    assert "row 2: " in line
    assert len(line) < 1100


def test_a_damaged_archive_is_named(throughput, tmp_path):
    whole = gzip.compress(LENGTHS.encode() * 100)
    for number, data in enumerate((b"no archive", whole[:20], whole[:30] + b"x" + whole[31:])):
        trace = tmp_path / f"{number}.csv.gz"
        trace.write_bytes(data)
        code, _, err = throughput(*SMALL, "--trace", trace)
        assert code == 2
        (line,) = err.splitlines()
        assert trace.name in line


def test_a_method_that_is_none_is_told_at_any_rate(throughput):
    for rate in ("v", "8"):
        sizes = "--input-len", 8, "--output-len", 2, "--num-prompts", 1
        code, _, err = throughput("--rate", rate, "--method", "nothing", *sizes)
        assert (code, err.count("\n")) == (2, 1)
        assert "'nothing'" in err
