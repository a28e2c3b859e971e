"""Stop strings and min_tokens over one output's ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tokenizer_svc.detokenize import Detokenizer
from tokenizer_svc.messages import Open
from tokenizer_svc.sequence import OutputSequence, resume

if TYPE_CHECKING:
    from tokenizer_svc.loader import LoadedTokenizer

BETA = 11345
""" " beta" of the embedded tokenizer."""


def opening(min_tokens: int, replay: int = 0, chars: int = 0) -> Open:
    return Open(1, [], True, ["beta b"], False, [BETA] * replay, chars, min_tokens)


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [(0, 2, " "), (1, 2, " "), (2, 3, " beta "), (4, 5, " beta beta beta ")],
)
def test_a_stop_string_must_end_after_min_tokens(
    embedded: LoadedTokenizer, min_tokens: int, num_tokens: int, text: str
) -> None:
    sequence = OutputSequence(Detokenizer(embedded.tokenizer), opening(min_tokens))
    emitted = ""
    for _ in range(8):
        if sequence.stop_index is None:
            emitted += sequence.feed([BETA])
    assert (sequence.stop_index, sequence.num_tokens, emitted) == (0, num_tokens, text)


def test_replay_keeps_to_min_tokens(embedded: LoadedTokenizer) -> None:
    sequence, text = resume(Detokenizer(embedded.tokenizer), opening(2, replay=2, chars=3))
    assert sequence.stop_index is None
    # " beta beta" less what may begin the stop string and the three characters sent.
    assert text == "ta "
    assert sequence.feed([BETA]) == ""
    assert (sequence.stop_index, sequence.num_tokens) == (0, 3)


def test_min_tokens_holds_for_the_flush(embedded: LoadedTokenizer) -> None:
    ids = embedded.tokenizer.encode("🦜").ids
    for min_tokens, stopped in ((1, 0), (2, None)):
        opened = Open(1, [], True, ["\ufffd"], False, [], 0, min_tokens)
        sequence = OutputSequence(Detokenizer(embedded.tokenizer), opened)
        assert sequence.feed(ids[:2]) == ""
        assert sequence.finish() == ("" if stopped == 0 else "\ufffd")
        assert sequence.stop_index == stopped
