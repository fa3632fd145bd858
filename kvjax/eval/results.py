"""Results on disk: one JSON object a line, appended batch by batch, so that a run can go on."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvjax.errors import UserError
from kvjax.eval.files import open_text

Result = dict[str, Any]
Key = tuple[str, str, str, float]
SETTINGS = "settings"
"""Field of every row with what must not change within a file."""


def key_of(result: Mapping[str, Any]) -> Key:
    """(id, protocol, method, rate): there is one row of each."""
    return result["id"], result["protocol"], result["method"], float(result["rate"])


def read_results(path: str | Path) -> list[Result]:
    """The rows of a results file (.jsonl or .jsonl.gz); an unfinished last line is passed over.

    Raises:
        UserError: it cannot be read, or a line within it is no result; names the line.
    """
    with open_text(Path(path)) as file:
        return parse_results(path, file.read())[0]


def parse_results(path: str | Path, text: str) -> tuple[list[Result], int]:
    """The rows of such a text, and how many of its characters they take.

    Raises:
        UserError: a line is no result; names it. Only the last one may be half written.
    """
    results, size = [], 0
    # Not splitlines: answers may hold other characters that end lines.
    lines = [line for line in re.split(r"(?<=\n)", text) if line]
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith("\n"):
                raise ValueError("unfinished")
            result = json.loads(line)
            key_of(result)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path} line {number} is no result ({error}): mend or remove it"
            ) from error
        results.append(result)
        size += len(line)
    return results, size


class ResultsFile:
    """Results that are appended to a file and survive whatever ends the run.

    A context manager. Rows that the file holds already are in `results`.

    Raises:
        UserError: the file cannot be written, is in use, or holds results of other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path, self._settings = Path(path), dict(settings)
        if self.path.name.endswith(".gz"):
            raise UserError(f"{path}: give a name without .gz, rows are appended to it")
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._file.seek(0)
            # A half-written character can only be in a half-written last line.
            text = self._file.read().decode(errors="replace")
            self.results, size = parse_results(path, text)
            self._check()
            # What a killed run left of its last row goes; the row is computed again.
            self._file.truncate(len(text[:size].encode()))
        except BaseException:
            self._file.close()
            raise
        self._done = {key_of(result) for result in self.results}

    def _check(self) -> None:
        for result in self.results:
            held = result.get(SETTINGS, {})
            for name in {**held, **self._settings}:
                ours, theirs = self._settings.get(name), held.get(name)
                if ours != theirs:
                    raise UserError(
                        f"{self.path} holds results with {name} {theirs}, and this run has {ours}: "
                        "give another --out or the same settings"
                    )

    def has(self, key: Key) -> bool:
        return key in self._done

    def add(self, results: Sequence[Result]) -> None:
        """Append rows; they are on disk when this returns."""
        rows = [{**result, SETTINGS: self._settings} for result in results]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results += rows
        self._done |= {key_of(row) for row in rows}

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
