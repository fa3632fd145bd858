"""Calls that would break the cache: refused, with every field of it as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.store import put_slots, restored, saved, take_slots, typed
from tests.cache.pair import Geometry, assert_identical, clean, filled, host, jitted
from tests.oracle.audit import audit

G = Geometry(blocks=72)
T = G.prompt


@pytest.fixture(scope="module")
def cache() -> kv.PagedCache:
    """Sequences of 7 and 16 tokens; slot 2 is empty."""
    return clean(filled([7, 16], G, seed=1).cache)


def prompt() -> tuple[jax.Array, ...]:
    k = jnp.ones((G.layers, T, G.heads, G.d))
    return k, k + 1, jnp.ones((G.layers, G.heads, T))


LENGTHS = [-1, T + 1, -(2**31), 2**31 - 1]
SLOTS = [-1, -2, G.slots, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_impossible_length(cache, length):
    for slot in (0, 2):
        after, ok = jitted("write_prompt")(cache, jnp.int32(slot), *prompt(), jnp.int32(length))
        assert not ok
        assert_identical(cache, after, f"length {length}")
        after, _, ok = jitted("write_survivors")(
            cache, jnp.int32(slot), *prompt(), jnp.int32(length), jnp.int32(8)
        )
        assert not ok
        assert_identical(cache, after, f"survivors of length {length}")


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_that_is_not_there(cache, slot):
    after, ok = jitted("write_prompt")(cache, jnp.int32(slot), *prompt(), jnp.int32(5))
    assert not ok
    assert_identical(cache, after, f"slot {slot}")
    after, _, ok = jitted("write_survivors")(
        cache, jnp.int32(slot), *prompt(), jnp.int32(5), jnp.int32(4)
    )
    assert not ok
    assert_identical(cache, after, f"survivors to slot {slot}")
    one = jnp.array([slot], jnp.int32)
    after, report = jitted("compress")(cache, one, jnp.array([1], jnp.int32))
    assert_identical(cache, after, f"compression of slot {slot}")
    assert int(report.freed[0]) == int(report.shortfall[0]) == 0
    part = take_slots(cache, one)
    assert not np.asarray(part.context_len).any()
    assert_identical(cache, put_slots(cache, one, part), "nothing taken, nothing put")


def test_what_was_saved_needs_an_empty_slot(cache):
    held = typed(cache, saved(cache, 1))
    held["metric"] = held["metric"] + 1
    for slot in (0, *SLOTS):
        after, ok = jax.jit(restored)(cache, jnp.int32(slot), held)
        assert not ok
        assert_identical(cache, after, f"restored to slot {slot}")
    after, ok = jax.jit(restored)(cache, jnp.int32(2), held)
    assert ok
    assert audit(after) == []
    assert np.asarray(after.seq_len).tolist() == [7, 16, 16]


def test_a_compression_of_no_sequence(cache):
    none = jnp.zeros(0, jnp.int32)
    after, report = jitted("compress")(cache, none, none)
    assert_identical(cache, after, "compression of no slot")
    assert report.freed.shape == report.shortfall.shape == (0,)


def test_survivors_need_an_empty_slot(cache):
    args = (*prompt(), jnp.int32(12), jnp.int32(8))
    after, _, ok = jitted("write_survivors")(cache, jnp.int32(0), *args)
    assert not ok
    assert_identical(cache, after, "a slot in use")
    after, _, ok = jitted("write_survivors")(cache, jnp.int32(2), *args)
    assert ok
    assert audit(after) == []
    assert np.asarray(after.seq_len).tolist() == [7, 16, 12]


@pytest.mark.parametrize(
    ("index", "count"),
    [
        ([0, 1, 2, 3], -1),
        ([0, 1, 2, 3], 5),
        ([0, 1, 2, 3], 2**31 - 1),
        ([0, 2, 2, 3], 3),  # a position twice
        ([3, 2, 1, 0], 2),
        ([0, 1, 9, 3], 3),  # padding
        ([-1, 1, 2, 3], 2),
        ([0, 1, 2, 3], 4),  # fine, but for the lengths of the others
    ],
)
def test_survivors_that_are_no_ascending_tokens(cache, index, count):
    """One head of four is wrong, or none is."""
    kept = np.broadcast_to(np.arange(4, dtype=np.int32), (G.layers, G.heads, 4)).copy()
    kept[1, 0] = index
    counts = np.full((G.layers, G.heads), 2, np.int32)
    counts[1, 0] = count
    write = jitted("write_prompt")
    args = {"kept_index": jnp.asarray(kept), "kept_len": jnp.asarray(counts)}
    after, ok = write(cache, jnp.int32(2), *prompt(), jnp.int32(9), **args)
    if (index, count) == ([0, 1, 2, 3], 4):
        assert ok
        assert audit(after) == []
        return
    assert not ok
    assert_identical(cache, after, f"{count} of {index}")


def test_lengths_alone_may_say_what_is_kept(cache):
    for counts, good in (([[3, 0], [9, 1]], True), ([[3, 0], [10, 1]], False)):
        kept = jnp.asarray(counts, jnp.int32)
        after, ok = jitted("write_prompt")(
            cache, jnp.int32(2), *prompt(), jnp.int32(9), kept_len=kept
        )
        assert bool(ok) == good
        assert audit(after) == []
        assert np.asarray(after.context_len)[2].tolist() == (counts if good else [[0, 0], [0, 0]])


@pytest.mark.parametrize("length", [25, 2**31 - 1, 2**31 - 4])
def test_heads_longer_than_their_tables(cache, length):
    wanted = np.asarray(cache.context_len).copy()
    wanted[1, 1, 1] = length
    after, ok = jitted("allocate")(cache, jnp.asarray(wanted))
    assert not ok
    assert_identical(cache, after, f"{length} KVs")


def test_lengths_that_heads_have_already_change_nothing(cache):
    for wanted in (-1, -(2**31), 0):
        after, ok = jitted("allocate")(cache, jnp.full(cache.context_len.shape, wanted, jnp.int32))
        assert ok
        assert_identical(cache, after, f"{wanted} KVs")


def test_a_slot_that_comes_twice_is_compressed_once(cache):
    keep = jnp.asarray([9, 3, 4], jnp.int32)
    twice, report = jitted("compress")(cache, jnp.asarray([1, 1, 1], jnp.int32), keep)
    once, alone = jitted("compress")(cache, jnp.asarray([1, 3, 3], jnp.int32), keep)
    assert_identical(once, twice, "the same slot again")
    assert np.asarray(report.freed).tolist() == [7, 0, 0] == np.asarray(alone.freed).tolist()
    assert audit(cache) == []
    slots = jnp.asarray([1, 1], jnp.int32)
    part = take_slots(cache, slots)
    assert np.asarray(part.seq_len).tolist() == [16, 0]
    assert_identical(cache, put_slots(cache, slots, part), "taken twice, put once")


def test_budgets_and_protection_below_zero_are_none(cache):
    slot = jnp.asarray([1], jnp.int32)
    for low in (-1, -(2**31)):
        low = jnp.asarray([low], jnp.int32)
        after, report = jitted("compress")(cache, slot, low, protected=low[0])
        want, told = jitted("compress")(cache, slot, 0 * low, protected=0 * low[0])
        assert_identical(want, after, "a budget below zero")
        assert int(report.freed[0]) == int(told.freed[0]) == 12
        assert int(report.shortfall[0]) == 4


def test_slots_whose_heads_are_longer_than_a_part_are_left_alone(cache):
    """Slot 1 owns 4 blocks in each head, a part of 2 columns would lose the others."""
    slots = jnp.asarray([1, 0], jnp.int32)
    part = take_slots(cache, slots, 2)
    assert np.asarray(part.seq_len).tolist() == [0, 7]
    assert_identical(cache, put_slots(cache, slots, part), "only what fits")


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c, k, v, m: kv.write_prompt(c, 2, k[:1], v[:1], m[:1], 5), r"k shape: got \[1, 16"),
        (lambda c, k, v, m: kv.write_prompt(c, 2, k[..., :1], v[..., :1], m, 5), "k shape"),
        (lambda c, k, v, m: kv.write_prompt(c, 2, k, v[:, :1], m, 5), "v shape"),
        (lambda c, k, v, m: kv.write_prompt(c, 2, k, v, m[..., :5], 5), "metric shape"),
        (lambda c, k, v, m: kv.write_survivors(c, 2, k[:, :, :1], v, m, 5, 4), "k shape"),
        (lambda c, k, v, m: kv.append(c, k[:, :1], v[:, :1], jnp.ones(3, bool)), "k shape"),
        (lambda c, k, v, m: kv.append(c, k[:, :3], v[:, :1], jnp.ones(3, bool)), "v shape"),
        (lambda c, k, v, m: kv.append(c, k[:, :3], v[:, :3], jnp.ones(1, bool)), "active shape"),
        (lambda c, k, v, m: kv.release(c, jnp.ones(1, bool)), r"slots shape: got \[1\]"),
        (
            lambda c, k, v, m: kv.write_prompt(c, 2, k, v, m, 5, kept_len=jnp.ones((2, 1), int)),
            "kept_len shape",
        ),
        (
            lambda c, k, v, m: kv.write_prompt(
                c, 2, k, v, m, 5, kept_index=jnp.zeros((1, 1, 4), int)
            ),
            "kept_index shape",
        ),
    ],
)
def test_shapes_that_would_broadcast_are_refused(cache, call, says):
    with pytest.raises(ValueError, match=says):
        call(cache, *prompt())


def test_nothing_of_all_this_changed_the_cache(cache):
    assert_identical(clean(filled([7, 16], G, seed=1).cache), cache, "the start")
    c = host(cache)
    assert c["seq_len"].tolist() == [7, 16, 0]
