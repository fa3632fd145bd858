"""Text files as users have them: plain or gzipped, one or a folder of them."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvjax.errors import UserError

TEXT_ENDINGS = (".txt", ".txt.gz", ".md", ".jsonl", ".jsonl.gz", ".json", ".json.gz")


@contextlib.contextmanager
def open_text(path: Path, errors: str = "strict") -> Iterator[IO[str]]:
    """A UTF-8 text file, unpacked if its name ends in .gz; a byte order mark is none of its text.

    Args:
        path: the file.
        errors: what is done with bytes that are no text, as of `open`.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rt", encoding="utf-8-sig", errors=errors) as file:
                yield file
        else:
            with path.open(encoding="utf-8-sig", errors=errors) as file:
                yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: convert it, for instance with iconv") from error
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {why}") from error


def _texts_of(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        if ".jsonl" in path.name:
            for line in file:
                if line.strip():
                    yield _text_field(json.loads(line))
        elif ".json" in path.name:
            yield _text_field(json.load(file))
        else:
            yield file.read()


def _text_field(value: object) -> str:
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    raise ValueError('no object with a text named "text"')


def text_files(path: Path) -> list[Path]:
    """A file, or every text file of a folder in order of their names; none is read.

    Raises:
        UserError: there is no such path, or no such file in it.
    """
    if not path.exists():
        raise UserError(f"there is no {path}: give a text file or a folder of them")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(TEXT_ENDINGS))
        if not files:
            raise UserError(f"{path} holds no text file (any of {', '.join(TEXT_ENDINGS)})")
    return files


def read_texts(path: Path) -> list[str]:
    """The texts of a file, or of every text file of a folder in order of their names.

    Text files are .txt, .md, and JSON or JSONL with a field "text"; each may end in .gz.

    Raises:
        UserError: there is no such path, no text in it, or a file cannot be read.
    """
    texts = []
    for file in text_files(path):
        try:
            texts += [text for text in _texts_of(file) if text.strip()]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not what its name says: {error}") from error
    if not texts:
        raise UserError(f"{path} holds no text")
    return texts
