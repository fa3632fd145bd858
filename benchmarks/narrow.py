"""What weights of few bits change: how far next tokens move, and how fast they come.

    python -m benchmarks.narrow --data BOOK.txt.gz            # SmolLM2, int8 and fp8
    python -m benchmarks.narrow --data BOOK.txt.gz --model smollm2-135m --weights FILE --windows 16

Windows of the text run with full attention, by the model's weights as they are and by those of
each dtype; KL is that of the next token, full weights to narrow ones, and the mean of all places.
Then each decodes the same prompts in turn, and its fastest round counts. The last line is one JSON
object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import functools
import json
from pathlib import Path

from benchmarks.options import wholes
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script
from kvjax.cli.models import DTYPES, WEIGHT_DTYPES
from kvjax.errors import UserError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.narrow", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="text: .txt, .jsonl, .gz of these")
    add("--model", help="name of a model (what --weights holds; without both, smollm2-135m)")
    add("--weights", help="folder, GGUF file, Orbax checkpoint, or hub id")
    add("--dtype", choices=DTYPES, default="float32", help="of the activations (%(default)s)")
    add("--weight-dtype", choices=WEIGHT_DTYPES, nargs="+", default=list(WEIGHT_DTYPES))
    add("--windows", type=int, default=16, help="evenly from the text (%(default)s)")
    add("--tokens", type=int, default=512, help="of each (%(default)s)")
    add("--batches", type=wholes, default=[1, 8], help="sequences that decode at once (1,8)")
    add("--steps", type=int, default=64, help="tokens of each in a round (%(default)s)")
    add("--rounds", type=int, default=5, help="of decoding, 0 for none (%(default)s)")
    options = parser.parse_args(arguments)
    for name, least in (("windows", 1), ("steps", 2), ("rounds", 0)):
        check_whole(f"--{name}", getattr(options, name), least, 10**6)
    check_whole("--tokens", options.tokens, 2, 10**6)
    for batch in options.batches:
        check_whole("--batches", batch, 1, 1024)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import jax
    import numpy as np

    from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
    from kvjax.engine.dense import dense_pass
    from kvjax.eval.files import read_texts
    from kvjax.models import load_model

    def load(weight_dtype: str | None):
        return load_model(
            options.model, weights=options.weights, dtype=options.dtype, weight_dtype=weight_dtype
        )

    whole = load(None)
    ids = np.asarray(whole.tokenizer.encode("\n".join(read_texts(options.data))), np.int32)
    count, size = options.windows, options.tokens
    if len(ids) < count * size:
        raise UserError(f"{options.data} has {len(ids)} tokens: give fewer --windows or --tokens")
    starts = [i * (len(ids) - size) // max(1, count - 1) for i in range(count)]
    windows = [ids[at : at + size] for at in starts]

    @functools.partial(jax.jit, static_argnums=0)
    def log_p(config, params, tokens):
        places = np.arange(size - 1)
        return jax.nn.log_softmax(dense_pass(config, params, tokens, places).logits)

    wanted = [np.asarray(log_p(whole.config, whole.params, one)) for one in windows]

    def perplexity(found: list[np.ndarray]) -> float:
        own = [p[np.arange(size - 1), one[1:]] for p, one in zip(found, windows)]
        return float(np.exp(-np.mean(own)))

    def engine(model):
        sizes = EngineConfig(
            max_batch=max(options.batches), max_len=64 + options.steps, prefill_chunk=64,
            prefill_scratch=64, pool_tokens=max(options.batches) * (64 + options.steps),
        )  # fmt: skip
        return LLM(model, CompressionConfig(method="full"), sizes, calibration="none")

    def nbytes(model) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))

    models = {options.dtype: whole} | {name: load(name) for name in options.weight_dtype}
    rows = {options.dtype: {"weight_bytes": nbytes(whole), "perplexity": perplexity(wanted)}}
    for name in options.weight_dtype:
        model = models[name]
        found = [np.asarray(log_p(model.config, model.params, one)) for one in windows]
        kls = [(np.exp(p) * (p - q)).sum(-1) for p, q in zip(wanted, found)]
        same = [p.argmax(-1) == q.argmax(-1) for p, q in zip(wanted, found)]
        rows[name] = {
            "weight_bytes": nbytes(model),
            "perplexity": perplexity(found),
            "kl": float(np.mean(kls)),
            "same_best": float(np.mean(same)),
        }
    engines = {name: engine(model) for name, model in models.items() if options.rounds}
    sampling = SamplingParams(max_tokens=options.steps, ignore_eos=True)
    for batch in options.batches if options.rounds else ():
        prompts = [ids[16 * i : 16 * i + 64 - i % 2] for i in range(batch)]
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            for name, llm in engines.items():
                before = llm.metrics.as_dict()['kvjax_seconds_total{phase="decode"}']
                llm.generate(prompts, sampling)
                after = llm.metrics.as_dict()['kvjax_seconds_total{phase="decode"}']
                if number:  # the first compiles
                    seconds[name].append(after - before)
        for name, spent in seconds.items():
            rate = batch * (options.steps - 1) / min(spent)
            rows[name][f"decode_tokens_per_second_{batch}"] = rate
    for name, row in rows.items():
        print(name, *(f"{key} {value:.6g}" for key, value in row.items()), flush=True)
    print(json.dumps({"model": whole.config.name, "data": options.data.name, "windows": count,
                      "tokens": size, "rows": rows}))  # fmt: skip
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
