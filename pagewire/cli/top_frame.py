"""How `pagewire top` looks: one frame, for a terminal of any size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pagewire.cli.top_figures import Figures, Happened, Tenant

_WIDE = 116
"""Columns from which the tables stand beside the figures."""
_MAIN_WIDTH = 76
_MAIN_LINES = 15
_BAR_WIDTH = 24
_NAMES = {"ttft": "first token", "itl": "next token", "e2e": "whole request"}
_LABEL = "dim"


def frame(
    shown: Figures, *, width: int, height: int | None = None, trouble: str = ""
) -> RenderableType:
    """`height` in lines bounds the tables at the end; `trouble` stands in the second line."""
    head = _head(shown, trouble)
    second = Text(_clean(trouble), "bold red", no_wrap=True, overflow="ellipsis")
    main: list[RenderableType] = [_figures(shown), Text(), _latencies(shown)]
    if width >= _WIDE:
        room = None if height is None else height - 2
        beside = Table.grid(padding=(0, 3))
        beside.add_column(width=_MAIN_WIDTH)
        beside.add_column()
        beside.add_row(Group(*main), Group(*_tables(shown, room)))
        return Group(head, second, beside)
    room = None if height is None else height - 3 - _MAIN_LINES
    tables = _tables(shown, room)
    return Group(head, second, *main, *([Text(), *tables] if tables else []))


def _head(shown: Figures, trouble: str) -> Text:
    state, style = ("serving", "green") if shown.serving else ("not serving", "bold red")
    if shown.draining:
        state, style = "draining", "yellow"
    if trouble:
        state, style = "away", "bold red"
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("pagewire top  ", "bold")
    head.append(_clean(shown.model) or "no model yet")
    head.append(f"  {shown.server}  ", _LABEL)
    head.append(state, style)
    if not trouble:
        head.append(f"  over {shown.interval_s:.1f} s", _LABEL)
    return head


def _figures(shown: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_LABEL, width=10, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    slots = f"of {shown.max_num_seqs:,} at once"
    table.add_row(
        "requests",
        _counts(
            (shown.running, "running"), (shown.waiting, "waiting"), (shown.in_flight, "in flight")
        ).append(f"   {slots}", _LABEL),
    )
    blocks = shown.blocks
    table.add_row("KV blocks", _bar(blocks))
    table.add_row(
        "",
        _counts(*((blocks[name], name) for name in ("used", "cached", "free"))).append(
            f"   of {shown.block_size} tokens", _LABEL
        ),
    )
    table.add_row(
        "tokens/s",
        _counts(
            (_rate(shown.output_tokens_per_s), "output"),
            (_rate(shown.prompt_tokens_per_s), "prompt"),
        ),
    )
    hits = shown.prefix_cache_hit_rate
    table.add_row(
        "prefix",
        _counts(("-" if hits is None else f"{hits:.0%}", "of prompt tokens found in the cache")),
    )
    table.add_row("preempted", _happened({"requests": shown.preemptions}))
    table.add_row("ended", _happened(shown.ended))
    table.add_row("refused", _happened(shown.refused, "red"))
    table.add_row("calls", _happened(shown.errors, "red"))
    tokenizer = shown.tokenizer
    text = _counts((tokenizer["calls"], "encoding"), (tokenizer["queue"], "steps without text"))
    text.append(f"   p99 {_duration(shown.latency_s['detokenize'].p99)} a step", _LABEL)
    if not tokenizer["up"]:
        text = Text("gone", "bold red")
    table.add_row("tokenizer", text)
    return table


def _latencies(shown: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_LABEL, width=14)
    for _ in range(4):
        table.add_column(justify="right", width=10)
    table.add_row("", *(Text(name, _LABEL) for name in ("p50", "p90", "p99", "values")))
    for key, name in _NAMES.items():
        it = shown.latency_s[key]
        cells = [_duration(value) for value in (it.p50, it.p90, it.p99)]
        table.add_row(name, *cells, f"{it.count:,}")
    return table


def _tables(shown: Figures, room: int | None) -> list[RenderableType]:
    """What fits into so many lines of the engines, if there are several, and the tenants."""
    made: list[RenderableType] = []
    if len(shown.engines) > 1:
        rows = [_engine(engine) for engine in shown.engines]
        made += _table(("engine", "", "running", "waiting", "KV"), rows, room)
        room = None if room is None else room - len(rows) - 2
    tenants = [_tenant(tenant) for tenant in shown.tenants]
    if tenants:
        names = ("tenant", "ended", "in all", "output/s", "prompt/s")
        table = _table(names, tenants, room)
        made += [Text(), *table] if made and table else table
    return made


def _engine(engine: Mapping[str, Any]) -> tuple[Text | str, ...]:
    state = Text("gone", "bold red")
    if engine["ready"]:
        state = Text("draining", "yellow") if engine["draining"] else Text("ready", "green")
    blocks = engine["blocks"]
    usage = f"{blocks['used'] / blocks['total']:.0%}" if blocks["total"] else "-"
    address = Text(_clean(engine["address"]))
    return address, state, f"{engine['running']:,}", f"{engine['waiting']:,}", usage


def _tenant(tenant: Tenant) -> tuple[Text | str, ...]:
    return (
        Text(_clean(tenant.tenant)) if tenant.tenant else Text("(none)", _LABEL),
        f"{tenant.ended.recent:,}",
        f"{tenant.ended.total:,}",
        _rate(tenant.output_tokens_per_s),
        _rate(tenant.prompt_tokens_per_s),
    )


def _table(
    names: tuple[str, ...], rows: Sequence[tuple[Text | str, ...]], room: int | None
) -> list[RenderableType]:
    """Nothing where not even one row fits; the last line tells how many did not."""
    lines = len(rows) if room is None else min(len(rows), room - 1)
    if lines <= 0:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_LABEL)
    table.add_column(names[0], max_width=30, no_wrap=True, overflow="ellipsis")
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    shown = lines if lines == len(rows) else lines - 1
    for row in rows[:shown]:
        table.add_row(*row)
    if shown < len(rows):
        table.add_row(Text(f"{len(rows) - shown} more", _LABEL))
    return [table]


def _bar(blocks: Mapping[str, int]) -> Text:
    text = Text()
    total = blocks["total"]
    used, cached = (
        math.ceil(_BAR_WIDTH * blocks[name] / total) if total else 0 for name in ("used", "cached")
    )
    used = min(used, _BAR_WIDTH)
    cached = min(cached, _BAR_WIDTH - used)
    share = f"  {blocks['used'] / total:.1%} of {total:,}" if total else ""
    text.append("█" * used, "cyan")
    text.append("▒" * cached, "cyan")
    text.append("░" * (_BAR_WIDTH - used - cached), _LABEL)
    return text.append(share)


def _counts(*pairs: tuple[int | str, str]) -> Text:
    text = Text()
    for value, name in pairs:
        text.append("   " if text else "")
        text.append(f"{value:,}" if isinstance(value, int) else value, "bold")
        text.append(f" {name}", _LABEL)
    return text


def _happened(counted: Mapping[str, Happened], style: str = "") -> Text:
    """In the interval, and in all."""
    if not any(it.total for it in counted.values()):
        return Text("none", _LABEL)
    text = Text()
    by_size: Sequence[tuple[str, Happened]] = sorted(
        counted.items(), key=lambda item: (-item[1].recent, -item[1].total, item[0])
    )
    for name, it in by_size:
        text.append("   " if text else "")
        text.append(f"{_clean(name)} ", _LABEL)
        text.append(f"{it.recent:,}", f"bold {style}".strip() if it.recent else "")
        text.append(f" ({it.total:,})", _LABEL)
    return text


def _rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds == math.inf:
        return "beyond"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"


def _clean(text: str) -> str:
    """Names that callers made up must not steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
