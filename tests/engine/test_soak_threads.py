"""Clients in threads that come, go, raise, meddle and interrupt: all are told, nothing is lost."""

import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError
from tests.engine.serving import FULL, SMALL, TIGHT, alone, assert_empty, make_llm, prompts_of
from tests.oracle.audit import audit

LENGTHS = (5, 20, 33, 60)
SETTINGS = (
    FULL,
    SMALL,
    CompressionConfig(method="h2o-decode", max_cache_tokens=24, compress_every=8),
    CompressionConfig(method="random", max_cache_tokens=16),
)
"""What decode steps do to their metrics differs in two of them."""
MOST_TOKENS = 24


class Client(threading.Thread):
    """Adds requests one after the other, each with a mishap of its own."""

    def __init__(self, llm, number: int, requests: int, expected):
        super().__init__(name=f"client {number}", daemon=True)
        self.llm, self.requests, self.expected = llm, requests, expected
        self.rng = np.random.default_rng(number)
        self.ended: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self.requests):
                self.one()
        except BaseException as error:
            self.error = error

    def one(self) -> None:
        rng, llm = self.rng, self.llm
        which, mishap = int(rng.integers(len(LENGTHS))), rng.choice(list("....amrw"))
        settings = SETTINGS[rng.integers(len(SETTINGS))]
        tokens = int(rng.integers(1, MOST_TOKENS))
        sampled = bool(rng.integers(4) == 0)
        done, seen = threading.Event(), []

        def note(output):
            seen.append(output)
            if output.finished:
                done.set()
            if mishap == "m":
                for forbidden in (llm.step, lambda: llm.generate([[1]]), llm.reset):
                    with pytest.raises(UserError, match="inside a callback"):
                        forbidden()
            if mishap == "r":
                done.set()
                raise RuntimeError("the screen is gone")

        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=not sampled, temperature=float(sampled), logprobs=1
        )
        prompt = prompts_of(LENGTHS[which])[0]
        name = llm.add_request(
            prompt, sampling, settings, on_output=note, deadline=1e-3 if mishap == "w" else None
        )
        if mishap == "a":
            done.wait(rng.uniform(0, 0.05))
            try:
                llm.abort(name)
            except UserError:
                assert done.wait(120)
        assert done.wait(120), (name, mishap)
        last = seen[-1]
        self.ended[last.finish_reason or "raised"] += 1
        assert "".join(output.new_text for output in seen) == last.text
        assert [entry.token for entry in last.logprobs] == list(last.token_ids)
        if settings is FULL and not sampled:
            assert last.token_ids == self.expected[which][: len(last.token_ids)]
            assert len(last.token_ids) == tokens or last.finish_reason != "length"


def interrupter(stop: threading.Event, seed: int) -> None:
    """Often, but with pauses in which a step can be compiled: what is interrupted begins anew."""
    rng = np.random.default_rng(seed)
    while not stop.wait(rng.choice([0.05, 0.2, 1.0, 6.0])):
        os.kill(os.getpid(), signal.SIGINT)


def soak(params, phases: int, clients: int, requests: int, ahead: bool = False) -> None:
    prompts = prompts_of(*LENGTHS)
    sampling = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
    expected = alone(params, prompts, sampling)
    llm = make_llm(params, FULL, TIGHT)
    llm.worker.decodes_once = llm.engine.runs_ahead = ahead
    # Compiled first: what is interrupted half way is compiled anew.
    for settings in SETTINGS:
        llm.generate(prompts[::-1], SamplingParams(max_tokens=MOST_TOKENS, logprobs=1), settings)
    ended: Counter[str] = Counter()
    interrupted = 0
    for phase in range(phases):
        threads = [Client(llm, 1000 * phase + n, requests, expected) for n in range(clients)]
        stop = threading.Event()
        alarm = threading.Thread(target=interrupter, args=(stop, phase), daemon=True)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        waiting = [*threads, alarm]
        while waiting:
            try:
                while waiting and waiting[0].ident is not None and not waiting[0].is_alive():
                    waiting.pop(0)
                for thread in waiting:
                    if thread.ident is None:
                        thread.start()
                if waiting == [alarm]:
                    stop.set()
                llm.step()
            except KeyboardInterrupt:
                interrupted += 1
        signal.signal(signal.SIGINT, before)
        while llm.has_unfinished():
            llm.step()
        llm.step()
        assert [thread.error for thread in threads] == [None] * clients
        assert audit(llm.worker.cache) == []
        check_invariants(llm.worker.cache)
        assert_empty(llm)
        assert llm.dead is None
        for thread in threads:
            ended += thread.ended
    assert interrupted > 0 or phases * clients * requests < 1000
    assert sum(ended.values()) == phases * clients * requests
    # Whether a mishap comes before its request's end is a race; among many some do.
    assert "length" in ended
    assert phases * clients * requests < 1000 or {"abort", "raised", "deadline"} <= set(ended)
    found = llm.metrics.as_dict()
    total = sum(v for k, v in found.items() if k.startswith("kvjax_requests_ended_total"))
    assert total == found["kvjax_requests_total"]
    assert total == sum(ended.values()) + len(prompts) * len(SETTINGS)
    assert found["kvjax_requests_refused_total"] == 0
    assert found["kvjax_rounds_failed_total"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_few_clients(tiny_params, ahead):
    soak(tiny_params, 2, 4, 5, ahead)


@pytest.mark.slow
def test_many_clients(tiny_params):
    soak(tiny_params, 3, 10, 40)
