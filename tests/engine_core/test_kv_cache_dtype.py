"""--kv-cache-dtype: what it means, how much fits, and where scales of fp8 come from."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from engine_core.device.cpu import CpuDevice
from engine_core.device.memory import block_num_bytes
from engine_core.engine_builder import build_engine
from engine_core.model.kv_scales import read_kv_scales, resolve_kv_cache_dtype
from engine_core.model.loader import open_model
from engine_core.runner.kv_caches import allocate_kv_caches
from engine_core.runner.kv_calibration import calibrate_kv_scales
from engine_core.sim_builder import build_simulated
from kernels.reference.ops import ReferenceOps
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.model_source import resolve_model
from tests.parity.harness import load
from tests.support.tiny_model import TinySpec, tiny_weights, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.ops import Ops

FP8, INT8, F32 = torch.float8_e4m3fn, torch.int8, torch.float32
SPEC = TinySpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, max_positions=64)
NAMES = [f"model.layers.{i}.self_attn.{kind}" for i in range(2) for kind in ("k", "v")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf(tmp_path_factory.mktemp("kv") / "model", SPEC))


def build(path: str, **more: Any) -> Any:
    config: dict[str, Any] = {"model": path, "device": "cpu", "cpu_threads": 1}
    config |= {"dtype": "float32", "kv_cache_memory": "1MiB", **more}
    return build_engine(EngineConfig(**config), lambda *_: None)


@pytest.mark.parametrize(("name", "per_head"), [("fp8", 32), ("fp8_e4m3", 32), ("int8", 36)])
def test_more_blocks_fit(path: str, name: str, per_head: int) -> None:
    """2 layers, 2 heads of 32, keys and values, 16 tokens."""
    built, plain = build(path, kv_cache_dtype=name), build(path)
    assert plain.num_blocks == (1 << 20) // (2 * 2 * 2 * 16 * 4 * 32)
    assert built.num_blocks == (1 << 20) // (2 * 2 * 2 * 16 * per_head)
    assert built.dtype == f"float32, {name.removesuffix('_e4m3')} KV cache"
    assert plain.dtype == "float32"
    sixteen = build(path, dtype="bfloat16")
    assert sixteen.num_blocks * 1.75 < built.num_blocks <= sixteen.num_blocks * 2 + 1


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, FP8, INT8])
@pytest.mark.parametrize("share_blocks", [False, True])
def test_blocks_take_the_bytes_that_are_planned(
    path: str, dtype: torch.dtype, share_blocks: bool
) -> None:
    loaded = load(path, "cpu", 64)
    device = CpuDevice("1MiB", 1)
    device.layers_share_blocks = share_blocks
    caches = allocate_kv_caches(loaded.model, device, 7, 16, dtype)
    taken = sum(paged.numel() * paged.itemsize for cache in caches for paged in cache.paged)
    assert taken == 7 * block_num_bytes(loaded.config, 16, dtype)
    assert {paged.shape[0] for cache in caches for paged in cache.paged} == {7}


def test_a_host_tier_holds_codes_and_scales(path: str) -> None:
    block = 2 * 2 * 2 * 16 * 36
    built = build(path, kv_cache_dtype="int8", kv_offload_memory=str(10 * block + 1))
    assert built.num_host_blocks == 10


def test_kernels_without_such_a_cache_refuse_it() -> None:
    caches = {"kv_cache_dtypes": frozenset((FP8,)), "has_narrow_kv_caches": False}
    ops = cast("Ops", SimpleNamespace(name="odd", **caches))
    assert resolve_kv_cache_dtype("fp8", torch.bfloat16, ops) == FP8
    assert resolve_kv_cache_dtype("auto", torch.bfloat16, ops) == torch.bfloat16
    assert resolve_kv_cache_dtype("auto", F32, ops, rounds_activations=True) == F32
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: the odd kernels have no such"):
        resolve_kv_cache_dtype("int8", torch.bfloat16, ops)
    with pytest.raises(ConfigError, match=r"bfloat16: the odd kernels .* beside float32"):
        resolve_kv_cache_dtype("bfloat16", F32, ops)


def test_16_bits_beside_float32() -> None:
    ops = ReferenceOps()
    assert resolve_kv_cache_dtype("auto", F32, ops) == F32
    assert resolve_kv_cache_dtype("auto", F32, ops, rounds_activations=True) == torch.bfloat16
    assert resolve_kv_cache_dtype("float32", F32, ops, rounds_activations=True) == F32
    assert resolve_kv_cache_dtype("float16", F32, ops) == torch.float16
    narrow = torch.bfloat16
    assert resolve_kv_cache_dtype("auto", narrow, ops, rounds_activations=True) == narrow
    with pytest.raises(ConfigError, match=r"float16: the reference kernels .* beside bfloat16"):
        resolve_kv_cache_dtype("float16", narrow, ops)


def test_packed_weights_have_a_cache_of_16_bits_where_nobody_asked_for_float32(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("engine_core.device.cpu.multiplies_bfloat16", lambda: False)
    packed = build(path, dtype="auto", quantization="int8")
    assert packed.dtype == "float32 with int8 weights, bfloat16 KV cache"
    assert packed.num_blocks == (1 << 20) // (2 * 2 * 2 * 16 * 2 * 32)
    assert build(path, dtype="float32", quantization="int8").dtype == "float32 with int8 weights"
    assert build(path, dtype="auto").dtype == "float32"


def test_is_simulated(path: str) -> None:
    def simulate(name: str) -> Any:
        options: dict[str, Any] = {"device": "sim:l4", "kv_cache_memory": "1MiB"}
        return build_simulated(
            EngineConfig(model=path, dtype="bfloat16", kv_cache_dtype=name, **options)
        )

    assert simulate("fp8").num_blocks == 2 * simulate("auto").num_blocks
    assert simulate("int8").num_blocks == (1 << 20) // (2 * 2 * 2 * 16 * 36)
    assert simulate("int8").dtype == "bfloat16, int8 KV cache"
    with pytest.raises(ConfigError, match="--kv-cache-dtype float16: GPUs have no such cache"):
        simulate("float16")


class TestStoredScales:
    def write(self, tmp_path: Path, scales: dict[str, torch.Tensor]) -> str:
        return str(write_hf(tmp_path / "model", SPEC, extra_tensors=scales))

    def read(self, path: str) -> Any:
        opened = open_model(resolve_model(path))
        return read_kv_scales(opened.checkpoint, opened.config, range(2))

    @pytest.mark.parametrize("below", ["{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale"])
    def test_one_scale_is_that_of_all_heads(
        self, tmp_path: Path, below: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        names = [f"{name[:-1]}{below.format(name[-1])}" for name in NAMES]
        shapes: list[tuple[int, ...]] = [(), (1,), (2,), (2, 1, 1)]
        stored = {
            name: torch.full(shape, 0.25 + at).to(torch.bfloat16)
            for at, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }
        path = self.write(tmp_path, stored)
        scales = self.read(path)
        assert [[it.tolist() for it in layer] for layer in scales] == [
            [[0.25, 0.25], [1.25, 1.25]],
            [[2.25, 2.25], [3.25, 3.25]],
        ]
        built = build(path, kv_cache_dtype="fp8")
        assert [it.tolist() for it in built.runner._kv_caches[1][2:]] == [[2.25] * 2, [3.25] * 2]
        assert "are not part of" not in caplog.text

    def test_a_rank_has_those_of_its_heads(self, tmp_path: Path) -> None:
        stored = {f"{name}_scale": torch.tensor([1.0, 2.0]) for name in NAMES}
        opened = open_model(resolve_model(self.write(tmp_path, stored)))
        for heads in ((1,), (0, 0, 1)):
            scales = read_kv_scales(opened.checkpoint, opened.config, heads)
            assert scales is not None
            assert scales[1][0].tolist() == [1.0 + head for head in heads]

    def test_one_scale_of_both(self, tmp_path: Path) -> None:
        stored = {f"{NAMES[2 * i][:-1]}kv_scale": torch.tensor(0.5 + i) for i in range(2)}
        scales = self.read(self.write(tmp_path, stored))
        read = [[it.tolist() for it in layer] for layer in scales]
        assert read == [[[0.5] * 2] * 2, [[1.5] * 2] * 2]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (torch.ones(3), r"k_scale has shape \[3\], expected one scale, or one for each of 2"),
            (torch.tensor(0.0), "k_scale has a scale that is not a finite number above 0"),
            (torch.tensor(float("inf")), "k_scale has a scale that is not a finite"),
            (None, r"tensor model\.layers\.1\.self_attn\.k_scale is missing, but other scales"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, tmp_path: Path, wrong: torch.Tensor | None, message: str
    ) -> None:
        stored = {f"{name}_scale": torch.tensor(1.0) for name in NAMES}
        if wrong is None:
            del stored[f"{NAMES[2]}_scale"]
        else:
            stored[f"{NAMES[2]}_scale"] = wrong
        path = self.write(tmp_path, stored)
        with pytest.raises(ModelLoadError, match=message):
            build(path, kv_cache_dtype="fp8")
        build(path)


class TestCalibration:
    def calibrate(self, path: str) -> Any:
        loaded = load(path, "cpu", 64)
        return calibrate_kv_scales(loaded.model, loaded.device, 64, F32)

    def test_small_keys_and_values_have_scales_of_one(self, path: str) -> None:
        assert all((scale == 1).all() for layer in self.calibrate(path) for scale in layer)

    def test_a_large_bias_raises_the_scale_of_its_head(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        spec = replace(SPEC, attention_bias=True)
        name = "model.layers.1.self_attn.k_proj.bias"
        bias = tiny_weights(spec)[name].clone()
        bias[40] = 900.0  # of the second head
        path = write_hf(tmp_path / "model", spec, extra_tensors={name: bias})
        first, second = self.calibrate(str(path))
        assert all((scale == 1).all() for scale in (*first, second[1]))
        assert second[0][0] == 1
        assert float(second[0][1]) in (8.0, 16.0)
        assert "1 of 8 heads get a scale above 1" in caplog.text
