"""When a sequence has ended, judged from its length and its last id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.request import Status

if TYPE_CHECKING:
    from engine_core.request import Request


def has_room(request: Request) -> bool:
    """Whether a token that is drawn is output. With max_tokens 0 none is: then the prompt
    was computed for its own sake, and the request ends with it."""
    return len(request.token_ids) < request.max_num_tokens


def is_ending(request: Request) -> bool:
    """Whether the last token that it may draw is on its way, so that it needs no further step."""
    drawn = len(request.token_ids) + request.num_unread
    return request.num_unread > 0 and drawn >= request.max_num_tokens


def end_status(request: Request, token_id: int) -> Status | None:
    """STOPPED, LENGTH, or None to go on; token_id has just been appended.

    A stop token or EOS wins over the length when both come with the same
    token. EOS counts unless ignore_eos; the length is the smaller of what
    max_tokens and max_model_len allow. Stop strings are not the engine's.
    """
    if token_id in request.stop_ids:
        return Status.STOPPED
    if len(request.token_ids) >= request.max_num_tokens:
        return Status.LENGTH
    return None
