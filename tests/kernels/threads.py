"""That what Numba compiles computes the same in every bit on one thread as on several."""

import subprocess
import sys
from pathlib import Path

import numpy as np

_SCRIPT = """
import os, sys
if sys.argv[2] == "alone" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import numpy as np
{imports}
np.savez(sys.argv[1], *{call})
"""


def assert_one_thread_suffices(folder: Path, imports: str, call: str) -> None:
    """A call gives the same arrays in a process that may use one core.

    Two processes: what one compiled itself may be rounded unlike what it finds on disk, as LLVM
    then has functions that are called by themselves and as a part of others to choose from.
    """
    script = _SCRIPT.format(imports=imports, call=call)
    found = []
    for how in ("first", "together", "alone"):
        file = folder / f"{how}.npz"
        subprocess.run([sys.executable, "-c", script, str(file), how], check=True)
        found.append(np.load(file))
    _, together, alone = found
    assert together.files
    for name in together.files:
        np.testing.assert_array_equal(alone[name], together[name])
