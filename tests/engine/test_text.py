"""The text of a request: stop strings, ends, characters in pieces, and what goes with them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.engine.request import Request, TokenLogprobs
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.text import RequestText, StopStrings
from kvjax.models.tokenizer import Tokenizer
from tests.models.tokenizer_builders import (
    TINY_BOS,
    TINY_BYTES,
    TINY_EOS,
    tiny_tokenizer,
    write_sentencepiece_gguf,
)

TOKENIZER = tiny_tokenizer()
EURO = [TINY_BYTES.index(byte) for byte in "€".encode()]


def ids(text: str) -> list[int]:
    return [TINY_BYTES.index(byte) for byte in text.encode()]


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


def cut(whole: str, stop) -> tuple[str, bool]:
    """A text before the stop string that is complete first, the longest of those."""
    for end in range(len(whole) + 1):
        if found := [stop_ for stop_ in stop if whole[:end].endswith(stop_)]:
            return whole[: end - max(map(len, found))], True
    return whole, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_streaming_equals_cutting_the_whole(pieces, stop):
    assert feed(stop, pieces) == cut("".join(pieces), stop)


def test_where_a_text_stops_does_not_depend_on_its_pieces():
    assert feed(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert feed(["abcd", "bc"], list("xabcd")) == ("xa", True)
    assert feed(["bc", "abc"], ["xabcd"]) == ("x", True)


def request_of(**sampling) -> Request:
    return Request(
        id="one",
        order=0,
        prompt=np.zeros(3, np.int32),
        sampling=SamplingParams(**sampling),
        compression=CompressionConfig(method="full"),
        method=METHODS["full"],
        budget=None,
        heads=6,
        block_size=4,
    )


def told(parts, tokenizer=TOKENIZER, **sampling) -> tuple[Request, list]:
    """A request and its outputs, where tokens come in parts and the last part is the end."""
    request = request_of(logprobs=0, **sampling)
    text = RequestText(tokenizer, request.sampling.stop)
    outputs = []
    for at, part in enumerate(parts):
        request.tokens += part
        request.logprobs += [TokenLogprobs(token, -float(token)) for token in part]
        if at == len(parts) - 1:
            request.finish_reason = "length"
        outputs.append(text.emit(request, 10.0 + at))
        if outputs[-1].finished:
            break
    return request, outputs


def test_what_is_held_back_comes_at_the_end():
    _, outputs = told([ids("abE"), ids("N"), []], stop=("END",))
    assert [output.new_text for output in outputs] == ["ab", "", "EN"]
    assert outputs[-1].text == "abEN"
    assert [output.finish_reason for output in outputs] == [None, None, "length"]


def test_a_character_comes_whole_and_half_of_one_at_the_end():
    _, outputs = told([EURO[:1], EURO[1:], [*ids("a"), *EURO[:2]]])
    assert [output.new_text for output in outputs] == ["", "€", "a\ufffd"]
    assert outputs[-1].text == "€a\ufffd"


def test_a_text_that_goes_on_keeps_the_space_before_its_first_word(tmp_path):
    tokenizer = Tokenizer.from_path(write_sentencepiece_gguf(tmp_path / "pieces.gguf"))
    prompt, whole = tokenizer.encode("hello"), tokenizer.encode("hello hello hello")
    for goes_on, expected in ((True, " hello hello"), (False, "hello hello")):
        request = request_of()
        text, joined = RequestText(tokenizer, (), goes_on), ""
        for token in whole[len(prompt) :]:
            request.tokens.append(token)
            joined += text.emit(request, 0.0).new_text
        assert text.text == joined == expected


def test_half_a_character_after_the_start_of_a_stop_text():
    _, outputs = told([ids("aE"), [*ids("N"), EURO[0]]], stop=("END",))
    assert outputs[-1].text == "aEN\ufffd"


def test_a_stop_text_cuts_tokens_and_their_logprobs():
    request, outputs = told([ids("ab"), ids("cdef"), ids("gh")], stop=("d",))
    assert [output.new_text for output in outputs] == ["ab", "c"]
    last = outputs[-1]
    assert last.text == "abc"
    assert last.finish_reason == "stop"
    assert list(last.token_ids) == ids("abcd") == request.tokens
    assert [entry.token for entry in last.logprobs] == ids("abcd")
    assert last.stats.finished == 11.0


def test_what_ends_a_request_behind_its_stop_text_is_no_error_of_it():
    request, text = request_of(stop=("d",)), RequestText(TOKENIZER, ("d",))
    request.tokens += ids("abcdef")
    request.finish_reason, request.error = "error", "dead: reset() was called"
    output = text.emit(request, 1.0)
    assert (output.text, output.finish_reason, output.error) == ("abc", "stop", None)


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_text_token_is_no_text(ignored):
    tokens = [*ids("ab"), TINY_EOS]
    _, outputs = told([tokens], ignore_eos=ignored)
    assert outputs[-1].text == "ab"
    assert list(outputs[-1].token_ids) == tokens
    _, outputs = told([[*tokens, TINY_BOS, *ids("c")]], ignore_eos=True)
    assert outputs[-1].text == "abc"


def test_a_word_that_ends_the_text_is_no_part_of_it():
    """Unless it is to be ignored: some checkpoints end with a token that is no mark."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_ids = frozenset(ids("z"))
    tokens = ids("abz")
    assert told([tokens], tokenizer)[1][-1].text == "ab"
    assert told([tokens], tokenizer, ignore_eos=True)[1][-1].text == "abz"


def test_without_a_tokenizer_there_are_tokens_alone():
    request = request_of(logprobs=0)
    text = RequestText(None, ())
    request.tokens += [1, 2]
    output = text.emit(request, 1.0)
    assert (output.token_ids, output.text, output.finish_reason) == ((1, 2), "", None)
    assert output.stats.finished is None
    request.finish_reason = "abort"
    output = text.emit(request, 2.0)
    assert output.stats.finished == 2.0


SOME = st.sampled_from([*ids("abE"), *EURO, TINY_BOS, TINY_EOS])


@given(
    st.lists(st.lists(SOME, max_size=4), min_size=1, max_size=6),
    st.lists(st.text("abE", min_size=1, max_size=3), max_size=2),
)
def test_text_does_not_depend_on_how_tokens_come(parts, stop):
    tokens = [token for part in parts for token in part]

    def text_of(some):
        data = b"".join(TINY_BYTES[t : t + 1] for t in some if t < len(TINY_BYTES))
        return data.decode(errors="replace")

    wanted, stopped = cut(text_of(tokens), stop)
    count = len(tokens)
    if stopped:
        count = next(n for n in range(count + 1) if cut(text_of(tokens[:n]), stop)[1])
    request, outputs = told(parts, stop=tuple(stop), ignore_eos=True)
    last = outputs[-1]
    assert "".join(output.new_text for output in outputs) == last.text == wanted
    assert last.finish_reason == ("stop" if stopped else "length")
    assert list(last.token_ids) == tokens[:count]
    assert [entry.token for entry in last.logprobs] == tokens[:count]
    for before, after in itertools.pairwise(outputs):
        assert after.text == before.text + after.new_text
