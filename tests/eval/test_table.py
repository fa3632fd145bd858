"""The numbers of the tables against the same numbers worked out here."""

import pytest

from kvjax.eval.rows import PROTOCOLS
from kvjax.eval.table import Interval, bootstrap, rate_table, report, summarise


def result(index, method, rate, score, *, task="needle", metric="em", kvs=100, **values):
    return {
        "id": f"{task}{index}",
        "task": task,
        "protocol": "prompt",
        "method": method,
        "rate": rate,
        "metric": metric,
        "score": score,
        "nll": 1.0 + index,
        "kl": 0.5,
        "agree": 0.75,
        "recall": 0.5,
        "kvs": kvs,
        "kvs_full": 100,
        "bytes": kvs * 10_000,
        "seconds": {"prefill": 2.0, "select": 0.1, "score": 0.3, "decode": 0.0},
        **values,
    }


SCORES = {"full": [1.0, 1.0, 1.0, 0.0], "a": [1.0, 0.0, 1.0, 0.0], "b": [0.0, 0.0, 0.0, 0.0]}
RESULTS = [
    result(i, method, 1.0 if method == "full" else 4.0, score, kvs=100 if method == "full" else 25)
    for method, scores in SCORES.items()
    for i, score in enumerate(scores)
]


def mean_of(interval: Interval | None) -> float:
    assert interval is not None
    return interval.mean


def test_lines_hold_the_means():
    full, a, b = summarise(RESULTS[4:] + RESULTS[:4])
    assert (full.method, a.method, b.method) == ("full", "a", "b")
    assert mean_of(full.score) == 0.75
    assert mean_of(a.score) == 0.5
    assert mean_of(a.share) == pytest.approx(0.5 / 0.75)
    assert mean_of(b.share) == 0
    assert mean_of(a.nll) == 2.5
    assert (a.prompts, a.kvs, a.kvs_share, a.megabytes) == (4, 25, 0.25, 0.25)
    assert a.select_share == pytest.approx(0.05)
    assert a.seconds == pytest.approx(0.4)
    assert not a.full_fails


def test_a_share_is_of_the_same_prompts():
    partly = [row for row in RESULTS if row["method"] != "a" or row["id"] != "needle1"]
    a = summarise(partly)[1]
    assert mean_of(a.share) == pytest.approx((2 / 3) / (2 / 3))


def test_without_the_full_cache_there_is_no_share():
    assert summarise(RESULTS[4:])[0].share is None


def test_what_the_full_cache_cannot_do_is_marked():
    rows = [result(i, m, r, 0.4) for m, r in (("full", 1.0), ("a", 4.0)) for i in range(3)]
    lines = summarise(rows)
    assert all(line.full_fails for line in lines)
    page = report(rows, "Title")
    assert "the full cache fails" in page
    assert "needle ✗" in page
    f1 = [{**row, "metric": "f1"} for row in rows]
    assert not any(line.full_fails for line in summarise(f1))


def test_what_the_full_cache_says_by_itself_has_a_table_of_divergences():
    rows = [
        result(i, method, rate, None, task="summary", metric="own", kl=kl)
        for method, rate, kl in (("full", 1.0, 0.0), ("a", 4.0, 0.25))
        for i in range(3)
    ]
    page = report(rows, "Title")
    section = page.split("## KL(full ‖ compressed) on what the full cache says by itself")[1]
    assert "| a | 0.250 |" in section.split("##")[0]
    assert "the full cache fails" not in page


def test_intervals_are_those_of_the_bootstrap():
    values = [0.0, 1.0] * 25
    interval = bootstrap(values)
    assert interval is not None
    assert interval.mean == 0.5
    # The mean of 50 coins has a standard deviation of 0.5 / √50.
    assert interval.low == pytest.approx(0.5 - 1.96 * 0.5 / 50**0.5, abs=0.03)
    assert interval.high == pytest.approx(0.5 + 1.96 * 0.5 / 50**0.5, abs=0.03)
    same = bootstrap(values, values)
    assert same is not None
    assert (same.low, same.mean, same.high) == (1, 1, 1)
    assert bootstrap([]) is None
    assert bootstrap([1.0], [0.0]) is None


def test_what_rounds_to_nothing_has_no_sign():
    assert Interval(-1e-9, -4e-4, 1e-4).shown(3) == "0.000 [0.000, 0.000]"
    assert Interval(-0.0126, -1.5, 2).shown(2) == "-0.01 [-1.50, 2.00]"


def test_rate_tables_average_over_tasks_or_say_nothing():
    other = [
        result(i, m, r, s, task="kv")
        for m, r, s in (("full", 1.0, 1.0), ("a", 4.0, 1.0))
        for i in range(2)
    ]
    lines = summarise(RESULTS + other)
    table = rate_table(lines, "prompt", ["needle", "kv"], "share").splitlines()
    assert table[0] == "| method | 4× |"
    assert table[2] == "| full | 100.0 |"
    assert table[3] == f"| a | {100 * (2 / 3 + 1) / 2:.1f} |"
    assert table[4] == "| b | – |"
    # Absolute scores, the full cache's beside them at every rate.
    table = rate_table(lines, "prompt", ["needle", "kv"], "score").splitlines()
    assert table[2:4] == ["| full | 87.5 |", "| a | 75.0 |"]
    assert rate_table(lines, "prompt", ["needle"], "rate").splitlines()[2:4] == [
        "| full | 1.0 |",
        "| a | 4.0 |",
    ]
    assert rate_table(lines, "prompt", ["needle"], "kl").splitlines()[3] == "| a | 0.500 |"


def test_fewer_prompts_than_others_are_told():
    """A mean over some prompts does not look like one over all of them."""
    few = [result(i, "c", 4.0, 1.0, kvs=kvs, bytes_full=4_000_000) for i, kvs in ((0, 25), (1, 75))]
    lines = summarise([*RESULTS, *few])
    assert rate_table(lines, "prompt", ["needle"], "score").splitlines()[2:] == [
        "| full | 75.0 |",
        "| a | 50.0 |",
        "| b | 0.0 |",
        "| c | 100.0 (2 of 4 prompts) |",
    ]
    # Of means, not a mean of ratios: 4 MB of .5 MB, and 1 of a half of the KVs.
    assert lines[-1].smaller == pytest.approx(8)
    assert 1 / lines[-1].kvs_share == 2
    named = [result(0, "a|b", 4.0, 1.0, task="x\ny")]
    assert "| x y | prompt | a\\|b | 4 |" in report(named, "Title")


def test_free_answers_have_a_column_of_their_own():
    rows = [{**row, "free": 1.0 if row["method"] == "full" else 0.25} for row in RESULTS]
    full, a, _ = summarise(rows)
    assert (mean_of(full.free), mean_of(a.free), mean_of(a.score)) == (1.0, 0.25, 0.5)
    assert rate_table([full, a], "prompt", ["needle"], "free").splitlines()[2:] == [
        "| full | 100.0 |",
        "| a | 25.0 |",
    ]
    page = report(rows, "Title")
    assert "| needle | prompt | em | 4 | 75.0 [25.0, 100.0] | 100.0 [100.0, 100.0] |" in page
    assert "## Free answers × 100 (`prompt`)" in page
    # Rows of files from before there were any.
    assert "Free answers × 100 (" not in report(RESULTS, "Title")
    assert summarise(RESULTS)[0].free is None


def test_protocols_come_in_the_order_of_what_people_do():
    names = ("prompt", "agnostic", "question", "chat")
    rows = [{**row, "protocol": name} for name in names for row in RESULTS]
    page = report(rows, "Title")
    places = [page.index(f"## Score × 100 (`{name}`)") for name in PROTOCOLS]
    assert places == sorted(places)
    assert list(PROTOCOLS) == ["chat", "agnostic", "question", "prompt"]
    in_lines = list(dict.fromkeys(line.protocol for line in summarise(rows)))
    assert in_lines == list(PROTOCOLS)


def test_the_page_holds_every_line():
    page = report(RESULTS, "Title", ["a note"])
    assert page.startswith("# Title\n\n- a note\n")
    assert "| needle | prompt | a | 4 | 4 | 50.0 [" in page
    assert "66.7 [" in page
    # First the scores themselves, the full cache's beside them.
    scores = page.partition("## Score × 100 (`prompt`)")[2].split("##")[0].split("\n")
    assert scores[2:] == [
        *("| method | 4× |", "| --- | --- |"),
        *("| full | 75.0 |", "| a | 50.0 |", "| b | 0.0 |", ""),
        "",
    ]
