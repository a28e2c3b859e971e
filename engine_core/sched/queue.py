"""Requests ordered by a key, with removal from the middle."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core.request import Request

Key = tuple[float, ...]
"""Compared as tuples; the smaller goes first."""


class Order(Protocol):
    """Keys must be fixed while a request waits, and differ between requests."""

    def waiting_key(self, request: Request) -> Key: ...


class _Entry:
    """A place in the heap; request is None once it has been removed."""

    __slots__ = ("key", "request")

    def __init__(self, key: Key, request: Request) -> None:
        self.key = key
        self.request: Request | None = request

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


class RequestHeap:
    """A binary heap of requests: push and pop O(log n), peek and removal O(1)
    amortized.

    A removed entry stays in the heap, emptied, until it comes up or until such
    entries are the majority, so removal never costs memory for long.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[Request, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[Request]:
        """In order of key. O(n log n)."""
        for entry in sorted(self._entries.values()):
            assert entry.request is not None
            yield entry.request

    def push(self, request: Request, key: Key) -> None:
        assert request not in self._entries, request
        entry = _Entry(key, request)
        self._entries[request] = entry
        heappush(self._heap, entry)

    def peek(self) -> Request:
        """The request with the smallest key; there must be one."""
        self._drop_emptied()
        request = self._heap[0].request
        assert request is not None
        return request

    def peek_key(self) -> Key:
        """The smallest key; there must be one."""
        self._drop_emptied()
        return self._heap[0].key

    def pop(self) -> Request:
        """Takes the request with the smallest key; there must be one."""
        request = self.peek()
        heappop(self._heap)
        del self._entries[request]
        return request

    def remove(self, request: Request) -> None:
        """Takes a request from wherever it is; it must be there."""
        self._entries.pop(request).request = None
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, request: Request) -> None:
        """Like remove, but the request may be absent."""
        if request in self._entries:
            self.remove(request)

    def _drop_emptied(self) -> None:
        while self._heap[0].request is None:
            heappop(self._heap)


class WaitingQueue:
    """Requests that wait to be admitted, in an order of fixed keys."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap = RequestHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request in self._heap

    def __iter__(self) -> Iterator[Request]:
        return iter(self._heap)

    def push(self, request: Request) -> None:
        self._heap.push(request, self._order.waiting_key(request))

    def peek(self) -> Request:
        """Who is next; the queue must not be empty."""
        return self._heap.peek()

    def pop(self) -> Request:
        """Takes who is next; the queue must not be empty."""
        return self._heap.pop()

    def remove(self, request: Request) -> None:
        """Takes a request that ends while it waits."""
        self._heap.remove(request)
