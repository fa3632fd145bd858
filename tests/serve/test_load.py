"""`kvjax throughput --server` and what it says of a server."""

import json

import pytest

from kvjax.cli import main_of
from kvjax.cli.main import main


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


def test_servers_that_give_no_answer(capsys, serve):
    with serve(api_keys=("alpha",)) as server:
        assert main_of(main, ["throughput", "--server", server.url]) == 2
        assert "needs an API key" in capsys.readouterr().err
        url = server.url
    for wrong in (url, "nonsense", "http://"):
        assert main_of(main, ["throughput", "--server", wrong]) == 2
        assert "gives no answer" in capsys.readouterr().err
