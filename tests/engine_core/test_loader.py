"""Safetensors: what loads, and which file and tensor a refusal names."""

from __future__ import annotations

import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from engine_core.device.cpu import CpuDevice
from engine_core.model.embedding import PackedEmbedding
from engine_core.model.loader import load_model, open_model
from kernels.registry import load_ops
from pagewire.errors import ModelLoadError
from pagewire.model_source import resolve_model
from tests.support.tiny_model import TinySpec, config_json, tiny_weights, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.loader import OpenedModel


def open_path(path: Path) -> OpenedModel:
    return open_model(resolve_model(str(path)))


def load(path: Path, progress: Any = lambda done, total: None) -> Any:
    device = CpuDevice("1MiB", 1)
    opened = open_path(path)
    return load_model(
        opened, load_ops("reference"), device.torch_device, torch.float32, 64, progress
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_weights_are_fused_unchanged(tmp_path: Path, num_shards: int) -> None:
    spec = TinySpec(attention_bias=True)
    model = load(write_hf(tmp_path, spec, num_shards=num_shards))
    weights = tiny_weights(spec)
    prefix = "model.layers.1.self_attn"
    attention, mlp = model._blocks.blocks[2:4]  # of layer 1
    for kind in ("weight", "bias"):
        expected = torch.cat([weights[f"{prefix}.{p}_proj.{kind}"] for p in "qkv"])
        assert torch.equal(getattr(attention.qkv, kind), expected)
    gate_up = [weights[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(mlp.gate_up.weight, torch.cat(gate_up))
    assert mlp.gate_up.bias is None
    assert torch.equal(model._head.weight, weights["lm_head.weight"])


def test_a_tied_head_is_the_embedding_s_only_memory(tmp_path: Path) -> None:
    spec = TinySpec(tie_embeddings=True)
    opened = open_path(write_hf(tmp_path, spec))
    table, device = tiny_weights(spec)["model.embed_tokens.weight"], torch.device("cpu")
    for name, dtype in itertools.product(("reference", "cpu"), (torch.float32, torch.bfloat16)):
        model = load_model(opened, load_ops(name), device, dtype, 64, lambda done, total: None)
        assert isinstance(model._embedding, PackedEmbedding)
        assert model._head is model._embedding.table
        ids = torch.tensor([3, 0, 3, spec.vocab_size - 1])
        assert torch.equal(model._embedding.rows(ids), table[ids].to(dtype))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_converts_the_stored_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    write_hf(tmp_path, TinySpec())
    weights = {name: tensor.to(stored) for name, tensor in tiny_weights(TinySpec()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert torch.equal(model._embedding.table, weights["model.embed_tokens.weight"].float())


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(write_hf(tmp_path, TinySpec()), lambda done, total: calls.append((done, total)))
    size = sum(t.numel() * 4 for t in tiny_weights(TinySpec()).values())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_wins_over_a_stored_head(
    tmp_path: Path, equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-project/vllm#6758: fine-tuned files of tied models also hold lm_head.weight."""
    spec = TinySpec(tie_embeddings=True)
    embedding = tiny_weights(spec)["model.embed_tokens.weight"]
    head = embedding.clone() if equal else embedding + 1
    write_hf(tmp_path, spec, extra_tensors={"lm_head.weight": head})
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert torch.equal(model._head.weight, embedding)
    assert ("lm_head.weight differs from the embedding" in caplog.text) == (not equal)


def test_unused_tensors_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stray = {
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(36),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    with caplog.at_level(logging.WARNING):
        open_path(write_hf(tmp_path, TinySpec(), extra_tensors=stray))
    assert "1 tensors are not part of LlamaForCausalLM" in caplog.text
    assert "q_proj.bias" in caplog.text


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        open_path(tmp_path / "nowhere")


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither config.json nor a .gguf file"):
        open_path(tmp_path)


def test_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(TinySpec())))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="pickled weights"):
        open_path(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    file = write_hf(tmp_path, TinySpec()) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a whole safetensors file"):
        open_path(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_hf(tmp_path, TinySpec(), num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors: no such file"):
        open_path(tmp_path)


def test_shard_outside_the_directory(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", TinySpec(), num_shards=2)
    index = tmp_path / "a" / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["lm_head.weight"] = "../model.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=r"no such file, but model\.safetensors\.index"):
        open_path(tmp_path / "a")


def test_index_that_puts_a_tensor_in_the_wrong_shard(tmp_path: Path) -> None:
    write_hf(tmp_path, TinySpec(), num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    here = raw["weight_map"]["lm_head.weight"]
    (other,) = set(raw["weight_map"].values()) - {here}
    raw["weight_map"]["lm_head.weight"] = other
    index.write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=f"{other}: tensor lm_head.weight is missing"):
        open_path(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_bad_index(tmp_path: Path, content: str) -> None:
    write_hf(tmp_path, TinySpec(), num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        open_path(tmp_path)


def _save(directory: Path, weights: dict[str, torch.Tensor]) -> Path:
    write_hf(directory, TinySpec())
    save_file(weights, directory / "model.safetensors")
    return directory


def test_missing_tensor(tmp_path: Path) -> None:
    weights = tiny_weights(TinySpec())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        open_path(_save(tmp_path, weights))


def test_wrong_shape(tmp_path: Path) -> None:
    weights = tiny_weights(TinySpec())
    weights["lm_head.weight"] = torch.zeros(299, 36)
    with pytest.raises(
        ModelLoadError, match=r"lm_head\.weight has shape \[299, 36\], expected \[300, 36\]"
    ):
        open_path(_save(tmp_path, weights))


def test_integer_weights(tmp_path: Path) -> None:
    weights = tiny_weights(TinySpec())
    weights["lm_head.weight"] = torch.zeros(300, 36, dtype=torch.int8)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight has dtype I8; known: F64"):
        open_path(_save(tmp_path, weights))
