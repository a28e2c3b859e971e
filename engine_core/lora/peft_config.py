"""adapter_config.json, as the PEFT library writes it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_core.model.fields import Fields, is_finite
from engine_core.model.hf_config import read_json
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_N = TypeVar("_N", int, float)

logger = logging.getLogger(__name__)

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "use_bdlora": (False,),
    # The others have changed the base weights, and are right over those only.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""What each key may be besides null, so that the adapter is B A x and nothing more."""
_READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
}
_FOR_TRAINING = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version"),
    *("inference_mode", "lora_dropout", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Which matrices an adapter is of, with which rank and scale."""

    path: Path
    rank: int
    alpha: float
    divides_by_root: bool
    """Rank-stabilized (arXiv:2312.03732): scale is alpha / sqrt(r), else alpha / r."""
    ranks: Mapping[str, int]
    """Regular expression of a module's last names -> its own rank."""
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    """A regular expression of whole names, or last names."""
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    """None: all."""

    def selects(self, module: str) -> bool:
        """Of a module such as model.layers.0.self_attn.q_proj."""
        if self.excluded and _names(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        if not _names(self.targets, module):
            return False
        if isinstance(self.targets, str) or self.layers is None:
            return True
        index = re.search(r"\.(\d+)\.", module)
        return index is not None and int(index[1]) in self.layers

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return float(alpha / rank**0.5) if self.divides_by_root else alpha / rank


def read_peft_config(directory: Path) -> PeftConfig:
    """Raises ModelLoadError naming the file and the key that is wrong or not supported."""
    path = directory / "adapter_config.json"
    raw = read_json(path)
    fields = Fields(raw, path)
    for key, plain in _PLAIN.items():
        value = raw.get(key)
        if value is not None and not any(_is(value, allowed) for allowed in plain):
            raise ModelLoadError(f"{path}: {key} is {_shown(value)}, which is not supported")
    if raw.get("peft_type") is None:
        raise ModelLoadError(f"{path}: peft_type is missing")
    unknown = [key for key in raw if key not in {*_PLAIN, *_READ, *_FOR_TRAINING} and raw[key]]
    if unknown:
        logger.warning("%s: unknown keys are ignored: %s", path, ", ".join(sorted(unknown)))
    rank = fields.integer("r")
    ranks = {key: _integer(fields, "rank_pattern", key, 1) for key in _patterns(fields, "rank")}
    if rank < 1:
        raise fields.wrong("r", "at least 1")
    return PeftConfig(
        path=path,
        rank=rank,
        alpha=fields.number("lora_alpha"),
        divides_by_root=fields.flag("use_rslora"),
        ranks=ranks,
        alphas={key: _number(fields, key) for key in _patterns(fields, "alpha")},
        targets=_targets(fields, "target_modules"),
        excluded=_targets(fields, "exclude_modules", optional=True),
        layers=_layers(fields),
    )


def _is(value: object, allowed: object) -> bool:
    return type(value) is type(allowed) and value == allowed


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _patterns(fields: Fields, kind: str) -> dict[str, Any]:
    key = f"{kind}_pattern"
    value = fields.raw.get(key) or {}
    if not isinstance(value, dict):
        raise fields.wrong(key, "an object")
    for pattern in value:
        _check_pattern(fields, key, pattern)
    return value


def _integer(fields: Fields, key: str, pattern: str, least: int) -> int:
    value = fields.raw[key][pattern]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise fields.wrong(key, f"numbers of at least {least}")
    return value


def _number(fields: Fields, pattern: str) -> float:
    value = fields.raw["alpha_pattern"][pattern]
    if not is_finite(value):
        raise fields.wrong("alpha_pattern", "numbers")
    return float(value)


def _targets(fields: Fields, key: str, *, optional: bool = False) -> str | tuple[str, ...]:
    value = fields.raw.get(key)
    if value is None and optional:
        return ()
    if isinstance(value, str) and value:
        _check_pattern(fields, key, value)
        return value
    names = value if isinstance(value, list) else []
    if not all(isinstance(name, str) for name in names) or not (names or optional):
        raise fields.wrong(key, "a name, a regular expression or a list of names")
    return tuple(names)


def _check_pattern(fields: Fields, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelLoadError(
            f"{fields.path}: {key} has {pattern!r}, which is no regular expression: {error}"
        ) from error


def _layers(fields: Fields) -> frozenset[int] | None:
    value = fields.raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    if isinstance(value, int):
        return frozenset({value})
    return frozenset(fields.integers("layers_to_transform"))


def _names(targets: str | tuple[str, ...], module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def _by_pattern(values: Mapping[str, _N], module: str, default: _N) -> _N:
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
