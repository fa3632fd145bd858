"""What `kvjax throughput` serves: prompts of one length, or the arrivals of a trace."""

import csv
import dataclasses
import datetime
import gzip
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import check_number, check_whole, shown
from kvjax.errors import UserError

MOST_CHARACTERS = 1 << 26
"""Of a text; no run needs so many."""
TRACES = (
    "TIMESTAMP, ContextTokens, GeneratedTokens (Azure's CSV); timestamp, input_length, "
    "output_length (Mooncake's JSONL); prompt_tokens, output_tokens (a CSV without times)"
)
"""What rows of a trace may hold, as messages say it."""
REPEATED = "hello"
"""The word that the papers' prompts repeat."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    seconds: float
    """After the first."""
    input_len: int
    output_len: int


def source_tokens(tokenizer: Any, prompt_file: str | None, *, repeated: bool = False) -> np.ndarray:
    """Tokens of the text that prompts are cut from: a file, or Python's own documentation; the
    first of one word where they are to repeat it."""
    if repeated:
        return np.asarray(tokenizer.encode(REPEATED)[:1], np.int32)
    if prompt_file is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        try:
            with _opened(prompt_file) as file:
                text = file.read(MOST_CHARACTERS)
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompt-file {prompt_file} is not UTF-8: convert it, for instance with iconv"
            ) from error
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read --prompt-file {_short(prompt_file, error)}") from error
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    if len(tokens) < 2:
        raise UserError(f"--prompt-file {prompt_file} is too short: give a text of some pages")
    return tokens


def prompts_of(source: np.ndarray, lengths: list[int], seed: int) -> list[np.ndarray]:
    """A prompt of each length, each from another place of the text (which starts anew at its end).

    With one token as the source every prompt repeats it.
    """
    starts = np.random.default_rng(seed).integers(0, len(source), len(lengths))
    return [
        np.take(source, np.arange(start, start + length), mode="wrap").astype(np.int32)
        for start, length in zip(starts, lengths, strict=True)
    ]


def read_trace(name: str, limit: int) -> list[Arrival]:
    """The first `limit` requests of a trace.

    Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's JSONL (timestamp in
    milliseconds, input_length, output_length), or a CSV with prompt_tokens and output_tokens and
    no times. A name that ends in .gz is unpacked.

    Raises:
        UserError: it cannot be read, or a row is malformed (names the row).
    """
    rows: list[Arrival] = []
    number = 0
    try:
        with _opened(name) as file:
            jsonl = name.removesuffix(".gz").endswith((".jsonl", ".json"))
            records = map(json.loads, file) if jsonl else csv.DictReader(file)
            while True:
                # Reading a row may fail as well as what it says.
                number += 1
                record = next(records, None)
                if record is None:
                    break
                row = _arrival(record)
                check_number("seconds", row.seconds, 0)
                check_whole("tokens of the prompt", row.input_len, 1)
                check_whole("tokens of the answer", row.output_len, 1)
                rows.append(row)
                if len(rows) == limit:
                    break
    except UserError as error:
        raise UserError(f"--trace {name}, row {number}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--trace {name} is not UTF-8: give a CSV or JSONL file as text (or .gz)"
        ) from error
    except (ValueError, OverflowError, RecursionError, csv.Error) as error:
        # JSON's own line is always the first.
        why = getattr(error, "msg", error)
        raise UserError(f"--trace {name}, row {number}: {why}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read --trace {_short(name, error)}") from error
    if not rows:
        raise UserError(f"--trace {name} has no rows")
    first = rows[0].seconds
    return [dataclasses.replace(row, seconds=row.seconds - first) for row in rows]


def _short(name: str, error: Exception) -> str:
    """A file and what is wrong with it."""
    return f"{name or repr(name)}: {getattr(error, 'strerror', None) or error}"


def _opened(name: str) -> Any:
    if name.endswith(".gz"):
        return io.TextIOWrapper(gzip.open(Path(name), "rb"), encoding="utf-8-sig")
    return open(name, encoding="utf-8-sig")


def _arrival(record: Any) -> Arrival:
    """A row of any of the known kinds.

    Raises:
        UserError: it is of none of them, or lacks a field or has another kind of value in it.
    """
    if not isinstance(record, dict):
        raise UserError(f"{shown(record)} is no JSON object")

    def read[T](name: str, kind: Callable[[Any], T], wanted: str) -> T:
        if record.get(name) is None:
            raise UserError(f"it has no {name}: give {TRACES}")
        try:
            return kind(record[name])
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{name} {shown(record[name])}: give {wanted}") from error

    def lengths(prompt: str, answer: str) -> tuple[int, int]:
        return read(prompt, int, "a whole number"), read(answer, int, "a whole number")

    if "ContextTokens" in record:
        when = read("TIMESTAMP", datetime.datetime.fromisoformat, "a date and a time")
        return Arrival(when.timestamp(), *lengths("ContextTokens", "GeneratedTokens"))
    if "input_length" in record:
        seconds = read("timestamp", float, "milliseconds") / 1000
        return Arrival(seconds, *lengths("input_length", "output_length"))
    if "prompt_tokens" in record:
        return Arrival(0.0, *lengths("prompt_tokens", "output_tokens"))
    if "num_prefill_tokens" in record:
        return Arrival(0.0, *lengths("num_prefill_tokens", "num_decode_tokens"))
    held = ", ".join(map(str, record))
    raise UserError(f"it has {held[:200] or 'no fields'}, which says no lengths: give {TRACES}")


def at_rate(arrivals: list[Arrival], per_second: float | None, seed: int) -> list[Arrival]:
    """The arrivals at a mean rate: the trace's own gaps scaled, or random ones if it has none."""
    if per_second is None:
        return arrivals
    if per_second <= 0:
        raise UserError(f"--request-rate {per_second}: give a number above 0")
    span = arrivals[-1].seconds
    if span > 0:
        scale = (len(arrivals) - 1) / per_second / span
        times = [row.seconds * scale for row in arrivals]
    else:
        gaps = np.random.default_rng(seed).exponential(1 / per_second, len(arrivals))
        times = (np.cumsum(gaps) - gaps[0]).tolist()
    return [dataclasses.replace(row, seconds=t) for row, t in zip(arrivals, times, strict=True)]
