"""The CPU backend: what the parity cases do not show."""

from __future__ import annotations

import errno
import logging
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.cpu import build, library
from kernels.cpu.ops import CpuOps, TorchCpuOps, load_cpu_ops
from kernels.inputs import (
    Maker,
    Row,
    attention_args,
    linear_args,
    norm_args,
    rope_args,
    sampling_batch,
)
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from tests.support.cpu_kernels import VARIANTS, best_cpu_ops, cpu_ops, threads
from tests.support.cxx import compile_cxx, headers_read_once

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernels.ops import Ops

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    with threads(2):
        yield cpu_ops(request.param)


# Loading


def test_tests_cover_every_variant_that_this_cpu_runs() -> None:
    best_cpu_ops()
    assert tuple(variant.name for variant in library.supported_variants()) == VARIANTS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", build.variants(), ids=lambda variant: variant.name)
def test_every_variant_is_sound_cxx(variant: build.Variant, tmp_path: Path) -> None:
    """Those that this CPU cannot run too: all templates are instantiated, without code."""
    if said := build.refusal(variant, tmp_path):
        pytest.skip(f"the compiler does not know {variant.name}: {said}")
    flags = ["-std=c++17", *variant.flags, "-Wno-psabi", "-Wall", "-Werror"]
    headers = headers_read_once(tmp_path, flags)
    sources = sorted(map(str, build.SOURCES.glob("*.cpp")))
    compile_cxx(*flags, *headers, "-fsyntax-only", *sources)


def test_best_variant_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    best = best_cpu_ops()
    with caplog.at_level(logging.WARNING):
        loaded = load_cpu_ops()
    assert isinstance(loaded, CpuOps) and isinstance(best, CpuOps)
    assert loaded.variant == best.variant
    assert not caplog.records


def test_without_the_library_torch_stands_in_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert type(load_cpu_ops(use_library=False)) is TorchCpuOps
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "switched off" in caplog.text


def test_missing_and_stale_builds_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (build, library):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    assert type(load_cpu_ops()) is TorchCpuOps
    assert "not built" in caplog.text and "python -m kernels.cpu.build" in caplog.text
    (tmp_path / "pagewire_portable_0123.so").touch()
    assert type(load_cpu_ops()) is TorchCpuOps
    assert "older than their sources" in caplog.text


def test_a_process_that_is_refused_tiles_runs_the_next_variant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best_cpu_ops()
    portable, *_ = build.variants()
    tiled = replace(library.supported_variants()[-1], uses_tiles=True)
    monkeypatch.setattr(library, "variants", lambda: (portable, tiled))
    for error, usable in ((errno.ENOSPC, [portable]), (0, [portable, tiled])):
        monkeypatch.setattr(library, "request_tiles", lambda _, error=error: error)
        library._may_use_tiles.cache_clear()
        assert library.supported_variants() == library.supported_variants() == usable
    library._may_use_tiles.cache_clear()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"CPU ops: without {tiled.name}: the system refuses tile registers: "
        + os.strerror(errno.ENOSPC)
    )


@pytest.mark.parametrize("wrong", [None, "linear", "prepare_quantized_linear"])
def test_tiles_that_multiply_wrongly_are_left_alone(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best_cpu_ops()
    *_, plain = library.supported_variants()
    tiled = replace(plain, uses_tiles=True)
    monkeypatch.setattr(library, "supported_variants", lambda: [plain, tiled])
    if wrong is not None:
        right = getattr(CpuOps, wrong)

        def first_is_wrong(ops: CpuOps, first: Any, *rest: Any) -> Any:
            if ops._lib.variant.uses_tiles:
                first = -first if wrong == "linear" else [replace(first[0], data=first[0].data ^ 1)]
            return right(ops, first, *rest)

        monkeypatch.setattr(CpuOps, wrong, first_is_wrong)
    with caplog.at_level("WARNING"):
        loaded = load_cpu_ops()
    assert isinstance(loaded, CpuOps)
    assert loaded._lib.variant.uses_tiles == (wrong is None)
    assert ("without" in caplog.text) == (wrong is not None)


def test_the_system_grants_tiles_where_the_cpu_has_them() -> None:
    best_cpu_ops()
    portable, *_ = build.variants()
    assert (build.request_tiles(portable.path()) == 0) == ("amx" in VARIANTS)


def test_only_one_openmp_runtime_is_mapped() -> None:
    best_cpu_ops().rms_norm(torch.ones(200, 512), torch.ones(512), 1e-5)
    with open("/proc/self/maps") as maps:
        runtimes = set(re.findall(r"\S+/lib(?:g|i|)omp\S*\.so\S*", maps.read()))
    assert len(runtimes) == 1, runtimes


def test_build_error_shows_what_the_compiler_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", "sh -c 'echo this is no compiler >&2; exit 1'")
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 1
    assert "this is no compiler" in capsys.readouterr().err


def test_build_leaves_out_what_the_compiler_does_not_know_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old_compiler"
    old.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mavxvnni*) echo "unknown option -mavxvnni" >&2; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    built = {path.name.rsplit("_", 1)[0] for path in build.build(every=True)}
    assert built == {f"pagewire_{v.name}" for v in build.variants() if v.name != "avx_vnni"}
    said = capsys.readouterr().err
    assert ("WITHOUT the variant avx_vnni" in said) == (len(build.variants()) > 1)


def test_build_is_idempotent_and_removes_stale_libraries() -> None:
    best_cpu_ops()
    folder = build.FOLDER
    stale = folder / "pagewire_portable_0000000000000000.so"
    stale.touch()
    before = {path: path.stat().st_mtime_ns for path in build.build()}
    assert not stale.exists()
    assert {path: path.stat().st_mtime_ns for path in build.build()} == before


# Independence of the batch, bit for bit


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("in_features", [63, 576])
def test_linear_rows_do_not_depend_on_the_batch(
    ops: Ops, dtype: torch.dtype, in_features: int
) -> None:
    args = linear_args(Maker(dtype), 101, in_features, 131, bias=True)
    weight = ops.prepare_linear(args["weight"], args["bias"])
    together = ops.linear(args["x"], weight)
    for count in (1, 2, 3, 5, 8, 20):
        assert torch.equal(ops.linear(args["x"][:count], weight), together[:count])
    torch.set_num_threads(1)
    assert torch.equal(ops.linear(args["x"], weight), together)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_decode_does_not_depend_on_the_batch_or_threads(ops: Ops, dtype: torch.dtype) -> None:
    seq_lens = [700, 1, 513, 512, 40, 1100, 64, 65, 3, 900]
    together = attention_args(Maker(dtype), [1] * 10, seq_lens, 9, 3, 64)
    out = ops.attention(**together)
    torch.set_num_threads(1)
    assert torch.equal(ops.attention(**together), out)
    table = together["batch"].block_table
    for row in range(len(seq_lens)):
        alone = attention_args(Maker(dtype), [1], [seq_lens[row]], 9, 3, 64)
        alone |= {name: together[name] for name in ("k_cache", "v_cache")}
        alone["q"] = together["q"][row : row + 1]
        alone["batch"].block_table.copy_(table[row, : alone["batch"].block_table.shape[1]])
        assert torch.equal(ops.attention(**alone)[0], out[row])


def test_prefill_does_not_depend_on_threads(ops: Ops) -> None:
    args = attention_args(Maker(F32), [90, 33], [300, 33], 9, 3, 64)
    torch.set_num_threads(2)
    two = ops.attention(**args)
    torch.set_num_threads(1)
    assert torch.equal(ops.attention(**args), two)


# Attention's corners


def test_tokens_of_no_sequence_and_empty_sequences_get_zeros(ops: Ops) -> None:
    args = attention_args(Maker(F32), [1, 1, 4], [5, 9, 30], 6, 2, 32)
    batch = args["batch"]
    batch.seq_lens_host[1] = 0
    args["q"] = torch.cat((args["q"], torch.full((3, 6, 32), float("nan"))))
    out = ops.attention(**args)
    assert (out[1] == 0).all() and (out[6:] == 0).all()
    torch.testing.assert_close(out, ReferenceOps().attention(**args))


def test_caches_may_be_views_of_one_tensor(ops: Ops) -> None:
    args = attention_args(Maker(F32), [1, 20], [50, 20], 4, 2, 32)
    both = torch.stack((args["k_cache"], args["v_cache"]), dim=1)
    views = {**args, "k_cache": both[:, 0], "v_cache": both[:, 1]}
    assert torch.equal(ops.attention(**views), ops.attention(**args))
    rope = rope_args(Maker(F32), 20, 4, 2, 32)
    caches = torch.full((4, 2, 16, 2, 32), float("nan"))
    ops.rope_and_cache(**{**rope, "k_cache": caches[:, 0], "v_cache": caches[:, 1]})
    fresh = rope_args(Maker(F32), 20, 4, 2, 32)
    ops.rope_and_cache(**fresh)
    torch.testing.assert_close(caches[:, 0], fresh["k_cache"], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(caches[:, 1], fresh["v_cache"], equal_nan=True, rtol=0, atol=0)


def test_large_scores_do_not_overflow(ops: Ops) -> None:
    args = attention_args(Maker(F32), [1, 40], [200, 90], 3, 1, 64)
    args["scale"] = 40.0
    torch.testing.assert_close(
        ops.attention(**args), ReferenceOps().attention(**args), rtol=1e-4, atol=1e-4
    )


# Wrong arguments: C++ must never see them


def test_block_id_out_of_range_is_refused(ops: Ops) -> None:
    args = attention_args(Maker(F32), [1, 3], [40, 20], 4, 2, 32)
    args["batch"].block_table[1, 1] = args["k_cache"].shape[0]
    with pytest.raises(IndexError, match="sequence 1 of length 20"):
        ops.attention(**args)
    args["batch"].block_table[1, 1] = -1
    with pytest.raises(IndexError, match="sequence 1"):
        ops.attention(**args)


def test_sequence_beyond_its_block_table_is_refused(ops: Ops) -> None:
    args = attention_args(Maker(F32), [1], [40], 4, 2, 32)
    args["batch"].seq_lens_host[0] = 1000
    with pytest.raises(IndexError, match="sequence 0 of length 1000"):
        ops.attention(**args)


def test_queries_beyond_the_sequence_or_the_batch_are_refused(ops: Ops) -> None:
    args = attention_args(Maker(F32), [5], [40], 4, 2, 32)
    args["batch"].seq_lens_host[0] = 4
    with pytest.raises(IndexError, match="sequence 0 of length 4"):
        ops.attention(**args)
    args["batch"].seq_lens_host[0] = 40
    args["batch"].query_start_loc_host[1] = 6
    with pytest.raises(IndexError, match=r"query tokens \[0, 6\] of 5"):
        ops.attention(**args)


@pytest.mark.parametrize(("name", "value"), [("slot_mapping", 10**6), ("slot_mapping", -2)])
def test_slot_out_of_range_writes_nothing(ops: Ops, name: str, value: int) -> None:
    args = rope_args(Maker(F32), 5, 4, 2, 32)
    args[name][4] = value
    q = args["q"].clone()
    with pytest.raises(IndexError, match="token 4"):
        ops.rope_and_cache(**args)
    assert torch.equal(args["q"], q) and args["k_cache"].isnan().all()


def test_position_out_of_range_is_refused(ops: Ops) -> None:
    args = rope_args(Maker(F32), 5, 4, 2, 32)
    args["positions"][2] = 4096
    with pytest.raises(IndexError, match="token 2 has position 4096 of 4096"):
        ops.rope_and_cache(**args)


def test_wrong_shapes_and_dtypes_are_refused(ops: Ops) -> None:
    norm = norm_args(Maker(F32), 3, 8)
    with pytest.raises(ShapeError, match="rms_norm: weight"):
        ops.rms_norm(norm["x"], norm["weight"][:7], 1e-5)
    with pytest.raises(ShapeError, match="add_rms_norm: residual"):
        ops.add_rms_norm(norm["x"], norm["x"].half(), norm["weight"], 1e-5)
    with pytest.raises(ShapeError, match="silu_mul: gate_up"):
        ops.silu_mul(torch.zeros(2, 7))
    with pytest.raises(ShapeError, match="linear: weight"):
        ops.linear(norm["x"], ops.prepare_linear(torch.zeros(4, 9)))
    with pytest.raises(ShapeError, match="prepare_linear: bias"):
        ops.prepare_linear(torch.zeros(4, 9), torch.zeros(9))
    with pytest.raises(ShapeError, match="sample: logits"):
        ops.sample(torch.zeros(2, 5, dtype=torch.float64), sampling_batch([Row(), Row()]))
    with pytest.raises(ShapeError, match="sample: temperature"):
        ops.sample(torch.zeros(2, 5), sampling_batch([Row()]))
    args = attention_args(Maker(F32), [1], [4], 4, 2, 32)
    with pytest.raises(ShapeError, match="attention: v_cache"):
        ops.attention(**{**args, "v_cache": args["v_cache"][:, :, :1]})


# Layouts and the choice of matrix product


def test_strided_rows(ops: Ops) -> None:
    wide = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(90)
    view, dense = wide[:, 3:93], wide[:, 3:93].clone()
    assert torch.equal(ops.rms_norm(view, weight, 1e-5), ops.rms_norm(dense, weight, 1e-5))
    assert torch.equal(ops.silu_mul(view), ops.silu_mul(dense))
    prepared = ops.prepare_linear(torch.randn(90, 33).t())
    assert torch.equal(ops.linear(view, prepared), ops.linear(dense, prepared))
    residual = wide[:, 100:190]
    expected = residual + dense
    ops.add_rms_norm(view, residual, weight, 1e-5)
    assert torch.equal(wide[:, 100:190], expected)


def test_no_tokens(ops: Ops) -> None:
    empty = torch.zeros(0, 8)
    assert ops.rms_norm(empty, torch.ones(8), 1e-5).shape == (0, 8)
    assert ops.silu_mul(empty).shape == (0, 4)
    assert ops.linear(empty, ops.prepare_linear(torch.ones(3, 8))).shape == (0, 3)
    ops.rope_and_cache(**rope_args(Maker(F32), 0, 4, 2, 32))


def test_half_conversion_rounds_as_torch_does(ops: Ops) -> None:
    """Every float16 and bfloat16 value through silu_mul(x, 1)'s neighbour: rms_norm's weight."""
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        values = bits.view(dtype)
        values = values[values.float().isfinite()]
        x = torch.ones(1, values.numel(), dtype=dtype)
        out = ops.rms_norm(x, values, 0.0)[0]
        assert torch.equal(out.view(torch.int16), values.view(torch.int16))
        # Sums land between representable values: rounding to nearest even.
        other = values.flip(0).contiguous()
        residual = values.clone().unsqueeze(0)
        ops.add_rms_norm(other.unsqueeze(0), residual, torch.ones_like(values), 1e-5)
        expected = (values.float() + other.float()).to(dtype)
        assert torch.equal(residual[0].view(torch.int16), expected.view(torch.int16))
