"""The command `kvjax`, also as `python -m kvjax`; scripts/*.py come in here too.

Imports nothing slow before signals are taken care of.
"""

import functools
from typing import NoReturn

from kvjax.startup import guard


def main(script: str | None = None) -> NoReturn:
    """Run `kvjax`, or the one of its commands that scripts/SCRIPT.py stands for, and exit."""
    guard()
    from kvjax.cli.command import run_script
    from kvjax.cli.main import main, run_command

    command = main if script is None else functools.partial(run_command, script, script=True)
    run_script(command, lazy_imports=True)


if __name__ == "__main__":
    main()
