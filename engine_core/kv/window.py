"""KV that no later token sees, in a model whose every layer has a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class KVWindow:
    """The widest of the layers' windows, in tokens, and what it means for blocks.

    A token at position p sees the positions above p - num_tokens. So once num_computed
    tokens are computed, their KV read and the next to come,

        0          num_computed + 1 - num_tokens        num_computed
        | seen by nobody any more | the next token sees it  |

    the blocks that lie whole in the first part can be given back. The device keeps their
    ids in its table and does not read there (Ops.attention).
    """

    num_tokens: int
    max_chunk: int
    """Most tokens that one sequence computes in a step."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("num_tokens", "max_chunk"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")

    def num_unseen_blocks(self, table: BlockTable, block_size: int) -> int:
        """Leading blocks that no later token sees and that the prefix cache has been offered."""
        num_unseen = table.num_computed + 1 - self.num_tokens
        return min(max(0, num_unseen) // block_size, table.num_registered)

    def max_blocks(self, block_size: int) -> int:
        """Blocks that a sequence holds at most, those aside that it began with as a hit.

        Two steps are planned beyond what is known to be computed; both ends may lie inside
        a block, and blocks are given back when one has become full.
        """
        num_tokens = self.num_tokens + 2 * self.max_chunk
        return -(-num_tokens // block_size) + 2
