"""Adapters of tiny models, made and saved by PEFT, which is also what they are compared to."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path


def save_adapter(model: Any, directory: Path, *, seed: int, std: float = 0.3, **lora: Any) -> Path:
    """An adapter of a transformers model, which is left as it was. lora: of peft.LoraConfig.
    The matrices are drawn wide, so that the tokens are others than the model's own."""
    import peft

    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        adapted.save_pretrained(directory)
        adapted.unload()
    return directory


class Adapted:
    """The transformers model with each of several adapters."""

    def __init__(self, model: Any, adapters: dict[str, Path]) -> None:
        import peft

        self._known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        first, *others = adapters
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = peft.PeftModel.from_pretrained(
                model, str(adapters[first]), adapter_name=first
            ).eval()
            for name in others:
                self._model.load_adapter(str(adapters[name]), adapter_name=name)

    def _use(self, name: str) -> Any:
        """The empty name is the base model."""
        if not name:
            return self._model.disable_adapter()
        self._model.set_adapter(name)
        return torch.inference_mode()

    def logits(self, name: str, token_ids: list[int]) -> torch.Tensor:
        """[T, V]"""
        with self._use(name), torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, name: str, prompt: list[int], num_tokens: int) -> list[int]:
        """Computed once for each prompt."""
        key = (name, tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._greedy(name, prompt, num_tokens)
        return self._known[key]

    def _greedy(self, name: str, prompt: list[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(name, ids)[-1].argmax()))
        return ids[len(prompt) :]
