"""Paged attention that Numba compiles: what it serves, and that nothing depends on threads."""

import ctypes
import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import cfunc, njit

from kvjax.kernels import (
    explain,
    matmul,
    numba_calls,
    numba_source,
    numba_threads,
    paged_attention,
)
from kvjax.kernels.match_attention import numba_cpu as match_cpu
from kvjax.kernels.matmul import amx, numba_rows
from kvjax.kernels.matmul import numba_cpu as matmul_cpu
from kvjax.kernels.paged_attention import numba_cpu, spec
from kvjax.kernels.prefill_attention import numba_cpu as prefill_cpu
from kvjax.kernels.prefill_attention import tiled
from tests.kernels.devices import H200
from tests.kernels.paged import Problem, assert_exact, problem, run_numba

SHAPE = spec.Shape(3, 2, 4, 64, 0, 16, 60, "float32")
LENGTHS = [[70, 900], [300, 0], [5, 513]]
"""Heads of one piece and of several, and an empty one."""


def long_problem() -> Problem:
    return problem(LENGTHS, SHAPE, spread=4.0, observed=[True, False, True])


def given(**changes):
    return dataclasses.replace(SHAPE, blocks=9, **changes).arguments(metric=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "numba does not serve float16 pools, served are float32, bfloat16,"),
        ({"max_blocks": 1 << 20}, "numba does not serve 384 MB of partial results, served are 256"),
        ({"seqs": 0}, "numba does not serve an empty batch, pool or table"),
    ],
)
def test_what_is_left_to_xla(changes: dict, reason: str) -> None:
    found = explain(paged_attention, *given(**changes))
    assert found.startswith("xla: ")
    assert reason in found


@pytest.mark.parametrize(
    ("forms", "reason"),
    [
        (("e4m3", "e4m3"), "e4m3 pools, served are float32, bfloat16, int8, int4"),
        (("int8", None), "codes of keys or values alone"),
    ],
)
def test_codes_that_are_left_to_xla(forms: tuple, reason: str) -> None:
    shape = dataclasses.replace(SHAPE, blocks=9, forms=forms)
    with pytest.raises(NotImplementedError, match=reason):
        numba_cpu.config(shape, scale=1.0, keep_weights=False, exact=False)


def test_exact_rows_and_halves_are_left_to_xla() -> None:
    shape = dataclasses.replace(SHAPE, blocks=9)
    with pytest.raises(NotImplementedError, match="exact rows"):
        numba_cpu.config(shape, scale=1.0, keep_weights=False, exact=True)
    halves = dataclasses.replace(shape, halves=True)
    with pytest.raises(NotImplementedError, match="halves of rows"):
        numba_cpu.config(halves, scale=1.0, keep_weights=False, exact=False)


def test_only_cpus_have_it() -> None:
    with (
        jax.sharding.use_abstract_mesh(H200),
        pytest.raises(ValueError, match="'numba', wanted one that serves device"),
    ):
        explain(paged_attention, *given(), implementation="numba")


def test_without_numba_xla_serves(monkeypatch) -> None:
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else usual(name)
    )
    found = explain(paged_attention, *given())
    assert found.startswith("xla: ")
    assert "Python without Numba (pip install '.[cpu]')" in found


@pytest.mark.parametrize(
    ("target", "of", "modules"),
    [
        (numba_cpu._target, (1, 2, 0, 0, False), 6),
        (prefill_cpu._target, (1, 2), 6),
        (tiled.target, (1, 32, 0), 7),
        (match_cpu._target, (16,), 6),
        (amx._target, (0, 0), 6),
        (matmul_cpu._target, (0, 1), 6),
        (numba_rows._target, (0, 1), 6),
    ],
)
def test_what_lies_on_disk_is_of_this_version(target, of, modules, monkeypatch) -> None:
    """Numba tells functions on disk by what they close over, and by their own file alone."""
    made = []
    monkeypatch.setattr(numba_threads, "serve", lambda _, *functions: made.extend(functions))
    monkeypatch.setattr(numba_source.inspect, "getsource", lambda module: "anything")
    monkeypatch.setattr(numba_source, "stamp", numba_source.stamp.__wrapped__)
    target.__wrapped__(*of)
    stamp = zlib.crc32(b"anything" * modules)
    assert [inspect.getclosurevars(f).nonlocals["stamp"] for f in made] == [stamp, stamp]


def test_codes_of_sequences_that_are_not_observed() -> None:
    shape = dataclasses.replace(SHAPE, forms=("int8", "int8"))
    assert_exact("numba", problem(LENGTHS, shape, observed=[True, False, True]))


def test_large_logits_of_several_pieces() -> None:
    assert_exact("numba", problem(LENGTHS, SHAPE, spread=100.0))


def test_a_version_that_jaxlib_does_not_serve_is_a_reason(monkeypatch) -> None:
    def refuse(*_, **__):
        raise RuntimeError("unsupported API version 0.4\nand more")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    anew = numba_calls.once(numba_calls._nothing.__wrapped__)
    monkeypatch.setattr(numba_calls, "_nothing", anew)
    found = explain(matmul, jnp.ones((4, 96)), jnp.ones((96, 544)))
    assert re.search(r"numba does not serve jaxlib [\d.]+ \(unsupported API version 0\.4\)", found)


def test_a_head_computes_the_same_wherever_it_stands() -> None:
    p = long_problem()
    q, k, v, table, lengths = p.arguments
    out, metric = run_numba(p, True)
    for order in ([2, 0, 1], [1, 2, 0]):
        at = jnp.asarray(order)
        moved = dataclasses.replace(
            p,
            arguments=(q[at], k, v, table[at], lengths[at]),
            observed=None if p.observed is None else p.observed[at],
        )
        out_moved, metric_moved = run_numba(moved, True)
        np.testing.assert_array_equal(out_moved, np.asarray(out)[order])
        np.testing.assert_array_equal(metric_moved, metric)


def test_one_thread_computes_what_several_do(tmp_path) -> None:
    """In every bit, in a process that may use one core."""
    script = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from tests.kernels.paged import run_numba
from tests.kernels.test_numba import long_problem
out, metric = run_numba(long_problem(), True)
np.savez(sys.argv[1], out=out, metric=metric)
"""
    out, metric = run_numba(long_problem(), True)
    file = tmp_path / "alone.npz"
    subprocess.run([sys.executable, "-c", script, str(file)], check=True)
    with np.load(file) as alone:
        np.testing.assert_array_equal(alone["out"], out)
        np.testing.assert_array_equal(alone["metric"], metric)


def test_calls_of_several_threads_do_not_disturb_each_other() -> None:
    """More calls at once than XLA has threads to lend: nobody waits for one that did not begin."""
    p = long_problem()
    call = jax.jit(lambda *a: run_numba(dataclasses.replace(p, arguments=a), False)[0])
    wanted = [np.asarray(call(p.arguments[0] * i, *p.arguments[1:])) for i in range(4)]
    wrong = []

    def repeat(i: int) -> None:
        for _ in range(20):
            got = np.asarray(call(p.arguments[0] * i, *p.arguments[1:]))
            if not np.array_equal(got, wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_shape_is_compiled_once_for_all_threads() -> None:
    """A name of a function that is another one would be refused."""
    names = []
    threads = [
        threading.Thread(target=lambda: names.append(numba_cpu._target(2, 8, 0, 0, False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(names) == 2
    assert len(set(names)) == 1


def test_what_is_not_finite_stays_its_own() -> None:
    p = long_problem()
    q = p.arguments[0]
    for bad in (jnp.nan, jnp.inf):
        broken = dataclasses.replace(p, arguments=(q.at[0, 0, 3].set(bad), *p.arguments[1:]))
        out, usual = (np.array(run_numba(x, False)[0]) for x in (broken, p))
        assert np.isnan(out[0, 0]).all()
        out[0, 0] = usual[0, 0]
        np.testing.assert_array_equal(out, usual)


def test_entries_and_lengths_that_lead_nowhere_touch_nothing_else() -> None:
    """What the XLA path reads in place of such blocks is the last one, and it adds to none."""
    p = long_problem()
    q, k, v, table, lengths = p.arguments
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    table = table.at[0, 0].set(1 << 30).at[0, 1].set(-(1 << 30))
    lengths = lengths.at[2, 1].set(1 << 30).at[2, 0].set(-7)
    broken = dataclasses.replace(p, arguments=(q, k, v, table, lengths), observed=None)
    out, metric = run_numba(broken, True)
    assert np.isfinite(np.asarray(out)).all()
    assert not np.asarray(out)[2, :4].any()
    blocks = np.unique(np.asarray(table)[1, 0, : -(-300 // 16)])
    others = np.setdiff1d(np.arange(k.shape[0]), np.asarray(table)[1:])
    assert (np.asarray(metric)[blocks] != np.asarray(p.metric)[blocks]).any()
    np.testing.assert_array_equal(np.asarray(metric)[others], np.asarray(p.metric)[others])


class Lender:
    """A frame whose interface says that there are two threads, and keeps what it is given."""

    def __init__(self, version: tuple[int, int] = numba_calls.API_VERSION):
        self.scheduled = np.zeros(2, np.int64)
        kept = self.scheduled.ctypes.data

        def count(given):
            numba_calls.words(numba_calls.words(given)[3])[0] = 2
            return 0

        def schedule(given):
            args, at = numba_calls.words(given), numba_calls.words(kept)
            at[1], at[0] = args[4], args[3]
            return 0

        of_address = numba_calls.types.int64(numba_calls.types.int64)
        self.functions = [cfunc(of_address)(f) for f in (schedule, count)]
        self.api = np.zeros(25, np.int64)
        self.api[4] = version[0] | version[1] << 32
        self.api[17:19] = [int(f.address or 0) for f in self.functions]
        self.frame = np.zeros(22, np.int64)
        self.frame[2] = self.api.ctypes.data

    def run_later(self) -> None:
        """What the borrowed thread does when it comes."""
        while not self.scheduled[0]:
            time.sleep(1e-3)
        task, team = (int(x) for x in self.scheduled)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(task)(team)


def shared_work(done: np.ndarray):
    """A task that marks its chunks a while after it took them, the second one later."""
    at = done.ctypes.data

    def task(team):
        chunk = numba_threads.take(team)
        while chunk < numba_calls.words(team)[numba_threads.TOTAL]:
            for _ in range(5_000_000 * (1 + chunk)):
                numba_threads._add(at + 8 * (len(done) + chunk), 1)
            numba_calls.words(at)[chunk] = 1
            numba_threads.finished(team)
            chunk = numba_threads.take(team)
        numba_threads.leave(team)

    return cfunc(numba_calls.types.void(numba_calls.types.int64))(task)


@njit(nogil=True)
def run(frame, task, total):
    numba_threads.run(numba_calls.words(frame), task, 0, total)


def test_the_caller_waits_for_chunks_that_others_are_at() -> None:
    lender, done = Lender(), np.zeros(16, np.int64)
    task = shared_work(done[:2])
    helper = threading.Thread(target=lender.run_later)
    helper.start()
    run(lender.frame.ctypes.data, task.address, 2)
    assert done[:2].all()
    helper.join(60)
    assert not helper.is_alive()


def test_one_that_comes_late_finds_nothing_to_do() -> None:
    lender, done = Lender(), np.zeros(16, np.int64)
    task = shared_work(done[:3])
    run(lender.frame.ctypes.data, task.address, 3)
    assert done[:3].all()
    done[:], lender.frame[:] = 0, -1
    lender.run_later()
    assert not done.any()


def test_an_unknown_version_of_the_interface_lends_no_threads() -> None:
    """Its functions may be others then: none is called."""
    lender, done = Lender((0, 99)), np.zeros(16, np.int64)
    lender.api[17:19] = 8
    run(lender.frame.ctypes.data, shared_work(done[:3]).address, 3)
    assert done[:3].all()
