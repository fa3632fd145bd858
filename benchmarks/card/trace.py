"""Which kernels a device runs, for how long each, and how long it runs none."""

import collections
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

MOST = 40
"""Kernels that are listed, those that take longest first."""
SMALLEST = 1e-3
"""Of all that they take, what a kernel takes that is listed."""


def traced(run: Callable[[], Any]) -> dict[str, Any]:
    """Run something under the profiler, which makes the host slower and the kernels not.

    Returns:
        `busy_us` in which any kernel ran, `span_us` from the first to the end of the last, and
        `kernels`, each with how often it ran and how long in all.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return summary(events(jax.profiler.ProfileData.from_file(str(file))))


def events(profile: Any) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end in µs of what a profile says that devices ran: kernels, copies, fills."""
    for plane in profile.planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                for event in line.events:
                    begin = event.start_ns / 1e3
                    yield event.name, begin, begin + event.duration_ns / 1e3


def summary(found: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """What `traced` returns, of `events` in any order."""
    taken: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    busy, until, first = 0.0, None, None
    for name, begin, end in sorted(found, key=lambda event: event[1]):
        taken[name][0] += 1
        taken[name][1] += end - begin
        first = begin if first is None else first
        # Streams overlap.
        busy += max(0.0, end - (begin if until is None else max(begin, until)))
        until = end if until is None else max(until, end)
    in_all = sum(us for _, us in taken.values())
    most = sorted(taken.items(), key=lambda item: -item[1][1])[:MOST]
    kernels = [
        {"kernel": name, "times": times, "us": round(us, 1)}
        for name, (times, us) in most
        if us >= SMALLEST * in_all
    ]
    span = 0.0 if first is None or until is None else until - first
    return {"busy_us": round(busy, 1), "span_us": round(span, 1), "kernels": kernels}
