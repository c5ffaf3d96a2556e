"""`agentspec bench report DIR`: the results of a replay for somebody who has to decide, in two minutes.

Writes DIR/report.html (one file, no script, nothing loaded from anywhere) and DIR/report.md. The order is the
order of questions: does it pay, what does an agent feel, what is wasted and where, how far is the limit, what
does it cost, may I trust it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agentspec_runtime.bench import charts
from agentspec_runtime.bench.charts import PALETTE, Bar, Series
from agentspec_runtime.bench.limits import Limits, read_limits
from agentspec_runtime.bench.measure import DraftCounts, ResultRow
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
from agentspec_runtime.bench.results import load_rows
from agentspec_runtime.bench.summary import CellSummary, Cost, agents, doubts, summarise, verdict

__all__ = ["build_report", "write_report"]

_ACCEPTED: Final = PALETTE[0]
_REJECTED: Final = "#d9a79c"


def write_report(folder: Path, cost: Cost | None = None) -> tuple[Path, Path]:
    """Build both files in the folder of a replay; where they are.

    Raises:
        ConfigurationError: the folder holds no results.
    """
    rows = load_rows(folder / "results.jsonl")
    provenance_file = folder / "provenance.json"
    provenance = provenance_file.read_text(encoding="utf-8") if provenance_file.is_file() else "{}"
    report = build_report(rows, provenance, read_limits(folder / "limits.json"), cost)
    return write_pages(report, folder / "report")


def build_report(
    rows: Sequence[ResultRow], provenance: str, limits: dict[int, Limits], cost: Cost | None
) -> Report:
    """The report of some result rows."""
    cells = summarise(rows)
    colors = charts.method_colors(cell.method for cell in cells)
    sections = [
        _throughput(cells, colors),
        _latency(cells, colors),
        _waste(cells),
        _steps(cells, colors),
        _limit(cells, limits),
        *([_costs(cells, cost)] if cost else []),
        _numbers(cells),
        origin(provenance),
    ]
    title = f"Replay of {rows[0].workload.replace('+', ', ')}"
    told, doubted = verdict(cells), doubts(cells, rows)
    intro = _introduction(rows, provenance)
    return report_of(title, intro, told, doubted, sections)


def _introduction(rows: Sequence[ResultRow], provenance: str) -> str:
    origin = json.loads(provenance)
    machine, notes = origin.get("machine", {}), origin.get("notes", {})
    processor, cpus = machine.get("processor", "unknown machine"), machine.get("cpus", "?")
    where = machine.get("gpus") or f"{processor}, {cpus} cores"
    return (
        f"{rows[0].mode}; model {notes.get('model', 'unknown')} on {where}; context limit "
        f"{notes.get('max_model_len', '?')} tokens. Every method emitted the same recorded text: acceptance "
        "is that of the model that wrote the recording, time is that of the model and machine named here."
    )


def _by_method(cells: Sequence[CellSummary]) -> dict[str, list[CellSummary]]:
    grouped: dict[str, list[CellSummary]] = {}
    for cell in cells:
        grouped.setdefault(cell.method, []).append(cell)
    return grouped


def _throughput(cells: Sequence[CellSummary], colors: dict[str, str]) -> Section:
    series = [
        Series(
            name=method,
            x=[cell.concurrency for cell in own],
            y=[cell.tok_s for cell in own],
            low=[cell.tok_s_range[0] for cell in own],
            high=[cell.tok_s_range[1] for cell in own],
            color=colors[method],
            dashed=method in charts.DASHED,
        )
        for method, own in _by_method(cells).items()
    ]
    ticks = sorted({float(cell.concurrency) for cell in cells})
    chart = charts.lines(
        series,
        x_label="agents at the same time",
        y_label="output tokens / s",
        x_ticks=ticks,
        log_x=len(ticks) > 1,
    )
    heading = ["method", *(agents(int(tick)) for tick in ticks)]
    table = [[method, *(_speedup(cell) for cell in own)] for method, own in _by_method(cells).items()]
    return Section(
        title="Does it pay?",
        lead="Throughput over the whole run, prompts included, and the factor over plain within one repeat.",
        html=f'<div class="grid">{chart}{html_table(heading, table)}</div>',
        markdown=markdown_table(heading, table),
    )


def _speedup(cell: CellSummary) -> str:
    if cell.speedup is None:
        return f"{cell.tok_s:.1f} tok/s"
    low, high = cell.speedup_range or (cell.speedup, cell.speedup)
    spread = f" ({low:.2f} to {high:.2f})" if cell.repeats > 1 else ""
    return f"{cell.tok_s:.1f} tok/s, {cell.speedup:.2f}x{spread}"


def _latency(cells: Sequence[CellSummary], colors: dict[str, str]) -> Section:
    ticks = sorted({float(cell.concurrency) for cell in cells})
    parts = []
    for name in ("P50", "P95", "P99"):
        series = [
            Series(
                name=method,
                x=[cell.concurrency for cell in own],
                y=[_turn(cell, name) or 0.0 for cell in own],
                color=colors[method],
                dashed=method in charts.DASHED,
            )
            for method, own in _by_method(cells).items()
        ]
        parts.append(
            charts.lines(
                series,
                x_label="agents at the same time",
                y_label=f"turn latency {name}, s",
                x_ticks=ticks,
                log_x=len(ticks) > 1,
            )
        )
    highest = max(cell.concurrency for cell in cells)
    distribution = [
        Series(
            name=cell.method,
            x=cell.turn_quantiles,
            y=[100 * index / (len(cell.turn_quantiles) - 1) for index in range(len(cell.turn_quantiles))],
            color=colors[cell.method],
            dashed=cell.method in charts.DASHED,
        )
        for cell in cells
        if cell.concurrency == highest and len(cell.turn_quantiles) > 1
    ]
    parts.append(
        charts.lines(
            distribution, x_label=f"turn latency at {agents(highest)}, s", y_label="turns finished, %"
        )
    )
    return Section(
        title="What does an agent feel?",
        lead="A turn is one model call, from request to last token. Below right: the whole distribution.",
        html=f'<div class="grid">{"".join(parts)}</div>',
        markdown="See the table at the end; the charts are in the HTML report.\n",
    )


def _turn(cell: CellSummary, name: str) -> float | None:
    return {"P50": cell.turn_p50, "P95": cell.turn_p95, "P99": cell.turn_p99}[name]


def _waste(cells: Sequence[CellSummary]) -> Section:
    drafting = [cell for cell in cells if cell.drafted_per_token > 0]
    rows = [
        Bar(
            label=f"{cell.method}, {cell.concurrency}",
            parts=[
                (cell.drafted_per_token * (1 - cell.rejected_share), _ACCEPTED),
                (cell.drafted_per_token * cell.rejected_share, _REJECTED),
            ],
            note=f"{cell.rejected_share:.0%} rejected",
        )
        for cell in drafting
    ]
    legend = [("accepted", _ACCEPTED), ("rejected", _REJECTED)]
    parts = [charts.bars(rows, x_label="draft tokens per output token", legend=legend)]
    ours = [cell for cell in cells if cell.by_source]
    table: list[list[str]] = []
    if ours:
        cell = max(ours, key=lambda one: (one.method == "agentspec", one.concurrency))
        parts.append(_verdict_bars(f"{cell.method} at {agents(cell.concurrency)}", cell, legend))
        for what, counts in (("block", cell.by_block), ("source", cell.by_source)):
            table += [
                [what, name, f"{count.drafted:,}", f"{_share(count):.0%}"] for name, count in counts.items()
            ]
    return Section(
        title="What is wasted, and where?",
        lead="A rejected token was computed for nothing. At low load that is nearly free, at high load not.",
        html=f'<div class="grid">{"".join(parts)}</div>',
        markdown=markdown_table(["by", "name", "drafted", "rejected"], table) if table else "",
    )


def _share(count: DraftCounts) -> float:
    return 1 - count.accepted / count.drafted if count.drafted else 0.0


def _verdict_bars(title: str, cell: CellSummary, legend: Sequence[tuple[str, str]]) -> str:
    rows = [
        Bar(
            label=f"{kind}: {name}",
            parts=[(count.accepted, _ACCEPTED), (count.drafted - count.accepted, _REJECTED)],
            note=f"{_share(count):.0%} rejected",
        )
        for kind, counts in (("block", cell.by_block), ("source", cell.by_source))
        for name, count in counts.items()
        if count.drafted
    ]
    return charts.bars(rows, x_label=f"{title}: draft tokens by block and by source", legend=legend)


def _steps(cells: Sequence[CellSummary], colors: dict[str, str]) -> Section:
    highest = max(cell.concurrency for cell in cells)
    here = [cell for cell in cells if cell.concurrency == highest]
    tokens = [
        Series(
            name=cell.method,
            x=list(range(1, 33)),
            y=_at_least(cell),
            color=colors[cell.method],
        )
        for cell in here
        if cell.drafted_per_token > 0
    ]
    batches = [
        Series(
            name=cell.method,
            x=list(cell.batch_histogram),
            y=_cumulative(list(cell.batch_histogram.values())),
            color=colors[cell.method],
            dashed=cell.method in charts.DASHED,
        )
        for cell in here
        if cell.batch_histogram
    ]
    return Section(
        title=f"What do the steps look like at {agents(highest)}?",
        lead="Left: how many tokens a request gets from one step. Right: how many requests ran at once, "
        "which is what decides the price of a draft.",
        html='<div class="grid">'
        + _at_least_chart(tokens)
        + charts.lines(batches, x_label="requests in the step", y_label="steps with at most so many, %")
        + "</div>",
    )


def _at_least_chart(series: Sequence[Series]) -> str:
    label = "steps with at least so many, %"
    return charts.lines(series, x_label="tokens", y_label=label, x_ticks=[1, 2, 4, 8, 16, 32], log_x=True)


def _at_least(cell: CellSummary) -> list[float]:
    total = sum(cell.tokens_histogram.values()) or 1
    return [
        100 * sum(count for size, count in cell.tokens_histogram.items() if size >= tokens) / total
        for tokens in range(1, 33)
    ]


def _cumulative(counts: Sequence[int]) -> list[float]:
    total, running, shares = sum(counts) or 1, 0, []
    for count in counts:
        running += count
        shares.append(100 * running / total)
    return shares


def _limit(cells: Sequence[CellSummary], limits: dict[int, Limits]) -> Section:
    parts: list[str] = []
    table: list[list[str]] = []
    for cell in cells:
        limit = limits.get(cell.concurrency)
        if cell.method != "agentspec" or limit is None:
            continue
        steps = [
            ("O3: longest copy", limit.o3, "not addressed"),
            ("O2/1: best occurrence", limit.o2, "wrong choice"),
            ("O1: our draft, true length", limit.o1, "lengths, price of a slot"),
            ("measured tokens per step", cell.tokens_per_step, "cost of steps and prompts"),
        ]
        if cell.speedup is not None:
            steps.append(("measured factor over plain", cell.speedup, ""))
        label = f"{agents(cell.concurrency)}: tokens per step, factor over plain"
        parts.append(charts.waterfall(steps, x_label=label))
        factor = "-" if cell.speedup is None else f"{cell.speedup:.2f}"
        values = (limit.o3, limit.o2, limit.o1, cell.tokens_per_step)
        eta = cell.tokens_per_step / limit.o2
        table.append([str(cell.concurrency), *(f"{value:.2f}" for value in values), f"{eta:.0%}", factor])
    heading = ["agents", "O3", "O2/1", "O1", "measured tokens/step", "of O2/1", "factor over plain"]
    note = '<p class="note">No limits were computed for this run.</p>'
    return Section(
        title="How far is the limit?",
        lead="Tokens per step if nothing were ever rejected: with any copy (O3), the best occurrence of "
        "the last token (O2/1), with our own drafts cut at the true length (O1). Then what the budget let "
        "through (measured tokens per step), and what the engine made of it: steps with drafts take longer, "
        "prompts take what they did (factor over plain).",
        html=f'<div class="grid">{"".join(parts)}</div>' + html_table(heading, table) if parts else note,
        markdown=markdown_table(heading, table) if table else "No limits were computed for this run.\n",
    )


def _costs(cells: Sequence[CellSummary], cost: Cost) -> Section:
    ticks = sorted({cell.concurrency for cell in cells})
    heading = ["method", *(agents(tick) for tick in ticks)]
    table = [
        [method, *(f"{cost.currency}{cost.per_hour / cell.tasks_per_hour:.4f}" for cell in own)]
        for method, own in _by_method(cells).items()
    ]
    return Section(
        title="What does a task cost?",
        lead=f"At {cost.currency}{cost.per_hour:g} per machine hour, for one replayed agent run. Whether "
        "tasks succeed is not measured here: the text is recorded (agentspec bench live measures it).",
        html=html_table(heading, table),
        markdown=markdown_table(heading, table),
    )


def _numbers(cells: Sequence[CellSummary]) -> Section:
    heading = [
        "method", "agents", "tok/s", "factor", "TTFT P50 s", "TPOT P50 ms", "turn P50 s", "turn P95 s",
        "turn P99 s",
        "task P50 s", "tokens/step", "rejected", "draft ms/step", "batch", "prefix hits", "wrong",
    ]  # fmt: skip
    table = [
        [
            cell.method,
            str(cell.concurrency),
            f"{cell.tok_s:.1f}",
            "-" if cell.speedup is None else f"{cell.speedup:.2f}",
            number(cell.ttft_p50, 2),
            number(None if cell.tpot_p50 is None else 1e3 * cell.tpot_p50, 1),
            number(cell.turn_p50, 2),
            number(cell.turn_p95, 2),
            number(cell.turn_p99, 2),
            number(cell.task_p50, 1),
            f"{cell.tokens_per_step:.2f}",
            f"{cell.rejected_share:.0%}" if cell.drafted_per_token else "-",
            f"{cell.draft_ms_per_step:.2f}",
            f"{cell.mean_batch:.1f}",
            f"{cell.prefix_hit_rate:.0%}",
            str(cell.mismatched),
        ]
        for cell in cells
    ]
    return Section(
        title="All numbers",
        lead="Medians over repeats. TTFT: time to the first token. TPOT: time per further token. Batch: mean "
        "number of requests that sampled in a step. Wrong: turns unlike the recording (must be 0).",
        html=html_table(heading, table),
        markdown=markdown_table(heading, table),
    )
