"""A whole evaluation: methods × rates × rows × protocols, resumable."""

import functools
import re
import zlib
from collections.abc import Sequence

from kvjax.cache import get_method
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.prompt_codecs import PROMPT_CODECS
from kvjax.eval.results import OF_METHODS, ResultsFile
from kvjax.eval.rows import Row, Skipped, TokenRow
from kvjax.eval.sizes import Variant, bucket
from kvjax.models.hub import Progress


def variants_of(
    methods: Sequence[str], rates: Sequence[float], cache_dtypes: Sequence[str] = ()
) -> list[Variant]:
    """The full cache first, then every other method at every rate.

    With `cache_dtypes`, methods (and the full cache again) in each of these types.
    """
    others = [method for method in dict.fromkeys(methods) if method != "full"]
    kinds = [None] if not cache_dtypes else list(dict.fromkeys(cache_dtypes))
    found = [Variant("full", 1.0)] + [Variant("full", 1.0, kind) for kind in kinds if kind]
    return found + [Variant(m, float(r), kind) for kind in kinds for m in others for r in rates]


@functools.cache
def settings_read(label: str) -> frozenset[str]:
    """Which of `OF_METHODS` the rows of a method follow from; of one that is not known, all.

    Args:
        label: what rows call it, as `Variant.label`.
    """
    name, _, stored = label.partition(" in ")
    try:
        method = get_method(re.sub(r" at \d+ tokens$", "", name))
    except UserError:
        return frozenset(OF_METHODS)
    levels = stored in PROMPT_CODECS and PROMPT_CODECS[stored].calibrated
    reads = {
        "calibration": bool(method.calibrated),
        "levels": bool(levels),
        "draft": method.drafts,
    }
    return frozenset(name for name in OF_METHODS if reads[name])


def tokenised(
    evaluator: Evaluator, rows: Sequence[Row], skipped: Skipped
) -> list[tuple[Row, TokenRow]]:
    """The rows that fit the model, with their tokens, in order of their padded lengths.

    Raises:
        UserError: none is left.
    """
    ready: dict[str, tuple[Row, TokenRow]] = {}
    for number, row in enumerate(rows, 1):
        if row.id in ready:
            skipped.add(row.task, number, f"id {row.id!r} was there before")
            continue
        try:
            ready[row.id] = row, evaluator.tokenise(row)
        except (ValueError, UserError) as error:
            skipped.add(row.task, number, str(error))
    if not ready:
        raise UserError(f"no row is left: {skipped.reasons[-1] if skipped.reasons else 'none'}")
    # Rows of one size side by side, so that the cache is laid out once for all of them.
    return sorted(ready.values(), key=lambda r: bucket(len(r[1].prompt) + len(r[1].target), 128))


def digest(tokens: TokenRow) -> str:
    """A fingerprint of a row's tokens and their segments."""
    parts = [*tokens.segments, tokens.target]
    data = b"/".join(part.tobytes() for part in parts)
    return f"{zlib.crc32(data):08x}"


def run(
    evaluator: Evaluator,
    rows: Sequence[tuple[Row, TokenRow]],
    protocols: Sequence[str],
    variants: Sequence[Variant],
    file: ResultsFile,
    progress: Progress,
    details: int = 0,
) -> None:
    """Compute what the file lacks, row by row.

    Args:
        evaluator: the model.
        rows: from `tokenised`.
        protocols: names of `PROTOCOLS`.
        variants: from `variants_of`.
        file: where results go and what is there already.
        progress: called with what is being done, results so far and results in all.
        details: so many rows of each task keep what each layer and head held and its recall.

    Raises:
        UserError: the file holds a result of one of these ids for another prompt.
    """
    known = {result["id"]: result["digest"] for result in file.results}
    jobs: list[tuple[Row, TokenRow, dict[str, list[Variant]], bool]] = []
    seen: dict[str, int] = {}
    for row, tokens in rows:
        if known.get(row.id, digest(tokens)) != digest(tokens):
            raise UserError(
                f"{file.path} holds results of another prompt with the id {row.id}: "
                "give another --out"
            )
        lacking = {
            protocol: [v for v in variants if not file.has((row.id, protocol, v.label, v.rate))]
            for protocol in protocols
        }
        lacking = {protocol: wanted for protocol, wanted in lacking.items() if wanted}
        seen[row.task] = seen.get(row.task, 0) + 1
        if lacking:
            jobs.append((row, tokens, lacking, seen[row.task] <= details))
    done, total = 0, sum(len(w) for *_, lacking, _ in jobs for w in lacking.values())
    for row, tokens, lacking, detailed in jobs:
        progress(row.id, done, total)
        for batch in evaluator.evaluate(row, tokens, lacking):
            for result in batch:
                result["digest"] = digest(tokens)
                if not detailed:
                    del result["recall_by_layer"], result["kept"]
            file.add(batch)
            done += len(batch)
            progress(row.id, done, total)
