"""Commands of `agentspec bench` that start engines or servers: replay, gpu-check, calibrate, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from agentspec_runtime.bench.options import (
    DtypeOption,
    EagerOption,
    EngineArgOption,
    KvCacheOption,
    ModelOption,
    MoreTraces,
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

__all__ = ["calibrate", "live", "replay"]

_ALL_REPLAYED: Final = "plain,plain-sync,ngram,suffix,agentspec,agentspec-nohints,agentspec-nobudget"


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
    eager: EagerOption = False,
    dtype: DtypeOption = "auto",
    kv_cache_gib: KvCacheOption = None,
    engine_arg: EngineArgOption = None,
) -> None:
    """Replay recordings through the real engine, every method with the same forced output."""
    from agentspec_runtime.bench import tables
    from agentspec_runtime.bench.methods import split_methods
    from agentspec_runtime.bench.progress import shown_progress
    from agentspec_runtime.bench.replay import ReplayPlan, replay_together, separated

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
    plans = separated(plan) if separate else [plan]
    with shown_progress() as show:
        rows = replay_together(plans, show)
    for part in plans:
        if own := [row for row in rows if row.workload == part.workload]:
            shown.print(tables.replayed(own))
        shown.print(f"Results: {part.out / 'results.jsonl'}. Next: agentspec bench report {part.out}")


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

    shown = console()
    plan = LivePlan(
        out=out,
        served=model or EMBEDDED_MODEL_NAME,
        model=model,
        methods=tuple(split_methods(methods)),
        concurrency=tuple(int(size) for size in names(concurrency)),
        rounds=rounds,
        attempts=attempts,
        temperature=temperature,
        rate_per_s=rate(arrival),
        seed=seed,
        tasks=load_tasks(tasks) if tasks else FUNCTION_TASKS,
        coder=coder and tasks is None,
        vllm_flags=tuple(vllm_flag or ()),
    )
    shown.print(tables.lived(run(plan, price_per_hour=price_per_hour, say=shown.print)))
    shown.print(f"Results: {out / 'live.jsonl'}")
