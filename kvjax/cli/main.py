"""The command `kvjax`: which commands there are, and how one is run."""

import argparse
import importlib
import re

import kvjax
from kvjax.cli.command import ArgumentParser

COMMANDS = {
    "decode": "answer a prompt from a compressed cache, and say what the cache held",
    "serve": "answer OpenAI's clients over HTTP, with a page that shows the cache",
    "evaluate": "compare compression methods on the same prompts",
    "plot": "draw what evaluate has measured",
    "calibrate": "learn from a model's own repetitions which KVs will be read",
    "throughput": "tokens per second, by compression rate and prompt length",
    "convert": "turn a checkpoint into Orbax, in the dtype that it will run in",
    "fetch": "fetch a model's weights ahead of their first use",
}
"""Each a module of this package: a docstring, `add_options(parser)` and `run(options)`."""


def main(arguments: list[str] | None = None) -> int:
    """What `kvjax ARGUMENTS` does; returns the exit code."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    parser = ArgumentParser(
        prog="kvjax",
        usage="kvjax [--help] [--version] COMMAND ...",
        description="KV-cache compression on JAX.\n\n" + "\n".join(lines),
        epilog="kvjax COMMAND --help says more of each.",
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    hidden = argparse.SUPPRESS
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=hidden)
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=hidden)
    rest.required = False
    options = parser.parse_args(arguments)
    return run_command(options.command, options.arguments)


def run_command(name: str, arguments: list[str] | None, *, script: bool = False) -> int:
    """Run one of `COMMANDS`; returns the exit code.

    Args:
        name: of the command.
        arguments: after the command's name; None for the process's own.
        script: it was called as scripts/NAME.py, and its help says so.
    """
    command = importlib.import_module(f"kvjax.cli.{name}")
    text = command.__doc__ or ""
    if script:
        text = re.sub(rf"\bkvjax ({'|'.join(COMMANDS)})\b", r"python scripts/\1.py", text)
    parser = ArgumentParser(prog=None if script else f"kvjax {name}", description=text)
    command.add_options(parser)
    return command.run(parser.parse_args(arguments))
