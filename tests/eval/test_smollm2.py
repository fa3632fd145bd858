"""The evaluator on a real model, end to end."""

import jax
import numpy as np
import pytest

from kvjax.eval.evaluator import Evaluator
from kvjax.eval.rows import PROTOCOLS, Skipped
from kvjax.eval.sizes import EvaluatorConfig, Variant
from kvjax.eval.tasks import Context, TaskOptions, make_rows
from kvjax.models import load_model
from tests.models.decoder_helpers import dense_scores

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model("smollm2-135m", weights=smollm2_path)


def plain_scores(model, tokens, last: int) -> np.ndarray:
    """Log-probabilities after each of the last tokens, without the engine's attention."""

    @jax.jit
    def run(params, tokens):
        scores = dense_scores(model.config, params, tokens, slice(-last, None))
        return jax.nn.log_softmax(scores)

    return np.asarray(run(model.params, np.asarray(tokens, np.int32)))


def test_needles_are_found_and_agree_with_a_plain_pass(model):
    options = TaskOptions(lengths=(400,), rows=2, depths=2)
    rows = make_rows(["passkey"], Context(model.tokenizer, options, Skipped()))
    evaluator = Evaluator(model, EvaluatorConfig(num_slots=4))
    found, freely = 0, 0
    variants = [Variant("full", 1.0), Variant("kv-compress", 1.0), Variant("kv-compress", 8.0)]
    for row in rows:
        tokens = evaluator.tokenise(row)
        whole = np.concatenate([tokens.prompt, tokens.target[:-1]])
        scores = plain_scores(model, whole, len(tokens.target))
        nll = -scores[np.arange(len(tokens.target)), tokens.target]
        batches = evaluator.evaluate(row, tokens, dict.fromkeys(PROTOCOLS, variants))
        for result in (result for batch in batches for result in batch):
            if result["rate"] > 1:
                assert result["kvs"] / result["kvs_full"] == pytest.approx(1 / 8, rel=0.1)
                assert result["kl"] > 0
                continue
            holds = (
                result["free_answer"] is not None and row.target.strip() in result["free_answer"]
            )
            assert result["free"] == (None if result["protocol"] == "prompt" else holds)
            freely += holds
            assert result["em"] == (scores.argmax(-1) == tokens.target).all()
            found += result["em"]
            np.testing.assert_allclose(result["nll"], nll[1:].mean(), rtol=1e-3, atol=1e-4)
            assert abs(result["kl"]) < 1e-4
            assert result["agree"] == 1
    assert found > 0
    assert freely > 0
