"""Every Triton kernel compiles for every architecture, without a device.

scripts/kernel_table.py compiles the whole of the tables; here it is each kernel with
the head sizes and dtypes that most models have.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from kernels.cuda.aot import (
    KERNELS,
    SHARED_MEMORY_LIMIT,
    all_specimens,
    compile_specimen,
    representative_specimens,
)
from kernels.cuda.configs import (
    DECODE_CONFIGS,
    MAX_SPLITS,
    PREFILL_CONFIGS,
    block_d_for,
    decode_config,
    num_splits,
    prefill_config,
)

ROOT = Path(__file__).parents[2]
MAX_STACK = 32
"""Bytes per thread. ptxas puts a word or two there to reach a rounder register count; a tile
that does not fit takes hundreds."""
KERNEL_NAMES = {kernel.__name__ for kernel in KERNELS}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", SHARED_MEMORY_LIMIT)
def test_compiles_within_the_limits(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for specimen in representative_specimens():
        usage = compile_specimen(specimen, arch)
        assert usage.cubin_bytes > 0, specimen
        assert usage.shared_bytes <= SHARED_MEMORY_LIMIT[arch], specimen
        assert 0 < usage.registers <= 255, specimen
        assert usage.stack_bytes <= MAX_STACK, f"{specimen} spills on sm_{arch}: {usage}"


def test_specimens_cover_every_kernel() -> None:
    assert {specimen.name for specimen in representative_specimens()} == KERNEL_NAMES
    assert {specimen.name for specimen in all_specimens()} == KERNEL_NAMES
    names = [str(specimen) for specimen in all_specimens()]
    assert len(names) == len(set(names))


def test_every_kernel_of_the_package_is_listed() -> None:
    written = set()
    for source in (ROOT / "kernels" / "cuda").glob("*.py"):
        written |= set(re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE))
    assert written == KERNEL_NAMES


def test_the_document_lists_every_kernel_and_specimen() -> None:
    """If not: PYTHONPATH=. python scripts/kernel_table.py."""
    document = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+?) \|", document, re.MULTILINE)
    listed = [f"{name}-{element}-{case}" for name, element, case in rows]
    assert listed == [str(specimen) for specimen in all_specimens()]
    costs = re.findall(r"^\| `(\w+_kernel)` \| [^|]*\S[^|]* \| [^|]*\S[^|]* \|$", document, re.M)
    assert set(costs) == KERNEL_NAMES


@pytest.mark.parametrize("head_dim", [0, -1, 257])
def test_head_sizes_without_a_config_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim} is not supported"):
        block_d_for(head_dim)


def test_element_sizes_without_a_config_are_refused() -> None:
    with pytest.raises(ValueError, match="elements of 1 bytes"):
        decode_config(64, 1, 4)
    with pytest.raises(ValueError, match="elements of 8 bytes"):
        prefill_config(64, 8, 100)


def test_the_tables_cover_every_head_size() -> None:
    for size in (2, 4):
        for head_dim in range(1, 257):
            assert (block_d_for(head_dim), size) in DECODE_CONFIGS
            assert (block_d_for(head_dim), size) in PREFILL_CONFIGS


@pytest.mark.parametrize(
    ("programs", "max_seq_len", "num_sms", "expected"),
    [
        (1, 100_000, 132, MAX_SPLITS),  # one sequence alone: all that helps
        (8, 4096, 132, 32),
        (8, 1000, 132, 4),  # as many as are worth their combination
        (8, 127, 132, 1),  # too short to split
        (512, 4096, 132, 1),  # the batch fills the device
        (100, 4096, 132, 2),
        (8, 4096, 0, 1),
    ],
)
def test_num_splits(programs: int, max_seq_len: int, num_sms: int, expected: int) -> None:
    assert num_splits(programs, max_seq_len, num_sms) == expected
