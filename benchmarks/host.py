"""What a decode round costs the host, by the number of devices and of processes.

    python -m benchmarks.host                         # 1, 2, 4 and 8 devices, 2 and 4 processes
    python -m benchmarks.host --devices 1,2 --processes 1 --rounds 100
    python -m benchmarks.host --devices 1,8 --processes 2 --profile 5      # and where it goes

A tiny model of random weights decodes sequences on devices that the CPU is made to look like: in
one process, or in several on the loopback with a device each. What is told is the processor time
of the thread that decides and makes the calls, in the median round, of the process that takes
most: what other threads compute beside it does not count, nor does waiting. With `--profile` every
second round runs under a profiler: how many calls of functions it makes, and the functions that
take most themselves. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import cProfile
import json
import os
import pstats
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.options import wholes
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
HEADS = 8
"""KV heads of a layer: on 8 devices each has one."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    add = parser.add_argument
    add("--devices", type=wholes, default=[1, 2, 4, 8], help="of one process (1,2,4,8)")
    add("--processes", type=wholes, default=[2, 4], help="of one device each (2,4)")
    add("--sequences", type=int, default=16, help="at once (%(default)s)")
    add("--rounds", type=int, default=200, help="of a token each (%(default)s)")
    add("--profile", type=int, default=0, help="functions to show of each (%(default)s)")
    add("--part", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("devices", "processes"):
        for count in getattr(options, name):
            check_whole(f"--{name}", count, 1, HEADS)
    check_whole("--sequences", options.sequences, 1, 4096)
    check_whole("--rounds", options.rounds, 8, 10**6)
    check_whole("--profile", options.profile, 0, 1000)
    return options


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """This process's part: median milliseconds of the engine's thread in a round, and how many
    rounds there were."""
    index, count, port = options.part
    from kvjax.engine.processes import join

    together = join(f"127.0.0.1:{port}", count, index, 300) if count > 1 else None
    import jax
    import numpy as np

    from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
    from kvjax.models import ByteTokenizer, LoadedModel
    from kvjax.models.config import ModelConfig
    from kvjax.models.decoder import init_params

    model = ModelConfig(
        name="tiny", vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    loaded = LoadedModel(model, init_params(model, "float32"), ByteTokenizer(), "random weights")
    length = 64 + options.rounds
    config = EngineConfig(
        max_batch=options.sequences, max_len=length, prefill_chunk=64, prefill_scratch=64,
        pool_tokens=options.sequences * length, tensor_parallel=jax.device_count(),
        decode_steps_per_sync=1,
    )  # fmt: skip
    llm = LLM(loaded, CompressionConfig(method="full"), config, calibration="none")
    rng = np.random.default_rng(0)
    spent: list[float] = []
    for tokens in (8, options.rounds):  # the first compiles
        spent.clear()
        profile, profiled = cProfile.Profile(time.thread_time), 0
        for _ in range(options.sequences):
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            llm.add_request(rng.integers(0, 256, 40).astype(np.int32), sampling)
        while llm.has_unfinished():
            full = len(llm.scheduler.running) == options.sequences
            if full and options.profile and len(spent) > profiled:
                profile.runcall(llm.step)
                profiled += 1
                continue
            before = time.thread_time()
            llm.step()
            if full:
                spent.append(1e3 * (time.thread_time() - before))
    found: dict[str, Any] = {"milliseconds": float(np.median(spent)), "rounds": len(spent)}
    if options.profile:
        found |= by_function(profile, profiled, options.profile)
    if together is not None:
        together.close()
    return found


def by_function(profile: cProfile.Profile, rounds: int, most: int) -> dict[str, Any]:
    """Calls of functions in a round, and those that take most without what they call: where they
    are, their milliseconds of a round, and those with what they call."""
    stats = pstats.Stats(profile)
    rows = [
        (f"{Path(file).name}:{line} {name}", 1e3 * own / rounds, 1e3 * whole / rounds)
        for (file, line, name), (_, _, own, whole, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    rows.sort(key=lambda row: -row[1])
    calls = stats.total_calls / rounds  # type: ignore[attr-defined]
    return {"calls": round(calls), "functions": rows[:most]}


def of_all(options: argparse.Namespace, processes: int, devices: int) -> dict[str, Any]:
    """The same of the process that takes most."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.host", "--rounds", str(options.rounds)]
    command += ["--sequences", str(options.sequences), "--profile", str(options.profile), "--part"]
    running = [
        subprocess.Popen(
            [*command, str(index), str(processes), str(port)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    said = [one.communicate()[0] for one in running]
    if any(one.returncode for one in running):
        raise UserError(f"{processes} processes of {devices} devices: one of them ended early")
    found = [json.loads(out.splitlines()[-1]) for out in said]
    return max(found, key=lambda one: one["milliseconds"])


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.part:
        print(json.dumps(measured(options)))
        return 0
    rows = []
    print(f"{'processes':>9}  {'devices':>7}  {'ms of the host per round':>24}")
    for processes, devices in [(1, n) for n in options.devices] + [
        (n, 1) for n in options.processes
    ]:
        found = of_all(options, processes, devices)
        print(f"{processes:9}  {devices:7}  {found['milliseconds']:24.3f}", flush=True)
        for name, own, whole in found.get("functions", ()):
            print(f"    {own:6.3f} ms, with what it calls {whole:6.3f}: {name}")
        if options.profile:
            print(f"    {found['calls']:,} calls of functions in a round under the profiler")
        rows.append({"processes": processes, "devices": devices, **found})
    print(json.dumps({"sequences": options.sequences, "rows": rows}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
