"""Sequences of one request that wait until another of them has computed their prompt.

The leader is queued like any request. A follower is kept out of the queue until
the leader has drawn its first token, or has ended: only then are the prompt's
blocks there to begin with. It shares the full ones, also without a prefix cache
(see KVManager.lookup), gets a copy of the partial one, and computes the prompt's last
token, whose logits it needs, in the step that draws its own first token. So no block
is ever written by two.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.request import Request


def has_same_prompt(leader: Request, request: Request) -> bool:
    """Whether the KV of the leader's prompt is that of the request's."""
    num = request.num_prompt_tokens
    return (
        leader.num_prompt_tokens == num
        and leader.token_ids[:num] == request.token_ids[:num]
        and leader.table.hashes.root == request.table.hashes.root
    )


class Followers:
    """Those that are kept out of the queue, by leader."""

    def __init__(self) -> None:
        self._of: dict[Request, list[Request]] = {}
        self._leaders: dict[Request, Request] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def hold(self, leader: Request, request: Request) -> None:
        assert request not in self._leaders, request
        self._of.setdefault(leader, []).append(request)
        self._leaders[request] = leader

    def withdraw(self, request: Request) -> bool:
        """The request ends. Returns whether it was held here."""
        leader = self._leaders.pop(request, None)
        if leader is None:
            return False
        held = self._of[leader]
        held.remove(request)
        if not held:
            del self._of[leader]
        return True

    @property
    def has_due(self) -> bool:
        """Whether take_due() would return something. O(leaders)."""
        return any(map(_is_due, self._of))

    def take_due(self) -> list[Request]:
        """Those that may be queued now, in the order in which they came. O(leaders)."""
        due = list(filter(_is_due, self._of))
        taken = list(chain.from_iterable(self._of.pop(leader) for leader in due))
        for request in taken:
            del self._leaders[request]
        return taken


def _is_due(leader: Request) -> bool:
    return leader.first_token_at is not None or leader.is_finished
