"""Corrupted caches of every kind: kvjax's own check fails, and so does the audit beside it."""

from collections.abc import Callable
from typing import Any

import pytest

from kvjax import cache as kv
from tests.cache.pair import Geometry, clean, filled, host, of_host
from tests.oracle.audit import audit

GEOMETRY = Geometry(blocks=72)


@pytest.fixture(scope="module")
def sound() -> kv.PagedCache:
    """Sequences of 16, 7 and 0 tokens, the first compressed: heads of several lengths."""
    pair = filled([16, 7, 0], GEOMETRY, seed=3)
    pair.compress([0], [9], protected=2)
    return clean(pair.cache)


Fields = dict[str, Any]


def last_block(c: Fields, at: tuple[int, int, int]) -> tuple[int, int]:
    """The last block of a head, and how many KVs it holds."""
    length = c["context_len"][at]
    return c["block_table"][at][-(-length // 4) - 1], (length - 1) % 4 + 1


def free_block(c: Fields) -> int:
    return int(c["free"].nonzero()[0][0])


RAGGED = (1, 1, 0)  # 7 KVs


def two_owners(c: Fields) -> None:
    c["block_table"][0, 1, 1, 0] = c["block_table"][1, 0, 0, 0]


def owned_and_free(c: Fields) -> None:
    c["free"][c["block_table"][1, 0, 1, 0]] = True


def lost(c: Fields) -> None:
    c["free"][free_block(c)] = False


def free_twice(c: Fields) -> None:
    c["order"] = c["order"][[0, *range(len(c["order"]))]]


def names_a_block_past_its_length(c: Fields) -> None:
    c["block_table"][RAGGED][2] = free_block(c)


def negative_past_its_length(c: Fields) -> None:
    c["block_table"][2, 0, 0, 5] = -1


def outside(c: Fields) -> None:
    c["block_table"][RAGGED][0] = GEOMETRY.blocks


def negative_block(c: Fields) -> None:
    c["block_table"][RAGGED][1] = -1


def negative_length(c: Fields) -> None:
    c["context_len"][2, 0, 1] = -1


def longer_than_its_table(c: Fields) -> None:
    c["context_len"][RAGGED] = 25


def longer_by_a_block(c: Fields) -> None:
    c["context_len"][RAGGED] += 4


def shorter_by_one(c: Fields) -> None:
    c["context_len"][RAGGED] -= 1


def written_past_its_length(c: Fields) -> None:
    c["position"][last_block(c, RAGGED)] = 5


def same_position_twice(c: Fields) -> None:
    c["position"][c["block_table"][RAGGED][1], 0] = 2


def same_position_twice_in_a_block(c: Fields) -> None:
    block = c["block_table"][RAGGED][0]
    c["position"][block, 3] = c["position"][block, 0]


def newer_than_its_sequence(c: Fields) -> None:
    c["position"][c["block_table"][RAGGED][0], 1] = 7


def sequence_too_short(c: Fields) -> None:
    c["seq_len"][1] = 6


def sequence_forgotten(c: Fields) -> None:
    c["seq_len"][0] = 0


def position_in_a_free_block(c: Fields) -> None:
    c["position"][free_block(c), 2] = 3


def metric_in_a_free_block(c: Fields) -> None:
    c["metric"][free_block(c), 2] = 0.5


@pytest.mark.parametrize(
    ("corrupt", "invariants_say", "audit_says"),
    [
        (two_owners, "two owners", "owned by head"),
        (owned_and_free, "an owned block is free", "free, and owned by head (1, 0, 1)"),
        (lost, "free .* owned blocks are not 72", "neither owned nor free"),
        (free_twice, "a block is free twice", "some of them twice"),
        (names_a_block_past_its_length, "past a head's length names a block", "empty entry 2"),
        (negative_past_its_length, "past a head's length names a block", "empty entry 5 names -1"),
        (outside, "a block outside the pool", "entry 0 is block 72 of 72"),
        (negative_block, "a block outside the pool", "entry 1 is block -1 of 72"),
        (negative_length, "a context length is negative", "holds -1 KVs"),
        (longer_than_its_table, "more KVs than its table", "its table ends at 24"),
        (longer_by_a_block, "a block outside the pool", "entry 2 is block 72 of 72"),
        (shorter_by_one, "written past a context length", "written past the head's length"),
        (written_past_its_length, "written past a context length", "past the head's length"),
        (same_position_twice, "two KVs of one position", "holds position 2 twice"),
        (same_position_twice_in_a_block, "two KVs of one position", "twice"),
        (newer_than_its_sequence, "newer than its sequence", "position 7 of a sequence of 7"),
        (sequence_too_short, "newer than its sequence", "position 6 of a sequence of 6"),
        (sequence_forgotten, "newer than its sequence", "of a sequence of 0"),
        (position_in_a_free_block, "free block has token positions", "free, and not empty"),
        (metric_in_a_free_block, "a free block has metrics", "free, and not empty"),
    ],
)
def test_corruption_is_found(
    sound, corrupt: Callable[[Fields], None], invariants_say: str, audit_says: str
):
    c = host(sound)
    corrupt(c)
    cache = of_host(c)
    with pytest.raises(AssertionError, match=invariants_say):
        kv.check_invariants(cache)
    found = audit(cache)
    assert any(audit_says in line for line in found), found


def test_a_sound_cache_passes(sound):
    assert len(set(host(sound)["context_len"][0].reshape(-1).tolist())) > 1
    kv.check_invariants(sound)
    assert audit(sound) == []


def test_kvs_that_were_never_written(sound):
    """`allocate` leaves them, for whoever fills them; an engine's sequence never has any."""
    c = host(sound)
    c["position"][c["block_table"][RAGGED][0], 1] = -1
    cache = of_host(c)
    kv.check_invariants(cache)
    assert audit(cache, unwritten=True) == []
    assert audit(cache) == ["head (1, 1, 0): position -1 of a sequence of 7"]
