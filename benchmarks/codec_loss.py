"""What codes of keys and values cost in the words that follow: KL of the next token, by type.

    python -m benchmarks.codec_loss --data BOOK.txt.gz …          # SmolLM2, 3 texts of 320 tokens
    python -m benchmarks.codec_loss --data essays.jsonl.gz --texts 8 --tokens 1024 --types int8,int4
    python -m benchmarks.codec_loss --data BOOK.txt.gz --types int4,int4w16,int4w32

Nothing is evicted. The first tokens of a text are a prompt: they attend to keys and values as they
are. The last ones read everything coded, as decode steps do. Of each of these the distribution of
the next token is compared with that of the same model without codes: the mean of Σ p log(p / q),
its standard error, and the largest. What is told beside it is the squared error of keys and of
values over their squares. Types with a window (int4w16) read so many newest KVs as they are; the
bytes of these are told apart from those of a KV. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.demotion import refuse_refined
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.codec_loss", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="texts: .txt, .jsonl, .gz of these")
    add("--model", default="smollm2-135m", help="(%(default)s)")
    types = "bfloat16,int8,e4m3,k8v4,k5v4,k5v3.6,int4,int2"
    add("--types", default=types, help="what is stored (%(default)s)")
    add("--texts", type=int, default=3, help="from all of them, evenly (%(default)s)")
    add("--tokens", type=int, default=320, help="of each (%(default)s)")
    add("--coded", type=int, default=64, help="of these, the last that read codes (%(default)s)")
    options = parser.parse_args(arguments)
    check_whole("--texts", options.texts, 1)
    check_whole("--coded", options.coded, 1)
    check_whole("--tokens", options.tokens, options.coded + 1)
    return options


def next_tokens(model: Any, codecs: list, tokens: int, coded: int):
    """A compiled function of a codec's number and token ids: log-probabilities behind each of the
    last `coded` tokens, [coded, V], and the relative errors of keys and of values. Keys are
    smoothed where an engine smooths them (`kvjax.engine.smoothing`).

    Each of these reads the newest KVs of its codec's window, itself among them, uncoded.
    """
    import jax
    import jax.numpy as jnp

    from kvjax.engine.smoothing import smoothing_for
    from kvjax.models.decoder import forward, logits

    smoothing = [smoothing_for(model.config, model.params, codec) for codec in codecs]
    config, first = model.config, tokens - coded
    heads, d = config.num_kv_heads, config.head_dim
    position = jnp.arange(tokens, dtype=jnp.int32)
    windows = jnp.asarray([codec.window for codec in codecs], jnp.int32)

    def run(number, ids):
        def through(rows, part, layer):
            def of(codec, smoothing):
                one = (codec.of_keys, codec.of_values)[part]

                def coded(x):
                    return one.decode(one.encode(x)).astype(x.dtype)

                if part or smoothing is None:
                    return coded
                own = smoothing.of_layer(layer)
                return lambda k: own.read(coded(own.stored(k)))

            return jax.lax.switch(number, list(map(of, codecs, smoothing)), rows)

        def attended(q, rows, coded, exact):
            """Of some rows: keys and values as they are where they are new, else coded."""
            age = position[rows][:, None] - position
            new = age < windows[number]
            (k, v), (exact_k, exact_v) = coded, exact
            s = jnp.einsum("qhrd,khd->hrqk", q[rows], k)
            s = jnp.where(new, jnp.einsum("qhrd,khd->hrqk", q[rows], exact_k), s) / math.sqrt(d)
            weights = jax.nn.softmax(jnp.where(age >= 0, s, -jnp.inf), axis=-1)
            old, fresh = jnp.where(new, 0, weights), jnp.where(new, weights, 0)
            return jnp.einsum("hrqk,khd->qhrd", old, v) + jnp.einsum(
                "hrqk,khd->qhrd", fresh, exact_v
            )

        def attend(carry, layer, q, k, v, hidden):
            q, k, v = (x[0].astype(jnp.float32) for x in (q, k, v))
            q = q.reshape(tokens, heads, -1, d)
            keys, values = (through(x, part, layer) for part, x in enumerate((k, v)))
            out = jnp.concatenate([
                attended(q, slice(0, first), (k, v), (k, v)),
                attended(q, slice(first, tokens), (keys, values), (k, v)),
            ])  # fmt: skip
            error = [jnp.sum((a - b) ** 2) / jnp.sum(b**2) for a, b in ((keys, k), (values, v))]
            return carry, out.reshape(1, tokens, -1, d).astype(hidden.dtype), jnp.stack(error)

        last, _, errors = forward(config, model.params, ids[None], position[None], attend, ())
        found = logits(config, model.params, last[0, first:])
        return jax.nn.log_softmax(found.astype(jnp.float32)), jnp.mean(errors, axis=0)

    return jax.jit(run)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import numpy as np

    from kvjax.cache import CacheSpec, as_codec
    from kvjax.cli.models import check_cache_dtypes
    from kvjax.eval.files import read_texts
    from kvjax.models import load_model

    types = list(dict.fromkeys(options.types.split(",")))
    check_cache_dtypes(types)
    refuse_refined("--types", types)
    model = load_model(options.model)
    texts = [text for path in options.data for text in read_texts(path)]
    ids = []
    for n in range(options.texts):
        text = texts[n % len(texts)]
        # From the middle on, where books have begun.
        start = len(text) // 2 + 4 * options.tokens * (n // len(texts))
        found = model.tokenizer.encode(text[start : start + 16 * options.tokens])
        if len(found) < options.tokens:
            raise UserError(f"--data: a text is too short for {options.tokens} tokens")
        ids.append(np.asarray(found[: options.tokens], np.int32))
    codecs = [as_codec(kind, "float32") for kind in ("float32", *types)]
    call = next_tokens(model, codecs, options.tokens, options.coded)
    exact = [np.asarray(call(0, one)[0], np.float64) for one in ids]
    rows = {}
    for number, kind in enumerate(types, 1):
        losses, errors = [], []
        for one, true in zip(ids, exact, strict=True):
            other, error = call(number, one)
            losses.append(np.sum(np.exp(true) * (true - np.asarray(other, np.float64)), axis=-1))
            errors.append(error)
        loss, error = np.concatenate(losses), np.mean(errors, axis=0)
        spec = CacheSpec.of(model.config, codecs[number])
        rows[kind] = {
            "kv_bytes": spec.kv_bytes,
            "window_bytes": spec.window_bytes,
            "kl": round(float(loss.mean()), 5),
            "standard_error": round(float(loss.std() / math.sqrt(len(loss))), 5),
            "largest": round(float(loss.max()), 4),
            "error_of_keys": round(float(error[0]), 6),
            "error_of_values": round(float(error[1]), 6),
        }
        row = rows[kind]
        print(
            f"{kind:>10}: {row['kv_bytes']} bytes of a KV, KL {row['kl']:.4f} ± "
            f"{row['standard_error']:.4f}, at most {row['largest']:.3f}",
            flush=True,
        )
    told = {name: value for name, value in vars(options).items() if name != "data"}
    print(json.dumps({**told, "data": [path.name for path in options.data], "types": rows}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
