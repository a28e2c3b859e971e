"""Sizes, available memory, and the KV plan with its figures."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from engine_core.device.memory import (
    KVPlan,
    MemoryBudget,
    available_memory,
    block_num_bytes,
    parse_memory_size,
    plan_kv_cache,
    resolve_max_model_len,
)
from engine_core.model.hf_config import read_hf_config
from pagewire.errors import ConfigError
from tests.support.root_folder import make_root
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.config import ModelConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("1.5 gib", 3 << 29),
        ("2GB", 2 * 10**9),
        ("100kb", 100_000),
        ("7B", 7),
        (" 1048576 ", 1 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory_size(text, "--kv-cache-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 GiBs", "4G", "0", "0.1B", "1e9", "nan"])
def test_bad_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        parse_memory_size(text, "--kv-cache-memory")


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n"}
V2 = "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"
V1 = (
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 1_024_000),
        ({V2[0]: "max\n", V2[1]: "5\n"}, 1_024_000),
        ({V2[0]: "600000\n", V2[1]: "100000\n"}, 500_000),
        ({V2[0]: "9000000\n", V2[1]: "100000\n"}, 1_024_000),
        ({V2[0]: "100000\n", V2[1]: "200000\n"}, 0),
        ({V1[0]: "600000\n", V1[1]: "200000\n"}, 400_000),
        ({V1[0]: "9223372036854771712\n", V1[1]: "0\n"}, 1_024_000),
    ],
)
def test_available_memory_heeds_cgroups(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    assert available_memory(make_root(tmp_path, {**MEMINFO, **files})) == available


def test_available_memory_of_this_machine() -> None:
    assert available_memory() > 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_hf_config(write_hf(tmp_path, TinySpec(max_positions=100)))


def test_block_bytes(config: ModelConfig) -> None:
    # Keys and values, 2 layers, 3 heads of 4, 16 tokens.
    assert block_num_bytes(config, 16, torch.float32) == 2 * 2 * 3 * 4 * 16 * 4
    assert block_num_bytes(config, 16, torch.bfloat16) == 2 * 2 * 3 * 4 * 16 * 2


def test_max_model_len(config: ModelConfig) -> None:
    assert resolve_max_model_len(None, config) == 100
    assert resolve_max_model_len(100, config) == 100
    assert resolve_max_model_len(99, config) == 99
    with pytest.raises(ConfigError, match=r"--max-model-len 101 is above .* 100"):
        resolve_max_model_len(101, config)
    with pytest.raises(ConfigError, match="--max-model-len 1: "):
        resolve_max_model_len(1, config)


@pytest.mark.parametrize("given", [True, False])
def test_plan_takes_all_that_fits(given: bool) -> None:
    assert plan_kv_cache(MemoryBudget(10_999, "x"), 1000, 16, 144, given) == KVPlan(10, 144)


@pytest.mark.parametrize(
    ("enough", "max_model_len", "tokens"),
    [(None, 64, 160), (100, 64, 112), (16, 64, 64), (16, 70, 80), (1000, 64, 160)],
)
def test_plan_takes_no_more_than_is_enough(
    enough: int | None, max_model_len: int, tokens: int
) -> None:
    budget = MemoryBudget(11_000, "x", enough)
    plan = plan_kv_cache(budget, 1000, 16, max_model_len, False)
    assert plan == KVPlan(tokens // 16 + 1, max_model_len)


def test_plan_refuses_a_given_length_with_figures() -> None:
    budget = MemoryBudget(8 << 20, "--kv-cache-memory 8MiB")
    with pytest.raises(ConfigError) as caught:
        plan_kv_cache(budget, 1 << 20, 16, 113, True)
    assert str(caught.value) == (
        "--kv-cache-memory 8MiB gives the KV cache 8.0 MiB = 112 tokens; one sequence of 113 "
        "tokens takes 9.0 MiB: raise it or lower --max-model-len"
    )


def test_plan_lowers_a_length_nobody_gave(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = plan_kv_cache(MemoryBudget(8 << 20, "x"), 1 << 20, 16, 113, False)
    assert plan == KVPlan(8, 112)
    assert "max_model_len is lowered to 112" in caplog.text


@pytest.mark.parametrize("given", [True, False])
def test_plan_refuses_less_than_two_blocks(given: bool) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory 1 gives .* two are the least"):
        plan_kv_cache(MemoryBudget(1999, "--kv-cache-memory 1"), 1000, 16, 10, given)
