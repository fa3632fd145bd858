"""Tests on several devices, which a CPU is made to look like before JAX begins.

`tests/test_sharded.py` runs them in a process of its own; elsewhere they are not collected.
"""

import os

collect_ignore_glob = [] if os.environ.get("KVJAX_FAKE_DEVICES") else ["test_*.py"]
