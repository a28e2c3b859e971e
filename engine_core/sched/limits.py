"""What bounds a step and a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Learnt from configuration and model; raises ValueError if impossible."""

    max_num_seqs: int
    """Rows: sequences that run at once."""
    max_num_batched_tokens: int
    """Token budget of a step."""
    max_model_len: int
    """Prompt plus output, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    long_prefill_token_threshold: int = 0
    """Most tokens that one prompt gets in a step, so that others get some too; 0 sets
    no such limit."""

    max_mixed_prefill_tokens: int = 0
    """Most prompt tokens of a step in which others decode, so that these do not wait for a
    whole budget of them; 0 sets no such limit."""

    short_prefill_share: float = 0.0
    """Part of a step's prefill budget that goes to prompts with less left than the first in
    order, 0 to below 1."""

    @property
    def max_chunk(self) -> int:
        """Most tokens that one prompt can get in a step."""
        return min(
            self.long_prefill_token_threshold or self.max_num_batched_tokens,
            self.max_num_batched_tokens,
        )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, "
                "must be at least 0"
            )
        if self.max_mixed_prefill_tokens < 0:
            raise ValueError(
                f"max_mixed_prefill_tokens is {self.max_mixed_prefill_tokens}, must be at least 0"
            )
        if not 0 <= self.short_prefill_share < 1:
            raise ValueError(
                f"short_prefill_share is {self.short_prefill_share}, must be 0 to below 1"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, "
                "must be at least 2 (a prompt token and an output token)"
            )
