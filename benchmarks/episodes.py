"""What it gains that a question chooses among the caches of all episodes (EpiCache).

    python -m benchmarks.episodes --data DATA --split dev
    python -m benchmarks.episodes --data DATA --split dev --tasks news --number 2 --rates 8,16

Each prompt is compressed before any question is known, as in `agnostic`: once for each of its
episodes, and by the methods of --beside, at each rate and at the rate at which one cache has the
blocks of all episodes' together. Every question chooses the cache of the episode next to it, as
`LLM.episodes` has it do. Beside its answer stand the mean over all caches, which is what a choice
by lot gives, and whether any cache has the answer, which is what the best choice gives. Prompts and
scores are those of `kvjax evaluate`, whose other options it has; its results are written and gone
on with as there. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import check_number, check_whole
from kvjax.cli import ArgumentParser, Progress, add_model_options, load_chosen_model, run_script
from kvjax.cli.models import check_model_options
from kvjax.cli.progress import TimeLeft
from kvjax.cli.rows import add_row_options, check_rows, choose_methods, collect_rows, fill_in
from kvjax.cli.rows import numbers as numbers_of

USUAL = {"tasks": "five,news", "length": "1024", "rows": 8}
PROTOCOL = "agnostic"
BLOCK = 8
NAME = "episode {}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.episodes", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--number", type=int, default=4, help="of episodes (%(default)s)")
    add("--rates", default="4,8", help="of each cache (%(default)s)")
    add("--beside", default="epicache,snapkv", help="methods of one cache (%(default)s)")
    add("--out", type=Path, default=Path("episodes.jsonl"), help="results file (%(default)s)")
    add_row_options(parser, parser.add_argument_group("prompts"), usual=USUAL, target_tokens=64)
    options = parser.parse_args(arguments)
    check_whole("--number", options.number, 1, 64)
    options.rates = numbers_of("rates", options.rates, float)
    for rate in options.rates:
        check_number("--rates", rate, 1)
    options.beside = choose_methods(options.beside)
    fill_in(options, USUAL)
    check_model_options(options)
    check_rows(options)
    return options


def of_episode(number: int, which: int) -> Any:
    """`epicache` of one of a prompt's episodes; of the last where there are fewer."""
    from kvjax.cache import get_method
    from kvjax.cache.methods.epicache import Episode, Medoid

    @dataclasses.dataclass(frozen=True)
    class OfEpisode(Episode):
        which: int = 0

        def probes(self, prompt, at_hand):
            found = self.found(prompt, at_hand)
            return found[min(self.which, len(found) - 1)][0].probes(prompt, at_hand)

        def behind(self, probe):
            return Medoid(probe.first)

    scorer = OfEpisode(episodes=number, which=which)
    return dataclasses.replace(get_method("epicache"), name=NAME.format(which), scorer=scorer)


def questions_of(row: Any, tokenizer: Any) -> list[str]:
    """What a row asks, without what the chat template puts around it."""
    from kvjax.eval.tasks.base import chat_segments, next_turn

    if not row.turns:
        return [row.question]
    _, suffix = chat_segments(tokenizer)
    asked = (turn.asked.removeprefix(next_turn(tokenizer)) for turn in row.turns)
    return [one.removesuffix(suffix).strip() for one in asked]


def chosen(evaluator: Any, row: Any, tokens: Any, number: int) -> list[int]:
    """The episode that each of a row's questions chooses."""
    from kvjax.cache.methods.epicache import Episode, nearest_episode

    bench, tokenizer = evaluator.probing.bench, evaluator.model.tokenizer
    found = Episode(episodes=number).found(tokens.prompt[: tokens.cut(PROTOCOL)], bench)
    centroids = np.stack([centroid for _, centroid in found])
    asked = (np.asarray(tokenizer.encode(one)) for one in questions_of(row, tokenizer))
    return [nearest_episode(centroids, bench.embedded(one)) for one in asked]


def variants_of(options: argparse.Namespace) -> list[Any]:
    from kvjax.eval.sizes import Variant

    every = [Variant("full", 1.0)]
    for rate in options.rates:
        every += [Variant(NAME.format(which), rate) for which in range(options.number)]
        every += [Variant(name, at) for name in options.beside for at in beside(options, rate)]
    return list(dict.fromkeys(every))


def beside(options: argparse.Namespace, rate: float) -> list[float]:
    """Rates of one cache with the blocks of each of several, and of all of them, if it evicts."""
    return [at for at in dict.fromkeys((rate, rate / options.number)) if at > 1]


def measured(
    options: argparse.Namespace, progress: Progress
) -> tuple[dict[str, list[int]], list[dict[str, Any]]]:
    """The choices of each prompt's questions, by its id, and all results."""
    from kvjax.cache import get_method
    from kvjax.cache.methods.names import METHODS
    from kvjax.engine.key_similarity import measured as similarity
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.results import OF_WEIGHTS, ResultsFile
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import run, tokenised
    from kvjax.eval.sizes import EvaluatorConfig

    METHODS.update({NAME.format(i): of_episode(options.number, i) for i in range(options.number)})
    model, dtype = load_chosen_model(options, progress)
    config = EvaluatorConfig(block_size=BLOCK, free_tokens=0, answers=False)
    evaluator = Evaluator(model, config, similarity(model, [get_method("epicache")], {}))
    progress("prompts")
    skipped = Skipped()
    rows = tokenised(evaluator, collect_rows(options, model.tokenizer, skipped), skipped)
    for reason in skipped.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    settings = {"model": model.config.name, OF_WEIGHTS: model.fingerprint, "dtype": dtype}
    settings |= {"episodes": options.number, "block_size": BLOCK}
    choices = {row.id: chosen(evaluator, row, tokens, options.number) for row, tokens in rows}
    with ResultsFile(options.out, settings) as file:
        run(evaluator, rows, [PROTOCOL], variants_of(options), file, TimeLeft(progress))
        return choices, [result for result in file.results if result["id"] in choices]


def lines(
    options: argparse.Namespace, choices: dict[str, list[int]], results: list[dict[str, Any]]
) -> Iterator[list[Any]]:
    """Of each task and rate: each prompt's mean over its questions, with intervals."""
    from kvjax.eval.table import bootstrap

    right = {
        (r["id"], r["method"], r["rate"]): np.asarray(r.get("turns") or [r["em"]]) for r in results
    }
    for task in dict.fromkeys(r["task"] for r in results):
        ids = list(dict.fromkeys(r["id"] for r in results if r["task"] == task))

        def line(at: str, what: str, found: list[Any], task: str = task) -> list[Any]:
            mean = bootstrap([float(np.mean(one)) for one in found])
            questions = sum(len(one) for one in found)
            return [task, at, what, len(found), questions, mean and mean.shown(2)]

        yield line("1", "full", [right[one, "full", 1.0] for one in ids])
        for rate in options.rates:
            every = [NAME.format(i) for i in range(options.number)]
            of = [np.stack([right[one, name, rate] for name in every]) for one in ids]
            picked = [x[choices[one], np.arange(x.shape[1])] for one, x in zip(ids, of)]
            at, caches = f"{rate:g}", f"of {options.number} caches"
            yield line(at, f"the one chosen {caches}", picked)
            yield line(at, f"the mean {caches}", [x.mean(axis=0) for x in of])
            yield line(at, f"any {caches}", [x.max(axis=0) for x in of])
            for name in options.beside:
                for own in beside(options, rate):
                    yield line(f"{own:g}", name, [right[one, name, own] for one in ids])


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.table import markdown

    enable_compilation_cache()
    with Progress() as progress:
        choices, results = measured(options, progress)
    head = ["task", "rate", "cache", "prompts", "questions", "right"]
    rows = list(lines(options, choices, results))
    print("\n".join(markdown(head, rows)))
    print(json.dumps({"rows": [dict(zip(head, row)) for row in rows], "chosen": choices}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
