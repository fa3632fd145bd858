"""The package as installed."""

import re
import subprocess
import sys

import kvjax


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvjax.__version__)


def test_records_are_quiet_until_somebody_listens():
    say = "import logging, kvjax; {}; logging.getLogger('kvjax.engine').error('a record')"
    for setting, expected in (
        ("pass", ""),
        ("logging.basicConfig(format='%(message)s')", "a record\n"),
    ):
        command = [sys.executable, "-c", say.format(setting)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == expected
