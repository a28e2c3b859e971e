"""Tile sizes, chosen by padded head size and element size.

Explicit tables instead of run-time autotuning: a step must never stop to time
candidates, and each entry here is compiled ahead of time for every supported
architecture (kernels/cuda/aot.py), so that one that does not fit shared memory
is found without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_DOT = 16
"""tl.dot wants at least 16 along each axis."""

MAX_HEAD_DIM = 256

ENABLE_FP_FUSION = True
"""a * b + c in one rounding. Said at each launch, because Triton 3.10 changes the default
and 3.9 warns of that."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    block_m: int
    """Rows of one program: query heads of one group (decode), or tokens x heads (prefill)."""
    block_kv: int
    """Cache positions per iteration."""
    num_warps: int
    num_stages: int


# Both tables: (block_d, bytes per element) -> config. A key's address waits for its block
# id, so each level of the software pipeline costs two stages: five stages load the next
# tile while this one is computed, three would not. float32 products are unrolled into
# FMAs that want many registers, hence the small tiles and many warps.

DECODE_CONFIGS: dict[tuple[int, int], AttentionConfig] = {
    (16, 2): AttentionConfig(16, 128, 4, 5),
    (32, 2): AttentionConfig(16, 128, 4, 5),
    (64, 2): AttentionConfig(16, 64, 4, 5),
    (128, 2): AttentionConfig(16, 64, 4, 5),
    (256, 2): AttentionConfig(16, 32, 4, 5),
    (16, 4): AttentionConfig(16, 64, 4, 5),
    (32, 4): AttentionConfig(16, 64, 4, 5),
    (64, 4): AttentionConfig(16, 32, 4, 5),
    (128, 4): AttentionConfig(16, 32, 8, 5),
    (256, 4): AttentionConfig(16, 16, 8, 5),
}

PREFILL_CONFIGS: dict[tuple[int, int], AttentionConfig] = {
    (16, 2): AttentionConfig(128, 64, 4, 5),
    (32, 2): AttentionConfig(128, 64, 4, 5),
    (64, 2): AttentionConfig(128, 64, 8, 5),
    (128, 2): AttentionConfig(128, 64, 8, 5),
    (256, 2): AttentionConfig(64, 32, 8, 5),
    (16, 4): AttentionConfig(64, 32, 4, 5),
    (32, 4): AttentionConfig(64, 32, 4, 5),
    (64, 4): AttentionConfig(64, 32, 8, 5),
    (128, 4): AttentionConfig(32, 16, 8, 5),
    (256, 4): AttentionConfig(32, 16, 8, 5),
}


@dataclass(frozen=True, slots=True)
class LinearConfig:
    block_m: int
    """Tokens of a tile."""
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By bytes per element. One size for any number of tokens: see linear_invariant.py.
LINEAR_CONFIGS = {
    2: LinearConfig(64, 64, 64, 4, 4),
    4: LinearConfig(32, 32, 32, 4, 3),
}

SHORT_PREFILL_ROWS = 32
"""Below this many rows per sequence a full tile would be mostly padding."""

MIN_SPLIT_TOKENS = 128
"""A split of the cache shorter than this costs more to combine than it gains."""

MAX_SPLITS = 32


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def block_d_for(head_dim: int) -> int:
    """The padded head size. Raises ValueError for one that no table covers."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} is not supported; the kernels cover 1 to {MAX_HEAD_DIM}"
        )
    return max(MIN_DOT, next_power_of_2(head_dim))


def _lookup(
    table: dict[tuple[int, int], AttentionConfig], head_dim: int, element_size: int
) -> AttentionConfig:
    block_d = block_d_for(head_dim)
    config = table.get((block_d, element_size))
    if config is None:
        sizes = sorted({size for _, size in table})
        raise ValueError(f"elements of {element_size} bytes are not supported; known: {sizes}")
    return config


def decode_config(head_dim: int, element_size: int, group: int) -> AttentionConfig:
    """group: query heads per KV head. Groups over 64 heads take several tiles."""
    config = _lookup(DECODE_CONFIGS, head_dim, element_size)
    block_m = min(64, max(config.block_m, next_power_of_2(group)))
    return replace(config, block_m=block_m)


def prefill_config(
    head_dim: int, element_size: int, rows: int, *, unpacks_fp8: bool = False
) -> AttentionConfig:
    """rows: max_query_len x query heads per KV head. unpacks_fp8: codes in the cache are
    decoded by bits, for which a large tile has no registers left."""
    config = _lookup(PREFILL_CONFIGS, head_dim, element_size)
    if unpacks_fp8:
        config = replace(config, block_kv=max(MIN_DOT, config.block_kv // 2))
    if rows > SHORT_PREFILL_ROWS:
        return config
    num_warps = 4 if element_size == 2 else config.num_warps
    return replace(config, block_m=SHORT_PREFILL_ROWS, num_warps=num_warps)


def linear_config(element_size: int) -> LinearConfig:
    return LINEAR_CONFIGS[element_size]


# Rows that a tile holds at most -> config, the first that is not too small. Few rows are
# bound by the weights' bytes: low tiles, many loads in flight.
WEIGHT_ONLY_CONFIGS = {
    2: (
        LinearConfig(16, 64, 128, 4, 4),
        LinearConfig(32, 64, 128, 4, 4),
        LinearConfig(64, 128, 64, 4, 3),
    ),
    4: (LinearConfig(16, 32, 32, 4, 3), LinearConfig(32, 32, 32, 4, 3)),
}
"""By bytes per element of what is not quantized."""

FP8_CONFIGS = (
    LinearConfig(16, 64, 128, 4, 4),
    LinearConfig(64, 64, 128, 4, 4),
    LinearConfig(128, 128, 128, 8, 3),
)

EXPERTS_CONFIGS = {
    2: (
        LinearConfig(16, 64, 64, 4, 4),
        LinearConfig(32, 64, 64, 4, 4),
        LinearConfig(64, 64, 64, 4, 4),
    ),
    4: (LinearConfig(16, 32, 32, 4, 3), LinearConfig(32, 32, 32, 4, 3)),
}
"""By bytes per element; a program of the first product holds two tiles."""

MIN_SPLIT_TILES = 4
"""Tiles of K in a part: fewer are over before their loads overlap."""

MAX_K_SPLITS = 16


def _first_that_holds(configs: tuple[LinearConfig, ...], rows: int) -> LinearConfig:
    return next((config for config in configs if rows <= config.block_m), configs[-1])


def weight_only_config(element_size: int, rows: int) -> LinearConfig:
    return _first_that_holds(WEIGHT_ONLY_CONFIGS[element_size], rows)


def fp8_config(rows: int) -> LinearConfig:
    return _first_that_holds(FP8_CONFIGS, rows)


def experts_config(element_size: int, rows: int) -> LinearConfig:
    """rows: of the average expert."""
    return _first_that_holds(EXPERTS_CONFIGS[element_size], rows)


def num_k_splits(programs: int, tiles: int, num_sms: int) -> int:
    """How many programs share the K of one tile of a product, to give each multiprocessor
    two; tiles: of K."""
    return max(1, min((2 * num_sms) // max(programs, 1), tiles // MIN_SPLIT_TILES, MAX_K_SPLITS))


def num_splits(programs: int, max_seq_len: int, num_sms: int) -> int:
    """How many programs share one sequence's cache, a power of two.

    Enough to give each multiprocessor two programs when few sequences decode.
    Depends only on numbers that are fixed for a captured graph.
    """
    by_device = (2 * num_sms) // max(programs, 1)
    by_length = max_seq_len // MIN_SPLIT_TOKENS
    wanted = max(1, min(by_device, by_length, MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


MIN_PART_LOGITS = 4096
"""A part of a row of logits shorter than this costs more to launch than it gains."""

MAX_PARTS = 64


def sample_parts(num_rows: int, vocab_size: int, num_sms: int) -> int:
    """How many programs share a row of logits, a power of two: enough to give each
    multiprocessor two."""
    by_device = (2 * num_sms) // max(num_rows, 1)
    wanted = max(1, min(by_device, vocab_size // MIN_PART_LOGITS, MAX_PARTS))
    return 1 << (wanted.bit_length() - 1)


def row_warps(block: int) -> int:
    """Warps for a program that holds one row of `block` elements."""
    if block <= 1024:
        return 2
    if block <= 2048:
        return 4
    return 8 if block <= 8192 else 16
