"""Stop strings in streamed text."""

from hypothesis import given
from hypothesis import strategies as st

from kvjax.engine.text import StopStrings


def feed(stop, pieces):
    stops = StopStrings(stop)
    text = "".join(stops.push(piece) for piece in pieces)
    return text + stops.flush(), stops.found


def test_text_before_the_stop_string_is_all_there_is():
    assert feed(["END"], ["ab", "cE", "N", "Dxy"]) == ("abc", True)
    assert feed(["END"], ["ab", "cE", "N", "x"]) == ("abcENx", False)
    assert feed([], ["ab", "c"]) == ("abc", False)
    assert feed(["bc", "abc"], ["xab", "c"]) == ("x", True)


def test_nothing_that_may_be_a_stop_string_is_shown():
    stops = StopStrings(["END"])
    assert stops.push("abE") == "ab"
    assert stops.push("N") == ""
    assert stops.push("G") == "ENG"


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_streaming_equals_cutting_the_whole(pieces, stop):
    whole = "".join(pieces)
    at = [whole.find(s) for s in stop if s in whole]
    # With several stop strings the first to be complete ends the text.
    ends = [whole.find(s) + len(s) for s in stop if s in whole]
    text, found = feed(stop, pieces)
    assert found == bool(at)
    if not at:
        assert text == whole
    elif len(stop) == 1:
        assert text == whole[: at[0]]
    else:
        assert whole.startswith(text)
        assert len(text) <= min(ends)
