"""Folders of adapters: what is not right is named, before anything is made of it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from engine_core.lora.checkpoint import AdapterCheckpoint
from engine_core.lora.peft_config import read_peft_config
from engine_core.model.lora import Product
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, Q, KV, INTER = 12, 16, 4, 20
MAX_RANK = 8


def layer(index: int) -> list[Product]:
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    return [
        Product(tuple(f"{attention}.{name}_proj" for name in "qkv"), HIDDEN, (Q, KV, KV)),
        Product((f"{attention}.o_proj",), Q, (HIDDEN,)),
        Product((f"{mlp}.gate_proj", f"{mlp}.up_proj"), HIDDEN, (INTER, INTER)),
        Product((f"{mlp}.down_proj",), INTER, (HIDDEN,)),
    ]


PRODUCTS = [*layer(0), *layer(1)]
SHAPES = {
    module: (product.in_features, rows)
    for product in PRODUCTS
    for module, rows in zip(product.modules, product.rows, strict=True)
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
    "lora_dropout": 0.1,
    "task_type": "CAUSAL_LM",
}
TARGETS = [
    f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
]


def tensors_of(modules: list[str], rank: int = 4, root: str = "model") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module in modules:
        in_features, rows = SHAPES[module]
        name = f"base_model.model.{module.replace('model', root, 1)}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return tensors


def write(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(
        tensors_of(TARGETS) if tensors is None else tensors,
        directory / "adapter_model.safetensors",
    )
    return directory


def opened(directory: Path) -> AdapterCheckpoint:
    return AdapterCheckpoint(directory, PRODUCTS, MAX_RANK)


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        opened(directory)
    return str(caught.value)


def test_scale_is_in_b_and_what_is_not_adapted_is_none(tmp_path: Path) -> None:
    tensors = tensors_of(TARGETS)
    checkpoint = opened(write(tmp_path, tensors))
    part = checkpoint.part(TARGETS[0], torch.float32, torch.device("cpu"))
    assert part is not None
    name = f"base_model.model.{TARGETS[0]}"
    assert torch.equal(part.a, tensors[f"{name}.lora_A.weight"])
    assert torch.equal(part.b, tensors[f"{name}.lora_B.weight"] * 1.5)
    other = checkpoint.part("model.layers.0.self_attn.k_proj", torch.float32, torch.device("cpu"))
    assert other is None
    assert checkpoint.rank == 4


def test_what_the_models_type_cannot_hold(tmp_path: Path) -> None:
    large = {name: tensor * 30_000 for name, tensor in tensors_of(TARGETS).items()}
    checkpoint = opened(write(tmp_path, large, lora_alpha=40))
    device = torch.device("cpu")
    assert checkpoint.part(TARGETS[0], torch.bfloat16, device) is not None
    with pytest.raises(ModelLoadError, match=r"lora_[AB]\.weight times its scale of .*float16"):
        checkpoint.part(TARGETS[0], torch.float16, device)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one, same = opened(write(tmp_path / "one")), opened(write(tmp_path / "same"))
    assert one.digest == same.digest and len(one.digest) == 32
    assert opened(write(tmp_path / "alpha", lora_alpha=7)).digest != one.digest
    other = {name: tensor + 1 for name, tensor in tensors_of(TARGETS).items()}
    assert opened(write(tmp_path / "values", other)).digest != one.digest


@pytest.mark.parametrize("root", ["model.language_model", "language_model.model"])
def test_the_decoder_of_a_model_with_images(tmp_path: Path, root: str) -> None:
    pattern = rf"{root}\.layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"
    write(tmp_path, tensors_of(TARGETS, root=root), target_modules=pattern)
    assert opened(tmp_path).part(TARGETS[0], torch.float32, torch.device("cpu")) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not supported"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is [5]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"kasa_config": {}}, "kasa_config is {}"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"r": 0}, "r is 0, expected at least 1"),
        ({"r": "4"}, "r is '4', expected an integer"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"use_rslora": 1}, "use_rslora is 1, expected true or false"),
        ({"rank_pattern": [4]}, "rank_pattern is [4], expected an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is {'q_proj': 0}, expected numbers"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern is {'q_proj': 'x'}, expected numbers"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "expected numbers"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern has '(', which is no regular expression"),
        ({"target_modules": None}, "target_modules is None, expected a name"),
        ({"target_modules": []}, "target_modules is [], expected a name"),
        ({"target_modules": "["}, "target_modules has '[', which is no regular expression"),
        ({"layers_to_transform": [0.5]}, "layers_to_transform is [0.5], expected a list of"),
        (
            {"r": 9, "lora_alpha": 9},
            "the rank of model.layers.0.self_attn.q_proj is 9, above --max-",
        ),
        (
            {"target_modules": ["q_proj"]},
            "mlp.down_proj.lora_A.weight is of a module that adapter_c",
        ),
        (
            {"exclude_modules": ["q_proj"]},
            "q_proj.lora_A.weight is of a module that adapter_config",
        ),
        ({"layers_to_transform": 0}, "layers.1.mlp.down_proj.lora_A.weight is of a module that"),
        (
            {"rank_pattern": {"down_proj": 2}},
            "down_proj.lora_A.weight has shape [4, 20], expected [2",
        ),
        ({"target_modules": "all-linear"}, "lora_A of model.layers.0.self_attn.k_proj is missing"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_plain_lora(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused = refusal(write(tmp_path, **changes))
    assert message in refused and str(tmp_path) in refused


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    q = "base_model.model.model.layers.0.self_attn.q_proj"

    def refused(changes: dict[str, torch.Tensor | None]) -> str:
        tensors = {**tensors_of(TARGETS), **changes}
        return refusal(write(tmp_path, {k: v for k, v in tensors.items() if v is not None}))

    assert "lora_B of model.layers.0.self_attn.q_proj is missing" in refused(
        {f"{q}.lora_B.weight": None}
    )
    assert "has shape [4, 13], expected [4, 12]" in refused(
        {f"{q}.lora_A.weight": torch.ones(4, 13)}
    )
    assert "is not finite" in refused({f"{q}.lora_A.weight": torch.full((4, 12), torch.nan)})
    whole = torch.ones(4, 12, dtype=torch.int32)
    assert "has dtype torch.int32" in refused({f"{q}.lora_A.weight": whole})
    for stranger in (
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
        f"{q}.lora_magnitude_vector",
    ):
        message = refused({stranger: torch.ones(4, 12)})
        assert f"tensor {stranger} is of no matrix that can be adapted here" in message


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "none")
    assert "adapter_config.json: no such file" in refusal(tmp_path)
    write(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert "not a whole safetensors file" in refusal(tmp_path)
    header = b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    assert "a tensor has dtype F4, expected floats" in refusal(tmp_path)
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    assert "pickled adapters (.bin) are not read" in refusal(tmp_path)
    save_file({}, weights)
    assert "there is no tensor in it" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "expected a JSON object" in refusal(tmp_path)


def test_unknown_keys_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_peft_config(write(tmp_path, use_magic=True, new_option=None))
    assert "unknown keys are ignored: use_magic" in caplog.text


def test_rank_stabilized_scale_and_patterns(tmp_path: Path) -> None:
    config = read_peft_config(
        write(
            tmp_path,
            use_rslora=True,
            r=4,
            rank_pattern={r"layers\.1\..*": 16},
            alpha_pattern={"q_proj": 8},
        )
    )
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 4.0
    assert config.scale_of("model.layers.0.mlp.down_proj") == 3.0
    assert config.rank_of("model.layers.1.mlp.down_proj") == 16
    assert config.scale_of("model.layers.1.mlp.down_proj") == 1.5
