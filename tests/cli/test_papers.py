"""`kvjax evaluate --paper`: what runs, what is refused, and that a run goes on."""

import dataclasses
import functools
import json

import pytest

from kvjax.cli import evaluate, main_of
from kvjax.cli.main import main, run_command
from kvjax.cli.papers import SAID
from kvjax.eval import papers

EVALUATE = functools.partial(run_command, "evaluate")
TEXT = "".join(f"Line {i} of the text says {i * 7}. " for i in range(20))
PROMPTS = {
    "qasper": "Article: {context}\n\nQuestion: {input}\n\nAnswer:",
    "trec": "Kinds.\n\n{context}\n{input}",
}


@pytest.fixture
def folder(tmp_path):
    """LongBench's form: three prompts of one subset, one of another."""
    place = tmp_path / "longbench"
    place.mkdir()
    (place / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
    (place / "dataset2maxlen.json").write_text(json.dumps({"qasper": 4, "trec": 3}))
    row = {"context": TEXT, "input": "What?", "answers": ["seven"], "all_classes": None}
    asked = [json.dumps({**row, "input": f"What does line {i} say?"}) for i in range(3)]
    (place / "qasper.jsonl").write_text("\n".join(asked))
    trec = {**row, "answers": ["A"], "all_classes": ["A", "B"]}
    (place / "trec.jsonl").write_text(json.dumps(trec))
    return place


@pytest.fixture
def tiny(tiny_folder, folder, capsys, tmp_path):
    """Runs the command on the tiny checkpoint; returns exit code, stdout and stderr."""

    def run(*arguments):
        given = ("--weights", tiny_folder, "--out", tmp_path / "r.jsonl", "--batch", 4)
        given = (*given, "--longbench", folder, *arguments)
        code = main_of(EVALUATE, [str(argument) for argument in given])
        return code, *capsys.readouterr()

    return run


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]


def change_tables(monkeypatch, **fields):
    """Tables with two caps of two methods, which run in seconds, and other `fields`."""

    def changed(table):
        rows = [
            row
            for row in table.rows
            if row.variant.method in ("full", "snapkv", "kv-compress")
            and row.variant.cap in (None, 128, 512)
        ]
        return dataclasses.replace(table, rows=tuple(rows), **fields)

    tables = {name: changed(table) for name, table in papers.paper_tables().items()}
    monkeypatch.setattr(papers, "paper_tables", lambda: tables)


def test_a_table_is_run_as_the_paper_ran_it(tiny, tmp_path, monkeypatch):
    change_tables(monkeypatch)
    code, out, err = tiny("--paper", "kv-compress-1", "--rows", 1, "--methods", "streaming-llm")
    assert code == 0, err
    assert "not in the table: narrativeqa" in err
    rows = rows_of(tmp_path)
    assert {row["task"] for row in rows} == {"longbench/qasper", "longbench/trec"}
    methods = ("snapkv", "kv-compress", "streaming-llm")
    names = ["full", *(f"{method} at {cap} tokens" for cap in (128, 512) for method in methods)]
    assert sorted(row["method"] for row in rows) == sorted(2 * names)
    for row in rows:
        assert row["protocol"] == "chat"
        # The whole prompt is compressed, and nothing of it afterwards.
        assert row["compressed_tokens"] == row["prompt_tokens"]
        assert row["rate"] == 1
        assert row["metric"] == {"qasper": "f1", "trec": "classification"}[row["task"][10:]]
        assert len(row["answer"].encode()) <= 4 * len("\ufffd".encode())
        assert row["free"] is None
        assert row["settings"]["paper"] == "kv-compress-1"
        assert row["settings"]["block_size"] == 16
        heads = row["kvs_full"] // row["prompt_tokens"]
        _, _, cap = row["method"].removesuffix(" tokens").partition(" at ")
        held = min(row["prompt_tokens"], int(cap or 10**9)) * heads
        if row["method"].startswith("kv-compress"):
            # A head that loses nothing may end with a block that is not full.
            assert held - 16 * heads < row["kvs"] <= held
        else:
            assert row["kvs"] == held
    page = (tmp_path / "r.md").read_text()
    assert "# KV-Compress (Rehg 2024, arXiv 2410.00161), table 1, and ours" in out
    assert "## Every cell" not in out
    assert "- published with Llama-3.1-8B-Instruct" in page
    assert "| `streaming-llm` | ours |" in page
    assert "| 1 of 200 |" in page
    # The same command goes on from here, and the page is its own.
    code, _, err = tiny("--paper", "kv-compress-1", "--rows", 1, "--methods", "streaming-llm")
    assert code == 0, err
    assert "0 results" in err
    assert (tmp_path / "r.md").read_text() == page


@pytest.mark.slow
def test_a_run_goes_on_and_may_get_further_prompts(tiny, tmp_path, monkeypatch):
    change_tables(monkeypatch)
    given = ("--paper", "kv-compress-1")
    code, first, err = tiny(*given, "--rows", 1)
    assert code == 0, err
    path = tmp_path / "r.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    assert len(whole) == 2 * 5
    path.write_bytes(b"".join(whole[:5]) + whole[5][:40])
    code, again, err = tiny(*given, "--rows", 1)
    assert code == 0, err
    assert "5 results" in err
    assert "5 from before" in err
    assert again == first
    code, out, err = tiny(*given)
    assert code == 0, err
    assert "10 results" in err
    assert "| 3 of 200 |" in (tmp_path / "r.md").read_text()
    code, _, err = tiny("--paper", "kv-compress-2")
    assert code == 2
    assert "paper kv-compress-1, and this run has kv-compress-2" in err


@pytest.mark.slow
def test_prompts_lose_their_middle_at_the_papers_length(tiny, tmp_path, monkeypatch):
    change_tables(monkeypatch, prompt=300, context=280)
    code, out, err = tiny("--paper", "pyramidkv-11", "--rows", 1)
    assert code == 0, err
    for row in rows_of(tmp_path):
        most = 4 if row["task"] == "longbench/qasper" else 3
        assert row["prompt_tokens"] == 280 - most
        assert row["removed_tokens"] > 300
    assert "longer than the paper's, or than 2048 tokens with their answer" in out
    assert "middle cut out: 2" in out


@pytest.mark.slow
def test_ruler_is_run_from_its_files(tiny, tmp_path):
    for length in (4096, 8192):
        place = tmp_path / "ruler" / f"{length}" / "data" / "vt"
        place.mkdir(parents=True)
        row = {"input": TEXT + "Which?", "outputs": ["AB", "CD"], "answer_prefix": " They are"}
        (place / "validation.jsonl").write_text(json.dumps(row))
    given = ("--paper", "ruler-llama-8b", "--ruler13", tmp_path / "ruler")
    code, out, err = tiny(*given, "--methods", "streaming-llm", "--rates", "4")
    assert code == 0, err
    assert "not in the table: 16384, 32768" in err
    rows = rows_of(tmp_path)
    assert sorted((row["task"], row["method"]) for row in rows) == [
        (f"ruler13/{length}/vt", method)
        for length in (4096, 8192)
        for method in ("full", "streaming-llm")
    ]
    for row in rows:
        # What the answer begins with is fed after the compression.
        assert row["prompt_tokens"] == row["compressed_tokens"] + len(" They are")
        assert len(row["answer"].encode()) <= 30 * len("\ufffd".encode())
    assert "1 of 6500" in (tmp_path / "r.md").read_text()
    code, _, err = tiny(*given, "--methods", "streaming-llm")
    assert code == 2
    assert "has the full cache alone: give --rates, too" in err
    code, _, err = tiny(*given, "--rates", "4")
    assert code == 2
    assert "unless --methods has some: leave out --rates" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--paper", "kv-compress-3"), "no paper's table 'kv-compress-3'; did you mean"),
        (("--paper", ""), "no paper's table ''"),
        (("--paper", "pyramidkv-11", "--methods", "toba"), "did you mean tova"),
        (("--paper", "pyramidkv-11", "--longbench", "/no/rows"), "there is no /no/rows"),
        (("--paper", "pyramidkv-11", "--rows", "0"), "rows 0"),
    ],
)
def test_bad_input_gets_one_line(tiny, arguments, says):
    code, _, err = tiny(*arguments)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--quick",), ("--no-answers",), ("--prompts", "x"), ("--tasks", "needle")),
        *(("--rates", "2"), ("--length", "99"), ("--protocols", "agnostic"), ("--floor", "1")),
        *(("--block-size", "8"), ("--max-new-tokens", "2"), ("--kv-dtype", "int8")),
        *(("--split", "dev"), ("--free-tokens", "16")),
    ],
)
def test_what_a_table_says_itself_is_refused(tiny, arguments):
    assert arguments[0] in {"--rates", *(option for option, _ in SAID.values())}
    code, _, err = tiny("--paper", "kv-compress-1", *arguments)
    assert code == 2
    assert f"error: --paper kv-compress-1 says that itself: leave out {arguments[0]}" in err


@pytest.mark.parametrize(
    ("given", "written"),
    [((), "kv-compress-1"), (("--out", "results.jsonl"), "results")],
)
def test_results_go_where_they_were_asked_to(folder, tmp_path, monkeypatch, given, written):
    outs = []

    def evaluated(options, config, variants, protocols, table, *_):
        outs.append((str(options.out), str(table)))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    command = ["--paper", "kv-compress-1", "--longbench", str(folder), *given]
    assert main_of(EVALUATE, command) == 0
    assert outs == [(f"{written}.jsonl", f"{written}.md")]


def test_rows_of_no_column_are_refused(tiny, folder):
    (folder / "qasper.jsonl").unlink()
    (folder / "trec.jsonl").rename(folder / "trec_e.jsonl")
    code, _, err = tiny("--paper", "kv-compress-1")
    assert code == 2
    assert "has no rows of narrativeqa" in err


def test_help_names_every_table(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in papers.paper_tables())
