"""Which heads, features and tokens each rank computes.

As Megatron-LM does it (Shoeybi et al., 2019, arXiv:1909.08053): of the two products of
each block the first is cut by its rows (a rank has some heads, or some of the
intermediate features) and the second by its columns, so that ranks meet once a block, to
add up what it makes. Embedding and head are cut by tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.model.layers import expert_tensors
from engine_core.model.part import Part
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.model.config import ModelConfig
    from engine_core.model.layout import Layout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_UNITS = (256, 128, 32)
"""Features that quantized formats have in one block, or in one group."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    query: range
    kv: tuple[int, ...]
    """The KV heads that they read, each by equally many neighbours, in order. One may be
    there twice, and several ranks may have the same."""


def share(total: int, rank: int, size: int, unit: int = 1) -> range:
    """A rank's neighbours of `total` things that come in units; units differ by one at most."""
    units = -(-total // unit)
    start, end = units * rank // size * unit, units * (rank + 1) // size * unit
    return range(min(start, total), min(end, total))


def share_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShare:
    """Whole KV heads with their queries while there are enough of them; with more ranks than
    KV heads, queries are divided and KV heads replicated. size <= num_heads."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = share(num_kv_heads, rank, size)
        return HeadShare(range(kv.start * group, kv.stop * group), tuple(kv))
    query = share(num_heads, rank, size)
    readers = next(
        count
        for count in range(len(query), 0, -1)
        if len(query) % count == 0
        and all(at // group == (at + count - 1) // group for at in query[::count])
    )
    return HeadShare(query, tuple(at // group for at in query[::readers]))


def check_split(config: ModelConfig, layout: Layout, size: int, origin: str) -> None:
    """Raises ConfigError, with the figures, for a model that `size` ranks cannot divide."""
    flag = f"--tensor-parallel-size {size}: {origin}"
    if layout.qk_norm == "row" and config.num_kv_heads < 2 * size:
        # One head by itself would pass for a norm of each head, and a replicated one count twice.
        raise ConfigError(
            f"{flag} has {config.num_kv_heads} KV heads and a norm over all of them: each rank "
            "needs two at least"
        )
    inner = [config.intermediate_size]
    inner += [it.experts.intermediate_size for it in config.layers if it.experts is not None]
    figures = {
        "attention heads": config.num_heads,
        "intermediate features": min(inner),
        "tokens of the vocabulary": config.vocab_size,
    }
    for name, number in figures.items():
        if number < size:
            raise ConfigError(f"{flag} has {number} {name}: each rank needs one at least")


def share_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """What a rank's own layers are like: the widths that a KV cache follows."""
    heads = share_heads(config.num_heads, config.num_kv_heads, rank, size)
    return replace(config, num_heads=len(heads.query), num_kv_heads=len(heads.kv))


def feature_unit(features: int, size: int, *, is_quantized: bool) -> int:
    """In what units intermediate features are divided: so that no block or group of a
    quantized format is cut, where they divide."""
    if not is_quantized:
        return 1
    return next((unit for unit in _UNITS if features % unit == 0 and features >= unit * size), 1)


def share_tensors(
    config: ModelConfig, layout: Layout, rank: int, size: int, *, is_quantized: bool
) -> dict[str, Part]:
    """By Hugging Face name, every tensor that a rank does not read whole."""
    vocabulary = Part((share(config.vocab_size, rank, size),))
    parts = {EMBEDDING: vocabulary, HEAD: vocabulary}
    heads = share_heads(config.num_heads, config.num_kv_heads, rank, size)
    dim = config.head_dim
    query = range(heads.query.start * dim, heads.query.stop * dim)
    kv = _joined(range(head * dim, (head + 1) * dim) for head in heads.kv)
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        pieces = ((query,), kv, kv)
        offsets = (0, q_rows, q_rows + kv_rows)
        _cut_rows(parts, attention, layout.qkv, pieces, offsets)
        hidden = range(config.hidden_size)
        parts[f"{attention}.o_proj.weight"] = Part((hidden,), query)
        if layout.qk_norm == "row":
            parts[f"{attention}.q_norm.weight"] = Part((query,))
            parts[f"{attention}.k_norm.weight"] = Part(kv)
        experts = layer.experts
        width = config.intermediate_size if experts is None else experts.intermediate_size
        unit = feature_unit(width, size, is_quantized=is_quantized)
        inner = share(width, rank, size, unit)
        if experts is None:
            mlp = f"{prefix}.mlp"
            _cut_rows(parts, mlp, layout.gate_up, ((inner,), (inner,)), (0, width))
            parts[f"{mlp}.down_proj.weight"] = Part((hidden,), inner)
            continue
        assert layout.experts is not None, config.architecture
        gates, ups, downs = expert_tensors(layout.experts, prefix, experts.num_experts)
        parts |= dict.fromkeys([*gates, *ups], Part((inner,)))
        parts |= dict.fromkeys(downs, Part((hidden,), inner))
    return parts


def _cut_rows(
    parts: dict[str, Part],
    prefix: str,
    names: tuple[str, ...],
    pieces: tuple[tuple[range, ...], ...],
    offsets: tuple[int, ...],
) -> None:
    """pieces: the rows of each matrix; offsets: where each begins in one that is all of them."""
    if len(names) == len(pieces):
        cut = [Part(rows) for rows in pieces]
    else:
        moved = [_moved(rows, by) for rows, by in zip(pieces, offsets, strict=True)]
        cut = [Part(tuple(rows for piece in moved for rows in piece))]
    for name, part in zip(names, cut, strict=True):
        parts[f"{prefix}.{name}.weight"] = parts[f"{prefix}.{name}.bias"] = part


def _moved(rows: tuple[range, ...], by: int) -> tuple[range, ...]:
    return tuple(range(piece.start + by, piece.stop + by) for piece in rows)


def _joined(pieces: Iterable[range]) -> tuple[range, ...]:
    """Neighbours as one."""
    joined: list[range] = []
    for piece in pieces:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
