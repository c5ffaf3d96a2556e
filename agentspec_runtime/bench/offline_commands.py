"""Commands of `agentspec bench` that need no engine: simulate, plot, report. Heavy imports happen inside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from agentspec_runtime.bench.options import (
    ModelOption,
    MoreTraces,
    Side,
    SideOption,
    TemplateOption,
    TracesOption,
    console,
    embedded_model,
    names,
)

if TYPE_CHECKING:
    from agentspec_runtime.bench.costs import GoodputRow, StepTime
    from agentspec_runtime.bench.simulate import Plan, WorkloadResult

__all__ = ["plot", "report", "simulate"]

_ALL_METHODS: Final = "ngram,suffix,agentspec,oracle"


def simulate(
    traces: TracesOption,
    more_traces: MoreTraces = None,
    model: ModelOption = None,
    chat_template: TemplateOption = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = _ALL_METHODS,
    trajectories: Annotated[int | None, typer.Option(min=1, help="At most so many of each file.")] = None,
    set_aside: SideOption = Side.ALL,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Leave out longer requests.")] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            help="Cost curve file of 'bench calibrate', or a preset like h100/dense-8b. Repeatable."
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes for goodput.")] = "1,4,16,32,64,128,256",
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all figures as JSON.")] = None,
) -> None:
    """Acceptance, waste and the theoretical limit of every drafter on recordings, without an engine."""
    from rich.progress import Progress as Bar

    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.provenance import collect_provenance
    from agentspec_runtime.bench.simulate import Plan
    from agentspec_runtime.bench.simulate import simulate as run

    shown = console()
    costs = [_cost(name) for name in cost or ()]
    plan = Plan(
        files=(*traces, *(more_traces or ())),
        model=model or embedded_model(shown.print),
        chat_template=chat_template,
        methods=tuple(names(methods)),
        trajectories=trajectories,
        part=set_aside.value,
        max_model_len=max_model_len,
        processes=processes or len(os.sched_getaffinity(0)),
    )
    sizes = [int(size) for size in names(batches)]
    with Bar(console=shown, transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        results = run(plan, lambda done, total: bar.update(task, completed=done, total=total))
        priced = _priced(
            plan, results, costs, sizes, lambda n, total: bar.update(task, completed=n, total=total)
        )
    for index, result in enumerate(results):
        shown.print(tables.simulated(result))
        for curve in costs:
            shown.print(tables.goodput(curve.name, priced[index, curve.name]))
    if out is not None:
        provenance = asdict(collect_provenance(files=plan.files, notes={"set_aside": set_aside.value}))
        document = {
            "provenance": provenance,
            "workloads": [asdict(result) for result in results],
            "goodput": [
                {"file": results[index].file, "cost": name, "rows": [asdict(row) for row in rows]}
                for (index, name), rows in priced.items()
            ],
        }
        out.write_text(json.dumps(document, indent=1), encoding="utf-8")
        shown.print(f"All figures: {out}")


def plot(
    results: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Files of 'bench simulate --out'.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the pictures.")],
) -> None:
    """Draw a simulation: accepted against rejected drafts, and how well survival is calibrated (SVG)."""
    from agentspec_runtime.bench.plots import read_simulation, write_plots

    workloads = [workload for file in results for workload in read_simulation(file)]
    for path in write_plots(workloads, out):
        typer.echo(str(path))


def report(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a replay.")],
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine, for cost per task.")
    ] = None,
    currency: Annotated[str, typer.Option(help="Its sign.")] = "$",
) -> None:
    """One HTML file and Markdown out of a replay: what pays, what is wasted, how far the limit is."""
    from agentspec_runtime.bench.report import write_report
    from agentspec_runtime.bench.summary import Cost

    cost = None if price_per_hour is None else Cost(per_hour=price_per_hour, currency=currency)
    for path in write_report(folder, cost):
        typer.echo(str(path))


def _priced(
    plan: Plan,
    results: Sequence[WorkloadResult],
    costs: Sequence[StepTime],
    sizes: Sequence[int],
    progress: Callable[[int, int], None],
) -> dict[tuple[int, str], list[GoodputRow]]:
    """Goodput rows by file index and cost name, ours under its real budget included."""
    from agentspec_runtime.bench.costs import goodput_table
    from agentspec_runtime.bench.lockstep import budget_rows

    ours = budget_rows(plan, costs, sizes, progress) if costs and "agentspec" in plan.methods else {}
    return {
        (index, cost.name): [*goodput_table(result.lanes, cost, sizes), *ours.get((index, cost.name), [])]
        for index, result in enumerate(results)
        for cost in costs
    }


def _cost(name: str) -> StepTime:
    from agentspec_runtime.bench.costs import load_curve
    from agentspec_runtime.bench.presets import preset

    path = Path(name)
    return load_curve(path) if path.suffix == ".json" or path.is_file() else preset(name)
