"""What HTTP costs: the same prompts through `kvjax serve` and through `LLM.generate`, in turns.

    python -m benchmarks.serving --input-len 512 --output-len 64 --num-prompts 16 --rounds 3

Both have engines of the same sizes that were warmed up, the server in a process of its own, and
one works while the other is idle. Where others use the machine, processor time is the better guide:
the last line, JSON, has both, of each round, and the ratios (1 is no cost). What the server's event
loop and the client took of it stands apart, and so do the engines' rounds and decode steps: where
these are equal, the batches were. Needs Linux.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams, load_model
from kvjax.cli import ArgumentParser, run_script
from kvjax.cli.throughput.remote import Remote
from kvjax.cli.throughput.work import Arrival, prompts_of, source_tokens
from kvjax.engine.compilation import enable_compilation_cache
from kvjax.errors import UserError
from kvjax.startup import started


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name of a model (%(default)s)")
    add("--rate", type=float, default=8.0, help="(%(default)s)")
    add("--method", default="kv-compress", help="(%(default)s)")
    add("--input-len", type=int, default=512, help="(%(default)s)")
    add("--output-len", type=int, default=64, help="(%(default)s)")
    add("--num-prompts", type=int, default=16, help="(%(default)s)")
    add("--rounds", type=int, default=3, help="of each, in turns (%(default)s)")
    return parser.parse_args(arguments)


def begin_server(sizes: dict[str, Any], log: IO[str]) -> subprocess.Popen[bytes]:
    """A server of these options, on any port, that writes what it says into a file."""
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "kvjax", "serve", "--port", "0", *words]
    return subprocess.Popen(command, stderr=log)


def address(server: subprocess.Popen[bytes], log: IO[str]) -> str:
    """Where it listens, once everything is compiled.

    Raises:
        UserError: it has ended.
    """
    while server.poll() is None:
        log.seek(0)
        said = log.read()
        found = re.search(r"http://[^/ ]+:\d+", said)
        if found and '"message": "ready"' in said:
            return found[0]
        time.sleep(0.2)
    log.seek(0)
    raise UserError(f"the server has ended: {log.read().strip()}")


def seconds_of(task: str) -> float:
    """Processor time of a process's threads, or of one thread, below /proc."""
    folder = Path("/proc", task)
    files = (
        folder.glob("task/*/schedstat") if (folder / "task").is_dir() else [folder / "schedstat"]
    )
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


COUNTS = ("rounds", "decode_steps")


def counts_of(text: str) -> np.ndarray:
    """Of an engine so far, from its metrics."""
    found = [re.search(rf"^kvjax_{name}_total (\S+)$", text, re.MULTILINE) for name in COUNTS]
    return np.array([float(one[1]) if one else 0.0 for one in found])


def measure(
    options: argparse.Namespace, server: int, url: str, max_len: int, pool: int
) -> dict[str, Any]:
    """What each round took, through the server (a process id) and without it."""
    model = load_model(options.model)
    compression = CompressionConfig(method=options.method, rate=options.rate)
    config = EngineConfig(max_batch=options.num_prompts, max_len=max_len, pool_tokens=pool)
    llm = LLM(model, compression, config)
    llm.warm_up([options.input_len])
    lengths = [options.input_len] * options.num_prompts
    prompts = prompts_of(source_tokens(model.tokenizer, None), lengths, 0)
    arrivals = [Arrival(0.0, options.input_len, options.output_len)] * len(prompts)
    sampling = SamplingParams(max_tokens=options.output_len, ignore_eos=True)
    remote = Remote(url, None)
    loop = f"{server}/task/{server}"
    found: dict[str, Any] = {way: {} for way in ("http", "generate")}

    def state() -> dict[str, np.ndarray]:
        told = httpx.get(f"{url}/metrics", trust_env=False).text
        times = [time.perf_counter(), *map(seconds_of, (str(server), loop, "self"))]
        own = llm.metrics.prometheus()
        return {"times": np.array(times), "http": counts_of(told), "generate": counts_of(own)}

    def note(way: str, before: dict[str, np.ndarray]) -> None:
        after = state()
        wall, process, events, client = after["times"] - before["times"]
        values = {"seconds": wall, "processor_seconds": process + client}
        if way == "http":
            values |= {"event_loop_seconds": events, "client_seconds": client}
        values |= dict(zip(COUNTS, after[way] - before[way]))
        for name, value in values.items():
            found[way].setdefault(name, []).append(round(float(value), 3))

    def http() -> None:
        answers = asyncio.run(remote.serve(prompts, arrivals, {"temperature": 0}))
        wrong = [answer for answer in answers if answer["tokens"] != options.output_len]
        if wrong:
            raise UserError(f"the server did not answer: {wrong[0]['error']}")

    ways = {"http": http, "generate": lambda: llm.generate(prompts, sampling)}
    for number in range(-1, options.rounds):
        # Each goes first in every second round: what else the machine does favours neither.
        for way in sorted(ways, reverse=number % 2 == 1):
            began = state()
            ways[way]()
            if number >= 0:  # the first round of each is for what is left to compile
                note(way, began)
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    started()
    enable_compilation_cache()
    max_len = options.input_len + options.output_len
    pool = max_len * options.num_prompts
    sizes = {
        "model": options.model, "rate": options.rate, "method": options.method,
        "max-batch": options.num_prompts, "max-len": max_len, "pool-tokens": pool,
        "warm-up": options.input_len, "max-waiting": 4 * options.num_prompts,
    }  # fmt: skip
    # What is appended stays in order while it is read here.
    with tempfile.TemporaryFile("a+") as log:
        server = begin_server(sizes, log)
        try:
            found = measure(options, server.pid, address(server, log), max_len, pool)
        finally:
            server.terminate()
            server.wait(120)
    medians = {
        way: {name: statistics.median(values) for name, values in of.items()}
        for way, of in found.items()
    }
    total = options.num_prompts * (options.input_len + options.output_len)
    row = {
        **vars(options),
        **found,
        "tokens_per_second": {way: total / of["seconds"] for way, of in medians.items()},
        "ratio": medians["generate"]["seconds"] / medians["http"]["seconds"],
        "processor_ratio": medians["generate"]["processor_seconds"]
        / medians["http"]["processor_seconds"],
    }
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
