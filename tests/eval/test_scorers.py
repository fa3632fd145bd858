"""Scorers against cases worked out by hand."""

import pytest

from kvjax.eval.scorers import (
    SCORERS,
    check_metric,
    classification,
    count,
    edit_similarity,
    f1,
    finish_answer,
    gsm8k,
    needs_answer,
    retrieval,
    rouge_l,
    score_answer,
    score_free,
)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("The cat, a dog!", "cat dog", 1.0),  # articles and punctuation do not count
        ("cat bird", "cat dog", 0.5),
        ("cat cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("", "cat", 0.0),
        ("the", "a", 0.0),
        ("Paris is nice", "Rome", 0.0),
    ],
)
def test_f1(answer, truth, expected):
    assert f1(answer, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("one two three four", "one two three four", 1.0),
        # Longest common subsequence "one three": precision 2/2, recall 2/4.
        ("one three", "one two three four", 2 / 3),
        ("five six", "one two", 0.0),
        ("", "one", 0.0),
        (".", "one", 0.0),
    ],
)
def test_rouge_l(answer, truth, expected):
    assert rouge_l(answer, truth) == pytest.approx(expected, abs=1e-6)


def test_edit_similarity_takes_the_first_line_of_code():
    # "abcd" and "abed" share a, b and d in order: 2 · 3 / 8.
    assert edit_similarity("abcd", "abed") == 0.75
    assert edit_similarity("\n# a comment\n`x`\nreturn x\nmore", "return x") == 1.0
    assert edit_similarity("// nothing else", "return x") == 0.0
    # difflib takes the longest block first: "ab", before which nothing of "aabc" is in order.
    assert edit_similarity("acabba", "aabcac") == 0.33


def test_classification_splits_the_point_over_the_classes_named():
    classes = ("City", "Other location", "Country", "location")
    assert classification("It is a City.", "City", classes) == 1.0
    assert classification("City or Country", "City", classes) == 0.5
    assert classification("Country", "City", classes) == 0.0
    # "location" is only named as a part of the truth.
    assert classification("Other location", "Other location", classes) == 1.0
    # Of two such classes side by side LongBench's loop passes over the second.
    nested = ("abc", "a", "b", "x")
    assert classification("abc", "abc", nested) == 0.5


def test_numbers_count_by_their_share():
    assert retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert retrieval("Paragraph 12 or 1", "Paragraph 12") == 0.5
    assert retrieval("none", "Paragraph 12") == 0.0
    assert count("There are 7, not 8 or 7.", "7") == pytest.approx(2 / 3)
    assert count("seven", "7") == 0.0


def test_gsm8k_reads_the_number_after_the_mark():
    truth = "She makes 9 * 2 = 18\n#### 1,218"
    assert gsm8k("so\n#### 1218", truth) == 1.0
    assert gsm8k("#### $1,218.", truth) == 1.0
    assert gsm8k("1218", truth) == 0.0
    assert gsm8k("#### 18", truth) == 0.0


def test_best_truth_or_share_of_truths():
    assert score_answer("f1", "cat", ("dog", "cat")) == 1.0
    assert score_answer("contains", "It is 17, or 18", ("18", "99")) == 1.0
    assert score_answer("contains-all", "17 and 18", ("17", "18", "19", "20")) == 0.5


def test_answers_without_a_beginning_are_scored_by_holding_the_true_one():
    for metric in ("em", "contains"):
        assert score_free(metric, "It was 1234567, I think.", ("1234567",)) == 1.0
        assert score_free(metric, "It was 123456", ("1234567",)) == 0.0
    # The space that joins a target to its prompt is not part of it.
    assert score_free("em", "1234567.", (" 1234567",)) == 1.0
    assert score_free("em", "In a Copper Box", (" copper box",)) == 1.0
    assert score_free("em", "b", ("a", "b")) == 1.0
    assert score_free("contains-all", "17 and 18", ("17", "18", "19", "20")) == 0.5
    assert score_free("f1", "cat bird", ("cat dog",)) == 0.5
    assert score_free("classification", "City", ("City",), ("City", "Country")) == 1.0


def test_metrics_are_known_by_name():
    for name in SCORERS:
        assert needs_answer(name)
        check_metric(name)
    assert not needs_answer("em")
    assert not needs_answer("nll")
    assert not needs_answer("own")
    with pytest.raises(ValueError, match="'bleu' is none of em, nll, own, f1"):
        check_metric("bleu")


def test_answers_end_before_their_stop_texts():
    assert finish_answer("\n\nParis\nRome", ("\n",)) == "Paris"
    assert finish_answer(" a ### b Q: c", ("Q:", "###")) == " a "
    assert finish_answer("whole", ()) == "whole"
