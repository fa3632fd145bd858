"""The commands: `kvjax decode` and the rest, on top of everything else.

Here: options, what is printed, exit codes, signals, progress. Not here: anything that another
program would call; nothing below imports this package.
"""

from kvjax.cli.command import ArgumentParser, check_output_file, main_of, run_script
from kvjax.cli.models import DTYPES, add_model_options, check_model_options, load_chosen_model
from kvjax.cli.progress import Progress

__all__ = [
    "ArgumentParser",
    "Progress",
    "main_of",
    "run_script",
    "check_output_file",
    "add_model_options",
    "check_model_options",
    "load_chosen_model",
    "DTYPES",
]
