"""Every Triton kernel compiles for every architecture, without a device.

scripts/kernel_table.py compiles the whole of the tables, and its figures are checked in
docs/kernels.md; here it is each kernel with the head sizes and dtypes that most models have.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from kernels.cuda import costs
from kernels.cuda.aot import (
    KERNELS,
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
from kernels.cuda.limits import MAX_REGISTERS, MULTIPROCESSORS, Usage
from kernels.cuda.source import digest
from scripts.kernel_table import rows_that_hold

ROOT = Path(__file__).parents[2]
_ROUNDING = (
    "a word or two, where ptxas keeps to 80, 128 or 168 registers so that one more block fits"
)
_WINDOW = "three loops over keys; the loop-carried sums of 128 x 128 outputs take most registers"
_SCALES = "a tile's scales beside the loop-carried sums, where there is no tensor memory for these"
SPILLS = {
    ("paged_prefill_kernel-bf16-D=64,long", 100): (16, _ROUNDING),
    ("paged_prefill_kernel-bf16-D=64,short", 90): (8, _ROUNDING),
    ("paged_prefill_kernel-fp16-D=64,long", 100): (16, _ROUNDING),
    ("paged_prefill_kernel-fp16-D=64,short", 90): (8, _ROUNDING),
    ("paged_prefill_kernel-fp32-D=64,long", 80): (8, _ROUNDING),
    ("paged_decode_kernel-bf16-D=256,splits=8,window", 90): (8, _ROUNDING),
    ("paged_decode_kernel-bf16-D=256,splits=8,window,cap", 90): (8, _ROUNDING),
    ("paged_prefill_kernel-bf16-D=128,long,window", 80): (32, _WINDOW),
    ("paged_prefill_kernel-bf16-D=128,long,int8", 80): (16, _SCALES),
    ("paged_prefill_kernel-bf16-D=256,long,window,int8", 80): (16, _SCALES),
}
"""Bytes of stack per thread that are known and why they are left, by specimen and
architecture. Everything else keeps to its registers."""
KERNEL_NAMES = {kernel.__name__ for kernel in KERNELS}


def assert_fits(specimen: str, arch: int, registers: int, stack: int, blocks: int) -> None:
    assert 0 < registers <= MAX_REGISTERS, specimen
    allowed, _ = SPILLS.get((specimen, arch), (0, ""))
    assert stack == allowed, f"{specimen} keeps {stack} bytes on the stack on sm_{arch}"
    assert blocks >= 1, f"{specimen} does not run on sm_{arch}"


@pytest.fixture
def kept_compilations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache under .pytest_cache: what has not changed is compiled once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton")))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_compiles_within_the_limits(arch: int, kept_compilations: None) -> None:
    sm = MULTIPROCESSORS[arch]
    for specimen in representative_specimens():
        if arch not in specimen.archs:
            continue
        usage = compile_specimen(specimen, arch)
        assert usage.cubin_bytes > 0, specimen
        assert usage.shared_bytes <= sm.max_shared_bytes, specimen
        assert usage.tensor_columns <= sm.tensor_columns, specimen
        assert_fits(str(specimen), arch, usage.registers, usage.stack_bytes, usage.blocks(sm))


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


DOCUMENT = (ROOT / "docs" / "kernels.md").read_text()
REMEDY = "run: PYTHONPATH=. python scripts/kernel_table.py"


def test_the_document_says_what_all_kernels_take() -> None:
    """All specimens, as they are now (the digest), fit everywhere (the figures)."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+?) \| (\d.*) \|$", DOCUMENT, re.MULTILINE)
    listed = {f"{name}-{element}-{case}": cells for name, element, case, cells in rows}
    specimens = {str(specimen): specimen for specimen in all_specimens()}
    assert list(listed) == list(specimens), REMEDY
    spills = set()
    for name, specimen in specimens.items():
        cells = [cell.strip() for cell in listed[name].split("|")]
        assert cells[-1] == digest(specimen), f"{name} has changed; {REMEDY}"
        assert cells[:2] == [str(specimen.num_warps), str(specimen.num_stages)], REMEDY
        for index, arch in enumerate(MULTIPROCESSORS):
            taken, shared, blocks = cells[2 + 3 * index : 5 + 3 * index]
            assert bool(taken) == (arch in specimen.archs), name
            if not taken:
                continue
            registers, _, stack = taken.partition(" + ")
            assert float(shared) * 1024 <= MULTIPROCESSORS[arch].max_shared_bytes, name
            num_stack = int(stack.removesuffix(" B") or 0)
            assert_fits(name, arch, int(registers), num_stack, int(blocks))
            if num_stack:
                spills.add((name, arch))
    assert spills == set(SPILLS), "a spill that is gone is to be listed no more"


def test_only_rows_of_what_is_compiled_today_are_kept() -> None:
    one, two, *_ = specimens = all_specimens()
    rows = rows_that_hold(DOCUMENT, specimens)
    assert list(rows) == [str(specimen) for specimen in specimens]
    changed = DOCUMENT.replace(f"| {digest(one)} |", "| 00000000 |")
    assert rows_that_hold(changed, [one, two]) == {str(two): rows[str(two)]}
    renamed = replace(one, case="another case")
    assert rows_that_hold(DOCUMENT, [renamed, two]) == {str(two): rows[str(two)]}
    other = DOCUMENT.replace("Compiled by Triton ", "Compiled by Triton 0.")
    assert rows_that_hold(other, specimens) == {}


def test_specimens_have_every_combination_that_attention_meets() -> None:
    """At the greatest head size, which leaves the fewest registers and the least shared
    memory: windows and soft caps alone and together, and all kinds of 8-bit cache."""
    cases = {specimen.case for specimen in all_specimens() if specimen.element == "bf16"}
    for label in ("splits=8", "long", "short"):
        for more in ("", ",window", ",cap", ",window,cap"):
            assert f"D=256,{label}{more}" in cases
        for codes in (",fp8 bits", ",fp8", ",int8"):
            assert {f"D=256,{label}{codes}", f"D=256,{label},window{codes}"} <= cases


def test_the_document_has_the_costs_of_every_kernel() -> None:
    """Those with a formula in kernels/cuda/costs.py as it makes them; the others by hand."""
    assert "\n".join(costs.table()) in DOCUMENT, f"{REMEDY} --costs"
    written = re.findall(r"^\| `(\w+_kernel)` \| [^|]*\S[^|]* \| [^|]*\S[^|]* \|$", DOCUMENT, re.M)
    made = {cost.kernel for cost in costs.COSTS}
    assert made.isdisjoint(written)
    assert made | set(written) == KERNEL_NAMES


def test_costs_of_attention_by_hand() -> None:
    """Llama-3.2-1B, 64 sequences of 2048: 2 x 8 heads of 64 in 2 bytes for each position."""
    decode = costs.COSTS[0]
    keys_and_values = 64 * 2048 * 2 * 8 * 64 * 2
    queries_and_outputs = 64 * 2 * 32 * 64 * 2
    assert decode.num_bytes == keys_and_values + queries_and_outputs + 64 * 2048 // 16 * 4
    assert decode.num_operations == 64 * 32 * 2048 * 64 * 4
    assert decode.floor_seconds == decode.num_bytes / 4.3e12
    prefill = next(cost for cost in costs.COSTS if cost.kernel == "paged_prefill_kernel")
    assert prefill.num_operations == 4 * 32 * 64 * sum(range(1, 2049))
    assert prefill.floor_seconds == prefill.num_operations / 790e12
    with pytest.raises(KeyError, match="Z"):
        costs.evaluate("2*Z", {})


@pytest.mark.parametrize(
    ("usage", "arch", "blocks"),
    # warps, registers, stack, shared, tensor columns, size of the cubin
    [
        (Usage(4, 128, 0, 36 * 1024, 0, 1), 80, 4),  # registers and shared memory alike
        (Usage(8, 255, 0, 0, 0, 1), 90, 1),  # registers: 256 x 256 is all there is
        (Usage(1, 16, 0, 0, 0, 1), 90, 32),  # no more blocks than that
        (Usage(16, 32, 0, 1024, 0, 1), 90, 4),  # 64 warps
        (Usage(4, 64, 0, 164 * 1024, 0, 1), 80, 0),  # more than one block may have
        (Usage(4, 64, 0, 164 * 1024, 0, 1), 90, 1),
        (Usage(4, 256, 0, 0, 0, 1), 90, 0),  # more than a thread can have
        (Usage(4, 64, 0, 1024, 256, 1), 100, 2),  # tensor memory
        (Usage(32, 128, 0, 0, 0, 1), 90, 0),  # 1024 threads of 128
    ],
)
def test_blocks_on_a_multiprocessor(usage: Usage, arch: int, blocks: int) -> None:
    assert usage.blocks(MULTIPROCESSORS[arch]) == blocks


def test_a_digest_changes_with_the_code_and_the_options() -> None:
    one, *_ = representative_specimens()
    assert digest(one) == digest(replace(one, case="another name"))
    assert digest(one) != digest(replace(one, num_stages=2))
    assert digest(one) != digest(replace(one, constants={**one.constants, "BLOCK_KV": 16}))
    assert digest(one) != digest(replace(one, kernel=representative_specimens()[1].kernel))


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
