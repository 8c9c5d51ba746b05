"""Text as it grows: whole characters, stop strings, nothing twice; and what ends a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.config import SamplingParams
from dropmatch.core.sequence import Row, TextStream
from toys import make_row

PROPERTY = settings(deadline=None, derandomize=True, max_examples=300)


class ByteTokenizer:
    """Token i is the i-th piece of bytes given; decoding joins and reads UTF-8, as byte-level tokenizers do."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def __call__(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def _stream(pieces: Sequence[bytes], stop: tuple[str, ...] = (), *, include_stop: bool = False) -> TextStream:
    """A stream whose token i is pieces[i]; the prompt is one token "> "."""
    return TextStream(ByteTokenizer([*pieces, b"> "]), [len(pieces)], stop, include_stop)


def _feed(stream: TextStream, count: int) -> tuple[list[str], bool]:
    """Push tokens one by one and pop after each, as a stream of single tokens would. Returns shown pieces, stopped."""
    shown = []
    for token in range(count):
        stopped = stream.push(token)
        if stopped or token + 1 == count:
            stream.finish()
            shown.append(stream.pop(is_last=True))
            return shown, stopped
        shown.append(stream.pop(is_last=False))
    return shown, False


def test_characters_split_over_tokens_are_shown_whole() -> None:
    pieces = [bytes([byte]) for byte in "é漢🙂".encode()]
    shown, _ = _feed(_stream(pieces), len(pieces))
    assert [piece for piece in shown if piece] == ["é", "漢", "🙂"]


def test_a_tail_that_could_become_a_stop_string_is_held_back() -> None:
    stream = _stream([b"one", b"\n", b"\nUs", b"er:", b"x"], ("\n\nUser:",))
    stream.push(0)
    assert stream.pop(is_last=False) == "one"
    stream.push(1)
    assert stream.pop(is_last=False) == ""
    stream.push(2)
    assert stream.pop(is_last=False) == ""
    assert stream.push(3)
    assert stream.pop(is_last=True) == ""
    assert stream.text == "one"


def test_a_held_tail_is_shown_once_it_cannot_stop_any_more() -> None:
    stream = _stream([b"a\n", b"b"], ("\n\n",))
    stream.push(0)
    assert stream.pop(is_last=False) == "a"
    stream.push(1)
    assert stream.pop(is_last=False) == "\nb"


def test_a_held_tail_is_shown_at_the_end_of_the_row() -> None:
    shown, stopped = _feed(_stream([b"a", b"STO"], ("STOP",)), 2)
    assert ("".join(shown), stopped) == ("aSTO", False)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "say "), (True, "say STOP")])
def test_text_is_cut_at_the_stop_string(include_stop: bool, text: str) -> None:
    stream = _stream([b"say S", b"TOP it"], ("STOP",), include_stop=include_stop)
    assert not stream.push(0)
    assert stream.push(1)
    assert stream.text == text


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    stream = _stream([b"a.b!c"], ("!", "."))
    assert stream.push(0)
    assert stream.text == "a"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    stream = TextStream(ByteTokenizer([b"STOP", b"x", b"ST", b"OP"]), [0, 2], ("STOP",), False)
    assert not stream.push(1)
    assert stream.text == "x"
    # nor does one that the prompt only begins
    stream = TextStream(ByteTokenizer([b"ST", b"OP"]), [0], ("STOP",), False)
    assert not stream.push(1)
    assert stream.text == "OP"


def test_every_stop_string_holds_back_its_own_tail() -> None:
    """A tail held for one stop string once shortened the search for the next, so that text was shown that another
    stop string then cut away."""
    stream = _stream([b"ab", b"Y"], ("bX", "abY"))
    stream.push(0)
    assert stream.pop(is_last=False) == ""
    assert stream.push(1)
    assert stream.pop(is_last=True) == ""
    assert stream.text == ""


def test_a_stop_string_before_an_unfinished_character_still_cuts() -> None:
    """One token can complete a stop string and begin a character: it once stopped a token late, or, where the row
    ended first, not at all."""
    stream = _stream([b"aSTOP\xe6"], ("STOP",))
    assert stream.push(0)
    stream.finish()
    assert stream.text == "a"


def test_an_unfinished_character_becomes_text_only_at_the_end() -> None:
    stream = _stream([b"a", b"\xf0\x9f"])
    stream.push(0)
    stream.push(1)
    assert stream.pop(is_last=False) == "a"
    stream.finish()
    assert stream.pop(is_last=True) == "\ufffd"


def test_a_long_text_is_decoded_in_short_windows() -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return "x" * len(ids)

    stream = TextStream(decode, [0], (), False)
    for token in range(200):
        stream.push(token)
    assert stream.text == "x" * 200
    assert max(seen) < 20


def _cut(text: str, stop: tuple[str, ...], include_stop: bool) -> str | None:
    hits = [(text.find(s), s) for s in stop if s in text]
    if not hits:
        return None
    at, found = min(hits)
    return text[: at + len(found)] if include_stop else text[:at]


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes], tuple[str, ...], bool]:
    text = draw(st.text(alphabet="abé漢🙂\n", max_size=14))
    data, pieces = text.encode(), []
    while data:
        size = draw(st.integers(1, 5))
        pieces.append(data[:size])
        data = data[size:]
    stop = tuple(draw(st.lists(st.text(alphabet="abé漢", min_size=1, max_size=4), max_size=3)))
    return text, pieces, stop, draw(st.booleans())


@PROPERTY
@given(streams())
def test_shown_pieces_join_to_the_text_cut_at_the_first_stop(
    case: tuple[str, list[bytes], tuple[str, ...], bool],
) -> None:
    text, pieces, stop, include_stop = case
    expected, should_stop = text, False
    for count in range(1, len(pieces) + 1):
        cut = _cut(b"".join(pieces[:count]).decode(errors="replace"), stop, include_stop)
        if cut is not None:
            expected, should_stop = cut, True
            break
    stream = _stream(pieces, stop, include_stop=include_stop)
    shown, stopped = _feed(stream, len(pieces))
    assert "".join(shown) == expected
    assert stopped == should_stop
    assert stream.text == expected


@PROPERTY
@given(streams(), st.data())
def test_pieces_shown_in_bursts_join_to_the_same_text(
    case: tuple[str, list[bytes], tuple[str, ...], bool], data: st.DataObject
) -> None:
    _, pieces, stop, include_stop = case
    single, _ = _feed(_stream(pieces, stop, include_stop=include_stop), len(pieces))
    stream = _stream(pieces, stop, include_stop=include_stop)
    shown = []
    for token in range(len(pieces)):
        stopped = stream.push(token)
        is_last = stopped or token + 1 == len(pieces)
        if is_last:
            stream.finish()
        if is_last or data.draw(st.booleans()):
            shown.append(stream.pop(is_last=is_last))
        if is_last:
            break
    assert "".join(shown) == "".join(single)


def _row(params: SamplingParams, eos_ids: tuple[int, ...] = ()) -> Row:
    row = make_row([1, 2], params)
    row.eos_ids = frozenset(eos_ids)
    row.max_new_tokens = params.max_new_tokens
    return row


def test_end_of_sequence_beats_the_length_cap() -> None:
    row = _row(SamplingParams(max_new_tokens=2), eos_ids=(7, 8))
    assert not row.append(3)
    assert row.append(8)
    assert row.finish_reason == "eos"


def test_a_stop_beats_the_length_cap() -> None:
    row = _row(SamplingParams(max_new_tokens=1, stop_checks=(lambda ids: ids[-1] == 5,)))
    assert row.append(5)
    assert row.finish_reason == "stop"


def test_a_row_ends_at_its_cap() -> None:
    row = _row(SamplingParams(max_new_tokens=2))
    assert [row.append(3), row.append(3)] == [False, True]
    assert row.finish_reason == "length"
    assert row.num_generated == 2


def test_end_of_sequence_adds_no_text() -> None:
    row = _row(SamplingParams(), eos_ids=(1,))
    row.text = TextStream(ByteTokenizer([b"x", b"</s>"]), [0], (), False)
    row.append(0)
    row.append(1)
    assert row.text.text == "x"


def test_stop_checks_see_prompt_and_generated_ids() -> None:
    seen: list[list[int]] = []

    def check(ids: list[int]) -> bool:
        seen.append(list(ids))
        return False

    row = _row(SamplingParams(stop_checks=(check,)))
    row.append(9)
    assert seen == [[1, 2, 9]]


def test_processing_applies_penalty_masks_and_processors_in_order() -> None:
    def add_length(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert ids.shape == (2, 3)
        return logits + ids.shape[1]

    params = SamplingParams(
        repetition_penalty=2.0, suppress_tokens=(4,), min_new_tokens=2, eos_ids=(0,), processors=(add_length,)
    )
    row = make_row([1, 2], params)
    logits = torch.ones(2, 5)
    got = row.process(logits, [3])
    assert got.tolist() == [[float("-inf"), 3.5, 3.5, 3.5, float("-inf")]] * 2
    assert torch.equal(logits, torch.ones(2, 5))


def test_end_of_sequence_is_free_once_the_minimum_is_reached() -> None:
    row = make_row([1, 2], SamplingParams(min_new_tokens=2, eos_ids=(0,)))
    assert row.process(torch.ones(1, 3), [1])[0, 0] == float("-inf")
    assert row.process(torch.ones(1, 3), [1, 1])[0, 0] == 1.0
