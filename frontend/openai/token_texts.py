"""What token ids stand for, asked of tokenizer_svc once each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from frontend.tokenizer_client import TokenizerClient
    from pagewire.wire.messages import PositionLogprobs


class TokenTexts:
    """A table that grows with use, to the size of the vocabulary at most."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    async def load(self, positions: Iterable[PositionLogprobs]) -> None:
        """Makes the tokens of these positions known. Raises Unavailable."""
        known = self._bytes
        wanted = {p.token_id for p in positions if p.token_id >= 0}
        wanted.update(token_id for p in positions for token_id in p.top_ids)
        missing = [token_id for token_id in wanted if token_id not in known]
        if missing:
            known.update(zip(missing, await self._tokenizer.token_bytes(missing), strict=True))

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id]
