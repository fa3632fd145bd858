"""Results on disk: one JSON object a line, appended batch by batch, so that a run can go on."""

import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.eval.files import open_text

Result = dict[str, Any]
Key = tuple[str, str, str, float]
BEGINNING = b'{"id": '
"""What rows begin with, also where a killed run left no more of its first one."""
SETTINGS = "settings"
"""Field of every row with what must not change within a file."""
OF_METHODS = ("calibration", "levels", "draft")
"""Settings that count in the rows of methods and codecs that read them alone."""
OF_WEIGHTS = "fingerprint"
"""The setting that tells weights apart; rows from before it was written down lack it."""
NUMBER = (int, float)
FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "task", "protocol", "method", "metric", "digest"), str),
    **dict.fromkeys(("rate", "length", "em", "kvs", "kvs_full", "bytes"), NUMBER),
    "depth": (*NUMBER, type(None)),
    "seconds": dict,
}
"""What every row has, for tables and pictures to be made of it."""
MAYBE = ("score", "free", "nll", "kl", "agree", "recall", "bytes_full", "compressed_tokens")
"""Numbers that a row may have, or None."""
POSITIVE = ("kvs", "kvs_full", "bytes", "bytes_full", "compressed_tokens")
"""What is divided by."""
SECONDS = ("prefill", "select", "score", "decode")


def key_of(result: Mapping[str, Any]) -> Key:
    """(id, protocol, method, rate): there is one row of each."""
    return result["id"], result["protocol"], result["method"], float(result["rate"])


def read_results(path: str | Path) -> list[Result]:
    """The rows of a results file (.jsonl or .jsonl.gz); an unfinished last line is passed over.

    Raises:
        UserError: it cannot be read, or a line within it is no result; names the line.
    """
    # The unfinished line may end within a letter.
    with open_text(Path(path), errors="replace") as file:
        text = file.read()
    return parse_results(path, text[: text.rfind("\n") + 1])


def parse_results(path: str | Path, text: str) -> list[Result]:
    """The rows of such a text of whole lines.

    Raises:
        UserError: a line is no result, or one that was there before; names it.
    """
    results: list[Result] = []
    seen: dict[Key, int] = {}
    # Not splitlines: answers may hold other characters that end lines.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            result = _checked(json.loads(line))
            if (first := seen.setdefault(key_of(result), number)) != number:
                raise ValueError(f"line {first} has the same prompt, protocol, method and rate")
            results.append(result)
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


def _begun(data: bytes) -> bool:
    """Whether this is the beginning of a row, and not a whole JSON object of somebody else's."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data.startswith(BEGINNING[: len(data)])
    return False


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
    for name in MAYBE:
        if not isinstance(value.get(name), (*NUMBER, type(None))):
            raise ValueError(f"{name} {shown(value[name])}")
    for name in POSITIVE:
        if (number := value.get(name)) is not None and not number > 0:
            raise ValueError(f"{name} {shown(number)} is not more than 0")
    if not isinstance(value.get(SETTINGS, {}), dict):
        raise ValueError(f"{SETTINGS} {shown(value[SETTINGS])}")
    seconds = value["seconds"]
    if not all(isinstance(seconds.get(name), NUMBER) for name in SECONDS):
        raise ValueError(f"seconds {shown(seconds)}")
    if not seconds["prefill"] > 0:
        raise ValueError(f"seconds of the prefill: {shown(seconds['prefill'])}")
    return value


class ResultsFile:
    """Results that are appended to a file and survive whatever ends the run.

    A context manager. Rows that the file holds already are in `results`.

    Args:
        path: the file.
        settings: what must not change within it.
        own: which of `OF_METHODS` the rows of a method (as rows call it) follow from beside, and
            what they are in this run; without it all are among the settings.

    Raises:
        UserError: the file cannot be written, is in use, or holds something else, or results of
            other settings.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        own: Callable[[str], Mapping[str, Any]] | None = None,
    ):
        self.path, self._settings = Path(path), dict(settings)
        self._own = own or (lambda method: {})
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
            if data and not whole and not _begun(data):
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
            held = result.get(SETTINGS, {})
            wanted = {**self._settings, **self._own(result["method"])}
            for name in {**held, **wanted}:
                if name in OF_METHODS and name not in wanted:
                    continue
                if name == OF_WEIGHTS and name not in held:
                    continue
                ours, theirs = wanted.get(name), held.get(name)
                if ours != theirs:
                    raise UserError(
                        f"{self.path} holds results with {name} {theirs}, and this run has {ours}: "
                        "give another --out or the same settings"
                    )

    def _settings_of(self, method: str) -> dict[str, Any]:
        """The settings that a row of a method follows from."""
        own = {name: value for name, value in self._own(method).items() if value is not None}
        return {**self._settings, **own}

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
