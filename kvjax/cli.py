"""What every script of the project does alike: options, bad input, interruption, progress."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvjax import startup
from kvjax.checks import check_whole, shown
from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.models import LoadedModel

DTYPES = ("float32", "bfloat16", "float16")


MOST_OF_A_MESSAGE = 1000
"""Characters of an error that are printed."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

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


def add_model_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, files_only: bool = False
) -> None:
    """Add the options that say which model runs: what `load_chosen_model` reads.

    Args:
        parser: a parser or a group of one.
        files_only: leave out random weights, dtype and context length.
    """
    parser.add_argument(
        "--model", help="name of a model (what --weights holds; without both, smollm2-135m)"
    )
    parser.add_argument(
        "--weights", help="folder (safetensors), GGUF file, Orbax checkpoint, or hub id"
    )
    if files_only:
        parser.set_defaults(dummy_weights=False, dtype="float32", context_length=None)
        return
    parser.add_argument(
        "--dummy-weights", action="store_true", help="random weights of the true shapes"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of weights and cache (float32 on CPU, else bfloat16)"
    )
    parser.add_argument(
        "--context-length", type=int, help="most tokens, instead of the model's own limit"
    )


def check_model_options(options: argparse.Namespace) -> None:
    """Refuse, before anything slow, what `add_model_options` reads and no model has.

    Raises:
        UserError: there is no model of that name, or the context length is no length.
    """
    if options.context_length is not None:
        check_whole("--context-length", options.context_length, 1)
    if options.model is not None:
        from kvjax.models.config import get_model_entry

        get_model_entry(options.model)


def check_output_file(option: str, name: str) -> None:
    """Refuse, before anything slow, a file that could not be written in the end.

    Raises:
        UserError: it is a folder, there is no such folder, or it may not be written.
    """
    path = Path(name)
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


def load_chosen_model(
    options: argparse.Namespace, progress: "Progress | None" = None
) -> "tuple[LoadedModel, str]":
    """The model that the options of `add_model_options` choose, and its dtype by name.

    Raises:
        UserError: unknown name; weights that are missing, damaged or do not fit the model.
    """
    import jax

    from kvjax.models import load_model

    startup.started()
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = load_model(
        options.model,
        weights=options.weights,
        dummy_weights=options.dummy_weights,
        dtype=dtype,
        progress=progress,
    )
    return model, dtype


def main_of(run: Callable[[list[str] | None], int], arguments: list[str] | None = None) -> int:
    """Run a script and return its exit code.

    2 with one line for bad input and for output that cannot be written, 130 for Ctrl-C, 143 for
    SIGTERM, 141 (as for SIGPIPE) where the reader of the output has gone.
    """
    try:
        code = startup.exit_code(run(arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt as error:
        kind = signal.SIGTERM if isinstance(error, startup.Terminated) else signal.SIGINT
        _say(startup.WORDS[kind])
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


class Progress:
    """One status line on stderr: rewritten on a terminal, a line per stage elsewhere.

    A context manager: leave it, or call `clear`, before anything else is printed.
    """

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Show a stage; `done` of `total` bytes, tokens or whatever it counts."""
        if self._live:
            share = f" {100 * done // total} %" if total > 1 else ""
            print(f"\r\033[K{stage}{share} …", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(f"{stage} …", file=sys.stderr, flush=True)
        self._stage = stage

    def clear(self) -> None:
        """Take the line away."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
