"""What a call is made of: parts that are measured one after the other, and where they run."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NO_TUNING = "--xla_gpu_autotune_level=0"
"""Kernels of ours have nothing that XLA would tune; what it tunes, it times on the device."""


MEMORY_FRACTION = 0.92
"""Of a card's memory, what a process takes: the rest is the libraries'."""
ABSENT_BYTES = 150 * 10**9
"""Memory of the card that is not there."""
AT_ONCE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
"""Of a process with pools for which pieces of memory would be too small."""


class Program(NamedTuple):
    """A function to compile, with abstract arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    platform: str | None = None
    """Of an engine's step: it is compiled with the options that it has there."""


@dataclasses.dataclass
class Machine:
    """Where parts run, or what they are compiled for."""

    small: bool = False
    """Tiny sizes, kernels interpreted: a rehearsal without the hardware."""
    target: Any = None
    """A device that is not there, to compile for."""
    peaks_file: Path | None = None
    """Where the peaks are noted, which processes share."""
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """What parts of one process share: peaks, a model."""

    @property
    def memory(self) -> int | None:
        """Bytes that the device gives a process, where it says so."""
        if self.target is not None:
            return int(MEMORY_FRACTION * ABSENT_BYTES)
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")

    @property
    def interpreted(self) -> bool:
        return self.small and self.target is None

    def lowered(self, program: Program) -> Callable[[], Any]:
        """The program traced; what compiles it for the device here, or for the one that is not."""
        import jax

        from kvjax.engine.compilation import compiler_options

        function, arguments, donated, platform = program
        options = None if platform is None else compiler_options(platform)
        if self.target is not None:
            from benchmarks.kernels.compile import compiled

            return functools.partial(compiled, function, arguments, donated, self.target, options)
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        return functools.partial(lowered.compile, options)

    def device_of_calls(self) -> Any:
        """A context in which kernels are chosen for the target."""
        if self.target is None:
            return contextlib.nullcontext()
        from benchmarks.kernels.compile import in_its_place

        return in_its_place(self.target)

    def ours(self, chosen: str) -> bool:
        """Whether what runs is a kernel of the package's; in a rehearsal anything does."""
        return self.small or chosen.startswith("mosaic_gpu")

    def peaks(self) -> dict[str, float]:
        """Bytes/s of copies and of reads, FLOP/s of products; measured once for all processes."""
        if "peaks" not in self.kept:
            file = self.peaks_file
            if file is not None and file.exists():
                self.kept["peaks"] = json.loads(file.read_text(encoding="utf-8"))
            else:
                from benchmarks.card.peaks import measure_peaks

                self.kept["peaks"] = measure_peaks(self.small)
                if file is not None:
                    file.write_text(json.dumps(self.kept["peaks"]), encoding="utf-8")
        return self.kept["peaks"]


def no_programs(machine: Machine) -> dict[str, Program]:
    """Of a part that compiles what it needs when it needs it."""
    return {}


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing to measure."""

    name: str
    run: Callable[[Machine, dict[str, Any]], dict[str, Any]]
    """Measures it with its compiled programs. `good` in what it returns says if it is right."""
    programs: Callable[[Machine], dict[str, Program]] = no_programs
    seconds: float = 10
    """About what it takes; it is not begun when less is left."""
    limit: float = 30
    """Seconds after which it hangs, once its programs are compiled."""
    optional: bool = False
    """Whether its failure is none of ours."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parts that run in one process, or in a few."""

    name: str
    parts: tuple[Part, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overlap: bool = True
    """Whether parts are measured while the programs of later ones are compiled."""
    processes: int = 1
    """How many share its parts, at once: more than one where nothing is timed, for what takes most
    time is tracing, which one core does."""
    on_device: bool = True
    """Whether the process itself takes the device."""
    call: str = ""
    """The call in whose file its results are."""
    seconds: float | None = None
    """The most that it takes of a command's time; None for all that is left."""
