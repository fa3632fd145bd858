"""Processes of one engine do the same: here in threads, over a store in memory.

`tests/test_several_processes.py` runs real ones.
"""

import argparse
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvjax import startup
from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.cli.processes import add_process_options, joined
from kvjax.engine import LLM, SamplingParams, agreement, processes, warming
from kvjax.engine.agreement import Agreement
from kvjax.engine.link import Link
from kvjax.engine.processes import Processes, check_process_options, join
from kvjax.errors import UserError
from kvjax.models import ByteTokenizer, LoadedModel
from kvjax.models.decoder import init_params
from tests.engine.deciding import SIZES, lead, recorded
from tests.sharded.tiny import TINY, model_of

USUAL = CompressionConfig(method="key-norm", rate=3, floor=4)


class Store:
    """What JAX's coordination service keeps, as far as processes use it."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._news = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._news:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self._news.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._news:
            if self._news.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                return self.values[key]
        raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")

    def key_value_dir_get(self, folder):
        with self._news:
            return [(k, v) for k, v in self.values.items() if k.startswith(f"{folder}/")]

    def key_value_delete(self, folder):
        with self._news:
            for key in [key for key in self.values if key.startswith(f"{folder}/")]:
                del self.values[key]


class Left(BaseException):
    """What ends a process."""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Processes]:
    def leave(reason):
        raise Left(reason)

    monkeypatch.setattr(processes, "leave", leave)
    monkeypatch.setattr(processes, "PULSE_SECONDS", 0.01)
    monkeypatch.setattr(processes, "LINGER_SECONDS", 0.01)
    store = Store()
    return [Processes(store, index, 2) for index in range(2)]


def at_once(*calls) -> list[Any]:
    """What some calls return or raise, each in a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(number):
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    return found


# What they tell each other


def test_all_hear_what_each_says(two):
    assert (
        at_once(*[lambda p=p: p.exchange(f"from {p.index}") for p in two])
        == [["from 0", "from 1"]] * 2
    )
    assert at_once(*[lambda p=p: p.least(7 - p.index) for p in two]) == [6, 6]


def test_any_of_them_can_be_asked_to_end(two):
    first, second = two
    assert not first.asked
    second.ask_to_end()
    second.ask_to_end()
    assert first.asked


def test_processes_that_were_started_otherwise_are_refused(two):
    same = {"--rate": 8.0, "jax": "1"}
    assert at_once(*[lambda p=p: p.compare(same) for p in two]) == [None, None]
    found = at_once(*[lambda p=p: p.compare({**same, "--rate": 8.0 + p.index}) for p in two])
    for error in found:
        assert isinstance(error, UserError)
        assert str(error).startswith("process 1 has --rate '9.0' and process 0 '8.0': start all")


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (("bfloat16", None), ("float16", None), "dtype"),
        (("float32", "int8"), ("float32", "float8_e4m3fn"), "weight dtype"),
    ],
)
def test_numbers_of_other_types_are_noticed_whatever_the_cache_holds(one, other, named):
    """Their weights take as many bytes, and a fingerprint is that of the checkpoint."""

    def settings(dtype, weight_dtype):
        config = dataclasses.replace(TINY, weight_dtype=weight_dtype)
        params = init_params(config, dtype, seed=3)
        model = LoadedModel(config, params, ByteTokenizer(), "a folder", lambda: "the same")
        llm = LLM(model, USUAL, SIZES, cache_dtype="int8", calibration="none")
        return agreement.agreed_settings(llm, None)

    found, others = settings(*one), settings(*other)
    assert [name for name in found if found[name] != others[name]] == [named]


def test_who_is_silent_or_has_failed_is_named(two):
    first, second = two
    store = first.client
    for beat in range(3):
        store.key_value_set("kvjax/alive/0", str(beat), allow_overwrite=True)
        store.key_value_set("kvjax/alive/1", str(beat), allow_overwrite=True)
        assert first.why_lost(5.0 * beat) is None
    store.key_value_set("kvjax/alive/0", "3", allow_overwrite=True)
    assert first.why_lost(10.0 + processes.SILENCE_SECONDS) is None
    said = "process 1 of 2 has ended, or hangs"
    store.key_value_set("kvjax/alive/0", "4", allow_overwrite=True)
    assert first.why_lost(10.1 + processes.SILENCE_SECONDS) == said
    second.fail("no weights")
    assert first.why_lost(0.0) == "process 1: no weights"


def test_what_went_wrong_because_another_one_ended_says_so(two):
    first, _ = two
    store, told = first.client, []
    first.on_lost = told.append
    stop = threading.Event()

    def beat():
        for beats in range(10**6):
            store.key_value_set("kvjax/alive/0", str(beats), allow_overwrite=True)
            if stop.wait(0.001):
                return

    store.key_value_set("kvjax/alive/1", "9")
    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(Left, match="process 1 of 2 has ended: a round failed"):
        first.end_together("a round failed")
    stop.set()
    thread.join()
    assert told == [store.values["kvjax/failed/0"]]


# How they begin


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, 2, 0, 1), "need --coordinator HOST:PORT, or auto"),
        (("node0", 2, 0, 1), "--coordinator 'node0': give HOST:PORT of process 0, or auto"),
        (("node0:x", 2, 0, 1), "give HOST:PORT"),
        (("node0:0", 2, 0, 1), "give HOST:PORT"),
        ((":80", 2, 0, 1), "give HOST:PORT"),
        (("node0..cluster:80", 2, 1, 1), "'node0..cluster' can be no host"),
        (("node0:80", 0, 0, 1), "--num-processes 0: give a whole number from 1"),
        (("node0:80", 2, 2, 1), "--process-id 2: give a whole number from 0 to 1"),
        (("node0:80", 2, -1, 1), "--process-id -1"),
        (("node0:80", 2, 0, 0.0), "--coordinator-timeout 0.0: give a number above 0"),
    ],
)
def test_options_that_do_not_go_together(given, said):
    with pytest.raises(UserError, match=said):
        check_process_options(*given)


def test_a_coordinator_that_is_not_there():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: nobody answers there"):
            join(f"127.0.0.1:{port}", 2, 1, 0.3)
        assert time.monotonic() - start < 5
        one.listen()
        with pytest.raises(UserError, match=f"port {port} cannot be had here"):
            join(f"127.0.0.1:{port}", 2, 0, 0.3)
    assert join(None) is None


CLUSTERS = {
    "Open MPI": (
        {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        "10.96.0.1",
    ),
    "SLURM": (
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_NODELIST": "node[007-009],other",
            "SLURM_NTASKS": "3",
            "SLURM_PROCID": "2",
            "SLURM_LOCALID": "1",
        },
        "node007",
    ),
}
"""What a launcher says to the third of three processes, and where the first one is."""


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("address", [None, "node7:80"])
def test_what_is_not_given_is_what_jax_finds(monkeypatch, address, cluster):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="no coordinator, number of processes or process id"):
        processes._found(None, 1, address)
    said, first = CLUSTERS[cluster]
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = processes._found(None, None, address)
    host, _, _ = found.pop("coordinator_address").partition(":")
    assert host == (first if address is None else "node7")
    assert found == {"num_processes": 3, "process_id": 2, "local_device_ids": [1]}
    assert processes._found(4, 0, address)["process_id"] == 0


def test_other_versions_are_refused_before_anything_is_loaded(two, monkeypatch):
    """And other options, each in a line of its own process."""
    here = threading.local()
    monkeypatch.setattr(processes, "join", lambda *_: two[here.index])
    monkeypatch.setattr(agreement, "versions", lambda: {"kvjax": here.version, "jax": "1"})
    monkeypatch.setattr(startup, "leaves_at_once", lambda: None)
    monkeypatch.setattr(Processes, "close", lambda self: None)
    parser = argparse.ArgumentParser()
    add_process_options(parser)

    def start(index: int, version: str, rate: float):
        here.index, here.version = index, version
        given = ["--coordinator", "node0:80", "--num-processes", "2", "--process-id", str(index)]
        options = parser.parse_args(given)
        options.tensor_parallel, options.rate = 2, rate
        with joined(options, ("rate",)):
            return "joined"

    for (version, rate), said in (
        (("1", 8.0), None),
        (("2", 8.0), "process 1 has kvjax '2' and process 0 '1': start all with the same"),
        (("1", 4.0), "process 1 has rate '4.0' and process 0 '8.0': start all with the same"),
    ):
        two[0].client.values.clear()
        found = at_once(lambda: start(0, "1", 8.0), lambda v=version, r=rate: start(1, v, r))
        if said is None:
            assert found == ["joined"] * 2
        else:
            assert [type(error) for error in found] == [UserError] * 2
            assert [str(error)[: len(said)] for error in found] == [said] * 2


# The connection to the first one


@pytest.fixture
def far() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def test_a_broken_connection_is_noticed_before_who_uses_it(far):
    link = Link(far.getsockname())
    reached, go = threading.Event(), threading.Event()

    def gone():
        reached.set()
        assert go.wait(60)

    link.on_gone = gone
    host, port = link.address.split(":")
    with socket.create_connection((host, int(port)), 60) as here:
        there, _ = far.accept()
        with there:
            here.sendall(b"one")
            assert there.recv(9) == b"one"
            there.sendall(b"two")
            assert here.recv(9) == b"two"
            assert not reached.is_set()
        assert reached.wait(60)
        here.settimeout(0.1)
        with pytest.raises(TimeoutError):
            here.recv(9)
        go.set()
        here.settimeout(60)
        assert here.recv(9) == b""


def test_who_leaves_by_itself_has_not_lost_the_other(far):
    link, lost = Link(far.getsockname()), []
    link.on_gone = lambda: lost.append(1)
    host, port = link.address.split(":")
    for _ in range(2):
        with socket.create_connection((host, int(port)), 60):
            there, _ = far.accept()
        with there:
            there.settimeout(60)
            assert there.recv(9) == b""
    far.close()
    with socket.create_connection((host, int(port)), 60) as here:
        assert here.recv(9) == b"", "nobody is there yet: who connects tries again"
    assert lost == []


def test_a_first_process_that_is_gone_ends_the_others(two):
    with pytest.raises(Left, match="process 0 of 2 has ended, or cannot be reached"):
        two[1].lose_first()
    two[0].stop_watching()
    two[0].lose_first()


# What their engines do


def engines(two) -> list[LLM]:
    found = []
    for one in two:
        llm = LLM(model_of(True), USUAL, SIZES, calibration="none")
        llm.engine.agreement = Agreement(llm, one)
        found.append(llm)
    return found


def agreement_of(llm: LLM) -> Agreement:
    found = llm.engine.agreement
    assert found is not None
    return found


def test_all_do_as_the_first_process_does(two, monkeypatch):
    """In one test, as every engine compiles its steps anew."""
    monkeypatch.setattr(agreement, "BATCH", 4)
    first, second = engines(two)
    check_the_same_program(first, second)
    check_decisions(two, first, second)


def check_the_same_program(first: LLM, second: LLM) -> None:
    """Each process makes the same calls by itself."""
    prompts = [np.arange(n, n + 20, dtype=np.int32) for n in range(2)]
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    calls = [lambda llm=llm: llm.generate(prompts, greedy) for llm in (first, second)]
    for one, other in zip(*at_once(*calls), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.stats.kept, other.stats.kept)


def check_decisions(two: list[Processes], first: LLM, second: LLM) -> None:
    """The others follow a run in which much happens."""
    logs = [recorded(llm) for llm in (first, second)]

    def lead_all():
        lead(first, seed=3, rounds=24)
        first.reset()
        prompt, three = np.arange(30, dtype=np.int32), SamplingParams(max_tokens=3)
        parts = warming.parts(first, [8], compression=CompressionConfig(method="full"))
        assert len(parts) > 2
        for part in parts:
            part()
            last = first.generate([prompt], three)
        agreement_of(first).end()
        return last[0].finish_reason

    assert at_once(lead_all, second.follow) == ["length", None]
    kinds = {entry[0] for entry in logs[0]}
    assert {"Begin", "Chunk", "Insert", "Decode", "Remove"} <= kinds
    ends = {entry[2] for entry in logs[0] if str(entry[0]).startswith("request-")}
    assert {"length", "deadline", "error"} <= ends
    assert any(entry[0] == "compress" and entry[2] > 0 for entry in logs[0])
    assert logs[0] == logs[1]
    told = [key for key in two[0].client.values if "/told/" in key]
    assert len(told) <= 3 * 4, "what all have read is deleted"


def test_other_programs_are_noticed(two):
    first, second = engines(two)
    first.step()
    with pytest.raises(UserError, match=r"1 does forget_prefixes\(\) where process 0 does round"):
        second.forget_prefixes()
    new = []
    for number, llm in enumerate((first, second)):
        prompt = np.arange(number, number + 20, dtype=np.int32)
        llm.add_request(prompt, SamplingParams(max_tokens=5), request_id="mine")
        new.append(llm.engine.intake.take_new())
    assert agreement_of(first).agree(new[0], []) == (new[0], [])
    with pytest.raises(UserError, match="was given another request 'mine' than process 0"):
        agreement_of(second).agree(new[1], [])


def test_a_prefill_that_fails_in_one_process_ends_all(two, monkeypatch):
    """None knows whether it failed in the others, which may wait for it."""

    def broken(job):
        raise RuntimeError("no memory")

    first, second = engines(two)
    monkeypatch.setattr(second.worker, "advance", broken)
    first.add_request(np.arange(20, dtype=np.int32), SamplingParams(max_tokens=5))

    def lead_some():
        for _ in range(3):
            first.step()
        agreement_of(first).end()

    _, left = at_once(lead_some, second.follow)
    assert isinstance(left, Left)
    assert "a round failed (RuntimeError: no memory)" in str(left)
    assert two[0].why_lost(0.0) == f"process 1: {left}"


def test_what_several_processes_refuse(two):
    first, second = engines(two)
    asked = CompressionConfig(method=METHODS["streaming-llm"], rate=2, floor=8)
    with pytest.raises(UserError, match="method streaming-llm with several processes: a request"):
        first.add_request("text", SamplingParams(max_tokens=2), asked)
    for llm in (first, LLM(model_of(True), USUAL, SIZES, calibration="none")):
        with pytest.raises(UserError, match="for all processes of an engine but the first"):
            llm.follow()
    two[0].client.key_value_set(agreement_of(first)._key(0), '{"do": "dance"}')
    with pytest.raises(UserError, match="process 0 does dance, which this version does not know"):
        second.follow()
