"""Fetches a model's weights ahead of its first use: `python -m kvjax.models.hub NAME`."""

from kvjax.cli import ArgumentParser, Progress, run_script
from kvjax.models.hub import resolve_weights


def main(arguments: list[str] | None = None) -> int:
    """Fetches the weights of one model and prints where they are."""
    parser = ArgumentParser(
        prog="python -m kvjax.models.hub",
        description="Fetch a model's weights ahead of its first use and print their path.",
    )
    parser.add_argument("model", help="name of the model, for instance smollm2-135m")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(arguments)
    with Progress() as progress:
        path = resolve_weights(options.model, None, None if options.quiet else progress)
    print(path)
    return 0


if __name__ == "__main__":
    run_script(main)
