import argparse

import pytest

from benchmarks.conversations import headline, within


def row(rate, conversations, *, seconds=0.1, held=1.0):
    waits = {"time_per_output_token": {"p50": 0.0, "p90": seconds}}
    return {
        "rate": rate, "conversations": conversations, "next_turns": waits, "held": held,
        "pool_gb": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "held", "is_within"),
    [(0.2, 0.9, True), (0.21, 1.0, False), (0.2, 0.89, False)],
)
def test_conversations_need_their_turns_held_and_tokens_in_time(seconds, held, is_within):
    assert within(row(None, 1, seconds=seconds, held=held), 0.2, 0.9) == is_within


def test_the_headline_is_the_largest_number_within_the_bound():
    options = argparse.Namespace(rate=["v", "8"], out="a", plot_dir="b", seed=3)
    rows = [
        {**row(None, 1), "within": True},
        {**row(None, 2), "within": False},
        {**row(8.0, 1), "within": True},
        {**row(8.0, 4), "within": True},
    ]
    assert headline(options, rows, 0.25) == {
        "rate": ["v", "8"],
        "seed": 3,
        "bound_seconds": 0.25,
        "held": {"v": 1, "8": 4},
        "held_per_gb": {"v": 2.0, "8": 8.0},
    }
