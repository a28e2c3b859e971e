"""The architectures that can be served, by the name in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.llama import LlamaForCausalLM
from engine_core.model.mistral import MistralForCausalLM
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.decoder import DecoderModel

ARCHITECTURES: dict[str, type[DecoderModel]] = {
    cls.__name__: cls for cls in (LlamaForCausalLM, MistralForCausalLM)
}


def find_architecture(name: str, origin: str) -> type[DecoderModel]:
    """Raises ModelLoadError naming `origin` (a file) and what is known."""
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{origin}: architecture {name!r} is unknown; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]
