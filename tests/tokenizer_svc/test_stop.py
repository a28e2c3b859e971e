from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_svc.stop import Matched, StopMatcher, cut_at_stop

# Few letters, so that stop strings overlap with the text and with each other; one of
# them is outside the basic plane.
LETTERS = "ab\n🦜"
TEXTS = st.text(alphabet=LETTERS, max_size=24)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def stream(pieces: list[str], stops: list[str], *, include: bool) -> tuple[list[str], int | None]:
    """All deltas, the last by flush, and the stop that ended them."""
    matcher = StopMatcher(stops, include_stop_str=include)
    deltas = []
    for piece in pieces:
        text, index = matcher.feed(piece)
        deltas.append(text)
        if index is not None:
            return deltas, index
    return [*deltas, matcher.flush()], None


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_streamed_text_is_the_text_cut_afterwards(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    deltas, index = stream(pieces, stops, include=include)
    assert Matched("".join(deltas), index) == cut_at_stop(
        "".join(pieces), stops, include_stop_str=include
    )


@given(TEXTS, STOPS)
def test_the_match_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str]) -> None:
    by_character = stream(list(text), stops, include=False)
    at_once = stream([text], stops, include=False)
    assert ("".join(by_character[0]), by_character[1]) == ("".join(at_once[0]), at_once[1])


@given(TEXTS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for position, letter in enumerate(text):
        piece, index = matcher.feed(letter)
        if index is not None:
            return
        emitted += piece
        seen = text[: position + 1]
        longest = max(
            length for stop in stops for length in range(len(stop)) if seen.endswith(stop[:length])
        )
        assert emitted == seen[: len(seen) - longest]


@pytest.mark.parametrize(
    ("text", "stops", "left", "index"),
    [
        ("abcd", ["abcd", "bc"], "a", 1),  # the first to be complete
        ("xabc", ["bc", "abc"], "x", 1),  # both end there: the one that starts first
        ("abc", ["abc", "ab"], "", 1),  # the same start: the first to be complete
        ("aab", ["ab"], "a", 0),
        ("abab aba", ["abac"], "abab aba", None),
    ],
)
def test_which_match_wins(text: str, stops: list[str], left: str, index: int | None) -> None:
    assert cut_at_stop(text, stops) == Matched(left, index)
    deltas, found = stream(list(text), stops, include=False)
    assert ("".join(deltas), found) == (left, index)


def test_no_letter_of_a_stop_string_leaves_before_it_is_decided() -> None:
    # vllm-project/vllm#3574
    deltas, index = stream([" beta", " beta"], ["beta b"], include=False)
    assert (deltas, index) == ([" ", ""], 0)
    deltas, index = stream([" beta", " beta"], ["beta b"], include=True)
    assert ("".join(deltas), index) == (" beta b", 0)


def test_a_stop_string_over_four_tokens() -> None:
    # vllm-project/vllm#2577
    pieces = ["Thought: look it up", "\n", "Observ", "ation", ":", " none"]
    deltas, index = stream(pieces, ["\nObservation:"], include=False)
    assert (deltas, index) == (["Thought: look it up", "", "", "", ""], 0)


def test_hostile_stop_strings_cost_linear_time() -> None:
    stops = ["a" * 20_000 + "b"]
    matcher = StopMatcher(stops)
    matcher.feed("a" * 100_000)
    assert matcher.feed("b").stop_index == 0


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(TEXTS, TEXTS, STOPS, st.booleans())
def test_what_ends_too_early_is_no_match(
    early: str, late: str, stops: list[str], include: bool
) -> None:
    """By the definition: the first place past `early` where a stop string ends."""
    matcher = StopMatcher(stops, include_stop_str=include)
    pieces = [matcher.feed(letter, may_end=False) for letter in early]
    assert all(matched.stop_index is None for matched in pieces)
    pieces.append(matcher.feed(late))
    text = "".join(piece.text for piece in pieces)
    whole = early + late
    for end in range(len(early) + 1, len(whole) + 1):
        ended = [stop for stop in stops if whole[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            assert pieces[-1].stop_index == stops.index(longest)
            assert text == whole[: end if include else end - len(longest)]
            return
    assert pieces[-1].stop_index is None
    assert text + matcher.flush() == whole
