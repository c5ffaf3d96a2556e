"""Tables for people: what `simulate` and `replay` print. Numbers only; nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from agentspec_runtime.bench.costs import GoodputRow
from agentspec_runtime.bench.measure import ResultRow
from agentspec_runtime.bench.page import number
from agentspec_runtime.bench.simulate import WorkloadResult
from agentspec_runtime.bench.summary import CellSummary

if TYPE_CHECKING:
    from agentspec_runtime.bench.controller_figures import Figures
    from agentspec_runtime.bench.live import LiveRow

__all__ = ["checked", "controlled", "goodput", "lived", "replayed", "simulated"]


def simulated(result: WorkloadResult) -> Table:
    """Acceptance of every setting on one workload."""
    skipped = (
        f", {result.skipped_requests} requests over the context limit" if result.skipped_requests else ""
    )
    table = Table(
        title=f"{result.file}: {result.trajectories} trajectories, {result.requests} requests, "
        f"{result.out_tokens:,} output tokens{skipped}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    # acc, rej: accepted and rejected draft tokens per output token; ECE: calibration error.
    for heading in ("acc", "rej", "rej %", "tok/step", "µs/step", "ECE"):
        table.add_column(heading, justify="right")
    method = ""
    for lane in result.lanes:
        figures = lane.figures
        if method not in ("", lane.method):
            table.add_section()
        method = lane.method
        table.add_row(
            lane.method,
            lane.setting,
            f"{figures.accepted_per_token:.3f}",
            f"{figures.rejected_per_token:.3f}",
            f"{figures.rejected_share:.0%}",
            f"{figures.tokens_per_step:.2f}",
            f"{figures.draft_us_per_step:.0f}" if figures.draft_us_per_step else "-",
            "-" if figures.calibration_error is None else f"{figures.calibration_error:.3f}",
        )
    return table


def controlled(cost: str, found: Sequence[Figures]) -> Table:
    """What `bench controller` found, a line per programme."""
    table = Table(
        title=f"Budget that learns the step time of {cost} from cold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("programme", no_wrap=True)
    for heading in (
        "steps", "over plain", "worst window", "of optimum", "settled after", "swings", "longest wait",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found:
        settled = ("never" if steps is None else str(steps) for steps in row.settled)
        table.add_row(
            row.programme,
            f"{row.steps:,}",
            f"{row.over_plain:.2f}x",
            f"{row.worst_window:.2f}x",
            f"{row.of_optimum:.3f}",
            ", ".join(settled) or "-",
            str(row.swings),
            str(row.longest_wait),
        )
    return table


def goodput(name: str, rows: Sequence[GoodputRow]) -> Table:
    """Speedup over plain by batch size, the best setting of each method at each size."""
    batches = sorted({row.batch for row in rows})
    methods = list(dict.fromkeys(row.method for row in rows))
    table = Table(
        title=f"Decode goodput against plain, {name}; best setting of each method at each batch size",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("method")
    for batch in batches:
        table.add_column(f"b={batch}", justify="right")
    found = {(row.method, row.batch): row for row in rows}
    for method in methods:
        cells = [found.get((method, batch)) for batch in batches]
        if method == "plain":
            table.add_row("plain, tok/s", *(f"{cell.tokens_per_s:.0f}" if cell else "-" for cell in cells))
            table.add_section()
        else:
            table.add_row(method, *(f"{cell.speedup:.2f}x" if cell else "-" for cell in cells))
    return table


def replayed(rows: Sequence[ResultRow]) -> Table:
    """One line per cell of a replay."""
    table = Table(
        title=f"Replay of {rows[0].workload}" if rows else "Replay",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("method", "c", "repeat"):
        table.add_column(heading)
    for heading in (
        "tok/s",
        "decode tok/s",
        "TTFT P50 s",
        "TPOT P50 ms",
        "turn P50 s",
        "turn P99 s",
        "tokens/step",
        "rejected",
        "draft ms",
        "wrong",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            str(row.concurrency),
            str(row.repeat),
            f"{row.tok_s:.1f}",
            number(row.decode_tok_s, 1),
            number(row.ttft_p50, 2),
            number(None if row.tpot_p50 is None else 1e3 * row.tpot_p50, 1),
            number(row.turn_p50, 2),
            number(row.turn_p99, 2),
            f"{row.tokens_per_step:.2f}",
            f"{row.rejected_share:.2f}" if row.drafted else "-",
            f"{row.draft_ms_per_step:.2f}",
            str(row.mismatched),
        )
    return table


def checked(cells: Sequence[CellSummary]) -> Table:
    """Methods side by side at every load, one line per method and concurrency."""
    table = Table(title="Check", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("agents", justify="right")
    table.add_column("method")
    for heading in ("tok/s", "of plain", "turn P99 s", "rejected", "tokens/step"):
        table.add_column(heading, justify="right")
    for concurrency in sorted({cell.concurrency for cell in cells}):
        table.add_section()
        for cell in (cell for cell in cells if cell.concurrency == concurrency):
            table.add_row(
                str(cell.concurrency),
                cell.method,
                f"{cell.tok_s:.1f}",
                _factor(cell),
                number(cell.turn_p99, 2),
                f"{cell.rejected_share:.0%}" if cell.drafted_per_token else "-",
                f"{cell.tokens_per_step:.2f}",
            )
    return table


def _factor(cell: CellSummary) -> str:
    if cell.speedup is None:
        return "-"
    low, high = cell.speedup_range or (cell.speedup, cell.speedup)
    return f"{cell.speedup:.2f}x" + (f" ({low:.2f} to {high:.2f})" if cell.repeats > 1 else "")


def lived(rows: Sequence[LiveRow]) -> Table:
    """One line per cell of a live run."""
    table = Table(title="Live", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("method", "c", "repeat"):
        table.add_column(heading)
    headings = ("tasks", "solved", "failed", "tasks/h", "tok/s", "task P50 s", "task P95 s", "rejected")
    for heading in (*headings, "cost/task", "cost/solved"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            str(row.concurrency),
            str(row.repeat),
            str(row.tasks),
            str(row.solved),
            str(row.failed),
            f"{row.tasks_per_hour:.0f}",
            f"{row.tok_s:.1f}",
            number(row.task_p50, 2),
            number(row.task_p95, 2),
            f"{row.rejected_share:.2f}" if row.drafted else "-",
            number(row.cost_per_task, 5),
            number(row.cost_per_solved, 5),
        )
    return table
