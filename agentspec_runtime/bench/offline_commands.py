"""Commands of `agentspec bench` that need no engine: simulate, controller, plot, report.

Heavy imports happen inside.
"""

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
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec_runtime.bench.controller import KnownCost
    from agentspec_runtime.bench.costs import GoodputRow, StepTime
    from agentspec_runtime.bench.simulate import Plan, WorkloadResult

__all__ = ["CONTROLLER_HELP", "controller", "plot", "report", "simulate"]

_ALL_METHODS: Final = "ngram,suffix,agentspec,oracle"

CONTROLLER_HELP: Final = (
    "Does the budget settle? The real drafter and the real budget in virtual time, under changing load.\n\n"
    "The time of a step comes from --cost, with noise and rare stalls. The budget does not know that curve: "
    "it starts cold and learns from what it is told. Beside every choice stands the optimum, which is what "
    "the same rule would have chosen from the same survivals with the curve known.\n\n"
    "[bold]sweep[/bold]  one more request in flight every --hold steps, up to --most, and down again\n\n"
    "[bold]burst[/bold]  1, then --most at once, then 1 at once\n\n"
    "[bold]wake[/bold]   text that does not repeat, text as recorded, text that does not repeat\n\n"
    "Prints for each: goodput over never drafting, in all and in the worst window of 50 steps; the part of "
    "the optimum's goodput; steps after each jump until the budget stays within a fifth of the optimum; "
    "swings between too much and too little; the most steps in a row in which a request had a draft as good "
    "as one admitted and got none. Leaves controller.json (every step) and a picture of each programme."
    "\n\n[bold]agentspec bench controller --cost h100/dense-8b --out controller[/bold]"
    "\n\n[bold]agentspec bench controller --traces runs.jsonl.gz --cost curve.json --out controller[/bold]"
)


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


def controller(
    more_traces: MoreTraces = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Recordings of yours: FILE... Default: the small ones that ship with this package.",
        ),
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            help="True step time: a file of 'bench calibrate', a curve that a server has learned, or a "
            "preset like h100/dense-8b."
        ),
    ] = "h100/dense-8b",
    programmes: Annotated[str, typer.Option(help="Comma-separated.")] = "sweep,burst,wake",
    most: Annotated[int, typer.Option(min=2, help="Most requests in flight; wake runs a quarter.")] = 64,
    hold: Annotated[int, typer.Option(min=1, help="Steps of the sweep at each number in flight.")] = 25,
    steps: Annotated[int, typer.Option(min=50, help="Steps of each part of burst and wake.")] = 300,
    noise: Annotated[float, typer.Option(min=0, help="Relative spread of what the budget is told.")] = 0.05,
    stall_every: Annotated[int, typer.Option(min=0, help="One step in so many takes 5 times as long.")] = 200,
    seed: Annotated[int, typer.Option(help="Of noise and stalls.")] = 0,
    model: ModelOption = None,
    chat_template: TemplateOption = None,
    set_aside: SideOption = Side.ALL,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Leave out longer requests.")] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for JSON and pictures.")] = None,
) -> None:
    """Does the budget settle? `CONTROLLER_HELP` says more."""
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.chat_tokens import load_vocabulary
    from agentspec_runtime.bench.controller import Noise, programme, run_programme
    from agentspec_runtime.bench.controller_figures import figures
    from agentspec_runtime.bench.gpu_check import OWN_RECORDINGS
    from agentspec_runtime.bench.plots import write_controller
    from agentspec_runtime.bench.provenance import collect_provenance
    from agentspec_runtime.bench.simulate import Plan, selected_trajectories

    shown = console()
    chosen = [programme(name, most=most, hold=hold, steps=steps) for name in names(programmes)]
    truth = _known_cost(cost)
    plan = Plan(
        files=(*(traces or ()), *(more_traces or ())) or (OWN_RECORDINGS,),
        model=model or embedded_model(shown.print),
        chat_template=chat_template,
        part=set_aside.value,
        max_model_len=max_model_len,
    )
    texts = [text for file in plan.files for text in selected_trajectories(plan, file)[0]]
    told = Noise(sigma=noise, stall_every=stall_every, seed=seed)
    vocabulary = load_vocabulary(plan.model)
    results = []
    for part in chosen:
        run = run_programme(part, texts, vocabulary, truth, noise=told)
        results.append((run, figures(run)))
    shown.print(tables.controlled(truth.name, [found for _, found in results]))
    if out is not None:
        provenance = collect_provenance(
            files=plan.files,
            seeds=[seed],
            notes={
                "cost": truth.name,
                "noise": noise,
                "stall_every": stall_every,
                "set_aside": set_aside.value,
            },
        )
        for path in write_controller(results, provenance, out):
            typer.echo(str(path))


def plot(
    results: Annotated[
        list[Path],
        typer.Argument(
            exists=True, help="Files of 'bench simulate --out', or folders of results of 'bench replay'."
        ),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the pictures.")],
) -> None:
    """Draw results. Of simulations: accepted against rejected drafts, and how well survival is calibrated. Of
    replays: which method is fastest, by kind of traffic and load; also as a table."""
    from agentspec_runtime.bench.choice import read_traffic, write_choice
    from agentspec_runtime.bench.plots import read_simulation, write_plots

    if workloads := [workload for path in results if path.is_file() for workload in read_simulation(path)]:
        for path in write_plots(workloads, out):
            typer.echo(str(path))
    if traffic := [read_traffic(path) for path in results if path.is_dir()]:
        for path in write_choice(traffic, out):
            typer.echo(str(path))


def report(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of a replay or a live run.")
    ],
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine, for cost per task.")
    ] = None,
    currency: Annotated[str, typer.Option(help="Its sign.")] = "$",
) -> None:
    """One HTML file and Markdown out of a replay or a live run: what pays, what is wasted, what it costs."""
    from agentspec_runtime.bench.live import LIVE_FILE
    from agentspec_runtime.bench.live_report import write_live_report
    from agentspec_runtime.bench.report import write_report
    from agentspec_runtime.bench.summary import Cost

    cost = None if price_per_hour is None else Cost(per_hour=price_per_hour, currency=currency)
    written: list[Path] = []
    if (folder / LIVE_FILE).is_file():
        written += write_live_report(folder, cost)
    if not written or (folder / "results.jsonl").is_file():
        written += write_report(folder, cost)
    for path in written:
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


def _known_cost(name: str) -> KnownCost:
    """The same for `controller`, which also takes a curve that a scheduler has learned and kept."""
    from agentspec_runtime.bench.controller import KnownCost, KnownTime
    from agentspec_runtime.engine.curves import read_curve

    try:
        return KnownTime(_cost(name))
    except ConfigurationError:
        if not Path(name).is_file():
            raise
        return KnownCost(read_curve(Path(name)), Path(name).stem)
