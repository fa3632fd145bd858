"""Decode attention of one layer against the bytes it must read."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.card.parts import Machine, Part, Program
from benchmarks.kernels.cases import Case, paged_problem
from kvjax.cli.throughput.limits import TIMED_SECONDS, median_seconds
from kvjax.kernels import explain, paged_attention, plan_paged_attention

EXPECTED = 4.3e12
"""About the bytes per second of the memory: says how often to repeat a call."""


def attention_part(case: Case, statistic: bool) -> Part:
    """One case, with the statistic or without."""
    name = f"attention: {case.name} b={case.block_size}{' + statistic' if statistic else ''}"

    def programs(machine: Machine) -> dict[str, Program]:
        problem = jax.eval_shape(lambda: paged_problem(case))
        plan = _plan_of(problem, statistic)
        with machine.device_of_calls():
            work = jax.eval_shape(plan, problem.lengths, problem.k)
        turns = 4 if machine.small else _turns(case)
        return {
            "plan": Program(plan, (problem.lengths, problem.k)),
            "loop": Program(_loop(turns, statistic), (problem, work)),
        }

    def run(machine: Machine, compiled: dict[str, Any]) -> dict[str, Any]:
        problem = paged_problem(case)
        work = compiled["plan"](problem.lengths, problem.k)
        turns = 4 if machine.small else _turns(case)
        seconds = median_seconds(lambda: compiled["loop"](problem, work)) / turns
        call = (problem.q, problem.k, problem.v, problem.tables[0], problem.lengths)
        chosen = explain(paged_attention, *call)
        good = machine.ours(chosen)
        return shares(machine, seconds, case.kv_bytes, chosen=chosen, good=good)

    return Part(name, run, programs, seconds=8)


def shares(machine: Machine, seconds: float, moved: int, **more: Any) -> dict[str, Any]:
    """A time, and its share of what a copy and a read of as many bytes take here."""
    peaks = machine.peaks()
    return {
        "us": round(seconds * 1e6, 2),
        "bytes": moved,
        "share_of_copy": round(moved / seconds / peaks["copy_bytes_per_s"], 4),
        "share_of_read": round(moved / seconds / peaks["read_bytes_per_s"], 4),
        **more,
    }


def _turns(case: Case) -> int:
    return max(8, min(400, math.ceil(TIMED_SECONDS / (case.kv_bytes / EXPECTED))))


def _plan_of(problem: Any, statistic: bool) -> Callable[..., Any]:
    heads, width = problem.q.shape[1], problem.tables.shape[-1]

    def plan(lengths, k):
        return plan_paged_attention(
            lengths, k, num_query_heads=heads, max_blocks=width, return_metric=statistic,
        )  # fmt: skip

    return plan


def _loop(turns: int, statistic: bool) -> Callable[..., Any]:
    """So many calls on the device, each with the output of the one before as its queries."""

    def loop(problem, work):
        copies = problem.tables.shape[0]

        def turn(i, carry):
            q, metric = carry
            arrays = (q, problem.k, problem.v, problem.tables[i % copies], problem.lengths)
            call = functools.partial(paged_attention, *arrays, work=work)
            return call(metric=metric, return_metric=True) if statistic else (call(), metric)

        q, metric = lax.fori_loop(0, turns, turn, (problem.q, problem.metric))
        return q, jnp.sum(metric)

    return loop
