"""`agentspec bench ...`: parse, call one function, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from agentspec_runtime.bench.costs import GoodputRow, StepTime
    from agentspec_runtime.bench.simulate import Plan, WorkloadResult
    from agentspec_runtime.engine.args import JsonValue

__all__ = ["app"]

app = typer.Typer(
    name="bench",
    help="Measure before deciding: recorded agent runs against every drafting method, at your concurrency.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FILE_COLUMNS: Final = 150
_ALL_METHODS: Final = "ngram,suffix,agentspec,oracle"
_ALL_REPLAYED: Final = "plain,plain-sync,ngram,suffix,agentspec,agentspec-nohints,agentspec-nobudget"


class Side(StrEnum):
    """Values of --set-aside."""

    ALL = "all"
    TUNE = "tune"
    TEST = "test"


class Switch(StrEnum):
    """on or off."""

    ON = "on"
    OFF = "off"


TracesOption = Annotated[
    list[Path],
    typer.Option("--traces", exists=True, dir_okay=False, help="Recordings, JSON Lines or .gz: FILE..."),
]
MoreTraces = Annotated[
    list[Path] | None,
    # `--traces A B C`: an option takes one word, so the others arrive as arguments.
    typer.Argument(exists=True, dir_okay=False, hidden=True),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model directory or hub name. Default: the embedded SmolLM2-135M-Instruct."),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", exists=True, dir_okay=False, help="Chat template instead of the model's."
    ),
]
SideOption = Annotated[
    Side,
    typer.Option(
        "--set-aside",
        help="Split by task: tune on [bold]tune[/bold], decide on [bold]test[/bold], a quarter of them.",
    ),
]


@app.command()
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

    console = _console()
    costs = [_cost(name) for name in cost or ()]
    plan = Plan(
        files=(*traces, *(more_traces or ())),
        model=model or _embedded_model(console.print),
        chat_template=chat_template,
        methods=tuple(_names(methods)),
        trajectories=trajectories,
        part=set_aside.value,
        max_model_len=max_model_len,
        processes=processes or len(os.sched_getaffinity(0)),
    )
    sizes = [int(size) for size in _names(batches)]
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        results = run(plan, lambda done, total: bar.update(task, completed=done, total=total))
        priced = _priced(
            plan, results, costs, sizes, lambda n, total: bar.update(task, completed=n, total=total)
        )
    for index, result in enumerate(results):
        console.print(tables.simulated(result))
        for curve in costs:
            console.print(tables.goodput(curve.name, priced[index, curve.name]))
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
        console.print(f"All figures: {out}")


@app.command()
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


@app.command()
def replay(
    traces: TracesOption,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results; run again to continue.")],
    more_traces: MoreTraces = None,
    model: ModelOption = None,
    chat_template: TemplateOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; settings as ngram:num_speculative_tokens=10,...")
    ] = _ALL_REPLAYED,
    concurrency: Annotated[str, typer.Option(help="Agents at the same time.")] = "1,8,32",
    trajectories: Annotated[
        str, typer.Option(help="How many trajectories: one number, or one per concurrency; 'all'.")
    ] = "32",
    repeat: Annotated[int, typer.Option(min=1, help="Repeats, methods in alternating order.")] = 1,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Only the first turns of each.")] = None,
    max_model_len: Annotated[int, typer.Option(min=64, help="Context limit for all methods.")] = 8192,
    set_aside: SideOption = Side.ALL,
    separate: Annotated[
        bool,
        typer.Option("--separate/--mixed", help="Every file for itself, results in OUT/NAME, or all mixed."),
    ] = False,
    arrival: Annotated[
        str, typer.Option(help="closed, or poisson:RATE with RATE agents per second (open loop).")
    ] = "closed",
    waits: Annotated[Switch, typer.Option(help="Honour recorded tool times.")] = Switch.ON,
    session_reuse: Annotated[
        Switch, typer.Option(help="off: no method may draft from the text of earlier requests.")
    ] = Switch.ON,
    seed: Annotated[int, typer.Option(help="Of arrival times.")] = 0,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="Engine mode for all methods.")] = False,
    dtype: Annotated[
        str, typer.Option(help="vLLM's --dtype; auto is float32 on a CPU that has no bfloat16.")
    ] = "auto",
    kv_cache_gib: Annotated[float | None, typer.Option(min=0.1, help="KV cache; a CPU needs a size.")] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="name=value for every method, e.g. tensor_parallel_size=2.")
    ] = None,
) -> None:
    """Replay recordings through the real engine, every method with the same forced output."""
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.methods import split_methods
    from agentspec_runtime.bench.progress import shown_progress
    from agentspec_runtime.bench.replay import ReplayPlan, replay_together, separated

    console = _console()
    plan = ReplayPlan(
        files=(*traces, *(more_traces or ())),
        model=model or _embedded_model(console.print),
        out=out,
        methods=tuple(split_methods(methods)),
        concurrency=tuple(int(size) for size in _names(concurrency)),
        trajectories=tuple(None if count == "all" else int(count) for count in _names(trajectories)),
        repeat=repeat,
        max_turns=max_turns,
        max_model_len=max_model_len,
        part=set_aside.value,
        rate_per_s=_rate(arrival),
        honour_waits=waits is Switch.ON,
        reuse=session_reuse is Switch.ON,
        seed=seed,
        chat_template=chat_template,
        engine=_engine_arguments(eager=eager, dtype=dtype, kv_cache_gib=kv_cache_gib, extra=engine_arg or []),
    )
    plans = separated(plan) if separate else [plan]
    with shown_progress() as show:
        rows = replay_together(plans, show)
    for part in plans:
        if own := [row for row in rows if row.workload == part.workload]:
            console.print(tables.replayed(own))
        console.print(f"Results: {part.out / 'results.jsonl'}. Next: agentspec bench report {part.out}")


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(dir_okay=False, help="Cost curve to write, JSON.")],
    model: ModelOption = None,
    requests: Annotated[str, typer.Option(help="Requests at the same time.")] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(min=16, help="Tokens in the KV cache of every request.")] = 512,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="Engine mode.")] = False,
    dtype: Annotated[
        str, typer.Option(help="vLLM's --dtype; auto is float32 on a CPU that has no bfloat16.")
    ] = "auto",
    kv_cache_gib: Annotated[float | None, typer.Option(min=0.1, help="KV cache; a CPU needs a size.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="name=value for the engine.")] = None,
) -> None:
    """Measure how long a decode step takes here, by the number of tokens in it."""
    from agentspec_runtime.bench.calibrate import CalibrationPlan
    from agentspec_runtime.bench.calibrate import calibrate as run
    from agentspec_runtime.bench.chat_tokens import load_vocabulary
    from agentspec_runtime.bench.costs import save_curve

    console = _console()
    chosen = model or _embedded_model(console.print)
    curve = run(
        CalibrationPlan(
            model=chosen,
            vocab_size=load_vocabulary(chosen).vocab_size,
            requests=tuple(sorted(int(size) for size in _names(requests))),
            context_tokens=context,
            engine=_engine_arguments(
                eager=eager, dtype=dtype, kv_cache_gib=kv_cache_gib, extra=engine_arg or []
            ),
        ),
        console.print,
    )
    save_curve(out, curve)
    for tokens, seconds in curve.points:
        console.print(f"{tokens:5d} tokens in the step: {1e3 * seconds:8.2f} ms")
    console.print(f"Written: {out}. Use it with: agentspec serve --cost-curve {out}")


@app.command()
def live(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")],
    model: ModelOption = None,
    methods: Annotated[
        str, typer.Option(help="plain, plain-sync, ngram, suffix, agentspec; settings as in replay.")
    ] = "plain,agentspec",
    concurrency: Annotated[str, typer.Option(help="Agents at the same time.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="How often every task is run, with other seeds.")] = 2,
    attempts: Annotated[int, typer.Option(min=1, help="Trials of an agent at its task.")] = 2,
    temperature: Annotated[float, typer.Option(min=0, help="Of every call.")] = 0.7,
    arrival: Annotated[str, typer.Option(help="closed, or poisson:RATE (agents per second).")] = "closed",
    tasks: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Own Reflexion tasks, JSON Lines.")
    ] = None,
    coder: Annotated[bool, typer.Option(help="Also run the LangGraph coding agent.")] = True,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Price of the machine.")] = None,
    seed: Annotated[int, typer.Option(help="Of answers and arrival times.")] = 0,
    vllm_flag: Annotated[
        list[str] | None, typer.Option(help="Passed to every server, e.g. --vllm-flag=--enforce-eager.")
    ] = None,
) -> None:
    """Real agents at your concurrency: success by executed tests, and cost per solved task."""
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.live import LivePlan, load_tasks
    from agentspec_runtime.bench.live import live as run
    from agentspec_runtime.bench.methods import split_methods
    from agentspec_runtime.demo.tasks import FUNCTION_TASKS
    from agentspec_runtime.embedded import EMBEDDED_MODEL_NAME

    console = _console()
    plan = LivePlan(
        out=out,
        served=model or EMBEDDED_MODEL_NAME,
        model=model,
        methods=tuple(split_methods(methods)),
        concurrency=tuple(int(size) for size in _names(concurrency)),
        rounds=rounds,
        attempts=attempts,
        temperature=temperature,
        rate_per_s=_rate(arrival),
        seed=seed,
        tasks=load_tasks(tasks) if tasks else FUNCTION_TASKS,
        coder=coder and tasks is None,
        vllm_flags=tuple(vllm_flag or ()),
    )
    console.print(tables.lived(run(plan, price_per_hour=price_per_hour, say=console.print)))
    console.print(f"Results: {out / 'live.jsonl'}")


@app.command()
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


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _rate(arrival: str) -> float | None:
    kind, _, rate = arrival.partition(":")
    if kind == "closed" and not rate:
        return None
    try:
        value = float(rate)
    except ValueError:
        value = 0.0
    if kind != "poisson" or value <= 0:
        raise ConfigurationError(f"--arrival {arrival!r}: needed closed, or poisson:RATE with RATE above 0")
    return value


def _engine_arguments(
    *, eager: bool, dtype: str, kv_cache_gib: float | None, extra: list[str]
) -> dict[str, JsonValue]:
    from agentspec_runtime.engine.args import cpu_environment, cpu_kv_cache_bytes
    from agentspec_runtime.engine.compat import require_vllm
    from agentspec_runtime.engine.host import available_memory_bytes, has_fast_bfloat16, usable_cores

    if require_vllm().cpu:  # what `agentspec serve` sets, for every method
        os.environ.update({**cpu_environment(usable_cores()), **os.environ})
        if dtype == "auto" and not has_fast_bfloat16():
            dtype = "float32"
    engine: dict[str, JsonValue] = {"enforce_eager": eager, "dtype": dtype, "enable_prefix_caching": True}
    if kv_cache_gib is not None:
        engine["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    elif require_vllm().cpu:
        engine["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(available_memory_bytes())
    for item in extra:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--engine-arg {item!r}: needed name=value")
        try:
            engine[name.strip().replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            engine[name.strip().replace("-", "_")] = value
    return engine


def _console() -> Console:
    """In a file or a pipe, lines as wide as the tables need; rich would take 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)


def _embedded_model(progress: Callable[[str], None]) -> str:
    from agentspec_runtime.embedded.model import prepare_embedded_model

    return str(prepare_embedded_model(progress))


def _cost(name: str) -> StepTime:
    from agentspec_runtime.bench.costs import load_curve
    from agentspec_runtime.bench.presets import preset

    path = Path(name)
    return load_curve(path) if path.suffix == ".json" or path.is_file() else preset(name)
