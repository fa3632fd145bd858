"""Compiled steps: which there are, how long each took, and how they outlive the process."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, NamedTuple

import jax

from kvjax.engine.interrupts import released
from kvjax.errors import unmasked
from kvjax.models.hub import user_cache_dir

StepName = Literal[
    "prefill",
    "prefill narrowing",
    "prefill sparse",
    "prefill in scratch",
    "prefill in pool",
    "draft",
    "probe",
    "start",
    "decode",
    "decode once",
    "compress",
    "empty",
    "place",
    "share",
    "restore",
    "kept",
]


@dataclasses.dataclass(frozen=True)
class StepKey:
    """What a compiled step depends on, beside the model and the engine's sizes."""

    step: StepName
    policy: Hashable = None
    """The part of a method that it depends on: an observer, a method's parts, a decode rule."""
    sizes: tuple[int, ...] = ()
    num_top: int | None = None


def compiler_options(platform: str) -> dict[str, str] | None:
    """Options of XLA for steps on a platform ("cpu", "gpu" or "tpu").

    On GPUs its rematerialisation takes a pool of tens of gigabytes, which steps write in place,
    for several of them, finds that nothing fits, and computes again what it can: weights are read
    twice in every step, and writes to the pool repeated. Nothing in a step is worth that.
    """
    return {"xla_disable_hlo_passes": "rematerialization"} if platform == "gpu" else None


class Step:
    """A jitted step, compiled with the options of the device in use.

    Jitting wants them, and no device is to be asked for before there is work for it.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function, self._options = function, options
        self._jitted: Any = None
        # Engines share steps: the first calls of two threads would jit twice, and trace twice.
        self._once = threading.Lock()

    @property
    def jitted(self) -> Any:
        """The jitted function."""
        with self._once:
            if self._jitted is None:
                options = compiler_options(jax.default_backend())
                self._jitted = jax.jit(self._function, compiler_options=options, **self._options)
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)

    def lower(self, *args: Any) -> Any:
        """The call lowered, to be compiled; arguments may be shapes."""
        return self.jitted.lower(*args)

    def eval_shape(self, *args: Any) -> Any:
        """The shapes of what the call returns."""
        return self.jitted.eval_shape(*args)


class StepCall(NamedTuple):
    """A call of a jitted function; to compile it, its arguments may be shapes."""

    key: StepKey
    step: Callable[..., Any]
    args: tuple[Any, ...]


class CompiledSteps:
    """The steps that an engine has compiled."""

    def __init__(self) -> None:
        self.seconds: dict[StepKey, float] = {}
        """What compiling each took."""
        self.waited = 0.0
        """Seconds that requests waited for them: less, where some were compiled side by side."""
        self.under_way: dict[StepKey, Future[float]] = {}
        """Those that other threads compile."""
        self.flexible = False
        """Whether larger sizes do where the right one is not compiled."""
        self._tracing = threading.Lock()
        self.meet: Callable[[], None] = lambda: None
        """Called when steps were compiled, before any of them runs: some processes take longer, and
        nobody is to wait for them in a collective."""

    def run(self, call: StepCall) -> Any:
        """What the call returns; compiled at the first one of each key."""
        if call.key not in self.seconds:
            start = time.perf_counter()
            # What is compiled here is what the call below finds.
            with released():
                if (future := self.under_way.get(call.key)) is not None:
                    wait([future])
                if call.key not in self.seconds:
                    self.add(call)
                self.meet()
            self.waited += time.perf_counter() - start
        with unmasked():
            return call.step(*call.args)

    def compile(self, calls: Iterable[StepCall]) -> None:
        """Compile those of some calls that are new, side by side: XLA uses one core for most of it.

        One that cannot be compiled says so when it is run.
        """
        new = [call for call in calls if call.key not in self.seconds]
        if not new:
            return
        start = time.perf_counter()
        # An interruption goes on when the threads have ended: none can be stopped half way.
        with released(), ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as threads:
            wait([threads.submit(self.add, call) for call in new])
            self.meet()
        self.waited += time.perf_counter() - start

    def fitting(self, keys: Iterable[StepKey], exact: bool = False) -> StepKey:
        """The step to run of those that do, the best first: that one, or the first that is compiled
        where larger ones do."""
        best, *others = keys
        if exact or not self.flexible:
            return best
        return next((key for key in (best, *others) if key in self.seconds), best)

    def add(self, call: StepCall) -> None:
        """Compile a call."""
        start = time.perf_counter()
        # Python runs one thread at a time: two steps traced in turns would both be late for XLA.
        with self._tracing:
            lowered = call.step.lower(*call.args)  # type: ignore[attr-defined]
        lowered.compile()
        self.seconds[call.key] = time.perf_counter() - start


def sizes_upto(most: int, first: int, factor: int) -> tuple[int, ...]:
    """first, first · factor, … below `most`, and `most` itself."""
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return (*found, most)


GRAIN = 128
"""Chunks are padded to a multiple of at least so many tokens, so that few shapes are compiled."""


def bucket(sizes: Iterable[int], chunk: int) -> int:
    """Tokens that steps for parts of some sizes are compiled for, of which a chunk is the most."""
    grain = min(chunk, max(GRAIN, chunk // 16))
    return -(-max(sizes) // grain) * grain


def enable_compilation_cache() -> None:
    """Keep compiled programs below `user_cache_dir()`, unless JAX_COMPILATION_CACHE_DIR is set.

    Where the folder cannot be made, programs are compiled anew: slower, and nothing worse.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = user_cache_dir() / "compiled"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
