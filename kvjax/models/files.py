"""What a checkpoint's files may be, and its JSON read field by field.

A checkpoint comes from a stranger. Here its files are opened (a device or a pipe would never
end), its JSON is read whole or refused, and every field is checked as it is asked for, so that
whatever is wrong is said in one line with the file and the field.
"""

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, overload

from kvjax.checks import INT32_MAX, check_flag, check_number, check_text, check_whole, shown
from kvjax.errors import UserError

MAX_JSON_BYTES = 32 << 20
"""Of a JSON file: an index of 300,000 tensors takes as much; parsed it is 20 times as large."""
_MAX_DIGITS = 300
"""Of a whole number in JSON: no float64 has more, and longer ones take Python's parser too long."""


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages repeat it: whole, unless it is longer than any path or unprintable."""
    text = os.fspath(path)
    if text.isprintable() and len(text) <= 500:
        return text
    return shown(text)


def find(path: str | os.PathLike[str], what: str = "weights") -> os.stat_result | None:
    """What lies at `path`, a file or a folder; None where nothing does.

    Args:
        path: any text.
        what: what the message calls it.

    Raises:
        UserError: `path` cannot be looked up, or is a device, a pipe or a socket.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{what} {shown_path(path)}: {error.strerror or error}") from error
    except ValueError:  # a NUL, or a lone surrogate
        raise UserError(f"{what} {shown_path(path)}: no possible path") from None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise UserError(f"{what} {shown_path(path)}: neither a file nor a folder; give one of them")
    return found


def open_file(path: Path) -> BinaryIO:
    """The regular file `path`, open for reading.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read, or is something else than a file.
    """
    try:
        # Without O_NONBLOCK, to open a pipe waits for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no possible path"
        raise UserError(f"cannot read {path}: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"cannot read {path}: it is not a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of the file `path`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read or has more than `most` bytes.
    """
    with open_file(path) as stream:
        try:
            # Sizes of files that the kernel makes up are 0: both have to be looked at.
            large = os.fstat(stream.fileno()).st_size > most
            data = b"" if large else stream.read(most + 1)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if large or len(data) > most:
        raise UserError(f"{path} has more than {most} bytes, the most that is read of such a file")
    return data


def crc32(path: Path) -> int:
    """The CRC-32 of the bytes of the file `path`, of which a megabyte at a time is in memory.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read.
    """
    total = 0
    with open_file(path) as stream:
        try:
            while block := stream.read(1 << 20):
                total = zlib.crc32(block, total)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return total


def parse_json(data: bytes, where: str) -> Any:
    """The value that `data` holds as JSON.

    NaN, infinities and numbers too long for a float64 come as floats that are not finite: what
    asks for such a field refuses it, and what nobody asks for does no harm.

    Raises:
        UserError: it is not JSON, or nested too deeply; names `where`.
    """
    try:
        return json.loads(data, parse_int=_parse_int)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {shown_error(error)}") from None


def _parse_int(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_DIGITS else math.inf


def shown_error(error: BaseException) -> str:
    """What an error says, on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"


class Fields:
    """A JSON object of a checkpoint: each getter gives a field of one type, or a default.

    A field that is absent or null has its default; `None` by default. A field of another type or
    beyond its limits raises UserError, which names the file and the field.

    Attributes:
        values: the object as it was parsed.
        where: the file, and the field that holds the object if it is not the whole file.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def label(self, key: str) -> str:
        """What messages call a field."""
        return f"{self.where}: {key}"

    def get(self, key: str) -> Any:
        """The field as it stands; None where it is absent."""
        return self.values.get(key)

    def require(self, key: str) -> Any:
        """The field as it stands; UserError where it is absent."""
        value = self.values.get(key)
        if value is None:
            raise UserError(
                f"{self.where} has no {key!r}: is this folder a Llama-family checkpoint?"
            )
        return value

    @overload
    def whole(self, key: str, default: int, least: int = 1, most: int = INT32_MAX) -> int: ...
    @overload
    def whole(
        self, key: str, default: None = None, least: int = 1, most: int = INT32_MAX
    ) -> int | None: ...
    def whole(
        self, key: str, default: int | None = None, least: int = 1, most: int = INT32_MAX
    ) -> int | None:
        """A whole number from `least` to `most`."""
        value = self.values.get(key)
        return default if value is None else check_whole(self.label(key), value, least, most)

    @overload
    def number(self, key: str, default: float) -> float: ...
    @overload
    def number(self, key: str, default: None = None) -> float | None: ...
    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number above 0."""
        value = self.values.get(key)
        return default if value is None else check_number(self.label(key), value, 0, above=True)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False."""
        value = self.values.get(key)
        return default if value is None else check_flag(self.label(key), value)

    def text(self, key: str) -> str | None:
        """A text that UTF-8 can encode."""
        value = self.values.get(key)
        return None if value is None else check_text(self.label(key), value)

    def object(self, key: str) -> "Fields":
        """An object; an empty one where the field is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{self.label(key)} {shown(value)}: give an object")
        return Fields(value or {}, self.label(key))

    def whole_or_several(self, key: str) -> list[int]:
        """A whole number or a list of them; an empty list where the field is absent."""
        value = self.values.get(key)
        several = value if isinstance(value, list) else [] if value is None else [value]
        return [check_whole(self.label(key), item, 0) for item in several]


def read_fields(path: Path) -> Fields:
    """The object in the JSON file `path`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read, is too large, or holds something else.
    """
    value = parse_json(read_bytes(path, MAX_JSON_BYTES), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return Fields(value, str(path))
