"""Pictures: what they show for known rows, and `kvjax plot`."""

import functools
import gzip
import json

import numpy as np
import pytest

from kvjax.cli import main_of
from kvjax.cli.main import run_command
from kvjax.eval.result_plots import (
    frontier,
    plot_bytes,
    plot_kept,
    plot_needles,
    plot_recall,
    plot_scores,
    plot_text,
)

SCORES = {"full": 1.0, "good": 1.0, "bad": 0.0}


def rows(**changes):
    out = []
    for task, metric in (("needle", "em"), ("continuation", "nll")):
        for method, score in SCORES.items():
            for rate in (1.0,) if method == "full" else (2.0, 8.0):
                for index in range(4):
                    out.append(
                        {
                            "id": f"{task}{index}",
                            "task": task,
                            "protocol": "prompt",
                            "length": 1000,
                            "depth": index / 3 if metric == "em" else None,
                            "method": method,
                            "rate": rate,
                            "metric": metric,
                            "digest": "0",
                            "em": int(score),
                            "score": score if metric == "em" else None,
                            "free": score / 2 if metric == "em" else None,
                            "nll": 2.0,
                            "kl": 0.1,
                            "agree": 1.0,
                            "recall": 0.5,
                            "compressed_tokens": 100,
                            "kvs_full": 600,
                            "kvs": 600 / rate,
                            "bytes": 100,
                            "kept": [[50, 10]] * 3,
                            "recall_by_layer": [0.9, 0.5, 0.1],
                            "seconds": {"prefill": 1, "select": 0.1, "score": 0.1, "decode": 0},
                            **changes,
                        }
                    )
    return out


def axes_of(figure):
    assert figure is not None
    return figure.axes


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_scores_are_absolute_over_the_rate_really_kept():
    """A full cache that fails sometimes lowers its own line, and lifts no other above 100."""
    some = [
        {**row, "score": 0.0} if (row["method"], row["id"]) == ("full", "needle0") else row
        for row in rows()
    ]
    (axes,) = axes_of(plot_scores(some, "prompt"))
    lines = lines_of(axes)
    assert lines["good"].get_xdata() == pytest.approx([2, 8])
    assert lines["good"].get_ydata() == pytest.approx([100, 100])
    assert lines["bad"].get_ydata() == pytest.approx([0, 0])
    assert lines["full cache"].get_ydata() == pytest.approx([75, 75])
    assert "full" not in lines
    low, high = axes.get_ylim()
    assert low <= 0
    assert 100 <= high < 110


def test_answers_without_a_beginning_have_a_picture():
    (axes,) = axes_of(plot_scores(rows(), "prompt", "free"))
    lines = lines_of(axes)
    assert lines["good"].get_ydata() == pytest.approx([50, 50])
    assert lines["full cache"].get_ydata() == pytest.approx([50, 50])
    assert plot_scores(rows(free=None), "prompt", "free") is None


def test_text_shows_nll_and_kl():
    left, right = axes_of(plot_text(rows(), "prompt"))
    assert lines_of(left)["good"].get_ydata() == pytest.approx([2, 2])
    assert set(lines_of(left)) == {"good", "bad", "full"}
    assert lines_of(right)["bad"].get_ydata() == pytest.approx([0.1, 0.1])


def test_types_are_compared_over_their_bytes():
    def of(method, size, score):
        return [
            {**row, "method": method, "bytes": size * 8 / row["rate"], "bytes_full": 6400,
             "score": row["score"] and score, "kl": 1 - score / 2}
            for row in rows() if row["method"] == "good"
        ]  # fmt: skip

    full = [{**row, "bytes_full": 100} for row in rows() if row["method"] == "full"]
    several = [*full, *of("a in int8", 400, 0.5), *of("a in int4", 100, 0.25)]
    left, right = axes_of(plot_bytes(several, "prompt"))
    assert lines_of(left)["a in int8"].get_xdata() == pytest.approx([4, 16])
    assert lines_of(left)["a in int8"].get_ydata() == pytest.approx([50, 50])
    assert lines_of(left)["a in int4"].get_xdata() == pytest.approx([16, 64])
    assert lines_of(right)["a in int4"].get_ydata() == pytest.approx([0.875, 0.875])
    (best,) = [line for name, line in lines_of(right).items() if name.startswith("_")]
    assert best.get_xdata() == pytest.approx([16, 64])
    assert best.get_ydata() == pytest.approx([0.75, 0.875])
    assert plot_bytes(rows(), "prompt") is None
    # Nothing that the full cache knows, and no text: there are no numbers to draw.
    unknown = [{**row, "score": 0.0} for row in several if row["task"] == "needle"]
    assert plot_bytes(unknown, "prompt") is None


def test_the_frontier_is_what_nothing_beats():
    points = [(2, 9), (4, 7), (3, 7), (8, 8), (16, 1), (16, 0), (9, 1)]
    assert frontier(points) == [(2, 9), (8, 8), (16, 1)]
    assert frontier([]) == []


def test_needles_are_maps_of_depth_and_rate():
    good, bad = axes_of(plot_needles(rows(), "prompt", "needle"))[:2]
    assert good.get_title() == "good"
    np.testing.assert_array_equal(good.images[0].get_array(), np.ones((4, 2)))
    np.testing.assert_array_equal(bad.images[0].get_array(), np.zeros((4, 2)))
    several = rows() + [{**row, "length": 2000, "em": 1} for row in rows()]
    bad = axes_of(plot_needles(several, "prompt", "needle"))[1]
    np.testing.assert_array_equal(bad.images[0].get_array(), [[0, 1]] * 4)


def test_needles_by_length_are_those_of_the_largest_rate():
    """Not those of rate 1 beside it, where a method was run at both."""
    found = [row for row in rows(em=0) if row["rate"] in (1.0, 8.0)]
    found += [{**row, "rate": 1.0, "em": 1} for row in found if row["method"] != "full"]
    several = found + [{**row, "length": 2000} for row in found]
    (good, *_) = axes_of(plot_needles(several, "prompt", "needle"))
    np.testing.assert_array_equal(good.images[0].get_array(), np.zeros((4, 2)))


def test_kept_and_recall_are_means_of_the_rows_with_details():
    axes = axes_of(plot_kept(rows(), "prompt", 8.0))[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[50, 10]] * 3)
    recall = axes_of(plot_recall(rows(), "prompt", 8.0))[0]
    assert lines_of(recall)["good"].get_ydata() == pytest.approx([90, 50, 10])


def test_what_is_not_there_is_not_drawn():
    full = [row for row in rows() if row["method"] == "full"]
    assert plot_scores(full, "prompt") is None
    assert plot_text(full, "prompt") is None
    assert plot_needles(full, "prompt", "needle") is None
    plain = [{k: v for k, v in r.items() if k not in ("kept", "recall_by_layer")} for r in rows()]
    assert plot_kept(plain, "prompt", 8.0) is None
    assert plot_recall(plain, "prompt", 8.0) is None
    assert plot_scores(rows(score=0.0), "prompt") is None


PLOT = functools.partial(run_command, "plot")


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows()).encode()))
    return path


def test_the_command_writes_every_picture(results, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert main_of(PLOT, [str(results), "--out", str(out), "--methods", "good"]) == 0
    names = {path.stem for path in out.iterdir()}
    assert names == {
        f"{n}-prompt" for n in ("score", "free", "text", "kept", "recall", "needle-needle")
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())
    assert len(capsys.readouterr().out.split()) == len(names)


def test_pictures_whose_names_are_alike_are_all_kept(tmp_path, monkeypatch):
    """A task's name may have what stands for a folder in a file's."""
    drawn = {}

    def plot(own, protocol, task):
        return task

    monkeypatch.setattr("kvjax.eval.result_plots.plot_needles", plot)
    for name in ("plot_scores", "plot_text", "plot_bytes", "plot_kept", "plot_recall"):
        monkeypatch.setattr(f"kvjax.eval.result_plots.{name}", lambda *_: None)
    monkeypatch.setattr(
        "kvjax.eval.plots.save_figure",
        lambda figure, path: drawn.update({path.name: figure}),
    )
    tasks = ("a/b/c", "a-b/c", "a/b-c", "a")
    path = tmp_path / "r.jsonl"
    found = [
        {**rows()[0], "id": task, "task": task, "protocol": protocol}
        for task in tasks
        for protocol in ("prompt", "chat")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    assert main_of(PLOT, [str(path), "--out", str(tmp_path)]) == 0
    assert sorted(drawn.values()) == sorted(2 * tasks)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--methods", "goood"), "has no goood; it has full, good, bad"),
        (("--methods", ""), "--methods '': give at least one"),
        (("--rate", "3"), "no results at rate 3"),
        (("--methods", "full"), "nothing to draw"),
        (("--out", "/dev/null/pictures"), "cannot make the folder: Not a directory"),
        (("--out", __file__), "cannot make the folder: it is a file"),
        (("--format", "bmp"), "bmp"),
    ],
)
def test_bad_input_gets_one_line(results, tmp_path, capsys, arguments, says):
    out = () if "--out" in arguments else ("--out", str(tmp_path / "p"))
    assert main_of(PLOT, [str(results), *arguments, *out]) == 2
    assert says in capsys.readouterr().err
    assert main_of(PLOT, [str(tmp_path / "missing.jsonl")]) == 2


def test_pictures_name_what_tells_methods_apart():
    from kvjax.eval.result_plots import _labels

    theirs = ["kvcrush:snapkv", "kvpress:tova@ours", "kvpress:snapkv@ours"]
    assert list(_labels(theirs).values()) == ["kvcrush:snapkv", "kvpress tova", "kvpress snapkv"]
    twice = ["kvpress:tova@ours", "kvpress:tova@tova"]
    assert list(_labels(twice).values()) == twice
