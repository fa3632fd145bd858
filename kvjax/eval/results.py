"""Results on disk: one JSON object a line, appended batch by batch, so that a run can go on."""

import fcntl
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.eval.files import open_text

Result = dict[str, Any]
Key = tuple[str, str, str, float]
SETTINGS = "settings"
"""Field of every row with what must not change within a file."""
OF_METHODS = ("calibration", "levels", "draft")
"""Settings that count in the rows of methods and codecs that read them alone."""
NUMBER = (int, float)
FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "task", "protocol", "method", "metric", "digest"), str),
    **dict.fromkeys(("rate", "length", "em", "kvs", "kvs_full", "bytes"), NUMBER),
    "depth": (*NUMBER, type(None)),
    "seconds": dict,
}
"""What every row has, for tables and pictures to be made of it."""
SECONDS = ("prefill", "select", "score", "decode")


def key_of(result: Mapping[str, Any]) -> Key:
    """(id, protocol, method, rate): there is one row of each."""
    return result["id"], result["protocol"], result["method"], float(result["rate"])


def read_results(path: str | Path) -> list[Result]:
    """The rows of a results file (.jsonl or .jsonl.gz); an unfinished last line is passed over.

    Raises:
        UserError: it cannot be read, or a line within it is no result; names the line.
    """
    with open_text(Path(path)) as file:
        text = file.read()
    return parse_results(path, text[: text.rfind("\n") + 1])


def parse_results(path: str | Path, text: str) -> list[Result]:
    """The rows of such a text of whole lines.

    Raises:
        UserError: a line is no result; names it.
    """
    results = []
    # Not splitlines: answers may hold other characters that end lines.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            results.append(_checked(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path} line {number} is no result of kvjax evaluate ({error}): mend or remove "
                "it, or give another file"
            ) from error
    return results


def held_settings(path: Path) -> dict[str, Any]:
    """The settings of the first result in a file; none where there is none that can be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            return dict(_checked(json.loads(lines.readline())).get(SETTINGS, {}))
    except (OSError, ValueError, RecursionError):
        return {}


def _checked(value: Any) -> Result:
    """A row, if it has what every one has.

    Raises:
        ValueError: says what it lacks.
    """
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    for name, kind in FIELDS.items():
        if name not in value:
            raise ValueError(f"{name} is missing")
        if not isinstance(value[name], kind):
            raise ValueError(f"{name} {shown(value[name])}")
    if not isinstance(value.get(SETTINGS, {}), dict):
        raise ValueError(f"{SETTINGS} {shown(value[SETTINGS])}")
    for name in SECONDS:
        if not isinstance(value["seconds"].get(name), NUMBER):
            raise ValueError(f"seconds {shown(value['seconds'])}")
    return value


class ResultsFile:
    """Results that are appended to a file and survive whatever ends the run.

    A context manager. Rows that the file holds already are in `results`.

    Args:
        path: the file.
        settings: what must not change within it. Of `OF_METHODS`, what this run's methods read,
            None where they read what was not given.
        reads: which of `OF_METHODS` the rows of a method (as rows call it) follow from.

    Raises:
        UserError: the file cannot be written, is in use, or holds something else, or results of
            other settings.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        reads: Callable[[str], Collection[str]] = lambda method: OF_METHODS,
    ):
        self.path, self._settings, self._reads = Path(path), dict(settings), reads
        if self.path.name.endswith(".gz"):
            raise UserError(f"{path}: give a name without .gz, rows are appended to it")
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            self._file.seek(0)
            data = self._file.read()
            # What a killed run left of its last row goes; the row is computed again.
            whole = data[: data.rfind(b"\n") + 1]
            if data and not whole:
                raise UserError(f"{path} holds no results of kvjax evaluate: give another --out")
            self.results = parse_results(path, whole.decode(errors="replace"))
            self._check()
            self._file.truncate(len(whole))
        except BaseException:
            self._file.close()
            raise
        self._done = {key_of(result) for result in self.results}

    def _lock(self) -> None:
        """Have the file alone until it is closed, where the file system knows of such things."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path} is in use: another run writes into it; wait for its end, or give "
                "another --out"
            ) from None
        except OSError:
            pass

    def _check(self) -> None:
        for result in self.results:
            held, reads = result.get(SETTINGS, {}), self._reads(result["method"])
            for name in {**held, **self._settings}:
                if name in OF_METHODS and (name not in self._settings or name not in reads):
                    continue
                ours, theirs = self._settings.get(name), held.get(name)
                if ours != theirs:
                    raise UserError(
                        f"{self.path} holds results with {name} {theirs}, and this run has {ours}: "
                        "give another --out or the same settings"
                    )

    def _settings_of(self, method: str) -> dict[str, Any]:
        """The settings that a row of a method follows from."""
        unread = set(OF_METHODS) - set(self._reads(method))
        return {
            name: value
            for name, value in self._settings.items()
            if name not in unread and (name not in OF_METHODS or value is not None)
        }

    def has(self, key: Key) -> bool:
        return key in self._done

    def add(self, results: Sequence[Result]) -> None:
        """Append rows; they are on disk when this returns."""
        rows = [{**result, SETTINGS: self._settings_of(result["method"])} for result in results]
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
