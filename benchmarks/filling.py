"""What a pool of two types loses as it fills up, and whether the order of demotion matters.

    python -m benchmarks.filling --data DATA --split dev --protocols chat,agnostic

Blocks of `--kv-dtype int4+` have finer codes in blocks that are free, and lose them as these are
taken. Here prompts are written to a pool that has room for all finer codes, and others then take
so much of it that a share of the blocks keeps theirs: those that are worth most, as in an engine,
or those that are worth least, which tells what the order is good for. Prompts, protocols and scores
are those of `kvjax evaluate`, whose other options it has; its results are written and gone on with
as there. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.demotion import BLOCK, evaluated, parsed, parser_of
from kvjax.checks import check_number
from kvjax.cli import Progress, run_script
from kvjax.cli.models import check_cache_dtypes
from kvjax.cli.rows import choose_protocols, numbers


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("filling", __doc__, "of the blocks, with finer codes")
    add = parser.add_argument
    add("--type", default="int4+", help="of keys and values (%(default)s)")
    add("--beside", default="int8", help="another type, which loses nothing (%(default)s)")
    add("--rates", default="1,8", help="compression rates (%(default)s)")
    options = parsed(parser, arguments)
    options.rates = numbers("rates", options.rates, float)
    for rate in options.rates:
        check_number("--rates", rate, 1)
    check_cache_dtypes([options.type, options.beside])
    return options


def demoted(cache: Any, share: float, dearest: bool) -> Any:
    """A cache whose pool others took so much of that a share of the finer codes is left: those that
    are taken last, or (`dearest`) first."""
    fine = cache.kv.fine
    if fine is None:
        return cache
    count = int(fine.count[0])
    left = round(share * count)
    lost = cache.free.stack[: count - left] if dearest else cache.free.stack[left:count]
    kv = dataclasses.replace(cache.kv, fine=fine.parted(lost, cache.free))
    return dataclasses.replace(cache, kv=kv)


def measured(options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """All results."""
    from kvjax.eval.cuts import Cut
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.sizes import EvaluatorConfig, Variant

    @dataclasses.dataclass(frozen=True)
    class Filled(Variant):
        share: float = 1.0
        dearest: bool = False

        @property
        def label(self) -> str:
            return f"{super().label}, {described(self.share, self.dearest)}"

    class Filling(Cut):
        def admit(self, cache, pending):
            # One by one: what is left is left of one variant's finer codes.
            variant, *others = pending
            cache, batch, _ = super().admit(cache, [variant])
            if isinstance(variant, Filled):
                cache = demoted(cache, variant.share, variant.dearest)
            return cache, batch, others

    class Under(Evaluator):
        cut = Filling

    def variants_of(_: Any) -> list[Any]:
        found: list[Any] = []
        for rate in options.rates:
            found.append(Variant(options.method, rate, options.beside))
            found += [
                Filled(options.method, rate, options.type, share=share, dearest=dearest)
                for share, dearest in kinds(options.shares)
            ]
        return found

    # Slots whose pool has room for the finer codes of one variant.
    config = EvaluatorConfig(block_size=BLOCK, num_slots=4, free_tokens=0, answers=False)
    return evaluated(options, Under, config, variants_of, {"method": options.method}, progress)


def kinds(shares: list[float]) -> Iterator[tuple[float, bool]]:
    """Shares and orders; of all or nothing there is one order."""
    for share in shares:
        yield share, False
        if 0 < share < 1:
            yield share, True


def described(share: float, dearest: bool) -> str:
    order = "" if share in (0, 1) else ", the dearest lost" if dearest else ", the cheapest lost"
    return f"{100 * share:g} % with finer codes{order}"


def lines(options: argparse.Namespace, results: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Of each protocol, rate and share: means over prompts with intervals."""
    from kvjax.eval.table import bootstrap

    names = [described(*kind) for kind in kinds(options.shares)]
    labels = {f"{options.method} in {options.beside}": options.beside}
    labels |= {f"{options.method} in {options.type}, {name}": name for name in names}
    for protocol in choose_protocols(options.protocols):
        for rate in options.rates:
            for label, name in labels.items():
                key = protocol, label, rate
                found = [r for r in results if (r["protocol"], r["method"], r["rate"]) == key]
                right, lost = (
                    bootstrap([r[kind] for r in found if r.get(kind) is not None])
                    for kind in ("score", "kl")
                )
                fewer = sum(r["bytes_full"] / r["bytes"] for r in found) / len(found)
                shown = (x and x.shown(digits) for x, digits in ((right, 2), (lost, 4)))
                yield [protocol, f"{rate:g}", name, f"{fewer:.1f}", len(found), *shown]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.table import markdown

    enable_compilation_cache()
    with Progress() as progress:
        results = measured(options, progress)
    head = ["protocol", "rate", "blocks", "fewer bytes", "prompts", "right", "KL"]
    rows = list(lines(options, results))
    print("\n".join(markdown(head, rows)))
    print(json.dumps({"rows": [dict(zip(head, row)) for row in rows]}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
