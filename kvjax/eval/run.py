"""A whole evaluation: methods × rates × rows × protocols, resumable."""

import re
import zlib
from collections.abc import Sequence
from typing import Any

from kvjax.cache import get_method
from kvjax.cache.calibration import Calibration
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.prompt_codecs import PROMPT_CODECS
from kvjax.eval.results import ResultsFile
from kvjax.eval.rows import Row, Skipped, TokenRow
from kvjax.eval.sizes import Variant, padded_size
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


def settings_of(label: str, calibration: Calibration | None, draft: str | None) -> dict[str, Any]:
    """Those of `OF_METHODS` that the rows of a method follow from; none of one that is not known.

    Args:
        label: what rows call it, as `Variant.label`.
        calibration: what this run has; what it has no arrays for does not run.
        draft: the model that drafts, if one does.
    """
    name, _, stored = label.partition(" in ")
    try:
        method = get_method(re.sub(r" at \d+ tokens$", "", name))
    except UserError:
        return {}
    found: dict[str, Any] = {"draft": draft} if method.drafts else {}
    levels = PROMPT_CODECS[stored].calibrated if stored in PROMPT_CODECS else ()
    for kind, arrays in (("calibration", method.calibrated), ("levels", levels)):
        if arrays and calibration is not None and {*arrays} <= {*calibration.arrays}:
            found[kind] = calibration.digest(arrays)
    return found


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
        why = skipped.reasons[-1] if skipped.reasons else "tasks and files have none"
        raise UserError(f"no row is left: {why}")
    # Rows of one size side by side, so that the cache is laid out once for all of them.
    return sorted(
        ready.values(), key=lambda r: padded_size(len(r[1].prompt) + len(r[1].target), 128)
    )


def digest(tokens: TokenRow) -> str:
    """A fingerprint of a row's tokens and their segments."""
    parts = [*tokens.segments, tokens.target]
    data = b"/".join(part.tobytes() for part in parts)
    return f"{zlib.crc32(data):08x}"


def scoring(row: Row) -> str:
    """A fingerprint of what answers are compared with, and how."""
    fields = (row.task, row.metric, row.answers, row.classes, row.stop, row.max_new_tokens)
    return f"{zlib.crc32(repr(fields).encode()):08x}"


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
        UserError: the file holds a result of one of these ids for another prompt, or scored by
            something else.
    """
    known = {result["id"]: result["digest"] for result in file.results}
    # Rows from before it was written down lack it.
    scored = {r["id"]: r["scoring"] for r in file.results if "scoring" in r}
    jobs: list[tuple[Row, TokenRow, dict[str, list[Variant]], bool]] = []
    seen: dict[str, int] = {}
    for row, tokens in rows:
        if known.get(row.id, digest(tokens)) != digest(tokens):
            raise UserError(
                f"{file.path} holds results of another prompt with the id {row.id}: "
                "give another --out"
            )
        if scored.get(row.id, scoring(row)) != scoring(row):
            raise UserError(
                f"{file.path} holds results of {row.id} with another metric, other answers or "
                "tokens: give another --out"
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
                result["digest"], result["scoring"] = digest(tokens), scoring(row)
                if not detailed:
                    del result["recall_by_layer"], result["kept"]
            file.add(batch)
            done += len(batch)
            progress(row.id, done, total)
