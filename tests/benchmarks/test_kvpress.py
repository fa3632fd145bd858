"""`python -m benchmarks.kvpress` without torch: budgets, tables, positions, weights, bad input."""

import dataclasses
import functools
import json
import os
import sys
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.kvpress import __main__ as command
from benchmarks.kvpress import presses, process, report
from benchmarks.kvpress.checkpoint import export
from kvjax.cache.calibration import Calibration
from kvjax.cli import Progress, main_of
from kvjax.errors import UserError
from tests.tiny import TINY, write_tiny

PEER = """
import json, sys
if sys.argv[1] == "--versions":
    print(json.dumps({"kvpress": "9", "transformers": "8", "torch": "7"}))
    sys.exit()
for line in sys.stdin:
    job = json.loads(line)
    if "encode" in job:
        print(json.dumps({"ids": [n + SHIFT for n in job["encode"].encode()]}), flush=True)
        continue
    full = {"em": 1, "nll": 2.0, "kl": 0.0, "agree": 1.0}
    results = []
    for entry in job["presses"]:
        open(LOGITS + ".asked", "a").write(entry["press"] + "\\n")
        if entry["press"] == "tova":
            results.append({"error": "AssertionError: too short"})
            continue
        found = dict(full, nll=3.0, kl=0.5, kvs=entry["kvs"], ratio=0.5, simulated=False, bytes=8,
                     compress_seconds=1.0, score_seconds=1.0)
        if entry["positions"]:
            found["positions"] = [[list(range(job["cut"]))] * HEADS] * LAYERS
        if job["free_tokens"] and job["opened"] >= job["cut"]:
            found["free"] = list(b"the abc, " + b"x" * job["free_tokens"])
        results.append(found)
    if job.get("logits_to"):
        open(job["logits_to"], "wb").write(open(LOGITS, "rb").read())
    print(json.dumps({"full": full, "prefill": 0.5, "results": results}), flush=True)
"""


@pytest.fixture
def python(tmp_path):
    """Makes a stand-in for the peer's Python: runs `text` with the arguments after the script."""

    def make(text):
        script = tmp_path / "peer.py"
        script.write_text(text)
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" "{script}" "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make


def test_a_press_runs_at_the_reference_and_at_its_like_named_method():
    kept = {"kv-compress": 900, "snapkv-w64-avg5": 1800, "full": 9000}
    assert presses.budgets("snapkv", "kv-compress", kept) == ["kv-compress", "snapkv-w64-avg5"]
    assert presses.budgets("kvzip", "kv-compress", kept) == ["kv-compress"]
    assert presses.budgets("tova", "kv-compress", kept) == ["kv-compress"]
    assert presses.budgets("snapkv", "snapkv-w64-avg5", kept) == ["snapkv-w64-avg5"]


def test_budgets_that_are_equal_but_for_rounding_share_a_run():
    assert presses.group_equal({"a": 1000, "b": 1010, "c": 1011}) == [["a", "b"], ["c"]]
    assert presses.group_equal({}) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [
        ([[0, 1, 9], [3]], [[9, 0, 1], [3]], 1.0),
        ([[0, 1, 9], [3]], [[9, 0], [4]], 2 / 3),
        ([[0, 1, 2, 3]], [[2, 3, 4, 5]], 0.5),
        ([[]], [[1]], 1.0),
    ],
)
def test_agreement_is_the_share_of_the_smaller_set(ours, theirs, share):
    assert presses.agreement(ours, theirs) == pytest.approx(share)


def test_agreement_needs_the_same_heads():
    with pytest.raises(ValueError, match="got 1 heads, wanted 2"):
        presses.agreement([[1], [2]], [[1]])


def test_weights_for_the_peer_are_those_that_were_loaded(tiny_folder, tmp_path):
    from kvjax.models.architectures import config_from_hf
    from kvjax.models.tokenizer import ByteTokenizer

    folder = tmp_path / "out"
    arguments = TINY, ByteTokenizer(), tiny_folder
    export(*arguments, folder, Progress())
    written, true = (load_file(f / "model.safetensors") for f in (folder, tiny_folder))
    assert written.keys() == true.keys()
    for name, tensor in true.items():
        np.testing.assert_array_equal(written[name], tensor)
    config = json.loads((folder / "config.json").read_text())
    assert config_from_hf(config, name="tiny") == TINY
    export(*arguments, folder, Progress())
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="another model"):
        export(*arguments, folder, Progress())


def result(id, method, rate, **changes):
    base = {"task": "needle", "protocol": "prompt", "score": 1.0, "em": 1, "nll": 2.0, "kl": 0.0}
    base["kvs_full"] = 100
    base["metric"] = "em"
    return {**base, "id": id, "method": method, "rate": rate, "kvs": 10, **changes}


@pytest.fixture
def results():
    """Three prompts; the peer lacks one of them."""
    theirs = presses.peer_method("snapkv", "snapkv-w64-avg5")
    rows = [result(id, "full", 1.0, kvs=100) for id in "abc"]
    rows += [result(id, "snapkv-w64-avg5", 8.0, nll=3.0, kvs=12) for id in "abc"]
    full = {"em": 1, "nll": 2.0}
    rows += [
        result("a", theirs, 8.0, score=0.0, nll=4.0, kl=1.0, full=full, agreement=0.5),
        result("b", theirs, 8.0, score=0.0, nll=6.0, kl=2.0, full=full, agreement=None),
    ]
    return rows


def test_pairs_stand_on_the_prompts_that_both_ran(results):
    (pair,) = report.pairs_of(results)
    assert (pair.press, pair.method, pair.prompts) == ("snapkv", "snapkv-w64-avg5", 2)
    assert pair.like
    assert pair.kvs == (10, 12)
    assert [score and score.mean for score in pair.score] == [0.0, 1.0]
    assert [ratio and ratio.mean for ratio in pair.nll_ratio] == [2.5, 1.5]
    assert pair.kl[0] is not None
    assert pair.kl[0].mean == 1.5
    assert pair.positions == 0.5
    assert report.overlaps(pair) is False


def test_continuations_are_compared_by_nll(results):
    rows = [{**row, "score": None} for row in results]
    (pair,) = report.pairs_of(rows)
    assert pair.score == (None, None)
    assert report.overlaps(pair) is False
    same = [{**row, "nll": 3.0} if row["rate"] == 8 else row for row in rows]
    assert report.overlaps(report.pairs_of(same)[0]) is True


def test_the_mean_of_tasks_counts_each_task_once():
    mean = report.mean_of_tasks([[1, 0, 1, 0], [1, 1]])
    assert mean is not None
    assert mean.mean == 0.75
    assert 0.5 <= mean.low < 0.75 < mean.high <= 1
    assert report.mean_of_tasks([[0.5]]) == report.Interval(0.5, 0.5, 0.5)
    assert report.mean_of_tasks([]) is None
    assert report.mean_of_tasks([[1.0], []]) is None


def test_the_summary_has_a_line_per_method_and_a_column_per_rate(results):
    theirs = presses.peer_method("snapkv", "snapkv-w64-avg5")
    other = [{**row, "task": "fact", "id": "f" + row["id"]} for row in results]
    weak = [{**row, "task": "weak", "id": "w" + row["id"]} for row in results]
    weak = [{**row, "score": 0.0} if row["method"] == "full" else row for row in weak]
    text = [{**row, "task": "text", "score": None, "metric": "nll"} for row in results]
    rows = [dict(row) for row in (*results, *other, *weak, *text)]
    for row in rows:
        if row["method"] == theirs and row["task"] == "fact":
            row["score"] = 1.0
        if row["method"] == "full" and row["id"] == "fa":
            row["score"] = 0.0
        row["free"] = {"full": 1.0, theirs: 0.0}.get(row["method"], float(row["id"] == "a"))
    page = "\n".join(report.summary_tables(rows, "snapkv-w64-avg5"))
    exact, free = page.split("Answers without a given beginning that hold the answer, %, mean")
    assert "Exact matches, %, mean of needle, fact, `prompt`" in exact
    assert "| kvpress snapkv | 50 [50, 50] |" in exact
    # Absolute, whatever the full cache has.
    assert "| `snapkv-w64-avg5` | 100 [100, 100] |" in exact
    assert "| full cache | 83 [" in exact
    assert "| needle (3 prompts) | fact (3 prompts) |" in exact
    assert "| kvpress snapkv | 0 | 100 |" in exact
    assert "| full cache | 100 | 67 |" in exact
    assert "| kvpress snapkv | 0 | 0 |" in free
    assert "| full cache | 100 | 100 |" in free
    assert "| `snapkv-w64-avg5` | 33 | 0 |" in free
    assert "| `snapkv-w64-avg5` | 12 (8.3×) |" in free
    assert "| kvpress snapkv | 10 (10.0×) |" in free
    assert "| kvpress snapkv | 1.500 [1.000, 2.000] |" in page
    # The full cache fails there: nothing follows.
    assert "weak" not in page
    assert "kvpress" not in "\n".join(report.summary_tables(rows, "kv-compress"))


def test_the_page_says_what_was_measured(results):
    page = report.report(results, ["a note"], "snapkv-w64-avg5")
    line = next(line for line in page.splitlines() if "| snapkv |" in line)
    assert "2.50 [2.00, 3.00] | 1.50 [1.50, 1.50]" in line
    assert line.endswith("| no |")
    assert "- a note" in page
    assert "| needle | prompt | 8 | snapkv | snapkv-w64-avg5 | 50.00 |" in page


ROW = {
    "id": "one", "task": "mine", "length": 300, "head": "", "context": "abc " * 75,
    "question": "?", "suffix": "", "answer_prefix": "", "target": "abc",
}  # fmt: skip


@pytest.fixture
def run(tmp_path, tiny_folder, python, capsys):
    """Runs the command against a stand-in whose scores are made up and whose logits are ours."""
    from kvjax.engine.dense import dense_pass
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.rows import Row
    from kvjax.eval.sizes import EvaluatorConfig
    from kvjax.models import load_model

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(ROW) + "\n")
    model = load_model(weights=tiny_folder)
    tokens = Evaluator(model, EvaluatorConfig()).tokenise(Row(**ROW))
    last = np.full(1, len(tokens.prompt) - 1, np.int32)
    step = jax.jit(functools.partial(dense_pass, model.config))
    logits = np.asarray(step(model.params, tokens.prompt, last).logits[0])
    file, heads, layers = tmp_path / "logits", TINY.num_kv_heads, TINY.num_layers

    def go(*arguments, shift=0.0, token_shift=0):
        (logits + np.float32(shift)).tofile(file)
        values = f"{str(file)!r}, {heads}, {layers}, {token_shift}"
        program = python(f"LOGITS, HEADS, LAYERS, SHIFT = {values}\n" + PEER)
        given = ["--peer-python", program, "--weights", str(tiny_folder), "--prompts", str(prompts)]
        given += ["--out", str(tmp_path / "out.jsonl"), "--rates", "4", *map(str, arguments)]
        code = main_of(command.main, given)
        return code, *capsys.readouterr()

    return go


@pytest.mark.slow
def test_a_run_gives_every_press_our_kvs_and_goes_on(run, tmp_path):
    code, out, err = run("--presses", "streaming-llm,kvzip,tova", "--reference", "kv-compress")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kvs = {row["method"]: row["kvs"] for row in rows}
    assert set(kvs) == {
        "full", "kv-compress", "streaming-llm", "tova", "kvzip", "kvpress:kvzip@kv-compress",
        "kvpress:kvzip@kvzip",
        "kvpress:streaming-llm@kv-compress", "kvpress:streaming-llm@streaming-llm",
    }  # fmt: skip
    assert "skipped tova at rate 4 of one: AssertionError: too short" in err
    assert kvs["kvpress:kvzip@kv-compress"] == kvs["kv-compress"] < kvs["full"]
    free = {row["method"]: (row["free"], row["free_answer"]) for row in rows}
    assert free["kvpress:kvzip@kv-compress"] == (1.0, "the abc, " + "x" * 32)
    assert free["full"][0] == 0.0
    last = json.loads(out.splitlines()[-1])
    assert last["logits_difference"] < 1e-6
    # The stand-in keeps every position: none of ours is missing.
    (same,) = [p for p in last["pairs"] if p["kvjax"] == "streaming-llm"]
    assert same["equal_positions"] == 1.0
    assert "kvpress 9" in (tmp_path / "out.md").read_text()

    before = (tmp_path / "out.jsonl").read_text()
    code, again, err = run("--presses", "streaming-llm,kvzip,tova", "--reference", "kv-compress")
    assert code == 0, err
    assert "0 results in" in err
    assert (tmp_path / "out.jsonl").read_text() == before
    assert json.loads(again.splitlines()[-1])["pairs"] == last["pairs"]


@pytest.mark.slow
def test_another_reference_at_the_same_kvs_runs_no_press(run, tmp_path):
    given = "--presses", "streaming-llm,kvzip", "--reference-only"
    assert run(*given, "--reference", "kv-compress")[0] == 0
    asked = (tmp_path / "logits.asked").read_text()
    assert asked.split() == ["streaming-llm", "kvzip"]
    code, _, err = run(*given, "--reference", "h2o")
    assert code == 0, err
    assert (tmp_path / "logits.asked").read_text() == asked
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ours = {row["method"]: row for row in rows}
    assert {"kvpress:kvzip@h2o", "kvpress:streaming-llm@h2o", "h2o"} < set(ours)
    assert "streaming-llm" not in ours
    same = ("id", "rate", "kvs", "nll", "kl", "em")
    for press in ("kvzip", "streaming-llm"):
        first, second = (ours[f"kvpress:{press}@{name}"] for name in ("kv-compress", "h2o"))
        assert [first[name] for name in same] == [second[name] for name in same]


@pytest.mark.slow
def test_a_reference_that_reads_a_calibration(run, tmp_path, tiny_folder):
    from kvjax.models import load_model

    rng, heads = np.random.default_rng(0), TINY.num_kv_heads
    weight = rng.standard_normal((TINY.num_layers, TINY.hidden_size, heads)).astype(np.float32)
    extra = np.zeros((TINY.num_layers, heads, 5), np.float32)
    arrays = {"reads_weight": weight, "reads_extra": extra}
    of = load_model(weights=tiny_folder).fingerprint
    calibration = Calibration(arrays, of, {"data": "a book"})
    calibration.save(tmp_path / "one.safetensors")
    given = "--presses", "kvzip", "--reference-only", "--reference", "predicted-reads-blind"
    code, _, err = run(*given, "--calibration", tmp_path / "one.safetensors")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kvs = {row["method"]: row["kvs"] for row in rows}
    assert kvs["kvpress:kvzip@predicted-reads-blind"] == kvs["predicted-reads-blind"] < kvs["full"]
    assert {row["settings"]["calibration"] for row in rows} == {calibration.digest()}
    code, _, err = run(*given, "--calibration", "none", "--out", tmp_path / "other.jsonl")
    assert code == 2
    assert "reads the calibrated array" in err


def test_equal_kvs_are_found_under_any_name():
    rows = [
        result("a", presses.peer_method("tova", "h2o"), 8.0, kvs_wanted=1000),
        result("a", presses.peer_method("kvzip", "h2o"), 8.0, kvs_wanted=2000),
    ]
    assert presses.find_equal(rows, "tova", 1009) is rows[0]
    assert presses.find_equal(rows, "tova", 1020) is None
    assert presses.find_equal(rows, "kvzip", 1000) is None
    again = presses.relabelled(rows[0], "tova", "kv-compress", 16.0)
    assert (again["method"], again["rate"]) == ("kvpress:tova@kv-compress", 16.0)
    assert again["kvs_wanted"] == 1000


@pytest.mark.slow
def test_other_weights_are_noticed(run, tmp_path):
    code, _, err = run("--presses", "tova", shift=1.0)
    assert code == 2
    assert "not the same model" in err
    assert not (tmp_path / "out.jsonl").read_text()


@pytest.mark.slow
def test_another_tokenizer_is_noticed(run, tmp_path):
    code, _, err = run("--presses", "tova", token_shift=1)
    assert code == 2
    assert "the peer's tokens of a text are others" in err
    assert not (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--presses", "snapkw"), "no press 'snapkw'"),
        (("--rates", "1"), "give rates above 1"),
        (("--reference", "kv-kompress"), "did you mean kv-compress"),
        (("--out", "/no/such/folder/x.jsonl"), "no such folder"),
        (("--peer-python", "/no/python"), "give a Python with torch and kvpress"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    code = main_of(command.main, ["--peer-python", sys.executable, *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


SKETCHED = """
import sys
sys.path.append(FOLDER)
import kvpress, peer, torch
given, randn, press = torch.tensor(DRAWN), torch.randn, kvpress.CompactorPress
torch.randn = lambda *shape, **rest: given[None] if len(shape) == 4 else randn(*shape, **rest)
kvpress.CompactorPress = lambda ratio: press(ratio, blending=0.9)
peer.main()
"""
"""The peer with our λ and our sketch."""


@pytest.mark.slow
def test_real_presses_keep_the_same_positions(tmp_path):
    """At equal KVs, of a prompt whose chunks are whole."""
    peer_python = os.environ.get("KVJAX_PEER_PYTHON")
    if not peer_python:
        pytest.skip("needs a Python with kvpress (set KVJAX_PEER_PYTHON)")
    from benchmarks.kvpress.ours import kept_positions
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.sizes import EvaluatorConfig, Variant
    from kvjax.models import load_model

    wide = dataclasses.replace(TINY, num_layers=3, hidden_size=64, head_dim=64)
    write_tiny(tmp_path, wide)
    evaluator = Evaluator(load_model(weights=tmp_path), EvaluatorConfig())
    folder = tmp_path / "exported"
    export(evaluator.model.config, evaluator.model.tokenizer, tmp_path, folder, Progress())
    rng = np.random.default_rng(1)
    prompt, rate = rng.integers(0, 256, 8 + 512 + 4), 3.0
    drawn = rng_of_compactor().standard_normal((wide.num_kv_heads, 64, 48)).astype(np.float32)
    script = tmp_path / "peer.py.txt"
    values = f"FOLDER, DRAWN = {str(process.PEER.parent)!r}, {drawn.tolist()!r}\n"
    script.write_text(values + SKETCHED)
    names = ["keydiff", "expected-attention", "compactor"]
    like = [Variant(str(presses.PRESSES[name].like), rate) for name in names]
    tokens = types.SimpleNamespace(prompt=prompt)
    ours = kept_positions(evaluator, None, tokens, len(prompt), like)
    asked = [
        {"press": name, "kvs": sum(map(len, kept)), "positions": True}
        for name, kept in zip(names, ours)
    ]
    job = {
        "prompt": prompt.tolist(), "cut": len(prompt), "opened": len(prompt), "free_tokens": 0,
        "eos": [], "head": 0, "target": [1, 2], "presses": asked,
    }  # fmt: skip
    with process.PeerProcess(peer_python, folder, script) as peer:
        answer = peer.ask(job)
    for name, kept, found in zip(names, ours, answer["results"]):
        theirs = [sorted(head) for layer in found["positions"] for head in layer]
        # Ours are whole blocks.
        assert all(abs(len(a) - len(b)) < 16 for a, b in zip(kept, theirs)), name
        assert all(len(head) < len(prompt) / 2 for head in theirs)
        assert presses.agreement(kept, theirs) > 0.998, name


def rng_of_compactor():
    from kvjax.cache.methods.compactor import Compactor

    return np.random.default_rng(Compactor().seed)


def test_a_python_without_kvpress_says_what_to_install(python):
    program = python("raise ModuleNotFoundError(\"No module named 'kvpress'\")")
    with pytest.raises(UserError, match=r"No module named 'kvpress'; install it there: .*kvpress"):
        process.peer_versions(program)


def test_a_peer_that_ends_leaves_its_last_words(python, tmp_path):
    with (
        process.PeerProcess(python("raise MemoryError('too much')"), tmp_path) as peer,
        pytest.raises(UserError, match="MemoryError: too much"),
    ):
        peer.ask({"prompt": list(range(100_000))})
