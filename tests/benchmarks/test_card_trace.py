"""What of a trace is kept, and that there is one."""

import jax.numpy as jnp

from benchmarks.card.trace import MOST, summary, traced


def test_streams_that_overlap_are_busy_once():
    events = [("b", 20.0, 30.0), ("a", 0.0, 10.0), ("a", 5.0, 12.0), ("c", 6.0, 7.0)]
    found = summary(events)
    assert (found["busy_us"], found["span_us"]) == (22.0, 30.0)
    assert found["kernels"] == [
        {"kernel": "a", "times": 2, "us": 17.0},
        {"kernel": "b", "times": 1, "us": 10.0},
        {"kernel": "c", "times": 1, "us": 1.0},
    ]


def test_what_takes_next_to_nothing_is_left_out():
    long = [(f"{n}", 100.0 * n, 100.0 * n + 50) for n in range(MOST + 5)]
    found = summary([*long, ("short", 99.0, 99.1)])
    assert len(found["kernels"]) == MOST
    assert summary([("long", 0.0, 5000.0), ("short", 1.0, 1.5)])["kernels"] == [
        {"kernel": "long", "times": 1, "us": 5000.0}
    ]


def test_where_no_device_is_traced_nothing_is_said():
    """CPUs are no devices to the profiler."""
    x = jnp.ones(1000)
    assert traced(lambda: x + 1) == {"busy_us": 0.0, "span_us": 0.0, "kernels": []}
