"""What every script of the project does alike: options, bad input, interruption, progress."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.models import LoadedModel

DTYPES = ("float32", "bfloat16", "float16")


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

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
        UserError: there is no model of that name.
    """
    if options.model is not None:
        from kvjax.models.config import get_model_entry

        get_model_entry(options.model)


def load_chosen_model(
    options: argparse.Namespace, progress: "Progress | None" = None
) -> "tuple[LoadedModel, str]":
    """The model that the options of `add_model_options` choose, and its dtype by name.

    Raises:
        UserError: unknown name; weights that are missing, damaged or do not fit the model.
    """
    import jax

    from kvjax.models import load_model

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
    """Run a script and return its exit code: 2 with one line for bad input, 130 for Ctrl-C."""
    try:
        return run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_script(run: Callable[[list[str] | None], int]) -> NoReturn:
    """Run a script as the process's last act."""
    code = main_of(run)
    # All is said: a Ctrl-C while the interpreter shuts down would only print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


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
