"""How the calls in a request's output come about, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.tool_calls.parser import ToolCallParser

if TYPE_CHECKING:
    from frontend.request import StructuredOutputCall
    from frontend.tool_calls.parser import Format


@dataclass(frozen=True, slots=True)
class ToolPlan:
    format: Format | None = None
    """How calls are read back; None reads none."""
    markers: tuple[str, ...] = ()
    """Special tokens that stay in the text for the reading, and no further."""
    constraint: StructuredOutputCall | None = None
    """What makes sure that there are calls, and that they fit."""

    def field_at_fault(self, field: str) -> str:
        """What the caller sent, where the engine names `field`."""
        forced = self.constraint is not None and field.startswith(
            "sampling_params.structured_output"
        )
        return "chat.tools" if forced else field

    def parser(self) -> ToolCallParser | None:
        """Of one sequence; None where no calls are read."""
        return None if self.format is None else ToolCallParser(self.format, self.markers)
