"""What requests ask of the logits before a token is drawn from them.

The order is vLLM's, so that the same parameters mean the same:

    structured_output -> allowed_token_ids -> bad_words -> min_tokens -> logit_bias
        -> repetition -> frequency -> presence penalty

and then temperature, top_k, top_p and min_p, which belong to the sample op. Greedy
rows go through all of it too. What is banned stays banned: nothing after a ban
makes -inf finite again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine_core.runner.penalties import Penalties
from engine_core.runner.per_row import PerRow, flat_index, token_lists, upload
from engine_core.runner.structured import StructuredOutputs
from engine_core.sched.plan import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import NewSeq, StepPlan
    from kernels.ops import Ops

_BANNED = float("-inf")


class ProcessedLogits(NamedTuple):
    logits: torch.Tensor
    """[S, V]: what came in where no row asks for anything, else a float32 copy."""
    banning: tuple[int, ...] = ()
    """Places of rows that may have no token left to draw."""

    def mark_dead_ends(self, sampled: torch.Tensor) -> torch.Tensor:
        """sampled [S], drawn from these logits, with NO_TOKEN where all were banned."""
        if not self.banning:
            return sampled
        places = upload(np.array(self.banning), sampled.device)
        ids = sampled[places]
        # A banned id is drawn only where there is no other.
        dead = self.logits[places, ids] == _BANNED
        return sampled.index_put((places,), torch.where(dead, NO_TOKEN, ids))


class LogitsProcessor(Protocol):
    """One parameter's effect on the rows that ask for it.

    Its state is a function of a row's prompt, output and parameters alone, so that
    company, chunks, preemption and replay change nothing.
    """

    bans: bool
    """Whether it can leave a row without a token."""
    reads_ids: bool
    """Whether it looks at the ids that a row has drawn; else at their number at most."""

    def admit(self, new: NewSeq) -> bool:
        """Whether the sequence asks for it; if so, it is remembered until forget()."""
        ...

    def forget(self, row: int) -> None: ...

    def holds(self, row: int) -> bool: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """In place on logits [S, V] float32; rows [S] says whose each one is, and by
        Rows.lengths() what it follows."""
        ...


class LogitsProcessors:
    """All processors in their order, over the rows of a runner."""

    def __init__(self, history: Rows, eos_token_ids: tuple[int, ...], ops: Ops) -> None:
        self._processors: tuple[LogitsProcessor, ...] = (
            StructuredOutputs(history, eos_token_ids),
            AllowedTokens(),
            BadWords(history),
            MinTokens(history, eos_token_ids),
            LogitBias(ops),
            Penalties(history, ops),
        )
        self._asking: set[int] = set()

    def follow(self, plan: StepPlan) -> None:
        """Forgets freed rows and admits new ones, as Rows.apply does."""
        for row in plan.freed_rows:
            self.release(row)
        for new in plan.new_seqs:
            # A list, because each one has to see the sequence.
            if any([processor.admit(new) for processor in self._processors]):  # noqa: C419
                self._asking.add(new.row)

    def release(self, row: int) -> None:
        """The row asks for nothing any more, if it ever did."""
        if row in self._asking:
            self._asking.discard(row)
            for processor in self._processors:
                processor.forget(row)

    def read_ids_of(self, rows: np.ndarray) -> bool:
        """Whether process() has to look at ids that any of these rows has drawn."""
        return self.concern(rows) and any(
            processor.reads_ids and any(map(processor.holds, rows.tolist()))
            for processor in self._processors
        )

    def concern(self, rows: np.ndarray) -> bool:
        """Whether process() has anything to do for these rows."""
        return bool(self._asking) and not self._asking.isdisjoint(rows.tolist())

    def process(self, logits: torch.Tensor, rows: np.ndarray) -> ProcessedLogits:
        """logits [S, V] of any float type, not changed; rows [S], by Rows.lengths().

        Where read_ids_of() says so, every id of theirs must be known on the host.
        """
        if not self.concern(rows):
            return ProcessedLogits(logits)
        listed = rows.tolist()
        processed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        banning: set[int] = set()
        for processor in self._processors:
            places = [at for at, row in enumerate(listed) if processor.holds(row)]
            if places:
                processor.apply(processed, listed)
                banning.update(places if processor.bans else ())
        return ProcessedLogits(processed, tuple(sorted(banning)))


class AllowedTokens(PerRow[np.ndarray]):
    """Bans all ids but those listed."""

    reads_ids = False

    def admit(self, new: NewSeq) -> bool:
        allowed = new.sampling.allowed_token_ids
        if allowed is None:
            return False
        self._states[new.row] = np.unique(np.array(allowed, np.int64))
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        present = self._present(rows)
        index = flat_index(logits, [(at, allowed) for at, _, allowed in present])
        flat = logits.view(-1)
        kept = flat.index_select(0, index)
        logits[upload(np.array([at for at, _, _ in present]), logits.device)] = _BANNED
        flat.scatter_(0, index, kept)


class _Words(NamedTuple):
    alone: np.ndarray
    """Ids that are a bad word by themselves."""
    endings: dict[int, list[tuple[np.ndarray, int]]]
    """Last id before the end of a bad word -> (all ids before its end, its last id)."""


class BadWords(PerRow[_Words]):
    """Bans the last id of a sequence that the ids before it have begun.

    Prompt and output are read as one, as transformers' NoBadWordsLogitsProcessor
    does it, so the output does not complete a word that the prompt began.
    """

    def __init__(self, history: Rows) -> None:
        super().__init__()
        self._history = history

    def admit(self, new: NewSeq) -> bool:
        words = new.sampling.bad_words
        if not words:
            return False
        endings: dict[int, list[tuple[np.ndarray, int]]] = {}
        for word in words:
            if len(word) > 1:
                before = np.array(word[:-1], np.int32)
                endings.setdefault(word[-2], []).append((before, word[-1]))
        alone = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._states[new.row] = _Words(alone, endings)
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        banned = []
        lengths = self._history.lengths(np.asarray(rows))
        for at, row, words in self._present(rows):
            known = self._history.token_ids[row, : lengths[at]]
            begun = [
                last
                for before, last in words.endings.get(int(known[-1]), ())
                if len(before) <= len(known) and (known[len(known) - len(before) :] == before).all()
            ]
            banned.append((at, np.append(words.alone, np.array(begun, np.int64))))
        logits.view(-1)[flat_index(logits, banned)] = _BANNED


class _Floor(NamedTuple):
    num_tokens: int
    """Of prompt and output, before which it must not end."""
    ends: np.ndarray
    """EOS and stop ids."""


class MinTokens(PerRow[_Floor]):
    """Bans EOS and stop ids until the output has min_tokens ids."""

    reads_ids = False

    def __init__(self, history: Rows, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._history = history
        self._eos_token_ids = eos_token_ids

    def admit(self, new: NewSeq) -> bool:
        params = new.sampling
        ends = {*self._eos_token_ids, *params.stop_token_ids}
        if not params.min_tokens or not ends:
            return False
        self._states[new.row] = _Floor(
            new.num_prompt_tokens + params.min_tokens, np.array(sorted(ends), np.int64)
        )
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        lengths = self._history.lengths(np.asarray(rows))
        banned = [
            (at, floor.ends)
            for at, _, floor in self._present(rows)
            if lengths[at] < floor.num_tokens
        ]
        if banned:
            logits.view(-1)[flat_index(logits, banned)] = _BANNED


class _Bias(NamedTuple):
    ids: np.ndarray
    values: np.ndarray


class LogitBias(PerRow[_Bias]):
    """Adds to the logits of single ids."""

    bans = False
    reads_ids = False

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops

    def admit(self, new: NewSeq) -> bool:
        bias = new.sampling.logit_bias
        if not bias:
            return False
        ids, values = zip(*bias, strict=True)
        self._states[new.row] = _Bias(np.array(ids, np.int64), np.array(values, np.float32))
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        present = self._present(rows)
        ids = token_lists([(at, bias.ids) for at, _, bias in present], logits.device)
        values = np.concatenate([bias.values for _, _, bias in present])
        self._ops.add_logit_bias(logits, ids, upload(values, logits.device))
