"""Values of options that several benchmarks have."""

import argparse


def wholes(text: str) -> list[int]:
    """Whole numbers that are separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers separated by commas"
        ) from None
