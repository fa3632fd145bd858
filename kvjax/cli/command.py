"""What every command does alike: options, bad input, output, interruption, exit codes."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvjax import startup
from kvjax.checks import shown
from kvjax.errors import UserError, unmasked

MOST_OF_A_MESSAGE = 1000
"""Characters of an error that are printed."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and whose description keeps its lines."""

    def __init__(self, **settings: Any):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": layout, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, for arguments that may name files."""
        given = sys.argv[1:] if args is None else args
        if any("\0" in argument for argument in given):
            raise UserError("an argument has a NUL byte in it: no file or model has such a name")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def check_output_file(option: str, name: str | os.PathLike[str]) -> None:
    """Refuse, before anything slow, a file that could not be written in the end.

    Raises:
        UserError: it is a folder, there is no such folder, or it may not be written.
    """
    path, name = Path(name), os.fspath(name)
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {shown(name)}: there is no such folder")
    try:
        if path.exists():
            if not os.access(path, os.W_OK) or path.is_dir():
                raise UserError(f"{option} {shown(name)}: it is there and cannot be written")
            return
        path.touch()
        path.unlink()
    except OSError as error:
        raise UserError(f"{option} {shown(name)}: {error.strerror}") from error


def make_folder(option: str, path: Path) -> None:
    """Make a folder for pictures, before anything slow, unless it is there.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{option} {shown(str(path))}: cannot make the folder: {why}") from error


def check_apart(option: str, path: Path, other: str, others: Path) -> None:
    """Refuse, before anything slow, an output that another file of the command would be lost to.

    Raises:
        UserError: both options name the same file.
    """
    # Not Path.resolve, which raises where links go round.
    if os.path.realpath(path) == os.path.realpath(others):
        raise UserError(f"{option} {shown(str(path))}: that is {other}, too; give another name")


def main_of(run: Callable[[list[str] | None], int], arguments: list[str] | None = None) -> int:
    """Run a script and return its exit code.

    2 with one line for bad input and for output that cannot be written, 130 for Ctrl-C, 143 for
    SIGTERM, 141 (as for SIGPIPE) where the reader of the output has gone.
    """
    try:
        with unmasked():
            code = startup.exit_code(run(arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt as error:
        kind = signal.SIGTERM if isinstance(error, startup.Terminated) else signal.SIGINT
        _say(startup.WORDS[kind])
        startup.broken_off()
        return 128 + kind
    except ImportError:
        # What an extension module makes of a signal that comes while it is set up.
        code = startup.exit_code(0)
        if code == 0:
            raise
        _say(startup.WORDS[signal.Signals(code - 128)])
        return code
    except BrokenPipeError:
        # Whoever read the output has gone; there is nobody left to tell.
        _give_up_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        # With a name it is a file that was given, without one it is what was written to.
        what = error.strerror or str(error)
        if error.filename is not None:
            return _complain(f"{os.fsdecode(error.filename)}: {what}")
        _give_up_stdout()
        return _complain(f"cannot write the output: {what}")


def run_script(run: Callable[[list[str] | None], int], *, lazy_imports: bool = False) -> NoReturn:
    """Run a script as the process's last act.

    Args:
        run: its `main`.
        lazy_imports: it imports JAX itself and calls `startup.started` (as `load_chosen_model`
            does) once that is done; until then there is nothing that a signal could destroy.
    """
    startup.guard()
    if not lazy_imports:
        startup.started()
    if not _open_streams():
        code = _complain("stdout is closed: the result has nowhere to go")
    else:
        code = main_of(run)
    startup.ending()
    if code > 128 or (code and startup.at_once):
        # Libraries' threads may wait for ever for work that was broken off; all is said and put
        # away by now.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _complain(message: str) -> int:
    """Print an error in one line; the exit code of bad input."""
    line = " ".join(message.split())
    if len(line) > MOST_OF_A_MESSAGE:
        line = f"{line[: MOST_OF_A_MESSAGE // 2]} … {line[-MOST_OF_A_MESSAGE // 2 :]}"
    _say(f"error: {line}")
    return 2


def _say(line: str) -> None:
    """A line on stderr, if it can be had; what UTF-8 cannot write is escaped."""
    with contextlib.suppress(OSError):
        print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


def _give_up_stdout() -> None:
    """Let what is still buffered for stdout go nowhere, instead of failing at exit again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> bool:
    """Give the process the standard streams that it was started without; whether stdout was there.

    Python leaves out what is closed: files would get its number, and print says nothing or prints
    to another stream.
    """
    was_there = sys.stdout is not None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file name may hold bytes that are no UTF-8.
            stream.reconfigure(errors="backslashreplace")
    return was_there
