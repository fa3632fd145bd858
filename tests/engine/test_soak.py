"""Many requests of every kind, with aborts and failures: all end, and no block is lost."""

import os
import resource

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError
from tests.engine.conftest import TINY
from tests.engine.serving import FULL, SMALL, TIGHT, assert_empty, make_llm

SETTINGS = (
    FULL,
    SMALL,
    CompressionConfig(max_cache_tokens=24, protected=4, compress_every=8),
    CompressionConfig(max_cache_tokens=16, protected=8, before_preemption=False),
    CompressionConfig(max_cache_tokens=20, protected=8, on_prefill=False),
)


def resident_bytes() -> int:
    """Memory that the process holds now; its peak where that is not told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def soak(params, num_requests: int, seed: int, lengths, settings, ahead: bool) -> None:
    """With `ahead` as GPUs do it: chunks and single decode steps ahead of what was reported."""
    rng = np.random.default_rng(seed)
    llm = make_llm(params, FULL, TIGHT)
    llm.worker.decodes_once = llm.engine.runs_ahead = ahead
    ended: dict[str, str | None] = {}
    refused = failed = 0
    sizes = []

    def fail(output):
        raise ValueError("client gone")

    added = 0
    while added < num_requests or llm.has_unfinished():
        coming = int(rng.integers(0, 4)) if len(llm.scheduler.waiting) < 20 else 0
        for _ in range(min(num_requests - added, coming)):
            added += 1
            prompt = rng.integers(0, TINY.vocab_size, rng.choice(lengths)).astype(np.int32)
            sampling = SamplingParams(
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 1.0])),
                seed=added,
                ignore_eos=bool(rng.integers(2)),
                stop=() if rng.integers(4) else ("0", "Z"),
            )
            fails = rng.integers(20) == 0
            try:
                llm.add_request(
                    prompt,
                    sampling,
                    settings[rng.integers(len(settings))],
                    request_id=f"{added}",
                    on_output=fail if fails else None,
                )
                failed += bool(fails)
            except UserError:
                refused += 1
        unfinished = [r.id for r in llm.scheduler if r.finish_reason is None]
        if unfinished and rng.integers(8) == 0:
            one = unfinished[rng.integers(len(unfinished))]
            for name in unfinished if rng.integers(8) == 0 else [one]:
                llm.abort(name)
        for output in llm.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
        if added % max(1, num_requests // 10) == 0:
            sizes.append(resident_bytes())
    assert len(ended) + refused == num_requests
    assert 0 < refused < num_requests / 2
    reasons = set(ended.values())
    assert {"length", "abort", "stop"} <= reasons
    assert "pool" not in reasons
    assert sum(reason == "error" for reason in ended.values()) <= failed
    found = llm.metrics.as_dict()
    assert found["kvjax_preemptions_total"] > 0
    assert found["kvjax_rounds_failed_total"] == 0
    check_invariants(llm.worker.cache)
    assert_empty(llm)
    # Once everything is compiled, requests leave nothing behind.
    half = sizes[len(sizes) // 2 :]
    assert max(half) - half[0] < 64 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_hundred_requests(tiny_params, ahead):
    # Few lengths and settings, since each has steps of its own to compile.
    soak(tiny_params, 100, 0, (0, 5, 20, 28, 60, 140), SETTINGS[:2], ahead)


@pytest.mark.slow
def test_two_thousand_requests(tiny_params):
    soak(tiny_params, 2_000, 1, range(150), SETTINGS, ahead=False)
