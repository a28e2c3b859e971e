"""Chooses the ops backend, once, at start-up. The hot loop holds the object it gets."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.ops import Ops

_BACKENDS = {
    "reference": "kernels.reference.ops:ReferenceOps",
    "cpu": "kernels.cpu.ops:load_cpu_ops",
    "cuda": "kernels.cuda.ops:CudaOps",
}
_BATCH_INVARIANT = {
    "cpu": "kernels.cpu.batch_invariant:load_batch_invariant_cpu_ops",
    "cuda": "kernels.cuda.batch_invariant:BatchInvariantCudaOps",
}


class UnsupportedOps(ValueError):
    """The backend does not exist, or cannot run here; says what exists and why."""


def load_ops(name: str, *, batch_invariant: bool = False) -> Ops:
    """name is "reference", "cpu" or "cuda". batch_invariant: results that do not depend on
    the rest of the batch, nor on how a prompt is cut, bit for bit. Raises UnsupportedOps."""
    if name not in _BACKENDS:
        raise UnsupportedOps(f"no ops backend {name!r}; {_survey()}")
    reason = _unsupported(name)
    if reason:
        raise UnsupportedOps(f"ops backend {name!r} cannot run here: {reason}; {_survey()}")
    if batch_invariant and name not in _BATCH_INVARIANT:
        raise UnsupportedOps(
            f"ops backend {name!r} cannot promise results that do not depend on the batch: "
            f"torch chooses the order of its sums; those that can: {', '.join(_BATCH_INVARIANT)}"
        )
    place = (_BATCH_INVARIANT if batch_invariant else _BACKENDS)[name]
    module, attribute = place.split(":")
    factory = cast("Callable[[], Ops]", getattr(importlib.import_module(module), attribute))
    return factory()


def _unsupported(name: str) -> str | None:
    """Why the backend cannot run on this machine, or None."""
    if name != "cuda":
        return None
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.accelerator.device_count() == 0:
        return "no CUDA device is visible"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'pagewire[cuda]')"
    return None


def _survey() -> str:
    states = [f"{name} ({_unsupported(name) or 'runs here'})" for name in sorted(_BACKENDS)]
    return "known: " + ", ".join(states)
