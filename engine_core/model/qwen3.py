"""Qwen 3 (arXiv:2505.09388), dense: Qwen 2 with norms on each head's q and k, not biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.llama import attention_biases
from engine_core.model.qwen2 import Qwen2ForCausalLM

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    hf_defaults: ClassVar[dict[str, object]] = {**Qwen2ForCausalLM.hf_defaults, "head_dim": 128}
    layout = Layout(qk_norm="head")
    gguf = GgufDialect("qwen3")

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        return attention_biases(fields)
