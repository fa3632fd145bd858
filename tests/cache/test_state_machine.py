"""Random sequences of every cache operation, compared with the oracle after each one.

A `Pair` checks the whole contents, the allocator and `check_invariants` after every operation and
fills whatever is free or unwritten with NaN and huge numbers before the next.
"""

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cache.pair import SINGLE, SMALL, Geometry, Pair

SEEDS = st.integers(0, 2**20)


class CacheMachine(RuleBasedStateMachine):
    """Operations are drawn small (a seed each), so that long sequences stay cheap and shrink."""

    geometry: Geometry = SMALL
    done: Counter

    def __init__(self):
        super().__init__()
        self.pair = Pair(self.geometry)

    def _mask(self, rng: np.random.Generator, slots: list[int], share: float = 0.6) -> list[bool]:
        return [s in slots and bool(rng.random() < share) for s in range(self.geometry.slots)]

    def _slots(self, empty: bool) -> list[int]:
        """Slots that hold no sequence, or those that do."""
        return [s for s, n in enumerate(self.pair.oracle.seq_len) if (n == 0) == empty]

    def _count(self, name: str, ok: bool = True) -> None:
        self.done[name if ok else f"{name} refused"] += 1

    @initialize(seed=SEEDS)
    def start_busy(self, seed):
        """Two prompts stand in the cache already, so that few examples are about nothing."""
        self.write_prompt(seed, False)
        self.write_prompt(seed + 1, True)

    @rule(seed=SEEDS, partial=st.booleans())
    def write_prompt(self, seed, partial):
        """A prompt, or the next chunk of one, whole or already thinned out."""
        g, rng = self.geometry, np.random.default_rng(seed)
        self.pair.rng = rng
        slots = self._slots(empty=True)
        if not slots or rng.random() < 0.2:
            slots = list(range(g.slots))
        slot = int(rng.choice(slots))
        length = int(rng.integers(1, g.prompt + 1))
        kept = rng.integers(0, length + 1, (g.layers, g.heads)) if partial else None
        ok = self.pair.write_prompt(slot, length, kept)
        self._count("write_prompt, survivors" if partial else "write_prompt", ok)

    @precondition(lambda self: self._slots(empty=True))
    @rule(seed=SEEDS)
    def write_survivors(self, seed):
        """A prompt compressed on its way into the pool."""
        g, rng = self.geometry, np.random.default_rng(seed)
        self.pair.rng = rng
        slot, length = int(rng.choice(self._slots(empty=True))), int(rng.integers(1, g.prompt + 1))
        keep = int(rng.integers(0, 2 * g.layers * g.heads))
        protected, sinks = int(rng.choice([0, 2, 5])), int(rng.choice([0, 1]))
        ok, choice = self.pair.write_survivors(slot, length, keep, protected, sinks)
        self._count("write_survivors", ok)
        self.done["blocks evicted"] += sum(choice.blocks.values())

    @precondition(lambda self: self._slots(empty=False))
    @rule(seed=SEEDS, times=st.integers(1, 4))
    def append(self, seed, times):
        rng = self.pair.rng = np.random.default_rng(seed)
        for _ in range(times):
            mask = self._mask(rng, self._slots(empty=False), share=0.8)
            self._count("append", self.pair.append(mask))

    @precondition(lambda self: self._slots(empty=False))
    @rule(seed=SEEDS)
    def allocate(self, seed):
        g, rng = self.geometry, np.random.default_rng(seed)
        self.pair.rng = rng
        now = np.asarray(self.pair.cache.context_len)
        grow = rng.integers(-2, 2 + g.block, now.shape) * (rng.random(now.shape) < 0.3)
        running = np.isin(np.arange(g.slots), self._slots(empty=False))
        wanted = np.where(running[:, None, None], np.maximum(now + grow, 0), 0)
        if rng.random() < 0.1:
            wanted = np.full(now.shape, g.block * g.max_blocks + 1)  # no head can be so long
        self._count("allocate", self.pair.allocate(wanted))

    @precondition(lambda self: self._slots(empty=False))
    @rule(seed=SEEDS)
    def observe(self, seed):
        self.pair.rng = np.random.default_rng(seed)
        self.pair.observe()
        self._count("observe")

    @precondition(lambda self: self._slots(empty=False))
    @rule(seed=SEEDS, apart=st.booleans())
    def compress(self, seed, apart):
        """All slots in a random order, each with a budget of its own; empty ones too."""
        g, rng = self.geometry, np.random.default_rng(seed)
        self.pair.rng = rng
        slots = rng.permutation(g.slots).tolist()
        protected, sinks = int(rng.choice([0, 0, 1, 3, 9])), int(rng.choice([0, 0, 1, 4]))
        owned = [self.pair.oracle.owned_blocks(s) for s in slots]
        evict = [int(rng.integers(0, n + 2)) if rng.random() < 0.7 else 0 for n in owned]
        if apart:
            choices = self.pair.schedule_and_move(slots, evict, protected, sinks)
        else:
            keep = [max(0, n - e) for n, e in zip(owned, evict, strict=True)]
            if rng.random() < 0.3:
                slots[0] = g.slots + int(rng.integers(0, 3))
            choices = self.pair.compress(slots, keep, protected, sinks)
        self._count("schedule + move" if apart else "compress")
        self.done["blocks evicted"] += sum(sum(c.blocks.values()) for c in choices)
        self.done["blocks not to be had"] += sum(c.shortfall for c in choices)

    @precondition(lambda self: self._slots(empty=False))
    @rule(seed=SEEDS)
    def release(self, seed):
        rng = self.pair.rng = np.random.default_rng(seed)
        self.pair.release(self._mask(rng, list(range(self.geometry.slots)), share=0.4))
        self._count("release")


def drive(geometry: Geometry, examples: int, steps: int, derandomize: bool = True) -> Counter:
    """Run the machine; returns how often each operation was done."""
    done = Counter()
    machine = type("Machine", (CacheMachine,), {"geometry": geometry, "done": done})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    return done


OUTCOMES = ("blocks evicted", "blocks not to be had")


def operations(done: Counter) -> int:
    return sum(n for name, n in done.items() if name not in OUTCOMES)


def test_thousands_of_operations():
    done = drive(SMALL, examples=70, steps=40)
    assert operations(done) >= 2000, done
    for name in ("write_prompt", "append", "allocate"):
        assert done[name], f"{name} never worked"
        assert done[f"{name} refused"], f"{name} was never refused: the pool is too large"
    assert done["blocks evicted"] > 100
    assert done["blocks not to be had"] > 10


@pytest.mark.slow
def test_blocks_of_one():
    done = drive(SINGLE, examples=16, steps=25)
    assert operations(done) >= 200, done


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [SMALL, SINGLE], ids=["small", "single"])
def test_many_random_operations(geometry):
    """Fresh random sequences on every run: KVJAX_FUZZ_EXAMPLES of them (300)."""
    drive(geometry, int(os.environ.get("KVJAX_FUZZ_EXAMPLES", 300)), 50, derandomize=False)
