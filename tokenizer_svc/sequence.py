"""One output on its way to text: decoder, stop strings and token count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizer_svc.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizer_svc.detokenize import Detokenizer
    from tokenizer_svc.messages import Open


class OutputSequence:
    """Lives from OpenSequence until it finishes, stops or is closed."""

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "num_tokens", "stop_index")

    def __init__(self, detokenizer: Detokenizer, opening: Open) -> None:
        """Raises ValueError for an empty stop string."""
        self._decoder = detokenizer.decoder(
            opening.prompt_tail,
            skip_special_tokens=opening.skip_special_tokens,
            spaces_between_special_tokens=opening.spaces_between_special_tokens,
            kept_special_tokens=opening.kept_special_tokens,
        )
        self._matcher = (
            StopMatcher(opening.stop, include_stop_str=opening.include_stop_str_in_output)
            if opening.stop
            else None
        )
        self._min_tokens = opening.min_tokens
        self.num_tokens = 0
        """Output tokens so far, up to and including the one that completed a stop string."""
        self.stop_index: int | None = None
        """The stop string that matched. The text is then complete; more ids are ignored."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that may be emitted after these output ids."""
        if self._matcher is None:
            self.num_tokens += len(ids)
            return self._decoder.feed(ids)
        pieces = []
        for token_id in ids:
            if self.stop_index is not None:
                break
            self.num_tokens += 1
            if piece := self._decoder.feed([token_id]):
                may_end = self.num_tokens > self._min_tokens
                text, self.stop_index = self._matcher.feed(piece, may_end=may_end)
                pieces.append(text)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when no more ids follow. May still complete a stop string."""
        if self.stop_index is not None:
            return ""
        rest = self._decoder.flush()
        if self._matcher is None:
            return rest
        may_end = self.num_tokens > self._min_tokens
        text, self.stop_index = self._matcher.feed(rest, may_end=may_end)
        return text if self.stop_index is not None else text + self._matcher.flush()


def resume(detokenizer: Detokenizer, opening: Open) -> tuple[OutputSequence, str]:
    """Opens a sequence and replays the output it already has.

    Returns it with the text that follows the characters the client already has.
    Raises ValueError if the replayed ids make less text than the client has: then
    they are not the ids that it came from.
    """
    sequence = OutputSequence(detokenizer, opening)
    text = sequence.feed(opening.replay_token_ids)
    if len(text) < opening.replay_emitted_chars:
        raise ValueError(
            f"replay_emitted_chars is {opening.replay_emitted_chars}, but the replayed ids make "
            f"{len(text)} characters"
        )
    return sequence, text[opening.replay_emitted_chars :]
