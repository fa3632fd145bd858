"""Count what a decode step launches on a GPU, per layer and per token, from the compiled program.

Why: kernels of a decode step take a few microseconds each, and starting one takes about as long.
The engine's decode step is compiled for an H200 that is not there, with four layers and with five:
what the fifth one adds is what a layer launches, and the rest is what a token does beside them.

    pip install -e '.[cuda]'           # in an environment of its own: 4 GB
    python -m benchmarks.kernels.launches                # Llama-3.1-8B, with and without statistic
    python -m benchmarks.kernels.launches --seqs 256 --names
    python -m benchmarks.kernels.launches --kv-dtype int4w16

Kernels, copies and fills count. Of a conditional the branch that launches most counts, of a loop
one turn, and both themselves apart: each makes the host wait for the device. The last line is one
JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import collections
import dataclasses
import functools
import json
import os
import re

from benchmarks.kernels.compile import (
    NOT_TO_RUN,
    absent_device,
    check_toolchain,
    compiled,
    decode_steps,
)
from kvjax import startup
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script

LAYERS = (4, 5)
"""Of fewer, what stands beside them is fused in other ways."""
METHODS = {"off": "full", "on": "kv-compress-continual"}
"""Of each state of the statistic."""
FREE = (
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all",
    "add-dependency", "partition-id", "replica-id", "opt-barrier",
)  # fmt: skip
"""Operations that launch nothing."""
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = .*? ([\w-]+)\(")
CALLED = re.compile(r"(to_apply|body|condition|calls|\w+_computation)=%?([\w.-]+)")


@dataclasses.dataclass
class Launches:
    """What one run of a computation launches, by name without its number."""

    kernels: collections.Counter
    waits: int = 0
    """Conditionals, and turns of loops."""

    @property
    def count(self) -> int:
        return sum(self.kernels.values())

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(self.kernels + other.kernels, self.waits + other.waits)

    def __sub__(self, other: "Launches") -> "Launches":
        kernels = self.kernels.copy()
        kernels.subtract(other.kernels)
        return Launches(kernels, self.waits - other.waits)


NONE = Launches(collections.Counter())


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of an optimised program; that of the entry as "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
        if start and not line.startswith(" "):
            lines = found.setdefault("ENTRY" if start[1] else start[2], [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def program_launches(text: str) -> Launches:
    """What a program launches."""
    of = computations(text)

    def called(line: str) -> dict[str, str]:
        return dict(CALLED.findall(line))

    def branches(line: str) -> list[str]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", line)
        if listed:
            return re.findall(r"[\w.-]+", listed[1])
        return [name for kind, name in CALLED.findall(line) if kind.endswith("_computation")]

    @functools.cache
    def launches(name: str) -> Launches:
        return sum(map(of_line, of[name]), NONE)

    def of_line(line: str) -> Launches:
        match = INSTRUCTION.match(line)
        if match is None or match[2] in FREE or match[2].endswith("-done"):
            return NONE
        name, kind = re.sub(r"[.\d]+$", "", match[1]), match[2]
        if kind == "while":
            inner = called(line)
            turn = launches(inner["body"]) + launches(inner["condition"])
            return Launches(turn.kernels, turn.waits + 1)
        if kind == "conditional":
            most = max(map(launches, branches(line)), key=lambda x: x.count)
            return Launches(most.kernels, most.waits + 1)
        if kind in ("call", "async-start"):
            inner = called(line)
            return launches(inner.get("to_apply") or inner["calls"])
        return Launches(collections.Counter({name: 1}))

    return launches("ENTRY")


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.kernels.launches", description=__doc__)
    parser.add_argument("--seqs", type=int, default=64, help="sequences (%(default)s)")
    parser.add_argument("--statistic", choices=METHODS, action="append", help="(both)")
    parser.add_argument("--kv-dtype", help="codec of the pool, as int4w16 (the model's bfloat16)")
    parser.add_argument("--names", action="store_true", help="name what each layer launches")
    options = parser.parse_args(arguments)
    check_whole("--seqs", options.seqs, 1, 1024)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NOT_TO_RUN}".strip()
    check_toolchain("h200")
    startup.started()
    from kvjax.engine.compilation import compiler_options

    device, rows = absent_device("h200"), {}
    print("| statistic | launches per layer | per token beside them | waits per token |")
    print("|---|---|---|---|")
    sizes = {"slots": options.seqs, "stored": options.kv_dtype}
    for statistic in options.statistic or METHODS:
        few, many = (
            program_launches(
                compiled(
                    *decode_steps("h200", METHODS[statistic], layers, **sizes),
                    device,
                    compiler_options("gpu"),
                ).as_text()
                or ""
            )
            for layers in LAYERS
        )
        added = LAYERS[1] - LAYERS[0]
        layer = (many.count - few.count) / added
        token = few.count - LAYERS[0] * layer
        print(f"| {statistic} | {layer:g} | {token:g} | {few.waits} |", flush=True)
        rows[statistic] = {
            "per_layer": layer, "per_token": token, "waits": few.waits
        }  # fmt: skip
        if options.names:
            each = (many - few).kernels
            named = {name: count / added for name, count in each.items() if count}
            for name, count in sorted(named.items(), key=lambda pair: -pair[1]):
                print(f"  {count:5g}  {name}")
    print(json.dumps(rows, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
