"""What a Hopper GPU is asked, in a few calls: each goes on where it was broken off.

    python -m benchmarks.card first --out /tmp/out             # of all three, what tells most
    python -m benchmarks.card rest --out /tmp/out              # all else, as far as time allows
    python -m benchmarks.card A --out /tmp/out                 # are the kernels right
    python -m benchmarks.card B --out /tmp/out                 # attention and decode steps
    python -m benchmarks.card C --out /tmp/out                 # tokens per second
    python -m benchmarks.card A B C --rehearse --out /tmp/out  # tiny sizes on a CPU
    python -m benchmarks.card A B --compile-only               # for an H200 that is not there

Every part is written to its call's and its card's file (h200-kernels.json, h200-decode.json,
h200-throughput.json on an H200) as soon as it is measured, and left out the next time unless the
source that it measures has changed. Parts run in processes of their own: one that hangs or crashes
is noted, and the rest goes on. `--seconds` is kept whatever happens. `python -m
benchmarks.card.report` makes a page of the files.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import sys
import time
from pathlib import Path

from benchmarks.card import process
from kvjax.checks import check_number
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

CHOICES = (*process.PLANS, *process.CALLS)
RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.card", description=__doc__)
    add = parser.add_argument
    add("calls", nargs="+", choices=CHOICES, metavar="CALL", help="first, rest, A, B, C")
    add("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    add("--resume", type=Path, help="folder with what earlier calls left, if that is another one")
    seconds = f"in all (first {process.SECONDS['first']}, rest {process.SECONDS['rest']}, "
    add("--seconds", type=float, help=f"{seconds}others {process.USUAL_SECONDS})")
    add("--only", default="", help="parts whose name contains this")
    add("--rehearse", action="store_true", help="tiny sizes on a CPU, kernels interpreted")
    add("--compile-only", action="store_true", help="compile for an H200 (pip install '.[cuda]')")
    add("--child", help=argparse.SUPPRESS)
    add("--card", help=argparse.SUPPRESS)
    add("--share", type=int, default=0, help=argparse.SUPPRESS)
    add("--attempts", type=int, default=process.ATTEMPTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds is None:
        usual = process.USUAL_SECONDS
        options.seconds = max(process.SECONDS.get(call, usual) for call in options.calls)
    check_number("--seconds", options.seconds, 0, above=True)
    if not options.out.is_dir():
        raise UserError(f"--out {options.out}: there is no such folder")
    if options.child is not None:
        process.end_with_the_parent()
        return process.child(options)
    if options.compile_only:
        return process.compile_only(options)
    # The time runs from here: imports are part of it.
    began = time.monotonic()
    process.check_imports()
    options.card = "rehearsal" if options.rehearse else process.prefix_of(process.card_here())
    deadline, code = began + options.seconds, 0
    process.peaks_file(options).unlink(missing_ok=True)
    for call in options.calls:
        code |= process.run_call(call, options, deadline)
    process.peaks_file(options).unlink(missing_ok=True)
    print(f"python -m benchmarks.card.report makes a page of {options.out}", file=sys.stderr)
    return code


if __name__ == "__main__":
    run_script(main)
