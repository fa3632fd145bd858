"""Logs of one JSON object per line, without what clients say unless an operator asks for it."""

import datetime
import json
import logging
import traceback
from typing import Any, TextIO

log = logging.getLogger("kvjax.serve")


class JsonLines(logging.Formatter):
    """A record as one line of JSON.

    Of an exception it has the type and where it came from. Its message may repeat a prompt, and is
    left out unless `messages` is set.
    """

    def __init__(self, messages: bool = False):
        super().__init__()
        self._messages = messages

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["at"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(record.exc_info[2])[-8:]
            ]
            if self._messages:
                line["says"] = str(record.exc_info[1])
        return json.dumps(line, default=str)


def write_logs(stream: TextIO, messages: bool = False) -> None:
    """Send this package's records to a stream, and those of the HTTP library's troubles.

    Args:
        stream: where the lines go.
        messages: whether records may repeat what clients say.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(messages))
    for name, level in (
        ("kvjax", logging.WARNING),
        ("kvjax.engine.tell", logging.ERROR),  # each answer says what rate it reached
        ("kvjax.serve", logging.INFO),
        ("uvicorn", logging.WARNING),
        ("uvicorn.access", logging.CRITICAL),
    ):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = name not in ("kvjax", "uvicorn")
        if not logger.propagate:
            logger.handlers = [handler]
