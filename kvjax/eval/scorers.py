"""How a generated answer is compared with the true ones; every score is between 0 and 1.

The rules of LongBench's own scripts, so that figures compare: token F1 after normalisation,
ROUGE-L, the class named, the share of numbers that are the right one, edit similarity (the ratio
of difflib, which its library takes where nothing faster is installed). RULER's share of answers
found; GSM8K's number after "####".
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.extras import check_extra

Scorer = Callable[[str, str, Sequence[str]], float]
"""(answer, truth, classes) -> score."""


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and English articles."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of the shares of words that answer and truth have in common."""
    del classes
    ours, theirs = _words(answer), _words(truth)
    common = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """F-measure of ROUGE-L, by the library that LongBench uses."""
    del classes
    check_library("rouge-l")
    from rouge import Rouge

    try:
        scores: Any = Rouge().get_scores([answer], [truth], avg=True)
    except ValueError:
        # The library refuses texts without a word; they have nothing in common with the truth.
        return 0.0
    return scores["rouge-l"]["f"]


def edit_similarity(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code to the true one."""
    del classes
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return round(100 * difflib.SequenceMatcher(None, next(code, ""), truth).ratio()) / 100


def classification(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """1 / number of classes named, if the true one is among them.

    A class that is only named as a part of the truth does not count; of two such classes side by
    side the second one does, as in LongBench's loop.
    """
    named = [name for name in classes if name in answer]
    at = 0
    while at < len(named):
        if named[at] != truth and named[at] in truth:
            del named[at]
        at += 1
    return 1 / len(named) if truth in named else 0.0


def _share_of_numbers(answer: str, number: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the true paragraph's."""
    del classes
    number = re.search(r"\d+", truth)
    return _share_of_numbers(answer, number.group()) if number else 0.0


def count(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the true one."""
    del classes
    return _share_of_numbers(answer, truth.strip())


def contains(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Whether the truth stands in the answer, whatever the case of its letters."""
    del classes
    return float(truth.lower() in answer.lower())


def gsm8k(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Whether the number after "####" is the truth's."""
    del classes

    def number(text: str) -> str | None:
        found = re.search(r"#### *\$?(-?[0-9.,]+)", text)
        return found.group(1).replace(",", "").rstrip(".") if found else None

    true = number(truth) or truth.strip().replace(",", "")
    return float(number(answer) == true)


SCORERS: dict[str, Scorer] = {
    "f1": f1,
    "rouge-l": rouge_l,
    "edit": edit_similarity,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "contains": contains,
    "contains-all": contains,
    "gsm8k": gsm8k,
}
"""By name. An answer's score is its best over all truths; of "contains-all" it is the mean."""
PLAIN = ("em", "nll", "own")
"""What needs no generated answer to compare: see `kvjax.eval.rows.Row`."""
HELD = ("em", "contains", "contains-all")
"""By which an answer is right that holds the true one."""
LIBRARIES = {"rouge-l": "rouge"}
"""What some of them need."""


def needs_answer(metric: str) -> bool:
    """Whether a metric compares generated text: all but "em", "nll" and "own"."""
    return metric not in PLAIN


def check_metric(metric: str) -> None:
    """Raises ValueError for a metric there is none of."""
    if needs_answer(metric) and metric not in SCORERS:
        raise ValueError(f"metric {metric!r} is none of {', '.join([*PLAIN, *SCORERS])}")


def check_library(metric: str) -> None:
    """Refuse, before anything is answered, a metric whose library is not there.

    Raises:
        UserError: it is not installed.
    """
    if metric in LIBRARIES:
        check_extra(LIBRARIES[metric], "eval", f"the metric {metric}")


def score_answer(
    metric: str, answer: str, truths: Sequence[str], classes: Sequence[str] = ()
) -> float:
    """Score of a generated answer.

    Args:
        metric: a name of `SCORERS`.
        answer: what was generated.
        truths: the true answers.
        classes: all classes, where the metric is "classification".
    """
    scores = [SCORERS[metric](answer, truth, classes) for truth in truths]
    return sum(scores) / len(scores) if metric == "contains-all" else max(scores)


def score_free(
    metric: str, answer: str, truths: Sequence[str], classes: Sequence[str] = ()
) -> float:
    """Score of a greedy answer that was given no beginning: whether it holds the true one.

    Metrics that compare generated text score it themselves. Arguments as of `score_answer`.
    """
    if needs_answer(metric):
        return score_answer(metric, answer, truths, classes)
    return score_answer("contains", answer, [truth.strip() for truth in truths])


def finish_answer(text: str, stop: Sequence[str]) -> str:
    """The answer before the first of the stop texts, without empty lines before it."""
    text = text.lstrip("\n")
    ends = [text.find(mark) for mark in stop if mark in text]
    return text[: min(ends)] if ends else text
