"""`kvjax throughput --server` and what it says of a server."""

import json

import pytest

from kvjax.cli import main_of
from kvjax.cli.main import main
from kvjax.cli.throughput import remote
from tests.serve.conftest import ONE


def test_a_server_under_load(shared, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven " * 9)
    arguments = ["throughput", "--server", shared.url, "--input-len", "60", "--output-len", "6"]
    arguments += ["--num-prompts", "5", "--rate", "v", "2", "--prompt-file", str(text)]
    assert main_of(main, [*arguments, "--out", str(tmp_path / "rows.jsonl")]) == 0
    full, half = map(json.loads, capsys.readouterr().out.splitlines())
    assert (full["rate"], half["rate"]) == (None, 2.0)
    for row in (full, half):
        assert (row["num_prompts"], row["failed"], row["model"]) == (5, 0, "tiny")
        # Every prompt has the length that was asked for, every answer too.
        sums = row["total_tokens_per_second"] * row["seconds"]
        assert sums == pytest.approx(5 * (60 + 6))
        assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(5 * 6)
        assert 0 < row["time_to_first_token"]["p50"] <= row["request_seconds"]["p99"]
    assert full["reached_rate"] == 1
    assert half["reached_rate"] > 1.5
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


def test_a_server_is_asked_to_repeat_a_word(shared, capsys, monkeypatch):
    seen = []
    whole = remote.Remote.serve

    async def serve(self, prompts, arrivals, settings):
        seen.extend(prompts)
        return await whole(self, prompts, arrivals, settings)

    monkeypatch.setattr(remote.Remote, "serve", serve)
    arguments = ["throughput", "--server", shared.url, "--input-len", "60", "--output-len", "6"]
    arguments += ["--num-prompts", "2", "--rate", "v", "--repeated-word"]
    assert main_of(main, arguments) == 0, capsys.readouterr().err
    assert [len(set(prompt.tolist())) for prompt in seen] == [1, 1]


def test_servers_that_give_no_answer(capsys, serve):
    with serve(api_keys=("alpha",)) as server:
        assert main_of(main, ["throughput", "--server", server.url]) == 2
        assert "needs an API key" in capsys.readouterr().err
        url = server.url
    for wrong in (url, "nonsense", "http://"):
        assert main_of(main, ["throughput", "--server", wrong]) == 2
        assert "gives no answer" in capsys.readouterr().err


def test_requests_that_are_refused_are_not_served(serve, capsys, tmp_path):
    """An overloaded server is no faster for it, and lengths are those that its context holds."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven " * 40)
    with serve(**ONE, max_waiting=1) as server:
        arguments = ["throughput", "--server", server.url, "--rate", "v", "--prompt-file", text]
        arguments = [str(argument) for argument in (*arguments, "--output-len", 8)]
        assert main_of(main, [*arguments, "--input-len", "60", "--num-prompts", "9"]) == 0
        out, err = capsys.readouterr()
        row = json.loads(out)
        served = 9 - row["failed"]
        assert 0 < served < 9
        assert f"{row['failed']} of 9 requests were not served: " in err
        sums = row["total_tokens_per_second"] * row["seconds"]
        assert sums == pytest.approx(served * (60 + 8))
        assert (row["output_len"], row["trace"]) == (8, None)
        assert main_of(main, [*arguments, "--num-prompts", "1"]) == 0
        lengths = [json.loads(line)["input_len"] for line in capsys.readouterr().out.splitlines()]
        assert lengths == [500]
        assert main_of(main, [*arguments, "--input-len", "60", "900", "--num-prompts", "1"]) == 2
        out, err = capsys.readouterr()
        assert (out, "a prompt of 900 tokens and its answer of 8 are longer" in err) == ("", True)
