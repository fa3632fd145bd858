"""What a shared prefix saves: time to the first token of a second question about one document.

    python -m benchmarks.prefix                               # SmolLM2, 4 k tokens, rate 8
    python -m benchmarks.prefix --method full --tokens 2048

Another document and its questions run first, so that nothing is compiled in what is timed. The
tokens are random ones: times do not depend on what they say. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import json

from kvjax.cache.config import CALIBRATED
from kvjax.cli import ArgumentParser, run_script


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="(%(default)s)")
    add("--method", default=CALIBRATED, help="(%(default)s)")
    add("--rate", type=float, default=8.0, help="compression rate (%(default)s)")
    add("--tokens", type=int, default=4096, help="of the document (%(default)s)")
    add("--question", type=int, default=32, help="tokens of a question (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import numpy as np

    from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams

    length = options.tokens + options.question + 16
    sizes = EngineConfig(
        max_batch=1, max_len=length, pool_tokens=2 * length, share_prefix="auto", prefill_chunk=2048
    )
    llm = LLM(options.model, CompressionConfig(method=options.method, rate=options.rate), sizes)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)

    def tokens(size: int) -> np.ndarray:
        return rng.integers(10, 10_000, size).astype(np.int32)

    for _ in range(2):
        document, seconds, cached = tokens(options.tokens), [], []
        for _ in range(2):
            prompt = np.concatenate([document, tokens(options.question)])
            (output,) = llm.generate([prompt], sampling)
            seconds.append(output.stats.time_to_first_token)
            cached.append(output.stats.cached_tokens)
    print(
        json.dumps(
            {
                **vars(options),
                "first_s": round(seconds[0], 3),
                "second_s": round(seconds[1], 3),
                "ratio": round(seconds[1] / seconds[0], 4),
                "cached_tokens": cached[1],
            }
        )
    )
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
