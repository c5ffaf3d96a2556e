"""Charts as inline SVG: no plotting library, nothing to load, sharp when printed.

Four kinds are enough for the report: lines over a few x values, steps of a distribution, bars by category,
and a waterfall. Sizes are in SVG units; text is never below 12 of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = [
    "DASHED",
    "PALETTE",
    "Bar",
    "Series",
    "bars",
    "lines",
    "method_colors",
    "stacked",
    "waterfall",
]

PALETTE: Final = ("#0b6e4f", "#6b7280", "#c2571a", "#3867b7", "#9b3d8f", "#a68a12", "#3b8ea5", "#b23a48")
"""Distinguishable in print and with the common colour deficiencies; the first is for our own method."""

DASHED: Final = ("plain", "plain-sync", "agentspec-off")
"""Methods that do not draft: their lines are dashed."""

_WIDTH: Final = 620
_HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 150, 16, 46
_INK: Final = "#374151"
_GRID: Final = "#e5e7eb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. `low` and `high` are the spread over repeats, the same length as `y` or empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    color: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar: its label, its parts (value, colour) from the left, and a note at its end."""

    label: str
    parts: Sequence[tuple[float, str]]
    note: str


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """A colour for every method, our own always the same."""
    others = iter(PALETTE[1:] * 4)
    names = dict.fromkeys(methods)
    return {name: PALETTE[0] if name == "agentspec" else next(others) for name in names}


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float] | None = None,
    log_x: bool = False,
    y_from_zero: bool = True,
) -> str:
    """Lines with markers; `x_ticks` None marks round numbers."""
    points = [(x, y) for line in series for x, y in zip(line.x, line.y, strict=True)]
    if not points:
        return _nothing()
    highest = max([y for _, y in points] + [y for line in series for y in line.high])
    lowest = 0.0 if y_from_zero else min([y for _, y in points] + [y for line in series for y in line.low])
    ticks_y = _round_ticks(lowest, highest)
    xs = (
        list(x_ticks)
        if x_ticks is not None
        else _round_ticks(min(x for x, _ in points), max(x for x, _ in points))
    )
    place_x = _axis(
        min(xs + [x for x, _ in points]), max(xs + [x for x, _ in points]), _LEFT, _WIDTH - _RIGHT, log_x
    )
    place_y = _axis(ticks_y[0], max(ticks_y[-1], highest), _HEIGHT - _BOTTOM, _TOP, log=False)
    parts = [_frame(xs, ticks_y, place_x, place_y, x_label, y_label)]
    parts += [_line(line, place_x, place_y, markers=len(line.x) <= 12) for line in series]
    parts.append(_legend(series, place_y))
    return _svg("".join(parts), _WIDTH, _HEIGHT, f"{y_label} by {x_label}")


def stacked(charts: Sequence[str], *, title: str, columns: int = 1) -> str:
    """Charts of `lines` in one picture, so many beside each other, the next ones below."""
    placed = [
        chart.replace(
            "<svg ",
            f'<svg x="{_WIDTH * (number % columns)}" y="{_HEIGHT * (number // columns)}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" ',
            1,
        )
        for number, chart in enumerate(charts)
    ]
    return _svg("".join(placed), _WIDTH * columns, _HEIGHT * -(-len(charts) // columns), title)


def bars(rows: Sequence[Bar], *, x_label: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """Horizontal stacked bars; `legend` names the colours of the parts."""
    if not rows:
        return _nothing()
    left, step, top = 190, 28, 12 + (20 if legend else 0)
    height = top + step * len(rows) + 40
    longest = max(sum(value for value, _ in row.parts) for row in rows) or 1.0
    ticks = _round_ticks(0.0, longest)
    # 6.6 units a character of 12-unit text: a note at the end of the longest bar must fit.
    right = _WIDTH - 16 - 6.6 * max(len(row.note) for row in rows)
    place = _axis(0.0, max(ticks[-1], longest), left, max(right, left + 120), log=False)
    parts = [
        _rule(place(tick), top, place(tick), height - 38, _GRID)
        + _text(place(tick), height - 22, _number(tick), anchor="middle")
        for tick in ticks[:: 2 if right - left < 220 else 1]
    ]
    for index, (name, color) in enumerate(legend):
        parts.append(_rect(left + 130 * index, 6, 11, 11, color))
        parts.append(_text(left + 130 * index + 16, 16, name))
    for index, row in enumerate(rows):
        y = top + step * index
        parts.append(_text(left - 8, y + 17, row.label, anchor="end"))
        begin = 0.0
        for value, color in row.parts:
            x, end = place(begin), place(begin + value)
            parts.append(_rect(x, y + 4, end - x, step - 9, color))
            begin += value
        parts.append(_text(place(begin) + 6, y + 17, row.note))
    parts.append(_text(left, height - 5, x_label))
    return _svg("".join(parts), _WIDTH, height, x_label)


def waterfall(steps: Sequence[tuple[str, float, str]], *, x_label: str) -> str:
    """From the limit down to what was measured: (name, value, what was lost before the next)."""
    rows = [
        Bar(
            label=name,
            parts=[(value, PALETTE[0] if index == len(steps) - 1 else "#9db4ab")],
            note=f"{value:.2f}" + (f"  ({lost})" if lost else ""),
        )
        for index, (name, value, lost) in enumerate(steps)
    ]
    return bars(rows, x_label=x_label)


def _frame(
    xs: Sequence[float],
    ys: Sequence[float],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    x_label: str,
    y_label: str,
) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for y in ys:
        parts.append(_rule(_LEFT, place_y(y), right, place_y(y), _GRID))
        parts.append(_text(_LEFT - 8, place_y(y) + 4, _number(y), anchor="end"))
    parts += [_text(place_x(x), bottom + 18, _number(x), anchor="middle") for x in xs]
    parts.append(_rule(_LEFT, bottom, right, bottom, _INK))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 8, x_label, anchor="middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" transform="rotate(-90 14 {middle:.0f})" text-anchor="middle" '
        f'font-size="12" fill="{_INK}">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _line(
    line: Series, place_x: Callable[[float], float], place_y: Callable[[float], float], *, markers: bool
) -> str:
    path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in zip(line.x, line.y, strict=True))
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2.2"{dash}/>']
    if markers:
        parts += [
            f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3.2" fill="{line.color}"/>'
            for x, y in zip(line.x, line.y, strict=True)
        ]
    if line.low and line.high:
        parts += [
            _rule(place_x(x), place_y(low), place_x(x), place_y(high), line.color)
            for x, low, high in zip(line.x, line.low, line.high, strict=True)
            if high > low
        ]
    return "".join(parts)


def _legend(series: Sequence[Series], place_y: Callable[[float], float]) -> str:
    """Names at the right end of the lines, pushed apart so that none covers another."""
    parts = []
    previous = -math.inf
    for line in sorted((line for line in series if line.y), key=lambda line: place_y(line.y[-1])):
        place = max(place_y(line.y[-1]), previous + 15)
        previous = place
        parts.append(_text(_WIDTH - _RIGHT + 10, place + 4, line.name, color=line.color, bold=True))
    return "".join(parts)


def _axis(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    scale: Callable[[float], float] = (
        (lambda value: math.log2(max(value, 1e-9))) if log else (lambda value: value)
    )
    first, last = scale(low), scale(high)
    span = (last - first) or 1.0
    return lambda value: start + (scale(value) - first) / span * (end - start)


def _round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough)
    first = math.floor(low / step)
    return [round(step * number, 10) for number in range(first, math.ceil(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = _INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{color}"{weight}>'
        f"{escape(text)}</text>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{color}"/>'


def _svg(body: str, width: int, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _nothing() -> str:
    return '<p class="note">Nothing was measured for this chart.</p>'
