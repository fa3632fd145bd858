"""Compiled steps: which there are, how long each took, and how they outlive the process."""

import dataclasses
import os
import time
from collections.abc import Callable, Hashable
from typing import Literal

import jax

from kvjax.engine.interrupts import released
from kvjax.models.hub import user_cache_dir

StepName = Literal[
    "prefill",
    "prefill in scratch",
    "prefill in pool",
    "start",
    "insert",
    "decode",
    "compress",
    "empty",
]


@dataclasses.dataclass(frozen=True)
class StepKey:
    """What a compiled step depends on, beside the model and the engine's sizes."""

    step: StepName
    policy: Hashable = None
    """The part of a method that it depends on: an observer, a method's parts, a decode rule."""
    sizes: tuple[int, ...] = ()
    num_top: int | None = None


class CompiledSteps:
    """The steps that an engine has compiled."""

    def __init__(self) -> None:
        self.seconds: dict[StepKey, float] = {}
        """What compiling each took."""

    def run[**P, T](
        self, key: StepKey, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`step(*args)`, a jitted function, compiled at the first call of each key."""
        if key not in self.seconds:
            start = time.perf_counter()
            # What is compiled here is what the call below finds.
            with released():
                step.lower(*args, **kwargs).compile()  # type: ignore[attr-defined]
            self.seconds[key] = time.perf_counter() - start
        return step(*args, **kwargs)


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
