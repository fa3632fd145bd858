"""What a result says of its answers: the true ones, teacher-forced, and the model's own."""

from collections.abc import Sequence
from typing import Any, SupportsFloat

import numpy as np

from kvjax.eval.rows import Answer, Row
from kvjax.eval.scorers import PLAIN, finish_answer, score_answer, score_free
from kvjax.models.tokenizer import Tokenizer


def rounded(value: SupportsFloat) -> float:
    """A number as results hold it: five digits."""
    return float(f"{float(value):.5g}")


def scored_tokens(answers: Sequence[Answer]) -> np.ndarray:
    """Which tokens of a target count."""
    return np.concatenate([np.arange(answer.start, answer.end) for answer in answers])


def forced(
    answers: Sequence[Answer],
    target: np.ndarray,
    top: np.ndarray,
    full_top: np.ndarray,
    nll: np.ndarray,
    kl: np.ndarray,
) -> dict[str, Any]:
    """em over each whole answer; nll, kl and agree over what follows its first token.

    Args:
        answers: where they stand; the others hold their tokens, one answer after the other.
        target: the true tokens.
        top: the likeliest ones; longer arrays are padded at the end.
        full_top: the full cache's.
        nll: −log p of the true ones.
        kl: of the next token's distribution to the full cache's.
    """
    ends = np.cumsum([answer.end - answer.start for answer in answers])
    right = [bool(part.all()) for part in np.split(top[: ends[-1]] == target, ends[:-1])]
    out: dict[str, Any] = {"em": int(right[0])}
    if len(answers) > 1:
        out = {"em": rounded(np.mean(right)), "turns": [int(one) for one in right]}
    rest = np.ones(ends[-1], bool)
    rest[[0, *ends[:-1]]] = False
    if not rest.any():
        return {**out, "nll": None, "kl": None, "agree": None}
    agree = top[: ends[-1]] == full_top[: ends[-1]]
    values = {"nll": nll, "kl": kl, "agree": agree}
    return {**out, **{name: rounded(v[: ends[-1]][rest].mean()) for name, v in values.items()}}


def freely(row: Row, tokenizer: Tokenizer, said: Sequence[list[int]]) -> dict[str, Any]:
    """Greedy answers without a given beginning, and whether they hold the true ones.

    Of a row with turns the mean over them, and a list of texts.

    Args:
        row: what was asked.
        tokenizer: the model's.
        said: the tokens of every answer; none where there is none.
    """
    if not said:
        return {"free": None, "free_answer": None}
    texts = [finish_answer(tokenizer.decode(tokens), row.stop) for tokens in said]
    if row.metric == "own":
        return {"free": None, "free_answer": texts[0]}
    truths = [(turn.target,) for turn in row.turns] or [row.answers or (row.target,)]
    scores = [score_free(row.metric, text, true, row.classes) for text, true in zip(texts, truths)]
    return {
        "free": rounded(np.mean(scores)),
        "free_answer": texts if row.turns else texts[0],
    }


def answered(row: Row, tokenizer: Tokenizer, em: float, said: list[int] | None) -> dict[str, Any]:
    """The task's own metric: of the answer behind its given beginning, where it compares that."""
    if row.metric in PLAIN[1:]:
        return {"metric": row.metric, "score": None}
    if said is None:
        return {"metric": "em", "score": float(em)}
    text = finish_answer(tokenizer.decode(said), row.stop)
    score = score_answer(row.metric, text, row.answers or (row.target,), row.classes)
    return {"metric": row.metric, "score": rounded(score), "answer": text}
