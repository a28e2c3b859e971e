"""Queries of a Grafana dashboard and of alert rules, and what they select."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SELECTOR = re.compile(r"\b(?P<metric>(?:vllm:|pagewire_)\w+|up)\b(?:\{(?P<matchers>[^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


@dataclass(frozen=True)
class Selection:
    metric: str
    labels: frozenset[str]
    """Those that its matchers name, and the whole query's groupings."""


def dashboard_queries(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rule_queries(path: Path) -> list[str]:
    """The expr of each rule, as YAML has it on its line or in the block below."""
    found = re.findall(
        r"^ +expr: (?!\|)(.+)$|^( +)expr: \|\n((?:\2 +.*\n)+)", path.read_text(), re.M
    )
    return [line or block for line, _, block in found]


def selections(query: str) -> list[Selection]:
    groups = {
        label.strip() for found in _GROUPING.findall(query) for label in found.split(",") if found
    }
    return [
        Selection(match["metric"], frozenset(groups | set(_LABEL.findall(match["matchers"] or ""))))
        for match in _SELECTOR.finditer(query)
    ]
