"""The flags of adapters: what is wrong is named before any weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine_core.lora.start import lora_shape
from engine_core.model.loader import OpenedModel, open_model
from engine_core.model.lora import LoraShape, all_products
from engine_core.model.registry import find_architecture
from pagewire.adapter_list import adapter_list
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from pagewire.model_source import resolve_model
from pagewire.settings import load_config
from tests.engine_core.test_lora_checkpoint import write as write_adapter
from tests.support.tiny_model import TinySpec, write_gguf, write_hf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_model(
        resolve_model(str(write_hf(tmp_path_factory.mktemp("m") / "tiny", TinySpec())))
    )


def refusal(opened: OpenedModel, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        lora_shape(load_config(EngineConfig, list(flags)), opened)
    return str(caught.value)


def test_off_by_default(opened: OpenedModel) -> None:
    assert lora_shape(EngineConfig(), opened) is None
    assert lora_shape(EngineConfig(enable_lora=True), opened) == LoraShape(8, 16)


def test_flags_that_contradict_each_other(opened: OpenedModel, tmp_path: Path) -> None:
    assert refusal(opened, "--lora-modules=a=/a") == "--lora-modules needs --enable-lora"
    several = f"--lora-modules=a={tmp_path},b={tmp_path}"
    assert refusal(opened, "--enable-lora", several, "--max-loras=1") == (
        "--lora-modules has 2 adapters, but --max-loras is 1"
    )
    assert refusal(opened, "--enable-lora", f"--lora-modules=tiny={tmp_path}") == (
        "--lora-modules: tiny is the name of the model itself"
    )


def test_folders_that_are_wrong(opened: OpenedModel, tmp_path: Path) -> None:
    message = refusal(opened, "--enable-lora", f"--lora-modules=sql={tmp_path / 'none'}")
    assert message.startswith("--lora-modules sql=") and message.endswith("none: no such directory")
    write_adapter(tmp_path, r=32)
    message = refusal(opened, "--enable-lora", f"--lora-modules=sql={tmp_path}")
    assert "rank of model.layers.0.self_attn.q_proj is 32, above --max-lora-rank 16" in message
    write_adapter(tmp_path)
    message = refusal(opened, "--enable-lora", f"--lora-modules=sql={tmp_path}")
    assert "lora_A.weight has shape [4, 12], expected [4, 36]" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", "'sql' is not NAME=PATH"),
        ("sql=", "'sql=' is not NAME=PATH"),
        ("=/a", "a name of 0 characters"),
        ("a=/a,,b=/b", "'' is not NAME=PATH"),
        ("a=/a,a=/b", "a is there twice"),
        ("a b=/a", "printable ASCII"),
        (f"{'a' * 129}=/a", "129 characters"),
    ],
)
def test_lists_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules: ") as caught:
        load_config(EngineConfig, [f"--lora-modules={text}"])
    assert message in str(caught.value)


def test_a_path_may_hold_an_equals_sign() -> None:
    assert adapter_list("a=/x=1,b=c") == {"a": "/x=1", "b": "c"}


def test_a_gguf_has_the_modules_of_its_hugging_face_layout(tmp_path: Path) -> None:
    opened = open_model(resolve_model(str(write_gguf(tmp_path / "tiny.gguf", TinySpec()))))
    layout = find_architecture(opened.config.architecture, "").layout
    first = all_products(layout, opened.config)[0]
    assert first.modules == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert (first.in_features, first.rows) == (36, (36, 12, 12))
