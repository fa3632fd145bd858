"""Whether blocks had better be of two types: bits for some KVs, other bits for the cheapest.

    python -m benchmarks.demotion --data DATA --split dev --protocols chat,agnostic
    python -m benchmarks.demotion --data DATA --split dev --shares 0,1 --low int2 --equal-to 8

A cache that demotes before it evicts keeps more KVs in as many bytes. Here a share of what stays of
a prompt, the cheapest blocks of each layer first, goes through the lower type and the rest through
the higher one, and each share gets the rate at which its bytes are those of a cache all in the
higher type (at the rates of --equal-to, 8 bytes of numbers beside each KV counted). Prompts,
protocols and scores are those of `kvjax evaluate`, whose other options it has; its results are
written and gone on with as there. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvjax.checks import check_number
from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    load_chosen_model,
    run_script,
)
from kvjax.cli.models import (
    add_calibration_option,
    check_cache_dtypes,
    check_model_options,
    chosen_calibration,
)
from kvjax.cli.progress import TimeLeft
from kvjax.cli.rows import (
    add_row_options,
    check_rows,
    choose_protocols,
    collect_rows,
    fill_in,
    numbers,
)
from kvjax.errors import UserError

USUAL = {"tasks": "needle,passkey,fact,list,news", "length": "1024", "rows": 5}
BLOCK = 16
MOST = 1e30
"""What the score of a KV that may not go counts, so that sums stay finite."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("demotion", __doc__, "of what stays, in the lower type")
    add = parser.add_argument
    add("--high", default="int8", help="type of the others (%(default)s)")
    add("--low", default="int4", help="the lower type (%(default)s)")
    add("--equal-to", default="8,32", help="rates of a cache all in the higher (%(default)s)")
    options = parsed(parser, arguments)
    options.equal_to = numbers("equal-to", options.equal_to, float)
    for rate in options.equal_to:
        check_number("--equal-to", rate, 1)
    check_cache_dtypes([options.high, options.low])
    refuse_refined("--high", [options.high])
    refuse_refined("--low", [options.low])
    return options


def refuse_refined(name: str, kinds: Iterable[str]) -> None:
    """Refuse types of which a row alone does not tell what is stored of it.

    Raises:
        UserError: one has finer codes where a pool has room.
    """
    from kvjax.cache import as_codec

    for kind in kinds:
        if as_codec(kind, "float32").refines:
            raise UserError(
                f"{name} {kind}: which KVs have finer codes is a pool's; give "
                f"{kind.replace('+', '')}, or see python -m benchmarks.filling"
            )


def parser_of(name: str, doc: str | None, shares: str) -> ArgumentParser:
    """The options of a benchmark that shares of blocks, which it calls so, are given to."""
    parser = ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    add_model_options(parser)
    add_calibration_option(parser)
    add = parser.add_argument
    add(
        "--method",
        default="matched:predicted-reads-blind",
        help="of the form matched:… (%(default)s)",
    )
    add("--shares", default="0,0.25,0.5,0.75,1", help=f"{shares} (%(default)s)")
    add("--out", type=Path, default=Path(f"{name}.jsonl"), help="results file (%(default)s)")
    add_row_options(parser, parser.add_argument_group("prompts"), usual=USUAL, target_tokens=64)
    return parser


def parsed(parser: ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """What was given for them, checked."""
    options = parser.parse_args(arguments)
    options.shares = numbers("shares", options.shares, float)
    for share in options.shares:
        check_number("--shares", share, 0, 1)
    fill_in(options, USUAL)
    check_model_options(options)
    check_rows(options)
    return options


def demoting(base: Any, share: float, high: str, low: str, name: str) -> Any:
    """`base`, whose survivors have been through two types: the cheapest blocks of each layer, so
    great a share, through `low`.

    Raises:
        UserError: what stays is not fitted to attention as it was.
    """
    import jax.numpy as jnp

    from kvjax.cache import as_codec
    from kvjax.cache.methods.matched import AttentionMatched

    if not isinstance(base.merger, AttentionMatched):
        raise UserError(f"method {base.name}: give one of the form matched:NAME")
    types = [as_codec(name, "float32") for name in (low, high)]

    @dataclasses.dataclass(frozen=True)
    class Demoted(AttentionMatched):
        def fold(self, k, v, position, score, dropped, kept, seq_len, artefacts):
            k, v = super().fold(k, v, position, score, dropped, kept, seq_len, artefacts)
            lower = cheapest(score, kept, share)[..., None]

            def through(x, part):
                less, more = (getattr(codec, part) for codec in types)
                x_less, x_more = (one.decode(one.encode(x)) for one in (less, more))
                return jnp.where(lower, x_less, x_more).astype(x.dtype)

            return through(k, "of_keys"), through(v, "of_values")

    fields = {f.name: getattr(base.merger, f.name) for f in dataclasses.fields(base.merger)}
    return dataclasses.replace(base, name=name, merger=Demoted(**fields))


def cheapest(score: Any, kept: Any, share: float) -> Any:
    """The survivors [H, T] of a layer in the cheapest of its blocks, so great a share of these.

    A block is 16 survivors in a row, as they are written, and costs the sum of their scores; KVs
    that could not be evicted count more than any others.
    """
    import jax.numpy as jnp

    heads, tokens = kept.shape
    blocks = -(-tokens // BLOCK)
    at = jnp.where(kept, (jnp.cumsum(kept, axis=-1) - 1) // BLOCK, blocks)
    own = jnp.arange(heads)[:, None], at
    nothing = jnp.zeros((heads, blocks))
    cost = nothing.at[own].add(jnp.minimum(score, MOST), mode="drop")
    there = nothing.at[own].add(1, mode="drop") > 0
    order = jnp.argsort(jnp.where(there, cost, jnp.inf), axis=None)
    rank = jnp.zeros(order.size, jnp.int32).at[order].set(jnp.arange(order.size))
    lower = rank.reshape(heads, blocks) < jnp.floor(share * jnp.sum(there))
    return kept & lower.at[own].get(mode="fill", fill_value=False)


def rates_of(options: argparse.Namespace, share: float, head_dim: int) -> list[float]:
    """Rates at which a share in the lower type takes the bytes of `--equal-to` in the higher."""
    from kvjax.cache import as_codec
    from kvjax.cache.store.spec import METADATA_BYTES

    types = [as_codec(name, "float32").kv_bytes(head_dim) for name in (options.high, options.low)]
    high, low = (size + METADATA_BYTES for size in types)
    smaller = (high + share * (low - high)) / high
    return [max(1.0, round(rate * smaller, 3)) for rate in options.equal_to]


def measured(
    options: argparse.Namespace, shares: dict[str, float], progress: Progress
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Rates of each method, by the places of `--equal-to`, and all results."""
    from kvjax.cache import get_method
    from kvjax.cache.methods.names import METHODS
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.sizes import EvaluatorConfig, Variant

    # What can be refused without a model is refused before one is loaded.
    base = get_method(options.method)
    METHODS.update(
        {name: demoting(base, x, options.high, options.low, name) for name, x in shares.items()}
    )
    rates: dict[str, list[float]] = {}

    def variants_of(model: Any) -> list[Any]:
        rates.update(
            (name, rates_of(options, x, model.config.head_dim)) for name, x in shares.items()
        )
        return [Variant(name, rate) for name, own in rates.items() for rate in own]

    config = EvaluatorConfig(block_size=BLOCK, free_tokens=0, answers=False)
    settings = {"method": options.method, "high": options.high}
    return rates, evaluated(options, Evaluator, config, variants_of, settings, progress)


def evaluated(
    options: argparse.Namespace,
    kind: Callable[..., Any],
    config: Any,
    variants_of: Callable[[Any], list[Any]],
    settings: dict[str, Any],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Results of a model's variants of a method, and of its full cache, by an evaluator of a kind
    and a configuration; those that the file of results has are not computed again."""
    from kvjax.cache import get_method
    from kvjax.eval.results import OF_WEIGHTS, ResultsFile
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import run, tokenised
    from kvjax.eval.sizes import Variant

    base = get_method(options.method)
    model, dtype = load_chosen_model(options, progress)
    variants = [Variant("full", 1.0), *variants_of(model)]
    calibration = chosen_calibration(options, model, [base], progress)
    evaluator = kind(model, config, {} if calibration is None else calibration.on_device())
    progress("prompts")
    skipped = Skipped()
    rows = tokenised(evaluator, collect_rows(options, model.tokenizer, skipped), skipped)
    for reason in skipped.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    of_model = {"model": model.config.name, OF_WEIGHTS: model.fingerprint, "dtype": dtype}
    settings = {**of_model, **settings}
    if calibration is not None:
        settings["calibration"] = calibration.digest(base.calibrated)
    protocols = choose_protocols(options.protocols)
    with ResultsFile(options.out, settings) as file:
        run(evaluator, rows, protocols, variants, file, TimeLeft(progress))
        return file.results


def lines(
    options: argparse.Namespace, rates: dict[str, list[float]], results: list[dict[str, Any]]
) -> Iterator[list[Any]]:
    """Of each protocol, each number of bytes and each share: means over prompts with intervals."""
    from kvjax.eval.table import bootstrap

    for protocol in choose_protocols(options.protocols):
        for place, equal in enumerate(options.equal_to):
            for name, own in rates.items():
                key = protocol, name, own[place]
                found = [r for r in results if (r["protocol"], r["method"], r["rate"]) == key]
                right, lost = (
                    bootstrap([r[kind] for r in found if r.get(kind) is not None])
                    for kind in ("score", "kl")
                )
                kvs = sum(r["kvs"] / r["kvs_full"] for r in found) / len(found)
                shown = (x and x.shown(digits) for x, digits in ((right, 2), (lost, 3)))
                yield [protocol, f"{equal:g}", name, f"1/{1 / kvs:.1f}", len(found), *shown]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.table import markdown

    enable_compilation_cache()
    shares = {f"{100 * share:g} % in {options.low}": share for share in options.shares}
    with Progress() as progress:
        rates, results = measured(options, shares, progress)
    head = [
        "protocol",
        f"bytes of {options.high} at",
        "of what stays",
        "KVs",
        "prompts",
        "right",
        "KL",
    ]
    rows = list(lines(options, rates, results))
    print("\n".join(markdown(head, rows)))
    print(json.dumps({"rows": [dict(zip(head, row)) for row in rows]}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
