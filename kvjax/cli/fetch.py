"""Fetch a model's weights ahead of their first use, and print where they are.

kvjax fetch smollm2-135m
"""

import argparse

from kvjax import startup
from kvjax.cli.progress import Progress


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name of the model, for instance smollm2-135m")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(options: argparse.Namespace) -> int:
    from kvjax.models.hub import resolve_weights

    startup.started()
    with Progress() as progress:
        path = resolve_weights(options.model, None, None if options.quiet else progress)
    print(path)
    return 0
