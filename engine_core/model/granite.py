"""Granite 3 (IBM): Llama with a multiplier at every joint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.layout import GgufDialect
from engine_core.model.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class GraniteForCausalLM(LlamaForCausalLM):
    hf_defaults: ClassVar[dict[str, object]] = {
        **LlamaForCausalLM.hf_defaults,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    gguf = GgufDialect(
        "granite",
        keys={
            "embedding_scale": "embedding_multiplier",
            "attention.scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        defaults={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        interleaved=True,
    )

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        """residual_multiplier m scales what each block adds. Divided by m, the residual takes
        blocks as they are, and its norms give the same with their epsilon divided by m^2."""
        multipliers = {}
        for key in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ):
            multipliers[key] = fields.number(key)
            # Beyond that, squares and quotients of them are no floats.
            if not 1e-9 <= multipliers[key] <= 1e9:
                raise fields.wrong(key, "1e-9 to 1e9")
        residual = multipliers["residual_multiplier"]
        return super().read_differences(fields, head_dim) | {
            "embedding_scale": multipliers["embedding_multiplier"] / residual,
            "rms_norm_eps": fields.number("rms_norm_eps") / residual**2,
            "attention_scale": multipliers["attention_multiplier"],
            "logit_scale": 1 / multipliers["logits_scaling"],
        }
