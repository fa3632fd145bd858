"""docs/methods.md's table of methods is the code's, and says what tells methods apart."""

import dataclasses

import pytest

from kvjax.cache.methods import (
    METHODS,
    Allocation,
    Method,
    Observation,
    Representatives,
    get_method,
)
from kvjax.cache.methods.base import Reads
from kvjax.cli import main_of
from tests.scripts.conftest import load_script

TABLE = load_script("methods_table")


def test_the_page_holds_the_table_of_the_code():
    """If this fails: python scripts/methods_table.py"""
    held = [line for line in TABLE.PAGE.read_text().split("\n") if line.startswith("| `")]
    wanted = TABLE.table().split("\n")[2:]
    assert [line for line in held if line in wanted] == wanted
    assert TABLE.replaced(TABLE.PAGE.read_text()) == TABLE.PAGE.read_text()


def test_every_method_has_a_row_unlike_all_others():
    rows = {name: TABLE.row(method) for name, method in METHODS.items()}
    assert all(len(row) == len(TABLE.HEAD) for row in rows.values())
    assert len({row[1:] for row in rows.values()}) == len(METHODS)


def test_rows_say_what_their_methods_do():
    method = Method(
        "mine",
        "",
        Observation(
            window=5,
            power=2,
            pool=3,
            pool_kind="avg",
            pool_window=False,
            group="mean",
            group_first=True,
            excluded_distance=4,
            background=7,
            reads=Reads(tokens=6),
            query_decay=0.5,
            accumulate=True,
            decode_decay=0.9,
        ),
        protected=1,
        protected_share=0.25,
        sinks=2,
        allocation=Allocation("pyramid", "ada", beta=9, exact=False, floor=0.3),
        unit=8,
        per_age=True,
        representatives=Representatives(share=0.5, anchor="mean", unit=4),
        runs="both",
        query_aware=False,
        evidence="A",
    )
    assert TABLE.row(method) == (
        "`mine`",
        (
            "last 5 queries, Σ p² · 0.5ⁿ, avg 3 before the window, 4 apart, heads: mean first, "
            "+ 7 · mean p² of 256; 6 tokens read by any head; decode decays 0.9, adds"
        ),
        "pyramid β 9, floored: **more than the cap**, Ada heads α 0.3",
        "pages of 8, per query; 50 % KVCrush mean by 4",
        "newest 1, newest 0.25 of the cap, first 2",
        "no",
        "both",
        "A",
    )
    assert TABLE.row(get_method("kmeans-10:tova"))[3] == "KVs, same in a layer; 10 % k-means"


def test_another_table_is_noticed_and_mended(tmp_path, monkeypatch, capsys):
    page = tmp_path / "methods.md"
    page.write_text(TABLE.PAGE.read_text().replace("60 · mean", "30 · mean"))
    monkeypatch.setattr(TABLE, "PAGE", page)
    assert TABLE.main(["--check"]) == 1
    assert TABLE.main([]) == 0
    assert TABLE.main(["--check"]) == 0
    assert "60 · mean" in page.read_text()
    observed = dataclasses.replace(METHODS["tova"], protected=9)
    assert TABLE.protects(observed) == "newest 9"
    page.write_text("# Methods\n")
    assert main_of(TABLE.main, []) == 2
    assert "has no table" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full", "random", "key-norm"])
def test_methods_without_queries_say_so(name):
    assert "quer" not in TABLE.row(METHODS[name])[1]
