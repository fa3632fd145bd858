"""`python -m benchmarks.cpu --only products`: what its rows are of."""

import dataclasses

from benchmarks.cpu import products
from kvjax.cli import Progress
from kvjax.models import MODELS


def test_rows_of_every_implementation_that_serves(monkeypatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "head_dim": 32}
    heads = {"num_heads": 2, "num_kv_heads": 1}
    config = dataclasses.replace(MODELS["smollm2-135m"].config, **small, **heads, vocab_size=70)
    asked, usual = [], products.matmul

    def matmul(x, weight, *, axis, dtype, implementation):
        asked.append((implementation, x.shape, weight.shape))
        return usual(x, weight, axis=axis, dtype=dtype, implementation=implementation)

    monkeypatch.setattr(products, "matmul", matmul)
    found = products.measure_products(config, (2, 70), 1, Progress())
    kinds = ["float32"] * 2 + ["bfloat16"] * 2 + ["int8"] * 2
    assert [(row["rows"], row["weights"]) for row in found] == [
        (rows, kind) for rows, kind in zip([2, 70] * 3, kinds, strict=True)
    ]
    for row in found:
        assert {"numba", "xla"} <= set(row["milliseconds"]) <= set(products.NAMES)
        assert set(row["vocabulary"]) == {"numba", "xla"}
        assert min(*row["milliseconds"].values(), *row["vocabulary"].values()) > 0
    numba = {(x, w) for name, x, w in asked if name == "numba"}
    shapes = {(64, 128), (64, 64), (64, 192), (96, 64)}
    of_layers = {((rows, w[0]), w) for rows in (2, 70) for w in shapes}
    assert numba == of_layers | {((rows, 64), (70, 64)) for rows in (2, 70)}


def test_what_serves_no_such_shape_is_left_out() -> None:
    config = dataclasses.replace(
        MODELS["smollm2-135m"].config, hidden_size=36, num_layers=1, intermediate_size=10
    )
    (row, *_) = products.measure_products(config, (2,), 1, Progress())
    assert set(row["milliseconds"]) == set(row["vocabulary"]) == {"xla"}
