"""What a client asks for, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ChatTurn = tuple[str, str] | Mapping[str, Any]
"""A (role, content) pair, or the fields of a ChatMessage."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate from: a prompt, its token ids, or a conversation.

    A tool is the fields of a Tool; tool_choice is auto, none, required or the name of a tool.
    """

    prompt: str | None = None
    messages: Sequence[ChatTurn] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams; those left out have the server's defaults."""
    prompt_token_ids: Sequence[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the request that hold one value: priority, tenant, cache_salt, echo,
    request_id, return_token_ids, skip_prefix_cache."""
