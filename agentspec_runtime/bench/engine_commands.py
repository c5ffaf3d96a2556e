"""Commands of `agentspec bench` that start engines or servers: replay, gpu-check, calibrate, live."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from agentspec_runtime.bench.options import (
    DtypeOption,
    EagerOption,
    EngineArgOption,
    KvCacheOption,
    ModelOption,
    MoreTraces,
    RepeatOption,
    Side,
    SideOption,
    Switch,
    TemplateOption,
    TracesOption,
    console,
    embedded_model,
    engine_arguments,
    names,
    rate,
)
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from agentspec_runtime.bench.gpu_check import CheckResult

__all__ = ["GPU_CHECK_HELP", "calibrate", "gpu_check", "live", "replay"]

_ALL_REPLAYED: Final = "plain,plain-sync,ngram,suffix,agentspec,agentspec-nohints,agentspec-nobudget"


GPU_CHECK_HELP: Final = (
    "Put our claim to the test on your GPU, in about ten minutes: at no load slower than plain vLLM.\n\n"
    "Replays agent runs through the real engine with plain vLLM (asynchronous scheduling, CUDA graphs), "
    "agentspec, suffix decoding (where arctic-inference is installed) and n-gram drafting; many agents "
    "come first, one comes last. All methods emit the same recorded text, so that equal work is compared; "
    "the model computes every step in full.\n\n"
    "Prints tok/s and its factor over plain, P99 of a turn, the share of drafts that were rejected and "
    "tokens per step; then whether agentspec was at least 0.98x of plain everywhere. Leaves what 'bench "
    "replay' leaves: results.jsonl, provenance.json, raw cells; and the report. Exit code 0 whatever the "
    "verdict, 1 when an engine fails or answers are wrong.\n\n"
    "We have not run it on a GPU so far. If it says anything but what we claim, please send us the folder."
    "\n\n[bold]agentspec bench gpu-check Qwen/Qwen3-8B --traces my-agents.jsonl.gz[/bold]"
    "\n\n[bold]agentspec bench gpu-check --device cpu --eager[/bold]"
)


class Device(StrEnum):
    """Values of gpu-check --device."""

    GPU = "gpu"
    CPU = "cpu"


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
    repeat: RepeatOption = 1,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Only the first turns of each.")] = None,
    max_model_len: Annotated[
        int, typer.Option(min=128, help="Context limit for all methods; requests end 64 tokens before it.")
    ] = 8192,
    set_aside: SideOption = Side.ALL,
    separate: Annotated[
        bool,
        typer.Option("--separate/--mixed", help="Every file for itself, results in OUT/NAME, or all mixed."),
    ] = False,
    shuffled: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="With --separate: this recording too, the tokens of its answers in random order, so that "
            "nothing foretells them; results in OUT/NAME-shuffled. Repeatable.",
        ),
    ] = None,
    arrival: Annotated[
        str, typer.Option(help="closed, or poisson:RATE with RATE agents per second (open loop).")
    ] = "closed",
    waits: Annotated[Switch, typer.Option(help="Honour recorded tool times.")] = Switch.ON,
    session_reuse: Annotated[
        Switch, typer.Option(help="off: no method may draft from the text of earlier requests.")
    ] = Switch.ON,
    seed: Annotated[int, typer.Option(help="Of arrival times.")] = 0,
    eager: EagerOption = False,
    dtype: DtypeOption = "auto",
    kv_cache_gib: KvCacheOption = None,
    engine_arg: EngineArgOption = None,
) -> None:
    """Replay recordings through the real engine, every method with the same forced output."""
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.methods import split_methods
    from agentspec_runtime.bench.progress import shown_progress
    from agentspec_runtime.bench.replay import replay_together
    from agentspec_runtime.bench.replay_plan import ReplayPlan, separated

    if shuffled and not separate:
        raise ConfigurationError("--shuffled needs --separate: it is measured beside the recordings")
    shown = console()
    plan = ReplayPlan(
        files=(*traces, *(more_traces or ())),
        model=model or embedded_model(shown.print),
        out=out,
        methods=tuple(split_methods(methods)),
        concurrency=tuple(int(size) for size in names(concurrency)),
        trajectories=tuple(None if count == "all" else int(count) for count in names(trajectories)),
        repeat=repeat,
        max_turns=max_turns,
        max_model_len=max_model_len,
        part=set_aside.value,
        rate_per_s=rate(arrival),
        honour_waits=waits is Switch.ON,
        reuse=session_reuse is Switch.ON,
        seed=seed,
        chat_template=chat_template,
        engine=engine_arguments(eager=eager, dtype=dtype, kv_cache_gib=kv_cache_gib, extra=engine_arg or []),
    )
    plans = separated(plan, shuffled or ()) if separate else [plan]
    with shown_progress() as show:
        rows = replay_together(plans, show)
    for part in plans:
        if own := [row for row in rows if row.workload == part.workload]:
            shown.print(tables.replayed(own))
        shown.print(f"Results: {part.out / 'results.jsonl'}. Next: agentspec bench report {part.out}")


def gpu_check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory or hub name: the one that you serve. Default: the embedded 135M model, "
            "whose steps are so short on a GPU that the host decides."
        ),
    ] = None,
    more_traces: MoreTraces = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Recordings of yours: FILE... Default: the small ones that ship with this package, repeated "
            "until there are enough for the load, without reuse between copies.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for everything; what does not fit is named, not run.")
    ] = 10.0,
    concurrency: Annotated[
        str | None, typer.Option(help="Agents at the same time. Default: 1,8,32,64; on a CPU 1,4.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cpu rehearses on a machine without a GPU, as small as can be.")
    ] = Device.GPU,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the results; an old one is continued.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repeats, for a spread; give more --minutes.")] = 1,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Only the first turns of each run. Default: 8; on a CPU 2.")
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=128, help="Context limit for all methods; requests end 64 tokens before it.")
    ] = 8192,
    chat_template: TemplateOption = None,
    eager: EagerOption = False,
    dtype: DtypeOption = "auto",
    kv_cache_gib: KvCacheOption = None,
    engine_arg: EngineArgOption = None,
) -> None:
    """Put our claim to the test on your GPU, in about ten minutes; `GPU_CHECK_HELP` says more."""
    from agentspec_runtime.bench.gpu_check import (
        OWN_RECORDINGS,
        CheckPlan,
        prepare,
        require_device,
        run_check,
    )
    from agentspec_runtime.bench.progress import shown_progress

    if model is not None and Path(model).is_file():
        raise ConfigurationError(f"{model!r} is a file, not a model: gpu-check MODEL --traces FILE...")
    require_device(device.value)
    rehearsal = device is Device.CPU
    sizes = concurrency or ("1,4" if rehearsal else "1,8,32,64")
    shown = console()
    chosen = model or embedded_model(shown.print)
    check = prepare(
        CheckPlan(
            model=chosen,
            out=out or Path(f"gpu-check-{Path(chosen).name}-{datetime.now():%Y%m%d-%H%M%S}"),
            files=(*(traces or ()), *(more_traces or ())) or (OWN_RECORDINGS,),
            concurrency=tuple(int(size) for size in names(sizes)),
            minutes=minutes,
            repeat=repeat,
            max_turns=max_turns or (2 if rehearsal else 8),
            max_model_len=max_model_len,
            chat_template=chat_template,
            rehearsal=rehearsal,
            engine=engine_arguments(
                eager=eager, dtype=dtype, kv_cache_gib=kv_cache_gib, extra=engine_arg or []
            ),
        )
    )
    for remark in check.remarks:
        shown.print(remark, highlight=False)
    with shown_progress() as show:
        result = run_check(check, show)
    _show_check(shown, result, check.replay.out)
    raise typer.Exit(result.exit_code)


def _show_check(shown: Console, result: CheckResult, out: Path) -> None:
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.report import write_report

    if result.cells:
        shown.print(tables.checked(result.cells))
    for sentence in (result.judgement.sentence, *result.sentences):
        shown.print(sentence, highlight=False)
    if result.cells:
        html, _ = write_report(out)
        shown.print(f"Results: {out / 'results.jsonl'}. Report: {html}", highlight=False)
    if result.failed:
        typer.echo(result.failed, err=True)


def calibrate(
    out: Annotated[Path, typer.Option(dir_okay=False, help="Cost curve to write, JSON.")],
    model: ModelOption = None,
    requests: Annotated[str, typer.Option(help="Requests at the same time.")] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(min=16, help="Tokens in the KV cache of every request.")] = 512,
    eager: EagerOption = False,
    dtype: DtypeOption = "auto",
    kv_cache_gib: KvCacheOption = None,
    engine_arg: EngineArgOption = None,
) -> None:
    """Measure how long a decode step takes here, by the number of tokens in it."""
    from agentspec_runtime.bench.calibrate import CalibrationPlan
    from agentspec_runtime.bench.calibrate import calibrate as run
    from agentspec_runtime.bench.chat_tokens import load_vocabulary
    from agentspec_runtime.bench.costs import save_curve

    shown = console()
    chosen = model or embedded_model(shown.print)
    curve = run(
        CalibrationPlan(
            model=chosen,
            vocab_size=load_vocabulary(chosen).vocab_size,
            requests=tuple(sorted(int(size) for size in names(requests))),
            context_tokens=context,
            engine=engine_arguments(
                eager=eager, dtype=dtype, kv_cache_gib=kv_cache_gib, extra=engine_arg or []
            ),
        ),
        shown.print,
    )
    save_curve(out, curve)
    for tokens, seconds in curve.points:
        shown.print(f"{tokens:5d} tokens in the step: {1e3 * seconds:8.2f} ms")
    shown.print(f"Written: {out}. Use it with: agentspec serve --cost-curve {out}")


def live(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")],
    model: ModelOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help="plain, plain-sync, ngram, suffix, eagle3:model=HEAD, agentspec, "
            "agentspec-assist:assist=eagle3:HEAD; settings as in replay."
        ),
    ] = "plain,agentspec",
    concurrency: Annotated[str, typer.Option(help="Agents at the same time.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="How often every task is run, with other seeds.")] = 2,
    repeat: RepeatOption = 1,
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
    from agentspec_runtime.bench.live import LivePlan
    from agentspec_runtime.bench.live import live as run
    from agentspec_runtime.bench.live_agents import Agents, load_tasks
    from agentspec_runtime.bench.live_report import write_live_report
    from agentspec_runtime.bench.methods import split_methods
    from agentspec_runtime.bench.summary import Cost
    from agentspec_runtime.demo.tasks import FUNCTION_TASKS
    from agentspec_runtime.embedded import EMBEDDED_MODEL_NAME

    shown = console()
    plan = LivePlan(
        out=out,
        agents=Agents(
            served=model or EMBEDDED_MODEL_NAME,
            rounds=rounds,
            attempts=attempts,
            temperature=temperature,
            tasks=load_tasks(tasks) if tasks else FUNCTION_TASKS,
            coder=coder and tasks is None,
        ),
        model=model,
        methods=tuple(split_methods(methods)),
        concurrency=tuple(int(size) for size in names(concurrency)),
        repeat=repeat,
        rate_per_s=rate(arrival),
        seed=seed,
        vllm_flags=tuple(vllm_flag or ()),
    )
    shown.print(tables.lived(run(plan, price_per_hour=price_per_hour, say=shown.print)))
    cost = None if price_per_hour is None else Cost(per_hour=price_per_hour)
    html, _ = write_live_report(out, cost)
    shown.print(f"Results: {out / 'live.jsonl'}. Report: {html}", highlight=False)
