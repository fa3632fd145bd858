"""`python -m benchmarks.choice`: its masks are the engine's choice, and what it tells of them."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.choice import Comparison, main, results, summed_up, table
from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
from kvjax.cache.calibration import Calibration
from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
from kvjax.cli import main_of
from kvjax.engine.calibrate.choice import BLOCK_SIZE
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.rows import Row, tokenise
from kvjax.eval.sizes import EvaluatorConfig, Variant
from kvjax.models import load_model

LENGTH, CAP = 117, 32
ROW = Row(
    "one", "needle", LENGTH, head="", question="?", suffix="!", answer_prefix="=", target="13572",
    context="".join(chr(97 + i * i % 26) for i in range(LENGTH)),
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=str(tiny_folder), dtype="float32")


def calibration(model, seed: int) -> Calibration:
    rng, c = np.random.default_rng(seed), model.config
    heads = (c.num_layers, c.num_kv_heads)
    weight = rng.standard_normal((c.num_layers, c.hidden_size, c.num_kv_heads)) / 8
    extra = np.append(rng.uniform(-1, 1, (*heads, 4)), np.full((*heads, 1), 60), axis=-1)
    arrays = {WEIGHT: weight.astype(np.float32), EXTRA: extra.astype(np.float32)}
    return Calibration(arrays, model.fingerprint)


@pytest.fixture(scope="module")
def comparison(model):
    """Two calibrations beside each other."""
    return Comparison(model, {n: calibration(model, i).arrays for i, n in enumerate(("own", "b"))})


@pytest.fixture(scope="module")
def tokens(model):
    return tokenise(ROW, model.tokenizer, 512, 32)


@pytest.mark.slow
def test_masks_are_what_the_engine_keeps(model, comparison, tokens):
    """By the tokens that each head holds of the same prompt, at the same blocks."""
    heads = (model.config.num_layers, model.config.num_kv_heads)
    cut = tokens.cut("chat")
    of = comparison.look(tokens)
    # 32 of 119 tokens: as many blocks.
    (mask,) = np.asarray(comparison.masks(of, cut, "own", [cut / CAP]))
    llm = LLM(
        model,
        CompressionConfig("predicted-reads-blind", max_cache_tokens=CAP),
        EngineConfig(
            max_batch=1, max_len=256, prefill_chunk=128, pool_tokens=512, block_size=BLOCK_SIZE
        ),
        calibration=calibration(model, 0),
    )
    llm.add_request(tokens.prompt[:cut], SamplingParams(max_tokens=1), report_kept=True)
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    kept = outputs[-1].stats.kept_tokens
    assert kept is not None
    np.testing.assert_array_equal(mask[..., :cut], kept)
    assert not mask[..., cut:].any()
    assert mask.sum() == np.prod(heads) * CAP
    assert len({int(n) for n in mask.sum(-1).ravel()}) > 1


@pytest.mark.slow
def test_what_is_said_behind_a_mask_is_what_the_evaluation_says(model, comparison, tokens):
    artefacts = {n: jnp.asarray(x) for n, x in calibration(model, 0).arrays.items()}
    evaluator = Evaluator(model, EvaluatorConfig(num_slots=2, free_tokens=0), artefacts)
    of, rates = comparison.look(tokens), (1.0, 3.0, 7.0)
    variants = [Variant("predicted-reads-blind", rate) for rate in rates]
    for protocol in ("chat", "agnostic", "prompt"):
        batches = evaluator.evaluate(ROW, tokens, {protocol: variants})
        wanted = {result["rate"]: result for batch in batches for result in batch}
        found = list(comparison.compare(of, tokens.cut(protocol), rates))
        assert [result["calibration"] for result in found] == ["own"] * 3 + ["b"] * 3
        for result in found[:3]:
            for name in ("em", "kvs"):
                assert result[name] == wanted[result["rate"]][name]
            for name, most in (("nll", 2e-4), ("kl", 1e-5)):
                assert result[name] == pytest.approx(wanted[result["rate"]][name], abs=most)
        assert found[0]["kl"] == pytest.approx(0, abs=1e-5)
        assert found[2]["kl"] != pytest.approx(found[5]["kl"], abs=1e-4)


def test_answers_that_the_full_cache_does_not_give_are_left_out(comparison, tokens):
    """Of two prompts with the same words, the one whose answer is what it says."""
    said = np.zeros(0, np.int32)
    for _ in range(2):
        target = np.append(said, 0).astype(np.int32)
        of = comparison.look(dataclasses.replace(tokens, target=target))
        said = np.append(said, np.asarray(of.dense.logits)[len(said)].argmax()).astype(np.int32)
    right = dataclasses.replace(tokens, target=said)
    rows = [(ROW, tokens), (dataclasses.replace(ROW, id="two"), right)]
    found = list(results(comparison, rows, ["chat"], [1.0, 8.0], lambda *at: None))
    assert [(r["id"], r["calibration"], r["rate"]) for r in found] == [
        ("two", "own", 1.0), ("two", "own", 8.0), ("two", "b", 1.0), ("two", "b", 8.0)
    ]  # fmt: skip
    assert found[0]["em"] == 1
    # Behind a whole prompt the first token is the full cache's, and it is not the second's like.
    assert said[0] != said[1]
    whole = comparison.compare(comparison.look(right), right.cut("prompt"), [1.0])
    assert next(whole)["em"] == 1
    goes_on = dataclasses.replace(ROW, metric="nll")
    one, _ = results(comparison, [(goes_on, tokens)], ["chat"], [8.0], lambda *at: None)
    assert one["em"] is None
    assert one["kl"] > 0


def test_the_table_has_means_and_intervals():
    one = {"protocol": "chat", "rate": 8.0, "calibration": "a", "nll": 0.5, "kl": 0.25}
    found = [{**one, "task": "needle", "em": 1}, {**one, "task": "needle", "em": 0},
             {**one, "task": "text", "em": None, "nll": 2.0},
             {**one, "protocol": "agnostic", "task": "needle", "em": 1}]  # fmt: skip
    line, other = summed_up(found)
    assert (other["protocol"], other["prompts"], other["em"]) == ("agnostic", 1, [1, 1, 1])
    assert line["em"] == [0.5, 0.0, 1.0]
    assert line["tasks"] == {"needle": 0.5}
    assert line["nll"][0] == 1.0
    assert table([line]).splitlines()[2] == (
        "| chat | 8 | a | 50 | 50 [0, 100] | 1.00 [0.50, 2.00] | 0.250 [0.250, 0.250] |"
    )


def test_a_command_compares_files(model, tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = tmp_path / "prompts.jsonl"
    row = dataclasses.asdict(dataclasses.replace(ROW, metric="nll")).items()
    prompts.write_text(json.dumps({n: x for n, x in row if isinstance(x, str | int)}) + "\n")
    good, bad, out = (tmp_path / name for name in ("good.safetensors", "bad", "rows.jsonl"))
    calibration(model, 1).save(good)
    Calibration({"other": np.zeros((2, 3))}, model.fingerprint).save(bad)

    def run(*arguments) -> int:
        given = ("--weights", tiny_folder, "--prompts", prompts, "--rates", "4", *arguments)
        return main_of(main, [str(argument) for argument in given])

    assert run("--calibration", bad) == 2
    assert f"it lacks {WEIGHT}; give one that predicts" in capsys.readouterr().err
    assert run("--calibration", "auto") == 2
    elsewhere = tmp_path / "elsewhere" / good.name
    elsewhere.parent.mkdir()
    calibration(model, 0).save(elsewhere)
    other = tmp_path / "other.safetensors"
    calibration(model, 0).save(other)
    assert run("--calibration", good, good, elsewhere, other, "--protocols", "chat") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [line["calibration"] for line in report["results"]]
    assert names == [str(good), str(elsewhere), "other"]
    assert run("--calibration", good, "--out", out) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["protocol"] for row in rows] == ["chat", "agnostic"]
    assert (rows[0]["calibration"], rows[0]["rate"]) == ("good", 4)
    assert report["results"][0]["kl"][0] == rows[0]["kl"]
