"""The architectures that can be served, by the name in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.gemma2 import Gemma2ForCausalLM
from engine_core.model.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from engine_core.model.granite import GraniteForCausalLM
from engine_core.model.llama import LlamaForCausalLM
from engine_core.model.mistral import MistralForCausalLM
from engine_core.model.mixtral import MixtralForCausalLM
from engine_core.model.olmo2 import Olmo2ForCausalLM
from engine_core.model.phi3 import Phi3ForCausalLM
from engine_core.model.qwen2 import Qwen2ForCausalLM
from engine_core.model.qwen3 import Qwen3ForCausalLM
from engine_core.model.qwen3_moe import Qwen3MoeForCausalLM
from engine_core.model.smollm3 import SmolLM3ForCausalLM
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.decoder import DecoderModel

ARCHITECTURES: dict[str, type[DecoderModel]] = {
    cls.__name__: cls
    for cls in (
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3ForConditionalGeneration,
        GraniteForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        MixtralForCausalLM,
        Olmo2ForCausalLM,
        Phi3ForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        SmolLM3ForCausalLM,
    )
}


def find_architecture(name: str, origin: str) -> type[DecoderModel]:
    """Raises ModelLoadError naming `origin` (a file) and what is known."""
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{origin}: architecture {name!r} is unknown; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def find_gguf_architecture(
    name: str, origin: str, *, has_experts: bool, has_window: bool
) -> type[DecoderModel]:
    """By general.architecture. Raises ModelLoadError naming `origin` and what is known.

    One name may stand for several architectures, which differ in what they have.
    """
    known = [(cls.gguf, cls) for cls in ARCHITECTURES.values() if cls.gguf is not None]
    variants = {dialect.variant: cls for dialect, cls in known if dialect.architecture == name}
    if not variants:
        names = sorted({dialect.architecture for dialect, _ in known})
        raise ModelLoadError(
            f"{origin}: architecture {name!r} is unknown; known in GGUF: {', '.join(names)}"
        )
    if has_window and not has_experts and "windowed" in variants:
        return variants["windowed"]
    wanted = "experts" if has_experts else "plain"
    if wanted not in variants:
        with_or_without = "with" if has_experts else "without"
        raise ModelLoadError(
            f"{origin}: {name} {with_or_without} a mixture of experts is not supported"
        )
    return variants[wanted]
