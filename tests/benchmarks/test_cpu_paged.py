"""`python -m benchmarks.cpu --only paged`: what its rows are of."""

import jax
import numpy as np
import pytest

from benchmarks.cpu import paged
from kvjax.cli import Progress
from kvjax.models import ModelConfig
from tests.engine.conftest import TINY


@pytest.fixture
def small(monkeypatch) -> ModelConfig:
    monkeypatch.setattr(paged, "SUMMED_BYTES", 1 << 16)
    monkeypatch.setattr(paged, "LAYERS", 2)
    return TINY


@pytest.mark.slow
def test_every_case_is_timed_by_both(small: ModelConfig) -> None:
    found = paged.measure_paged(small, 20, 1, 2, Progress())
    assert found["memory_gb_per_second"] > 0
    cases = {(r["sequences"], r["stored"], r["in_order"], r["metric"]) for r in found["rows"]}
    assert len(cases) == len(found["rows"]) == 10
    assert all(min(r["numba"], r["xla"]) > 0 for r in found["rows"])
    # Two pages of 16 KVs for every head, keys and values in float32.
    (one,) = [r for r in found["rows"] if r["sequences"] == 1 and r["in_order"] and r["metric"]]
    assert one["bytes"] == 2 * 32 * small.num_kv_heads * small.head_dim * 4


def test_the_same_pages_are_read_in_order_and_anywhere(small: ModelConfig) -> None:
    q, pools, table, lengths = paged._arguments(small, 2, 20, "int8", order=False)
    in_order = paged._arguments(small, 2, 20, "int8", order=True)
    assert sorted(np.ravel(table)) == list(np.ravel(in_order[2]))
    assert (np.ravel(table) != np.ravel(in_order[2])).any()
    assert (np.asarray(lengths) == 20).all()
    for one, other in zip(jax.tree.leaves(pools), jax.tree.leaves(in_order[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert pools[0][0].form == "int8"
