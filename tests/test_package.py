"""The package as installed."""

import re

import kvjax


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvjax.__version__)
