"""What calibrations choose, on development prompts: every choice by its mask.

An evaluation writes what a method keeps to a cache and runs behind it. Here each prompt runs once
with full attention, each calibration predicts what will be read of its KVs, the engine's own block
schedule says which of them stay at a rate, and the rest of the prompt and the true answer run
behind a mask of these. So a calibration in the making is looked at before anything is built of it.
Prompts that the full cache does not answer are left out; figures are shares of the others.

    python -m benchmarks.choice --calibration mine.safetensors auto --data ./data
    python -m benchmarks.choice --calibration a.safetensors b.safetensors --rates 16,32 --rows 8

The table has 95 % intervals over prompts; the last line is one JSON object. --out appends a JSON
row for each prompt, protocol, calibration and rate to a file.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    check_output_file,
    load_chosen_model,
    run_script,
)
from kvjax.cli.models import check_model_options
from kvjax.cli.progress import TimeLeft
from kvjax.cli.rows import (
    add_row_options,
    check_rows,
    choose_protocols,
    collect_rows,
    fill_in,
    rates_of,
)
from kvjax.errors import UserError

USUAL = {"tasks": "needle,passkey,fact,list", "length": "1024", "rows": 4}
RATES = "8,16,32"


@dataclasses.dataclass(frozen=True)
class Pass:
    """A prompt and its answer as the full cache saw them."""

    tokens: Any
    """A `TokenRow`."""
    everything: np.ndarray
    """Token ids of the prompt, and of the answer but its last."""
    counts: np.ndarray
    """Which tokens of the target count."""
    at: np.ndarray
    """Positions of the tokens before them, padded."""
    dense: Any
    """The `DensePass`; its logits are those behind `at`."""

    @property
    def answered(self) -> bool:
        """Whether the full cache says the true answer."""
        top = np.asarray(self.dense.logits[: len(self.counts)]).argmax(axis=-1)
        return bool((top == self.tokens.target[self.counts]).all())


class Comparison:
    """A model, the calibrations that are compared on it, and what was compiled for them."""

    def __init__(self, model: Any, calibrations: Mapping[str, Mapping[str, np.ndarray]]):
        """`calibrations`: arrays by name, by a name for each calibration."""
        import jax
        import jax.numpy as jnp

        from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
        from kvjax.engine.calibrate.choice import BLIND, behind, kept, predictions
        from kvjax.engine.dense import dense_pass
        from kvjax.models.decoder import logits

        self.model = model
        config = model.config
        self.heads = config.num_layers * config.num_kv_heads
        self.arrays = {
            name: {key: jnp.asarray(arrays[key]) for key in (WEIGHT, EXTRA)}
            for name, arrays in calibrations.items()
        }
        self._dense = jax.jit(functools.partial(dense_pass, config))

        @jax.jit
        def choose(arrays, dense, length, blocks):
            scores = predictions(arrays, dense.hidden, dense.k, dense.v)
            return jax.lax.map(lambda keep: kept(scores, length, keep, BLIND)[0], blocks)

        @jax.jit
        def say(params, dense, masks, said, start, at):
            full = jax.nn.log_softmax(dense.logits.astype(jnp.float32))

            def behind_one(mask):
                last = behind(config, params, dense.k, dense.v, mask, start, said[None])
                found = logits(config, params, last[0, jnp.maximum(at, 0)])
                # What comes before the cut is the full cache's own.
                found = jnp.where((at < 0)[:, None], dense.logits, found)
                log_p = jax.nn.log_softmax(found.astype(jnp.float32))
                kl = jnp.sum(jnp.exp(full) * (full - log_p), axis=-1)
                return jnp.argmax(log_p, axis=-1), log_p, kl

            return jax.lax.map(behind_one, masks)

        self._choose, self._say = choose, say

    def look(self, tokens: Any) -> Pass:
        """Run a prompt and its answer with the full cache."""
        from kvjax.eval.sizes import padded_size
        from kvjax.eval.told import scored_tokens

        everything = np.concatenate([tokens.prompt, tokens.target[:-1]])
        counts = scored_tokens(tokens.answers)
        at = np.pad(counts, (0, padded_size(len(counts), 8) - len(counts)), mode="edge")
        at = (at + len(tokens.prompt) - 1).astype(np.int32)
        padded = np.pad(everything, (0, padded_size(len(everything), 128) - len(everything)))
        dense = self._dense(self.model.params, padded.astype(np.int32), at)
        return Pass(tokens, everything, counts, at, dense)

    def masks(self, of: Pass, cut: int, name: str, rates: Sequence[float]) -> Any:
        """The KVs [V, L, H, T] of the first `cut` tokens that a calibration keeps at each rate."""
        from kvjax.cache import rate_blocks
        from kvjax.engine.calibrate.choice import BLOCK_SIZE

        most = self.heads * -(-cut // BLOCK_SIZE)
        blocks = [min(most, rate_blocks(cut, rate, self.heads, BLOCK_SIZE)) for rate in rates]
        return self._choose(
            self.arrays[name], of.dense, np.int32(cut), np.asarray(blocks, np.int32)
        )

    def compare(self, of: Pass, cut: int, rates: Sequence[float]) -> Iterator[dict[str, Any]]:
        """What every calibration keeps of the first `cut` tokens at every rate, and what is said
        behind that: a dictionary for each."""
        from kvjax.eval.sizes import padded_size
        from kvjax.eval.told import forced

        chunk = of.everything[cut:]
        said = np.pad(chunk, (0, padded_size(max(1, len(chunk)), 16) - len(chunk))).astype(np.int32)
        true = of.tokens.target[of.counts]
        full = np.asarray(of.dense.logits).argmax(axis=-1)
        for name in self.arrays:
            masks = self.masks(of, cut, name, rates)
            where = np.int32(cut), of.at - np.int32(cut)
            found = self._say(self.model.params, of.dense, masks, said, *where)
            top, log_p, kl = (np.asarray(x) for x in found)
            nll = -np.take_along_axis(log_p[:, : len(true)], true[None, :, None], axis=-1)[..., 0]
            for i, rate in enumerate(rates):
                told = forced(of.tokens.answers, true, top[i], full, nll[i], kl[i])
                yield {"calibration": name, "rate": rate, "kvs": int(masks[i].sum()), **told}


def results(
    comparison: Comparison,
    rows: Sequence[tuple[Any, Any]],
    protocols: Sequence[str],
    rates: Sequence[float],
    progress: Any,
) -> Iterator[dict[str, Any]]:
    """Those of all rows but those that the full cache does not answer, one in memory at a time."""
    for number, (row, tokens) in enumerate(rows):
        progress(row.task, number, len(rows))
        of = comparison.look(tokens)
        # Nothing is asked where a text goes on.
        asked = {} if row.metric != "nll" else {"em": None}
        if asked or of.answered:
            for protocol in protocols:
                for result in comparison.compare(of, tokens.cut(protocol), rates):
                    yield {"id": row.id, "task": row.task, "protocol": protocol, **result, **asked}


def summed_up(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts with their intervals, by protocol, rate and calibration."""
    from kvjax.eval.table import bootstrap

    groups: dict[tuple, list] = collections.defaultdict(list)
    for result in found:
        groups[result["protocol"], result["rate"], result["calibration"]].append(result)
    lines = []
    for (protocol, rate, name), group in groups.items():
        line = {"protocol": protocol, "rate": rate, "calibration": name, "prompts": len(group)}
        for key in ("em", "nll", "kl"):
            mean = bootstrap([r[key] for r in group if r[key] is not None])
            line[key] = None if mean is None else [mean.mean, mean.low, mean.high]
        by_task: dict[str, list] = collections.defaultdict(list)
        for result in group:
            if result["em"] is not None:
                by_task[result["task"]].append(result["em"])
        line["tasks"] = {task: float(np.mean(right)) for task, right in by_task.items()}
        lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The lines as Markdown; exact match in %."""

    def shown(values: Sequence[float] | None, scale: float, digits: int) -> str:
        if values is None:
            return "–"
        mean, low, high = (f"{scale * value:.{digits}f}" for value in values)
        return f"{mean} [{low}, {high}]"

    tasks = list(dict.fromkeys(task for line in lines for task in line["tasks"]))
    head = ["protocol", "rate", "calibration", *tasks, "exact match, %", "NLL", "KL"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        by_task = [line["tasks"].get(task) for task in tasks]
        rows.append([
            line["protocol"], f"{line['rate']:g}", line["calibration"],
            *("–" if right is None else f"{100 * right:.0f}" for right in by_task),
            shown(line["em"], 100, 0), shown(line["nll"], 1, 2), shown(line["kl"], 1, 3),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def calibrations_of(files: Sequence[str], model: Any) -> dict[str, Mapping[str, np.ndarray]]:
    """The arrays of calibrations by the names of their files, or by paths where names are alike.

    Raises:
        UserError: there is no such file, or it is of another model, or predicts no reads.
    """
    from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
    from kvjax.engine.calibrate.shelf import find, load

    files = list(dict.fromkeys(files))
    stems = [Path(file).stem for file in files]
    found = {}
    for file, stem in zip(files, stems):
        calibration = find(model) if file == "auto" else load(file, model)
        if calibration is None:
            raise UserError(f"--calibration {file}: there is none of {model.config.name}")
        for name in (WEIGHT, EXTRA):
            if name not in calibration.arrays:
                raise UserError(f"--calibration {file}: it lacks {name}; give one that predicts")
        found[stem if stems.count(stem) == 1 else file] = calibration.arrays
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    add_model_options(parser.add_argument_group("model"))
    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument(
        "--calibration",
        nargs="+",
        default=["auto"],
        metavar="FILE",
        help="of `kvjax calibrate`; auto: this package's, or of the user's cache (%(default)s)",
    )
    what.add_argument("--rates", default=RATES, help="compression rates (%(default)s)")
    add_row_options(parser, what, usual=USUAL, target_tokens=32)
    parser.set_defaults(split="dev", protocols="chat,agnostic")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    options = parser.parse_args(arguments)
    fill_in(options, USUAL)
    options.rates = rates_of(options.rates)
    options.protocols = choose_protocols(options.protocols)
    check_model_options(options)
    check_rows(options)
    if options.out is not None:
        check_output_file("--out", options.out)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import tokenised
    from kvjax.eval.sizes import EvaluatorConfig

    enable_compilation_cache()
    with Progress() as progress:
        model, dtype = load_chosen_model(options, progress)
        comparison = Comparison(model, calibrations_of(options.calibration, model))
        evaluator = Evaluator(model, EvaluatorConfig(context_length=options.context_length))
        skipped = Skipped()
        rows = tokenised(evaluator, collect_rows(options, model.tokenizer, skipped), skipped)
        if any(row.metric == "own" for row, _ in rows):
            raise UserError("--tasks: what the model says of its own has no true answer; leave out")
        progress.clear()
        for reason in skipped.reasons:
            print(f"skipped {reason}", file=sys.stderr)
        left = TimeLeft(progress)
        found = list(results(comparison, rows, options.protocols, options.rates, left))
    if not found:
        raise UserError(f"the full cache answers none of {len(rows)} prompts: give other tasks")
    lines = summed_up(found)
    print(table(lines))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in found)
    report = {
        "model": model.config.name,
        "dtype": dtype,
        "rows": len(rows),
        "answered": len({result["id"] for result in found}),
        "results": lines,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    run_script(main)
