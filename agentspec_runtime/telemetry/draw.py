"""Drawing a trace in the terminal: where the time went, block by block, and where drafting paid.

Colours repeat what shape and text say, so that nothing is lost without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentspec_runtime.telemetry import attributes as names
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.turn import Speculation, Trace, TraceTotals, totals

__all__ = ["draw_comparison", "draw_trace", "format_s"]

_BAR: Final = 12
_NUMBERS_WIDTH: Final = 50
"""Columns that the timeline's numbers take: 8 for the time, 6 for tokens, 26 for acceptance, and gaps."""
_MAX_ROWS: Final = 400
"""A trace of thousands of spans is cut here, and says so; the sums below are over all of it."""
_COLOURS: Final = {
    "invoke_agent": "magenta",
    "chat": "cyan",
    "execute_tool": "yellow",
    "agentspec.request": "blue",
    "agentspec.queue": "red",
    "agentspec.prefill": "bright_black",
    "agentspec.block": "green",
}


def draw_trace(trace: Trace, console: Console) -> None:
    """Print one trace: head, timeline, blocks, sources."""
    sums = totals(trace)
    parts: list[RenderableType] = [_head(trace, sums), _timeline(trace, console.width)]
    if sums.blocks:
        parts.append(_blocks(sums))
    if sums.sources:
        parts.append(_sources(sums))
    if not sums.from_engine:
        parts.append(
            Text(
                "No engine spans in this trace: blocks and draft sources are known to the engine only.", "dim"
            )
        )
    console.print(Group(*parts))


def format_s(seconds: float) -> str:
    """A duration in the unit that keeps three digits."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def _head(trace: Trace, sums: TraceTotals) -> Text:
    began = datetime.fromtimestamp(trace.start_ns / 1e9, UTC)
    services = ", ".join(sorted({span.service for span in trace.spans if span.service}))
    text = Text()
    text.append(f"trace {trace.trace_id}", "bold")
    text.append(f"  {began:%Y-%m-%d %H:%M:%S} UTC  {services}\n", "dim")
    text.append(f"{format_s(sums.duration_s)}, {sums.num_calls} model calls, {sums.num_tools} tool runs, ")
    text.append(f"{sums.all.tokens} tokens")
    if sums.all.steps:
        text.append(f" in {sums.all.steps} steps ({sums.all.tokens_per_step:.2f} per step)")
    text.append("\n")
    return text


def _timeline(trace: Trace, width: int) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    name_width = max(24, min(44, width // 3))
    bar_width = max(10, width - name_width - _NUMBERS_WIDTH)
    table.add_column("span", no_wrap=True, width=name_width)
    table.add_column("time", no_wrap=True, width=bar_width)
    table.add_column("took", justify="right", no_wrap=True, min_width=8)
    table.add_column("tokens", justify="right", no_wrap=True, min_width=6)
    table.add_column("accepted/drafted", no_wrap=True, min_width=26)
    rows = list(trace.walk())
    for depth, span in rows[:_MAX_ROWS]:
        colour = _COLOURS.get(span.name.split(" ", 1)[0], "white")
        label = Text("  " * min(depth, 8) + span.name, colour, overflow="ellipsis")
        if span.status == "ERROR":
            label.append(" !", "bold red")
        tokens = span.attributes.get(names.OUTPUT_TOKENS)
        table.add_row(
            label,
            _time_bar(trace, span, bar_width, colour),
            format_s(span.duration_s),
            str(tokens) if isinstance(tokens, int) else "",
            _acceptance_of(span),
        )
    if len(rows) > _MAX_ROWS:
        table.add_row(Text(f"... and {len(rows) - _MAX_ROWS} more spans", "dim"), "", "", "", "")
    return table


def _time_bar(trace: Trace, span: SpanRecord, width: int, colour: str) -> Text:
    whole = max(1, trace.end_ns - trace.start_ns)
    begin = int((span.start_ns - trace.start_ns) / whole * width)
    end = int((span.end_ns - trace.start_ns) / whole * width)
    begin = min(begin, width - 1)
    length = max(1, end - begin)
    return Text(" " * begin + "━" * length + " " * (width - begin - length), colour)


def _acceptance_of(span: SpanRecord) -> Text:
    drafted, accepted = span.attributes.get(names.DRAFTED), span.attributes.get(names.ACCEPTED)
    if not isinstance(drafted, int) or not isinstance(accepted, int):
        return Text("")
    return _acceptance_bar(accepted, drafted)


def _acceptance_bar(accepted: int, drafted: int) -> Text:
    if not drafted:
        return Text("no drafts", "dim")
    good = round(accepted / drafted * _BAR)
    return Text.assemble(
        ("█" * good, "green"),
        ("░" * (_BAR - good), "red"),
        f" {accepted / drafted:4.0%} {accepted}/{drafted}",
    )


def _blocks(sums: TraceTotals) -> Table:
    table = Table(title="\nBlocks", title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in ("kind", "blocks", "time", "share", "tokens", "steps", "per step"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    table.add_column("accepted/drafted")
    whole_s = sum(block.time_s for block in sums.blocks) or 1.0
    for block in sums.blocks:
        table.add_row(
            block.kind,
            str(block.count),
            format_s(block.time_s),
            f"{block.time_s / whole_s:.0%}",
            str(block.tokens),
            str(block.steps),
            _number(block.tokens_per_step),
            _acceptance_bar(block.accepted, block.drafted),
        )
    return table


def _sources(sums: TraceTotals) -> Table:
    table = Table(
        title="\nWhere drafts came from", title_justify="left", box=None, pad_edge=False, header_style="dim"
    )
    table.add_column("source")
    table.add_column("share", justify="right")
    table.add_column("accepted/drafted")
    whole = sum(source.drafted for source in sums.sources)
    for source in sums.sources:
        share = f"{source.drafted / whole:.0%}"
        table.add_row(source.source, share, _acceptance_bar(source.accepted, source.drafted))
    return table


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the comparison; `less_is_better` is None where neither is."""

    label: str
    of: Callable[[TraceTotals], float | None]
    show: Callable[[float], str]
    less_is_better: bool | None


def _count(value: float) -> str:
    return f"{value:.0f}"


_ROWS: Final = (
    _Row("whole trace", lambda sums: sums.duration_s, format_s, True),
    _Row("queue", lambda sums: sums.queue_s, format_s, True),
    _Row("prefill", lambda sums: sums.prefill_s, format_s, True),
    _Row("decoding", lambda sums: sums.all.time_s, format_s, True),
    _Row("time per token", lambda sums: sums.all.s_per_token, format_s, True),
    _Row("model calls", lambda sums: sums.num_calls, _count, None),
    _Row("prompt tokens", lambda sums: sums.prompt_tokens, _count, None),
    _Row("output tokens", lambda sums: sums.all.tokens, _count, None),
    _Row("engine steps", lambda sums: sums.all.steps, _count, True),
    _Row("tokens per step", lambda sums: sums.all.tokens_per_step, lambda value: f"{value:.2f}", False),
    _Row("drafted", lambda sums: sums.all.drafted, _count, None),
    _Row("accepted", lambda sums: sums.all.accepted, _count, None),
    _Row("rejected", lambda sums: sums.all.rejected, _count, True),
)


def draw_comparison(first: Trace, second: Trace, console: Console) -> None:
    """Print two traces side by side, and how much the second is of the first."""
    left, right = totals(first), totals(second)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for trace in (first, second):
        table.add_column(trace.trace_id[:12], justify="right")
    table.add_column("second / first", justify="right")
    for row in _ROWS:
        _add_row(table, row, left, right)
    console.print(table)
    _note_different_work(left, right, console)
    kinds = {block.kind: block for block in right.blocks}
    both = [(block, kinds[block.kind]) for block in left.blocks if block.kind in kinds]
    if both:
        console.print(_compare_blocks([(one.kind, one, other) for one, other in both]))


def _add_row(table: Table, row: _Row, left: TraceTotals, right: TraceTotals) -> None:
    one, other = row.of(left), row.of(right)
    if not one and not other:
        return
    shown = ["-" if value is None else row.show(value) for value in (one, other)]
    ratio = Text("")
    if one and other:
        better = row.less_is_better is not None and (other < one) == row.less_is_better and other != one
        ratio = Text(f"{other / one:.2f}x", "green" if better else "")
    table.add_row(row.label, *shown, ratio)


def _note_different_work(left: TraceTotals, right: TraceTotals, console: Console) -> None:
    if left.all.tokens != right.all.tokens or left.prompt_tokens != right.prompt_tokens:
        console.print(
            "The two did not do the same work (other numbers of tokens): compare the time per token, "
            "or run both with temperature 0 and the same seed.",
            style="yellow",
        )


def _compare_blocks(pairs: list[tuple[str, Speculation, Speculation]]) -> Table:
    table = Table(title="\nTime per token, by block", title_justify="left", box=None, pad_edge=False)
    for name in ("kind", "first", "second", "second / first"):
        table.add_column(name, justify="left" if name == "kind" else "right", header_style="dim")
    for kind, one, other in pairs:
        if one.s_per_token and other.s_per_token:
            ratio = f"{other.s_per_token / one.s_per_token:.2f}x"
            table.add_row(kind, format_s(one.s_per_token), format_s(other.s_per_token), ratio)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
