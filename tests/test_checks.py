"""What users hand in is refused in one line, whatever it is."""

import math

import numpy as np
import pytest

from kvjax.checks import SHOWN, check_flag, check_number, check_text, check_whole, shown
from kvjax.errors import UserError


@pytest.mark.parametrize("value", [0, 1, 7, np.int64(3), np.uint8(7)])
def test_whole_numbers_pass_as_ints(value):
    got = check_whole("n", value, 0, 7)
    assert got == value
    assert type(got) is int


@pytest.mark.parametrize(
    "value",
    [-1, 8, 2**31, 10**5000, True, 2.0, 2.5, "3", b"3", None, [1], math.nan],
    ids=lambda value: shown(value),
)
def test_anything_else_is_no_whole_number(value):
    with pytest.raises(UserError) as caught:
        check_whole("n", value, 0, 7)
    message = str(caught.value)
    assert message.startswith("n ")
    assert message.endswith(": give a whole number from 0 to 7")
    assert "\n" not in message
    assert len(message) < SHOWN + 60


def test_the_default_limit_is_int32():
    assert check_whole("n", 2**31 - 1, 0) == 2**31 - 1
    with pytest.raises(UserError, match="to 2147483647"):
        check_whole("n", 2**31, 0)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.25), 1.0])
def test_numbers_pass_as_floats(value):
    got = check_number("x", value, 0, 1, above=True)
    assert got == value
    assert type(got) is float


@pytest.mark.parametrize(
    "value", [0, -1, 1.01, math.nan, math.inf, -math.inf, 10**400, "0.5", True, None, [0.5], 1j]
)
def test_anything_else_is_no_number(value):
    with pytest.raises(UserError, match=r"^x .*: give a number above 0 and at most 1$"):
        check_number("x", value, 0, 1, above=True)


def test_the_least_is_allowed_unless_it_must_be_above():
    assert check_number("x", 0, 0) == 0
    with pytest.raises(UserError, match=r"at least 0$"):
        check_number("x", math.inf, 0)


def test_flags_and_texts():
    assert check_flag("f", False) is False
    assert check_text("t", "é") == "é"
    for wrong in (0, 1, "yes", None):
        with pytest.raises(UserError, match="give True or False"):
            check_flag("f", wrong)
    for wrong in (b"t", 1, None, "\ud800"):
        with pytest.raises(UserError, match="give a text"):
            check_text("t", wrong)


def test_what_is_shown_is_short_and_on_one_line():
    class Bad:
        def __repr__(self):
            raise RuntimeError("no")

    assert shown("a\nb") == r"'a\nb'"
    assert shown(np.arange(1000)).count("\n") == 0
    assert len(shown("x" * 5000)) == SHOWN
    assert shown(Bad()) == "a value of type Bad"
    assert "int" in shown(10**5000)
