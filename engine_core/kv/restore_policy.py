"""Whether KV that was moved to the host is copied back or computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DECAY = 0.9
"""What an earlier measurement weighs against the next one."""
RETRY_AFTER = 32
"""Admissions that computed what they could have restored, after which one restores in
any case: what is never done is never measured again, and conditions change."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Of this model on this device, as measured before it serves."""

    restore_s_per_block: float
    prefill_s_per_token: float


class _Rate:
    """Seconds per unit over the last measurements, large ones counting for more."""

    def __init__(self, first: float | None) -> None:
        self._seconds = first or 0.0
        self._units = 0.0 if first is None else 1.0

    @property
    def value(self) -> float | None:
        """None while nothing has been measured."""
        return self._seconds / self._units if self._units else None

    def observe(self, units: int, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units


class RestorePolicy:
    """Takes the cheaper by running estimates of both costs, from measurements alone.

    Restoring saves the prefill of a block's tokens and costs the copy of a block.
    Until both costs are known everything is restored, which makes them known.
    """

    def __init__(self, block_size: int, costs: MeasuredCosts | None = None) -> None:
        self._block_size = block_size
        self._restore = _Rate(None if costs is None else costs.restore_s_per_block)
        self._prefill = _Rate(None if costs is None else costs.prefill_s_per_token)
        self._num_declined = 0
        """Admissions since the last restore that did without one."""

    def observe_restore(self, num_blocks: int, seconds: float) -> None:
        """num_blocks > 0 were copied to the device."""
        self._restore.observe(num_blocks, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed num_tokens > 0, some of them a prompt's."""
        self._prefill.observe(num_tokens, seconds)

    def num_worth(self, on_host: Sequence[bool]) -> int:
        """How many of the leading blocks to take, when on_host[i] says that block i has
        to be restored and otherwise it is on the device. Changes nothing."""
        restore_s, token_s = self._restore.value, self._prefill.value
        if restore_s is None or token_s is None or self._num_declined >= RETRY_AFTER:
            return len(on_host)
        saved_s = self._block_size * token_s
        gain = best = 0.0
        num_worth = 0
        for index, costs in enumerate(on_host):
            gain += saved_s - restore_s if costs else saved_s
            if gain >= best:
                best, num_worth = gain, index + 1
        return num_worth

    def admitted(self, num_restored: int, num_declined: int) -> None:
        """A sequence was admitted that restores so many blocks, and computes so many
        others that the host had."""
        if num_restored:
            self._num_declined = 0
        elif num_declined:
            self._num_declined += 1
