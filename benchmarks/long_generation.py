"""A long generation under a fixed cap: what continual compression costs in NLL and in the answer.

Made-up texts of somebody who works through a ledger step by step are generated again, token by
token, through the engine's decode step: every true token is fed, and the next one's probability
noted. A number that one step in the middle states is asked for at the end. After every so many
tokens the cache is compressed to its cap, also while it holds generated tokens alone. The full
cache's figures stand beside each method's.

    python -m benchmarks.long_generation                    # 2,048 tokens, cap 256; half an hour
    python -m benchmarks.long_generation --tokens 1024 --prompts 2 --methods r-kv,streaming-llm

Results are printed as a table; the last line is one JSON object, which --out appends to a file.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import check_whole
from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    check_output_file,
    load_chosen_model,
    run_script,
)
from kvjax.cli.models import add_calibration_option, check_model_options, chosen_calibration
from kvjax.cli.rows import choose_methods, numbers
from kvjax.errors import UserError

USUAL = (
    "matched:predicted-reads-blind,predicted-reads-blind,r-kv,triattention,h2o-decode,shared-reads,"
    "tova,streaming-llm"
)
GOODS = ("nails", "bricks", "candles", "ropes", "barrels", "tiles", "lamps", "sacks", "planks")
THINGS = ("iron gate", "blue lorry", "stone well", "tall crane", "old scale", "cold store")
ROOM = 64
"""Padding of what is run at once, in tokens."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A prompt, what is generated behind it, and the answer at its end, as tokens."""

    prompt: np.ndarray
    said: np.ndarray
    """The last `answer` tokens are the answer."""
    answer: int


def ledger(tokenizer: Any, seed: int, number: int, tokens: int) -> Generation:
    """Generation `number` of about `tokens` tokens; its seal number stands in the middle."""
    rng = np.random.default_rng((17, seed, number))
    thing = THINGS[number % len(THINGS)]
    seal = str(rng.integers(10_000, 100_000))
    asked = (
        "Work through the ledger of the warehouse step by step. At the end, say what the seal "
        f"number of the {thing} is."
    )
    prompt = tokenizer.render_chat([{"role": "user", "content": asked}])
    tail = f"\n\nThat was the last step. The seal number of the {thing} is"
    answer = tokenizer.encode(" " + seal)
    room = tokens - len(tokenizer.encode(tail)) - len(answer)
    said: list[int] = []
    stock = int(rng.integers(100, 900))
    stated = False
    while True:
        goods = GOODS[int(rng.integers(len(GOODS)))]
        more = int(rng.integers(2, 99))
        comes = bool(rng.integers(2)) or stock <= more
        after = stock + more if comes else stock - more
        step = (
            f"{more} {goods} {'come in' if comes else 'go out'}, so {stock} "
            f"{'+' if comes else '-'} {more} = {after}. I write down {after}."
        )
        if not stated and len(said) >= room // 2:
            step = f"the seal number of the {thing} is {seal}. I keep it in mind for the end."
            stated, after = True, stock
        ids = tokenizer.encode(f"\nNext: {step}")
        if len(said) + len(ids) > room:
            break
        said, stock = said + ids, after
    said += [*tokenizer.encode(tail), *answer]
    own = np.asarray(tokenizer.encode(prompt), np.int32)
    return Generation(own, np.asarray(said, np.int32), len(answer))


def padded(rows: list[np.ndarray], size: int) -> np.ndarray:
    out = np.zeros((len(rows), size), np.int32)
    for row, tokens in zip(out, rows):
        row[: len(tokens)] = tokens
    return out


class Runner:
    """A model, its generations, and what the full cache makes of them."""

    def __init__(self, model: Any, artefacts: dict[str, Any], made: list[Generation], every: int):
        from kvjax.cache import CacheSpec, as_codec
        from kvjax.models.decoder import activation_dtype
        from kvjax.models.rope import rope_artefacts

        self.model, self.made, self.every = model, made, every
        self.artefacts = {**artefacts, **rope_artefacts(model.config)}
        codec = as_codec(None, activation_dtype(model.params))
        self.spec = CacheSpec.of(model.config, codec)
        self.fed = max(len(g.said) for g in made)

    def full(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """−log p of every generated token, and the likeliest ones, with the whole cache."""
        import jax
        import jax.numpy as jnp

        from kvjax.kernels import prefill_attention
        from kvjax.models.decoder import forward, logits

        config = self.model.config

        @jax.jit
        def run(params, tokens, at, true):
            def attend(carry, layer, q, k, v, hidden):
                return carry, prefill_attention(q[0], k[0], v[0])[None], ()

            positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            last, _, _ = forward(config, params, tokens[None], positions[None], attend, ())
            # The logits of all tokens at once would be gigabytes.
            return jax.lax.map(
                lambda part: _likelihood(logits(config, params, last[0, part[0]]), part[1]),
                (at, true),
            )

        count = -(-self.fed // ROOM) * ROOM
        size = -(-(max(len(g.prompt) for g in self.made) + count) // ROOM) * ROOM
        out = []
        for g in self.made:
            tokens = padded([np.concatenate([g.prompt, g.said])], size)[0]
            at = np.arange(count, dtype=np.int32) + len(g.prompt) - 1
            true = padded([g.said], count)[0]
            parts = (x.reshape(-1, ROOM) for x in (at, true))
            found = run(self.model.params, tokens, *parts)
            nll, top = (np.asarray(x).reshape(-1)[: len(g.said)] for x in found)
            out.append((nll, top))
        return out

    def compressed(
        self, name: str, cap: int, progress: Any
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[int]]:
        """The same under a cap of so many tokens, and the most KVs that a slot held between steps.

        The prompt is compressed as well, where it is longer than the cap.
        """
        import jax
        import jax.numpy as jnp

        from kvjax.cache import budget_blocks, compress, get_method, init_cache, write_survivors
        from kvjax.engine.decode import decode_step
        from kvjax.engine.dense import dense_pass
        from kvjax.eval.passes import observe

        method, spec, made = get_method(name), self.spec, self.made
        slots, b = len(made), spec.block_size
        config, artefacts = self.model.config, self.artefacts
        longest = max(len(g.prompt) for g in made)
        # A head may hold all that a sequence ever has.
        width = -(-(longest + self.fed + b) // b)
        keep = budget_blocks(cap, spec.num_layers, spec.num_kv_heads, b)
        most = keep + spec.heads * (-(-(self.every + longest) // b) + 1)
        cache = init_cache(
            num_slots=slots, num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, num_blocks=slots * most, max_blocks_per_head=width,
            block_size=b, codec=spec.codec, planes=method.planes,
        )  # fmt: skip
        first = jax.jit(functools.partial(dense_pass, config))
        look = jax.jit(functools.partial(observe, method.observer))
        write = jax.jit(write_survivors, donate_argnums=0)
        size = -(-longest // ROOM) * ROOM
        for slot, g in enumerate(made):
            at = np.asarray([len(g.prompt) - 1], np.int32)
            seen = first(self.model.params, padded([g.prompt], size)[0], at)
            length = np.int32(len(g.prompt))
            scores = look(seen, length, artefacts)
            cache, _, ok = write(
                cache, np.int32(slot), seen.k, seen.v, scores, length, np.int32(keep), method,
                artefacts=artefacts,
            )  # fmt: skip
            assert bool(ok)
        step = functools.partial(decode_step, config, method.decode)

        @functools.partial(jax.jit, donate_argnums=1)
        def advance(params, cache, tokens, following, active):
            def one(cache, now):
                token, true, runs = now
                cache, out, ok = step(params, cache, token, runs, artefacts=artefacts)
                nll, top = _likelihood(out, true)
                return cache, (nll, top, ok)

            return jax.lax.scan(one, cache, (tokens.T, following.T, active.T))

        shrink = jax.jit(compress, donate_argnums=0)
        said = padded([g.said for g in made], self.fed + self.every)
        runs = np.arange(self.fed + self.every) < np.asarray([[len(g.said) - 1] for g in made])
        nll, top, peak = [], [], np.zeros(slots, int)
        every = jnp.arange(slots, dtype=jnp.int32)
        for start in range(0, self.fed - 1, self.every):
            progress(f"{name}, cap {cap}", start, self.fed)
            part, after = slice(start, start + self.every), slice(start + 1, start + self.every + 1)
            cache, (one, best, ok) = advance(
                self.model.params, cache, said[:, part], said[:, after], runs[:, part]
            )
            assert bool(np.all(ok))
            cache, _ = shrink(
                cache, every, jnp.full(slots, keep, jnp.int32), method, artefacts=artefacts
            )
            nll.append(np.asarray(one).T)
            top.append(np.asarray(best).T)
            peak = np.maximum(peak, np.asarray(cache.context_len).sum((1, 2)))
        nll, top = np.concatenate(nll, axis=1), np.concatenate(top, axis=1)
        ends = [len(g.said) - 1 for g in made]
        return [(n[:end], t[:end]) for n, t, end in zip(nll, top, ends)], [int(p) for p in peak]


def _likelihood(logits: Any, true: Any) -> tuple[Any, Any]:
    """−log p of the true tokens, and the likeliest ones."""
    import jax
    import jax.numpy as jnp

    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, true[..., None], axis=-1)[..., 0], jnp.argmax(scores, -1)


def summed_up(made: list[Generation], found: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Means over generations; the first token, which the prefill predicts, is left out."""
    nll, late, answers = [], [], []
    for g, (losses, top) in zip(made, found):
        losses, top = losses[-(len(g.said) - 1) :], top[-(len(g.said) - 1) :]
        nll.append(losses[: -g.answer].mean())
        late.append(losses[-g.answer :].mean())
        answers.append(bool((top[-g.answer :] == g.said[-g.answer :]).all()))
    return {
        "nll": round(float(np.mean(nll)), 4),
        "nll_answer": round(float(np.mean(late)), 4),
        "answers": sum(answers),
        "prompts": len(made),
    }


def check_methods(names: list[str]) -> None:
    """Refuse methods that cannot compress what is being generated."""
    from kvjax.cache import get_method

    for name in names:
        method = get_method(name)
        if method.probed or not method.compresses:
            why = "runs more behind its prompt" if method.probed else "evicts nothing"
            raise UserError(f"method {name} {why}: give one that compresses generated tokens")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.long_generation", description=__doc__)
    add_model_options(parser)
    add_calibration_option(parser)
    add = parser.add_argument
    add("--methods", default=USUAL, help="(%(default)s)")
    add("--caps", default="256", help="tokens' worth of KVs that stay (%(default)s)")
    add("--every", type=int, default=64, help="tokens between two compressions (%(default)s)")
    add("--tokens", type=int, default=2048, help="of a generation (%(default)s)")
    add("--prompts", type=int, default=4, help="generations, side by side (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--out", type=Path, help="a JSONL file to append to")
    options = parser.parse_args(arguments)
    check_model_options(options)
    for name, least in (("every", 1), ("tokens", 128), ("prompts", 1), ("seed", 0)):
        check_whole(f"--{name}", getattr(options, name), least)
    options.methods = choose_methods(options.methods)
    check_methods(options.methods)
    options.caps = numbers("caps", options.caps, int)
    for cap in options.caps:
        check_whole("--caps", cap, 16)
    if options.out is not None:
        check_output_file("--out", options.out)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    from kvjax.cache import get_method
    from kvjax.engine.compilation import enable_compilation_cache

    enable_compilation_cache()
    with Progress() as progress:
        model, dtype = load_chosen_model(options, progress)
        methods = [get_method(name) for name in options.methods]
        calibration = chosen_calibration(options, model, methods, progress)
        made = [
            ledger(model.tokenizer, options.seed, number, options.tokens)
            for number in range(options.prompts)
        ]
        artefacts = {} if calibration is None else calibration.on_device()
        runner = Runner(model, artefacts, made, options.every)
        progress("full cache")
        kvs_full = float(np.mean([runner.spec.heads * (len(g.prompt) + len(g.said)) for g in made]))
        results = [{"method": "full", **summed_up(made, runner.full()), "kvs": kvs_full}]
        for cap in options.caps:
            for name in options.methods:
                found, kvs = runner.compressed(name, cap, progress)
                row = {"method": name, "cap": cap, **summed_up(made, found)}
                results.append({**row, "kvs": float(np.mean(kvs))})
    report = {
        "model": model.config.name,
        "dtype": dtype,
        **{name: getattr(options, name) for name in ("every", "tokens", "prompts", "seed")},
        "results": results,
    }
    print("| method | cap | NLL | NLL of the answer | answers | most KVs after a compression |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['method']} | {r.get('cap', '–')} | {r['nll']:.3f} | {r['nll_answer']:.3f} | "
            f"{r['answers']}/{r['prompts']} | {r['kvs']:,.0f} |"
        )
    line = json.dumps(report)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
