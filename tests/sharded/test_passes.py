"""What passes beside the engine find on several devices is what they find on one."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvjax.cache.config import CALIBRATED
from kvjax.engine.parallel import mesh_of
from kvjax.engine.spread import Spread
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.sizes import EvaluatorConfig, Variant
from kvjax.models import LoadedModel
from kvjax.models.decoder import is_stacked, logical_axes
from kvjax.models.parallel import Dealing, Split, split_params
from tests.eval.conftest import make_row
from tests.sharded.tiny import TINY, made_calibration, model_of

CONFIG = EvaluatorConfig(block_size=4, num_slots=3, free_tokens=4)
QUICK = [
    Variant("full", 1.0),
    Variant("kvzip-plus", 2.0),
    Variant("speckv", 2.0),
    Variant(CALIBRATED, 3.0, "int4+w8"),
]
VARIANTS = [
    Variant("full", 1.0),
    Variant("kv-compress", 3.0),
    Variant("kvzip-plus", 2.0),
    Variant("pyramidkv-exact", 2.0),
    Variant(CALIBRATED, 3.0),
    Variant(CALIBRATED, 3.0, "int4w8"),
]
LONG = "It was the age of wisdom, it was the age of foolishness. " * 3
ROWS = [make_row(context=LONG), make_row(metric="edit", max_new_tokens=4)]


def dealt(model: LoadedModel, shards: int, replicas: int = 1) -> LoadedModel:
    """The model on several devices, heads dealt out of order."""
    load = np.array([[1.0, 5, 2], [3, 1, 9]])
    dealing = Dealing.by_load(load, shards, replicas)
    split = Split(dealing, mesh_of(dealing))
    axes = logical_axes(model.config, is_stacked(model.params))
    return dataclasses.replace(model, params=split_params(model.params, axes, split), split=split)


def results(model: LoadedModel, variants, rows, protocols) -> list[dict[str, Any]]:
    calibrated = model.config.group_size == TINY.group_size  # the calibration is of these heads
    artefacts = made_calibration().on_device() if calibrated else {}
    variants = [v for v in variants if v.method != CALIBRATED or calibrated]
    evaluator, found = Evaluator(model, CONFIG, artefacts), []
    for row in rows:
        jobs = dict.fromkeys(protocols, variants)
        for batch in evaluator.evaluate(row, evaluator.tokenise(row), jobs):
            found += batch
    return found


def same(found: Any, want: Any, at: str = "") -> None:
    """Equal numbers and texts; floats to what their sums may differ by."""
    assert type(found) is type(want), at
    if isinstance(want, dict):
        assert found.keys() == want.keys(), at
        for name in want:
            if name != "seconds":
                same(found[name], want[name], f"{at} {name}")
    elif isinstance(want, list):
        assert len(found) == len(want), at
        for number, (one, other) in enumerate(zip(found, want)):
            same(one, other, f"{at} {number}")
    elif isinstance(want, float):
        assert found == pytest.approx(want, rel=1e-3, abs=2e-5), at
    else:
        assert found == want, at


@pytest.mark.parametrize(
    ("shards", "replicas", "group"), [(2, 1, 2), pytest.param(2, 2, 3, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_an_evaluation_finds_what_one_device_finds(shards, replicas, group):
    """What each head keeps, what is said and how likely it was, at which recall; of a prompt."""
    model = model_of(False, group=group)
    found, want = (
        results(one, QUICK, ROWS[:1], ["chat"]) for one in (dealt(model, shards, replicas), model)
    )
    same(found, want)
    assert len({tuple(np.ravel(row["kept"])) for row in found}) == len(found) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "replicas", "group"), [(2, 1, 2), (4, 1, 2), (3, 2, 3)])
def test_a_larger_evaluation_finds_what_one_device_finds(shards, replicas, group):
    model, protocols = model_of(False, group=group), ["chat", "agnostic"]
    found, want = (
        results(one, VARIANTS, ROWS, protocols) for one in (dealt(model, shards, replicas), model)
    )
    same(found, want)
    assert {row["protocol"] for row in found} == set(protocols)


def test_methods_that_join_heads_are_refused():
    model = dealt(model_of(False), 2)
    evaluator, row = Evaluator(model, CONFIG), ROWS[0]
    run = evaluator.evaluate(row, evaluator.tokenise(row), {"chat": [Variant("tova", 2.0)]})
    with pytest.raises(UserError, match=r"^method tova with tensor_parallel 2: [^\n]*$"):
        next(iter(run))


def test_what_has_heads_comes_back_in_their_order():
    model = dealt(model_of(True), 2)
    spread = Spread(model)
    dealing = spread.parallel.dealing  # type: ignore[union-attr]
    assert not np.array_equal(dealing.number, Dealing.even(2, 3, 2).number)
    assert spread.shard_heads.tolist() == dealing.heads_of_shards.tolist()
