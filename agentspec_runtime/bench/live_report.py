"""The page of a live run, for somebody who has to decide: does it pay, what does a solved task cost.

Written beside DIR/live.jsonl as live-report.html and live-report.md. Factors over plain pair cells of one
repeat, because a machine drifts; counts of solved tasks are added up over the repeats.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from agentspec_runtime.bench import charts
from agentspec_runtime.bench.charts import Series
from agentspec_runtime.bench.live import LIVE_FILE, PROVENANCE_FILE, LiveRow, load_live
from agentspec_runtime.bench.live_agents import known_sum
from agentspec_runtime.bench.page import (
    Report,
    Section,
    html_table,
    markdown_table,
    number,
    origin,
    report_of,
    write_pages,
)
from agentspec_runtime.bench.summary import Cost, agents

__all__ = ["build_live_report", "write_live_report"]

_REFERENCE: Final = "plain"
_OTHER_TEXT: Final = 0.05
"""From 5 % more or less text per task on, a difference of tasks per hour is told apart from one of speed."""
_CHANCE: Final = 1.96
"""Standard errors that a difference of solved shares must pass: 95 % of chance differences do not."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One method at one concurrency: its repeats, and its tasks per hour over plain's in each."""

    rows: Sequence[LiveRow]
    factors: Sequence[float]

    @property
    def method(self) -> str:
        return self.rows[0].method

    @property
    def concurrency(self) -> int:
        return self.rows[0].concurrency

    @property
    def tasks(self) -> int:
        return sum(row.tasks for row in self.rows)

    @property
    def solved(self) -> int:
        return sum(row.solved for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)

    @property
    def seconds_per_solved(self) -> float | None:
        """Machine time per solved task."""
        return sum(row.wall_s for row in self.rows) / self.solved if self.solved else None

    @property
    def tokens_per_task(self) -> float:
        return sum(row.out_tokens for row in self.rows) / self.tasks if self.tasks else 0.0

    def middle(self, value: Callable[[LiveRow], float | None]) -> float | None:
        """Median over the repeats that have the value."""
        known = [found for row in self.rows if (found := value(row)) is not None]
        return median(known) if known else None

    @property
    def rejected_share(self) -> float | None:
        drafted = known_sum(row.drafted for row in self.rows)
        return 1 - (known_sum(row.accepted for row in self.rows) or 0) / drafted if drafted else None


def write_live_report(folder: Path, cost: Cost | None) -> tuple[Path, Path]:
    """Build both files in the folder of a live run; where they are.

    Raises:
        ConfigurationError: the folder holds no finished cell.
    """
    rows = load_live(folder / LIVE_FILE)
    file = folder / PROVENANCE_FILE
    provenance = file.read_text(encoding="utf-8") if file.is_file() else "{}"
    return write_pages(build_live_report(rows, provenance, cost), folder / "live-report")


def build_live_report(rows: Sequence[LiveRow], provenance: str, cost: Cost | None) -> Report:
    """The report of some rows."""
    cells = _cells(rows)
    sections = [
        _pace(cells),
        _cost(cells, cost),
        _latency(cells),
        _by_agent(cells),
        _numbers(cells),
        origin(provenance),
    ]
    told, doubted = _verdict(cells), _doubts(cells)
    return report_of("Live agents", _introduction(rows, provenance), told, doubted, sections)


def _cells(rows: Sequence[LiveRow]) -> list[_Cell]:
    plain = {(row.concurrency, row.repeat): row.tasks_per_hour for row in rows if row.method == _REFERENCE}
    grouped: defaultdict[tuple[str, int], list[LiveRow]] = defaultdict(list)
    for row in rows:
        grouped[row.method, row.concurrency].append(row)
    return [
        _Cell(
            own,
            [
                row.tasks_per_hour / plain[row.concurrency, row.repeat]
                for row in own
                if plain.get((row.concurrency, row.repeat))
            ],
        )
        for own in grouped.values()
    ]


def _introduction(rows: Sequence[LiveRow], provenance: str) -> str:
    data = json.loads(provenance)
    machine, notes = data.get("machine", {}), data.get("notes", {})
    where = machine.get("gpus") or (
        f"{machine.get('processor', 'unknown machine')}, {machine.get('cpus', '?')} cores"
    )
    return (
        f"{rows[0].mode}; model {notes.get('model', 'unknown')} on {where}, temperature "
        f"{notes.get('temperature', '?')}. The model writes its own text, so answers and turns differ "
        "between methods; a task is solved when its hidden tests pass."
    )


def _verdict(cells: Sequence[_Cell]) -> list[str]:
    sentences: list[str] = []
    for concurrency, here in _by_concurrency(cells).items():
        plain = here.get(_REFERENCE)
        for name, cell in here.items():
            if plain is None or cell is plain or not cell.factors:
                continue
            sentence = f"At {agents(concurrency)}: {name} did {_factor(cell)} the tasks per hour of plain"
            if cell.seconds_per_solved and plain.seconds_per_solved:
                share = cell.seconds_per_solved / plain.seconds_per_solved
                sentence += f", a solved task took {share:.2f}x the machine time"
            sentence += f"; solved {cell.solved} of {cell.tasks}, plain {plain.solved} of {plain.tasks}"
            if cell.failed or plain.failed:
                sentence += f". Agents raised ({cell.failed} and {plain.failed}), so this is no comparison"
            sentences.append(f"{sentence}.")
    if not sentences:
        best = max(cells, key=lambda cell: cell.solved)
        where = f"{best.method} at {agents(best.concurrency)}"
        sentences.append(f"Most were solved by {where}: {best.solved} of {best.tasks}.")
    return sentences


def _factor(cell: _Cell) -> str:
    spread = f" ({min(cell.factors):.2f} to {max(cell.factors):.2f})" if len(cell.factors) > 1 else ""
    return f"{median(cell.factors):.2f}x{spread}"


def _doubts(cells: Sequence[_Cell]) -> list[str]:
    found: list[str] = []
    if not any(cell.method == _REFERENCE for cell in cells):
        found.append("There is no plain row, so no factor can be stated: add plain to --methods.")
    if max(len(cell.rows) for cell in cells) == 1:
        found.append("One repeat: there is no spread. --repeat 3.")
    if failed := sum(cell.failed for cell in cells):
        found.append(
            f"{failed} agents raised instead of ending: see `failed` of the outcomes in {LIVE_FILE}."
        )
    for concurrency, here in _by_concurrency(cells).items():
        if plain := here.get(_REFERENCE):
            others = [cell for cell in here.values() if cell is not plain and cell.tasks]
            found += [_chance(concurrency, cell, plain) for cell in others]
            found += [told for cell in others if (told := _other_text(concurrency, cell, plain))]
    return found


def _other_text(concurrency: int, cell: _Cell, plain: _Cell) -> str:
    """How much of a difference is text that was or was not written; "" where it is the same."""
    more = cell.tokens_per_task / plain.tokens_per_task - 1 if plain.tokens_per_task else 0.0
    if abs(more) < _OTHER_TEXT:
        return ""
    own, reference = (one.middle(lambda row: row.tok_s) or 0.0 for one in (cell, plain))
    speed = f" Per token {cell.method} had {own / reference:.2f}x the throughput." if reference else ""
    return f"At {agents(concurrency)} {cell.method} wrote {more:+.0%} text per task against plain.{speed}"


def _chance(concurrency: int, cell: _Cell, plain: _Cell) -> str:
    """Whether the solved shares differ by more than chance (normal approximation of two proportions)."""
    pooled = (cell.solved + plain.solved) / (cell.tasks + plain.tasks)
    error = (pooled * (1 - pooled) * (1 / cell.tasks + 1 / plain.tasks)) ** 0.5
    difference = cell.solved / cell.tasks - plain.solved / plain.tasks
    where = f"At {agents(concurrency)} {cell.method} solved {difference:+.0%} of the tasks against plain"
    bound = f"differences within ±{_CHANCE * error:.0%} are chance at this number of tasks"
    if abs(difference) > _CHANCE * error:
        return f"{where}, and {bound}: this is more, read the answers."
    return f"{where}; {bound}."


def _by_concurrency(cells: Sequence[_Cell]) -> dict[int, dict[str, _Cell]]:
    return {
        concurrency: {cell.method: cell for cell in cells if cell.concurrency == concurrency}
        for concurrency in sorted({cell.concurrency for cell in cells})
    }


def _chart(cells: Sequence[_Cell], value: Callable[[LiveRow], float | None], label: str) -> str:
    """A line per method over the concurrencies, with the spread over repeats."""
    colors = charts.method_colors(cell.method for cell in cells)
    series = []
    for method in colors:
        own = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.concurrency)
        values = [[found for row in cell.rows if (found := value(row)) is not None] for cell in own]
        shown = [(cell.concurrency, found) for cell, found in zip(own, values, strict=True) if found]
        series.append(
            Series(
                name=method,
                x=[concurrency for concurrency, _ in shown],
                y=[median(found) for _, found in shown],
                low=[min(found) for _, found in shown],
                high=[max(found) for _, found in shown],
                color=colors[method],
                dashed=method in charts.DASHED,
            )
        )
    ticks = sorted({float(cell.concurrency) for cell in cells})
    return charts.lines(
        series, x_label="agents at the same time", y_label=label, x_ticks=ticks, log_x=len(ticks) > 1
    )


def _table(cells: Sequence[_Cell], value: Callable[[_Cell], str]) -> tuple[list[str], list[list[str]]]:
    """Methods down, concurrencies across."""
    by_concurrency = _by_concurrency(cells)
    heading = ["method", *(agents(concurrency) for concurrency in by_concurrency)]
    methods = dict.fromkeys(cell.method for cell in cells)
    table = [
        [method, *(value(here[method]) if method in here else "-" for here in by_concurrency.values())]
        for method in methods
    ]
    return heading, table


def _pace(cells: Sequence[_Cell]) -> Section:
    def told(cell: _Cell) -> str:
        pace = f"{cell.middle(lambda row: row.tasks_per_hour):.0f} / h"
        return f"{pace}, {_factor(cell)}" if cell.factors else pace

    heading, table = _table(cells, told)
    chart = _chart(cells, lambda row: row.tasks_per_hour, "tasks per hour")
    return Section(
        title="Does it pay?",
        lead="Tasks per hour, solved or not, and the factor over plain within one repeat.",
        html=f'<div class="grid">{chart}{html_table(heading, table)}</div>',
        markdown=markdown_table(heading, table),
    )


def _cost(cells: Sequence[_Cell], cost: Cost | None) -> Section:
    def told(cell: _Cell) -> str:
        seconds = cell.seconds_per_solved
        if seconds is None:
            return "none solved"
        if cost is None:
            return f"{seconds:.1f} s"
        return f"{seconds:.1f} s, {cost.currency}{cost.per_hour * seconds / 3600:.4f}"

    heading, table = _table(cells, told)
    price = f" at {cost.currency}{cost.per_hour:g} per hour" if cost else "; --price-per-hour makes it money"
    return Section(
        title="What does a solved task cost?",
        lead=f"Machine time for the whole cell, shared by its solved tasks{price}.",
        html=html_table(heading, table),
        markdown=markdown_table(heading, table),
    )


def _latency(cells: Sequence[_Cell]) -> Section:
    parts = [
        _chart(cells, lambda row: row.task_p50, "task P50, s"),
        _chart(cells, lambda row: row.task_p95, "task P95, s"),
    ]
    return Section(
        title="How long does a task take?",
        lead="From when the task was due until its agent ended, all attempts and test runs included.",
        html=f'<div class="grid">{"".join(parts)}</div>',
    )


def _by_agent(cells: Sequence[_Cell]) -> Section:
    heading = [
        "method",
        "agents",
        "kind",
        "tasks",
        "solved",
        "calls per task",
        "tokens per task",
        "task P50 s",
    ]
    table = []
    for cell in cells:
        outcomes = [outcome for row in cell.rows for outcome in row.outcomes]
        for kind in sorted({outcome.agent for outcome in outcomes}):
            own = [outcome for outcome in outcomes if outcome.agent == kind]
            table.append(
                [
                    cell.method,
                    str(cell.concurrency),
                    kind,
                    str(len(own)),
                    str(sum(outcome.solved for outcome in own)),
                    f"{sum(outcome.calls for outcome in own) / len(own):.1f}",
                    f"{sum(outcome.tokens for outcome in own) / len(own):.0f}",
                    f"{median(outcome.seconds for outcome in own):.1f}",
                ]
            )
    return Section(
        title="Which agents?",
        lead="All repeats together. Where tokens per task differ, the model wrote more or less text.",
        html=html_table(heading, table),
        markdown=markdown_table(heading, table),
    )


def _numbers(cells: Sequence[_Cell]) -> Section:
    heading = [
        "method", "agents", "repeats", "tasks", "solved", "failed", "tasks/h", "tok/s", "tokens per task",
        "task P50 s", "task P95 s", "rejected",
    ]  # fmt: skip
    table = [
        [
            cell.method,
            str(cell.concurrency),
            str(len(cell.rows)),
            str(cell.tasks),
            str(cell.solved),
            str(cell.failed),
            number(cell.middle(lambda row: row.tasks_per_hour), 0),
            number(cell.middle(lambda row: row.tok_s), 1),
            f"{cell.tokens_per_task:.0f}",
            number(cell.middle(lambda row: row.task_p50), 2),
            number(cell.middle(lambda row: row.task_p95), 2),
            "-" if cell.rejected_share is None else f"{cell.rejected_share:.0%}",
        ]
        for cell in cells
    ]
    return Section(
        title="All numbers",
        lead="Counts over all repeats, the others medians over repeats.",
        html=html_table(heading, table),
        markdown=markdown_table(heading, table),
    )
