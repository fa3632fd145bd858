"""What HTTP costs: the same prompts through `kvjax serve` and through `LLM.generate`, in turns.

    python -m benchmarks.serving --input-len 512 --output-len 64 --num-prompts 16 --rounds 3

Both have engines of the same sizes that were warmed up, the server in a process of its own, and
one works while the other is idle. The last line is JSON: seconds of each round, and the ratio of
the throughputs (1 is no cost).
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
from typing import IO

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


def begin_server(
    options: argparse.Namespace, max_len: int, pool: int, log: IO[str]
) -> subprocess.Popen[bytes]:
    """A server of the same sizes, on any port, that writes what it says into a file."""
    sizes = {
        "model": options.model, "rate": options.rate, "method": options.method, "port": 0,
        "max-batch": options.num_prompts, "max-len": max_len, "pool-tokens": pool,
        "warm-up": options.input_len, "max-waiting": 4 * options.num_prompts,
    }  # fmt: skip
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return subprocess.Popen([sys.executable, "-m", "kvjax", "serve", *words], stderr=log)


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


def measure(
    options: argparse.Namespace, url: str, max_len: int, pool: int
) -> dict[str, list[float]]:
    """Seconds of each round, through the server and without it."""
    model = load_model(options.model)
    compression = CompressionConfig(method=options.method, rate=options.rate)
    config = EngineConfig(max_batch=options.num_prompts, max_len=max_len, pool_tokens=pool)
    llm = LLM(model, compression, config)
    llm.warm_up([options.input_len])
    lengths = [options.input_len] * options.num_prompts
    prompts = prompts_of(source_tokens(model.tokenizer, None), lengths, 0)
    arrivals = [Arrival(0.0, options.input_len, options.output_len)] * len(prompts)
    sampling = SamplingParams(max_tokens=options.output_len, ignore_eos=True)
    remote, seconds = Remote(url, None), {"http": [], "generate": []}
    for number in range(-1, options.rounds):
        began = time.perf_counter()
        answers = asyncio.run(remote.serve(prompts, arrivals, {"temperature": 0}))
        middle = time.perf_counter()
        wrong = [answer for answer in answers if answer["tokens"] != options.output_len]
        if wrong:
            raise UserError(f"the server did not answer: {wrong[0]['error']}")
        llm.generate(prompts, sampling)
        if number >= 0:  # the first round of each is for what is left to compile
            seconds["http"].append(middle - began)
            seconds["generate"].append(time.perf_counter() - middle)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    started()
    enable_compilation_cache()
    max_len = options.input_len + options.output_len
    pool = max_len * options.num_prompts
    # What is appended stays in order while it is read here.
    with tempfile.TemporaryFile("a+") as log:
        server = begin_server(options, max_len, pool, log)
        try:
            seconds = measure(options, address(server, log), max_len, pool)
        finally:
            server.terminate()
            server.wait(120)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    total = options.num_prompts * (options.input_len + options.output_len)
    row = {
        **vars(options),
        "seconds": {name: np.round(values, 3).tolist() for name, values in seconds.items()},
        "tokens_per_second": {name: total / value for name, value in medians.items()},
        "ratio": medians["generate"] / medians["http"],
    }
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
