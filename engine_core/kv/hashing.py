"""Chained hashes that name the content of full KV blocks.

    root   = H("root", fields that set sequences apart, such as the cache salt)
    hash_0 = H("block", root,   ids[0:B])
    hash_i = H("block", hash_i-1, ids[i*B:(i+1)*B])

A block's KV depends on every id before it, so a hash covers its whole prefix.
H is BLAKE2b (RFC 7693) with 32 bytes of digest: ids come from clients, and a
collision that somebody can construct would serve one client another's KV. The
two uses of H are kept apart by BLAKE2's personalization, and the fields under
the root by name and length, so that no salt can pass for another key.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

DIGEST_BYTES = 32
_ROOT = b"pagewire kv root"
_BLOCK = b"pagewire kv blck"


def root_hash(cache_salt: str, adapter: bytes = b"") -> bytes:
    """The parent of a sequence's first block. An empty salt is no salt; adapter: the digest
    of the one that computes the KV, empty for the base model."""
    root = blake2b(digest_size=DIGEST_BYTES, person=_ROOT)
    if cache_salt:
        value = cache_salt.encode("utf-8", "surrogatepass")
        root.update(b"cache_salt" + len(value).to_bytes(8, "little") + value)
    if adapter:
        root.update(b"adapter" + len(adapter).to_bytes(8, "little") + adapter)
    return root.digest()


def block_hash(parent: bytes, packed_ids: bytes) -> bytes:
    """The hash of a full block.

    parent: DIGEST_BYTES, the hash of the block before it, or the root.
    packed_ids: the block's ids as native int32.
    """
    return blake2b(parent + packed_ids, digest_size=DIGEST_BYTES, person=_BLOCK).digest()


class BlockHashes:
    """The hashes of one sequence's full blocks, each computed once, when asked.

    It reads the sequence's growing ids and never writes them. Hashes depend on
    ids alone, so they outlive preemption.
    """

    __slots__ = ("_block_size", "_hashes", "_parent", "_token_ids", "root")

    def __init__(
        self, token_ids: array[int], block_size: int, cache_salt: str, adapter: bytes = b""
    ) -> None:
        """token_ids: array of type code "i", only ever appended to."""
        self._token_ids = token_ids
        self._block_size = block_size
        self._hashes: list[bytes] = []
        self.root = root_hash(cache_salt, adapter)
        self._parent = self.root

    def adopt(self, other: BlockHashes, num_blocks: int) -> None:
        """Takes over what another sequence knows of their first num_blocks blocks, whose
        ids are the same, unless this one has been asked before and knows its own."""
        assert self.root == other.root, "sequences of different salts or adapters"
        if not self._hashes and other._hashes and num_blocks:
            self._hashes = other._hashes[:num_blocks]
            self._parent = self._hashes[-1]

    def first(self, num_blocks: int) -> list[bytes]:
        """The hashes of at least the first num_blocks blocks; not to be changed.

        All of these blocks must be full of known ids.
        """
        hashes = self._hashes
        size = self._block_size
        assert num_blocks * size <= len(self._token_ids), (num_blocks, len(self._token_ids))
        for start in range(len(hashes) * size, num_blocks * size, size):
            packed = self._token_ids[start : start + size].tobytes()
            self._parent = block_hash(self._parent, packed)
            hashes.append(self._parent)
        return hashes
