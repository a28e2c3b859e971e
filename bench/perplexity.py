"""What a model loses by the form in which its matrices and its KV cache are computed.

    python bench/perplexity.py [--model NAME] [--tokens 24576] [--window 1024]
        [--modes bfloat16 packed int8] [--kv-cache-dtypes auto fp8 int8]
        [--text FILE] [--json FILE]

Every mode reads the same windows of a text, each from its own beginning, and predicts
each next token. float32, with all matrices dequantized, is the reference: besides the
perplexity (and its ratio to the reference's) the report has the mean Kullback-Leibler
divergence of the predictions from the reference's, in millinats, and how often the
likeliest token is the same. A model may be any that is served, also an AWQ, GPTQ, fp8 or
compressed-tensors checkpoint: packed computes its own codes. The text is the language
reference that comes with Python (pydoc_data.topics) unless another is given.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.device.cpu import CpuDevice
from engine_core.model.inputs import ModelInput
from engine_core.model.kv_scales import FP8, read_kv_scales, resolve_kv_cache_dtype
from engine_core.model.loader import load_model, open_model
from engine_core.runner.kv_caches import allocate_kv_caches, set_kv_scales
from engine_core.runner.kv_calibration import calibrate_kv_scales
from kernels.ops import AttentionBatch
from kernels.registry import load_ops
from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core.model.decoder import DecoderModel
    from engine_core.model.quantization import Quantization

BLOCK_SIZE = 16
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "int8")
REFERENCE = "float32"
MODES: dict[str, tuple[torch.dtype, Quantization]] = {
    REFERENCE: (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "packed": (torch.bfloat16, "packed"),
    "packed-float32": (torch.float32, "packed"),
    "int8": (torch.bfloat16, "int8"),
    "int8-float32": (torch.float32, "int8"),
}
"""Dtype of the activations (and of an auto KV cache), and --quantization."""


@dataclass
class Score:
    """Sums over all predicted tokens."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same_top: int = 0
    seconds: float = field(default=0.0)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


class Mode:
    """One model in one form, with a KV cache for a window."""

    def __init__(self, model_name: str, name: str, kv_cache: str, window: int) -> None:
        self.name = name if kv_cache == "auto" else f"{name}, {kv_cache} KV"
        dtype, quantization = MODES[name]
        opened, ops = open_model(resolve_model(model_name)), load_ops("cpu")
        device = CpuDevice("64MiB", None)
        self._model: DecoderModel = load_model(
            opened,
            ops,
            device.torch_device,
            dtype,
            window,
            lambda done, total: None,
            quantization,
        )
        num_blocks = -(-window // BLOCK_SIZE) + 1
        kv_dtype = resolve_kv_cache_dtype(kv_cache, dtype, ops)
        self._kv_caches = allocate_kv_caches(self._model, device, num_blocks, BLOCK_SIZE, kv_dtype)
        if kv_dtype == FP8:
            heads = range(opened.config.num_kv_heads)
            scales = read_kv_scales(opened.checkpoint, opened.config, heads)
            scales = scales or calibrate_kv_scales(self._model, device, window, dtype)
            set_kv_scales(self._kv_caches, scales)
        self.score = Score()

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[T - 1, V] float32: of each next token."""
        began = time.perf_counter()
        num = len(token_ids)
        starts = torch.tensor([0, num], dtype=torch.int32)
        lens = torch.tensor([num], dtype=torch.int32)
        table = torch.arange(1, -(-num // BLOCK_SIZE) + 1, dtype=torch.int32).view(1, -1)
        positions = torch.arange(num)
        batch = AttentionBatch(starts, lens, table, 0, num, num, starts, lens)
        ids = torch.tensor(token_ids)
        inputs = ModelInput(ids, positions, positions + BLOCK_SIZE, batch, torch.arange(num - 1))
        with torch.inference_mode():
            logits = self._model.forward(inputs, self._kv_caches)
            assert logits is not None
            self.score.seconds += time.perf_counter() - began
            return torch.log_softmax(logits.float(), dim=-1)

    def compare(self, logprobs: torch.Tensor, reference: torch.Tensor, next_ids: list[int]) -> None:
        score, targets = self.score, torch.tensor(next_ids).unsqueeze(1)
        score.tokens += len(next_ids)
        score.loss -= float(logprobs.gather(1, targets).double().sum())
        terms = reference.exp() * (reference - logprobs)
        score.divergence += float(terms.double().sum())
        score.same_top += int((logprobs.argmax(1) == reference.argmax(1)).sum())


def read_windows(options: argparse.Namespace) -> Iterator[list[int]]:
    if options.text is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    else:
        text = Path(options.text).read_text()
    tokenizer = load_tokenizer(resolve_model(options.model).path).tokenizer
    # As many characters as give enough tokens and not the whole book.
    ids = tokenizer.encode(text[: 12 * options.tokens], add_special_tokens=False).ids
    ids = ids[: options.tokens]
    if len(ids) < options.tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {options.tokens} are wanted")
    for start in range(0, len(ids) - 1, options.window):
        yield ids[start : start + options.window]


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity by the form of matrices and KV cache.")
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES))
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", choices=KV_CACHE_DTYPES, default=KV_CACHE_DTYPES[:1]
    )
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--text", help="a file; default: Python's own language reference")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    forms = [(name, kv) for name in options.modes for kv in options.kv_cache_dtypes]
    forms = list(dict.fromkeys([(REFERENCE, "auto"), *forms]))
    modes = [Mode(options.model, name, kv, options.window) for name, kv in forms]
    for window in read_windows(options):
        if len(window) < 2:
            continue
        reference = modes[0].logprobs(window)
        for mode in modes:
            logprobs = reference if mode is modes[0] else mode.logprobs(window)
            mode.compare(logprobs, reference, window[1:])
    report(modes, options)


def report(modes: list[Mode], options: argparse.Namespace) -> None:
    base = modes[0].score
    source = options.text or f"pydoc_data.topics of Python {platform.python_version()}"
    print(f"{options.model}, {base.tokens} predictions in {source}, windows of {options.window}")
    print("| mode | perplexity | ratio | divergence, millinats | same likeliest token | s |")
    print("|---|---|---|---|---|---|")
    rows = {}
    for mode in modes:
        score = mode.score
        row = {
            "perplexity": score.perplexity,
            "ratio": score.perplexity / base.perplexity,
            "divergence_millinats": 1e3 * score.divergence / score.tokens,
            "same_top": score.same_top / score.tokens,
            "seconds": score.seconds,
        }
        rows[mode.name] = row
        print(
            f"| {mode.name} | {row['perplexity']:.4f} | {row['ratio']:.5f} "
            f"| {row['divergence_millinats']:.3f} | {100 * row['same_top']:.2f}% "
            f"| {row['seconds']:.1f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
