"""What the amx variant does around its tile registers, which are emulated in C++ here (see
tests/support/emulated_tiles.h): no machine with AMX has run these tests' subject."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.cpu.build import FLAGS, SOURCES, find_compiler, refusal, variants
from kernels.inputs import Maker, linear_args
from kernels.quantized import FORMATS, dequantize
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import threads
from tests.support.emulated import emulated_amx
from tests.support.quantized_weights import exact_activations, half_floats_at, random_weight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernels.cpu.ops import CpuOps
    from kernels.ops import Ops

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# Rows on either side of one, two and four tiles of 16, and of the 64 that are multiplied at once.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 81)
# Features on either side of a pair, of a tile of 32 and of a chunk of 256.
FEATURES = (1, 2, 3, 31, 32, 33, 34, 63, 64, 96, 255, 256, 257, 288, 290, 514)
OUTPUTS = (1, 15, 16, 17, 31, 32, 33, 65)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def emulated(folder: Path) -> CpuOps:
    return emulated_amx(folder)


@pytest.fixture
def ops(emulated: CpuOps) -> Iterator[CpuOps]:
    with threads(2):
        yield emulated


def linear(ops: Ops, args: dict[str, Any]) -> torch.Tensor:
    return ops.linear(args["x"], ops.prepare_linear(args["weight"], args["bias"]))


# bfloat16


@pytest.mark.parametrize("seed", range(40))
def test_products_of_bfloat16(ops: CpuOps, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def one_of(options: tuple[int, ...]) -> int:
        return options[int(torch.randint(len(options), (), generator=generator))]

    rows, features, outputs = one_of(ROWS), one_of(FEATURES), one_of(OUTPUTS)
    args = linear_args(Maker(BF16, seed=seed), rows, features, outputs, bias=seed % 2 == 0)
    wide = {name: None if value is None else value.double() for name, value in args.items()}
    exact, fair = linear(ReferenceOps(F64), wide), linear(ReferenceOps(), args)
    assert_within_budget(linear(ops, args), exact, fair, f"{rows} x {features} x {outputs}")


@pytest.mark.parametrize("features", [33, 290])
def test_rows_of_bfloat16_do_not_depend_on_the_batch_or_threads(ops: CpuOps, features: int) -> None:
    args = linear_args(Maker(BF16), 81, features, 65)
    together = linear(ops, args)
    for count in ROWS:
        assert torch.equal(linear(ops, args | {"x": args["x"][:count]}), together[:count])
    assert torch.equal(linear(ops, args | {"x": args["x"][40:57]}), together[40:57])
    torch.set_num_threads(1)
    assert torch.equal(linear(ops, args), together)


@pytest.mark.parametrize("features", [30, 64, 70, 71])
def test_only_the_rows_themselves_are_read(ops: CpuOps, features: int) -> None:
    wide = torch.full((40, 100), float("nan"), dtype=BF16)
    view = wide[2:35, 3 : 3 + features]
    view.copy_(Maker(BF16).normal(33, features))
    args = linear_args(Maker(BF16), 33, features, 40)
    expected = linear(ops, args | {"x": view.clone()})
    assert torch.equal(linear(ops, args | {"x": view}), expected)
    assert not expected.isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_only(ops: CpuOps, value: float) -> None:
    args = linear_args(Maker(BF16), 35, 70, 33)
    clean = linear(ops, args)
    args["x"] = args["x"].clone()
    args["x"][20, 69] = value
    spoilt = linear(ops, args)
    assert not spoilt[20].isfinite().any()
    assert torch.equal(spoilt[:20], clean[:20]) and torch.equal(spoilt[21:], clean[21:])


def test_rows_of_the_packed_table_are_what_was_packed(ops: CpuOps) -> None:
    weight = Maker(BF16).normal(45, 71)
    ids = torch.tensor([44, 0, 31, 32, 0])
    assert torch.equal(ops.packed_embedding(ids, ops.prepare_linear(weight), BF16), weight[ids])


def test_gated_products_of_experts(ops: CpuOps) -> None:
    """Two panels at once, of rows that are gathered."""
    maker = Maker(BF16)
    gate_up, down = maker.normal(3, 128, 70) / 70**0.5, maker.normal(3, 70, 64) / 8
    args = {
        "x": maker.normal(90, 70),
        "expert_ids": torch.stack([torch.arange(2) + t % 2 for t in range(90)]),
        "expert_scales": maker.normal(90, 2, dtype=F32).softmax(dim=-1),
        "activation": "silu",
    }

    def mixed(ops: Ops, cast: torch.dtype = BF16) -> torch.Tensor:
        weights = ops.prepare_experts(gate_up.to(cast), down.to(cast))
        return ops.experts(weights=weights, **{**args, "x": args["x"].to(cast)})

    fair = mixed(ReferenceOps())
    assert_within_budget(mixed(ops), mixed(ReferenceOps(F64), F64), fair, "experts")


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_other_floats_use_no_tiles(ops: CpuOps, dtype: torch.dtype) -> None:
    args = linear_args(Maker(dtype), 33, 70, 40, bias=True)
    wide = {name: value.double() for name, value in args.items()}
    exact, fair = linear(ReferenceOps(F64), wide), linear(ReferenceOps(), args)
    assert_within_budget(linear(ops, args), exact, fair, str(dtype))


# Quantized weights


def quantized(
    ops: CpuOps, name: str, rows: int, blocks: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product with a random weight, and what that means in float64."""
    weight = random_weight(name, rows, blocks)
    actual = ops.linear(x, ops.prepare_quantized_linear([weight], None, x.dtype))
    return actual, dequantize(weight).double()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_exact(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    blocks = 3 if FORMATS[name].block == 32 else 1
    x = exact_activations(37, blocks * FORMATS[name].block, dtype)
    actual, meaning = quantized(ops, name, 49, blocks, x)
    exact = x.double() @ meaning.T
    # Float sums of up to eight blocks, with as many mins, and one rounding to the dtype.
    scale = x.double().abs() @ (meaning.abs() + 1e-3).T
    allowed = 32 * torch.finfo(F32).eps * scale + torch.finfo(dtype).eps * exact.abs()
    assert bool(((actual.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_s_result_is_the_same_with_tiles_and_without(ops: CpuOps, name: str) -> None:
    """Sixteens of rows go through tiles, the rest does not."""
    features = FORMATS[name].block * (5 if FORMATS[name].block == 32 else 2)
    x = torch.randn(70, features, generator=torch.Generator().manual_seed(6)).bfloat16()
    weight = ops.prepare_quantized_linear(
        [random_weight(name, 49, features // FORMATS[name].block)], None, BF16
    )
    alone = torch.cat([ops.linear(x[r : r + 1], weight) for r in range(70)])
    for count in (15, 16, 17, 33, 64, 65, 70):
        assert torch.equal(ops.linear(x[:count], weight), alone[:count]), count
    assert torch.equal(ops.linear(x[20:37], weight), alone[20:37])


@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("name", FORMATS)
def test_greatest_codes_do_not_saturate(ops: CpuOps, name: str, fill: int) -> None:
    kind = FORMATS[name]
    weight = random_weight(name, 16, 2)
    blocks = weight.data.view(16, 2, kind.block_bytes)
    kept = torch.zeros(kind.block_bytes, dtype=torch.bool)
    for at in half_floats_at(name):
        kept[at : at + 2] = True
    blocks[..., ~kept] = fill
    x = torch.full((16, weight.shape[1]), 127.0)
    x[8:] = -127
    meaning = dequantize(weight).double()
    actual = ops.linear(x, ops.prepare_quantized_linear([weight], None, F32)).double()
    scale = x.double().abs() @ meaning.abs().T
    assert bool(((actual - x.double() @ meaning.T).abs() <= 1e-5 * scale + 1e-5).all())


# The registers


def test_tiles_are_released_after_a_product(ops: CpuOps, folder: Path) -> None:
    library = ctypes.CDLL(str(folder / "emulated_amx.so"))
    library.pagewire_tiles_in_use.restype = ctypes.c_bool
    with threads(1):
        args = linear_args(Maker(BF16), 20, 70, 40)
        linear(ops, args)
        assert not library.pagewire_tiles_in_use()
        quantized(ops, "Q4_1", 40, 2, args["x"][:, :64])
        assert not library.pagewire_tiles_in_use()


_TILES = """
#include <immintrin.h>
#include "tiles.h"
using namespace pagewire;
extern "C" {
void ours_load(const void* p, long stride) { tile_registers::load<3>(p, stride); }
void theirs_load(const void* p, long stride) { _tile_loadd(3, p, stride); }
void ours_store(void* p, long stride) { tile_registers::store<5>(p, stride); }
void theirs_store(void* p, long stride) { _tile_stored(5, p, stride); }
void ours_zero() { tile_registers::zero<7>(); }
void theirs_zero() { _tile_zero(7); }
void ours_bfloat16() { tile_registers::add_bfloat16_product<0, 4, 6>(); }
void theirs_bfloat16() { _tile_dpbf16ps(0, 4, 6); }
void ours_bytes() { tile_registers::add_byte_product<1, 3, 5>(); }
void theirs_bytes() { _tile_dpbsud(1, 3, 5); }
void ours_shapes(const TileShapes& shapes) { tile_registers::load_shapes(shapes); }
void theirs_shapes(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
void ours_release() { tile_registers::release(); }
void theirs_release() { _tile_release(); }
}
"""


def disassembled(source: Path, flags: tuple[str, ...], folder: Path) -> str:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    target = folder / f"{source.stem}.o"
    command = [*find_compiler(), *FLAGS, *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    command = [objdump, "-d", "--no-show-raw-insn", str(target)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def amx_flags(tmp_path: Path) -> tuple[str, ...]:
    amx = next((variant for variant in variants() if variant.name == "amx"), None)
    if amx is None:
        pytest.skip("this architecture has no AMX")
    if said := refusal(amx, tmp_path):
        pytest.skip(f"the compiler does not know AMX: {said}")
    return amx.flags


def test_instructions_are_those_of_the_compiler_s_intrinsics(
    amx_flags: tuple[str, ...], tmp_path: Path
) -> None:
    source = tmp_path / "both.cpp"
    source.write_text(_TILES)
    text = disassembled(source, (*amx_flags, f"-I{SOURCES}"), tmp_path)
    bodies = {}
    for name, body in re.findall(r"<((?:ours|theirs)_\w+)>:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL):
        bodies[name] = re.findall(r"\b((?:ld)?t(?:ile|dp)\w+.*)", body)
    assert len(bodies) == 14 and all(len(body) == 1 for body in bodies.values()), bodies
    for name, body in bodies.items():
        assert body == bodies[name.replace("theirs", "ours")], name


@pytest.mark.parametrize(
    ("source", "product"), [("weight", "tdpbf16ps"), ("quant_product", "tdpbsud")]
)
def test_the_real_variant_multiplies_by_tiles(
    amx_flags: tuple[str, ...], tmp_path: Path, source: str, product: str
) -> None:
    text = disassembled(SOURCES / f"{source}.cpp", (*amx_flags, "-O0"), tmp_path)
    used = set(re.findall(r"\b((?:ld)?t(?:ile|dp)\w+)", text))
    assert used >= {"ldtilecfg", "tileloadd", "tilestored", "tilezero", product}
