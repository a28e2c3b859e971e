"""Which layers have a sliding window, as configurations say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.rope_fields import LAYER_TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.model.fields import Fields


def read_layer_types(fields: Fields, default: Sequence[str]) -> list[str]:
    """layer_types, one of LAYER_TYPES for each layer; default where the key is absent.

    Raises ModelLoadError for another type (chunked or linear attention, for example).
    """
    value = fields.raw.get("layer_types")
    if value is None:
        return list(default)
    if (
        not isinstance(value, list)
        or len(value) != fields.integer("num_hidden_layers")
        or any(layer_type not in LAYER_TYPES for layer_type in value)
    ):
        raise fields.wrong(
            "layer_types", f"{' or '.join(LAYER_TYPES)} for each of num_hidden_layers"
        )
    return value


def windows_by_type(fields: Fields, layer_types: Sequence[str]) -> list[int | None]:
    """sliding_window for the layers of sliding attention; null there means no window."""
    window = fields.optional_integer("sliding_window")
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]


def periodic_layer_types(num_layers: int, period: int) -> list[str]:
    """Every period-th layer sees all, those before it slide."""
    return [
        "sliding_attention" if (index + 1) % period else "full_attention"
        for index in range(num_layers)
    ]
