"""docs/methods.md's table of methods is the code's, and says what tells methods apart."""

import dataclasses

from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.methods.adakv import Ada
from kvjax.cache.methods.kvcrush import SpreadOverBits
from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.methods.snapkv import SnapKV
from kvjax.cache.policy import ByLayer, Method
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
        SnapKV(window=5, pool=3, pool_kind="avg"),
        ByLayer(Pyramid(beta=9, exact=False), Ada(floor=0.3)),
        SpreadOverBits(share=0.5, anchor="mean", compared=4),
        protected=1,
        protected_share=0.25,
        sinks=2,
        query_aware=False,
        evidence="A",
    )
    assert TABLE.row(method) == (
        "`mine`",
        "SnapKV(window=5, pool=3, pool_kind=avg, group_first=True)",
        (
            "ByLayer(layers=Pyramid(beta=9, exact=False, short=False), heads=Ada(floor=0.3)); "
            "**more than the cap**"
        ),
        (
            "SpreadOverBits(unit=1, scope=head, share=0.5, compared=4, mode=paper, "
            "anchor=mean, pick=random, seed=0)"
        ),
        "newest 1, newest 0.25 of the cap, first 2",
        "no",
        "prefill",
        "A",
    )
    more = dataclasses.replace(method, protected=0, protected_more=0.5)
    assert TABLE.row(more)[4] == "newest 0.25 of the cap and 0.5 of it above 64, first 2"
    assert "share=0.1, iterations=10)" in TABLE.row(get_method("kmeans-10:tova"))[3]
    assert TABLE.row(METHODS["full"])[1:5] == ("–",) * 4
    assert TABLE.row(METHODS["a2sf"])[6] == "both"


def test_another_table_is_noticed_and_mended(tmp_path, monkeypatch, capsys):
    page = tmp_path / "methods.md"
    page.write_text(TABLE.PAGE.read_text().replace("background=60", "background=30"))
    monkeypatch.setattr(TABLE, "PAGE", page)
    assert TABLE.main(["--check"]) == 1
    assert TABLE.main([]) == 0
    assert TABLE.main(["--check"]) == 0
    assert "background=60" in page.read_text()
    observed = dataclasses.replace(METHODS["tova"], protected=9)
    assert TABLE.protects(observed) == "newest 9"
    page.write_text("# Methods\n")
    assert main_of(TABLE.main, []) == 2
    assert "has no table" in capsys.readouterr().err
