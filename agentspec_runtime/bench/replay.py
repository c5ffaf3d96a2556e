"""`agentspec bench replay`: recorded agent runs through a real engine, method after method.

Every (method, repeat) gets a fresh engine process that runs all concurrencies; over repeats the order of
the methods alternates, so that a machine that slows down does not favour whoever comes first. All methods
get the same requests, context limit, prefix caching, dtype and engine mode; only what `methods.py` names
differs.

Several plans that differ in their recordings share the processes (`replay_together`): starting an engine
takes as long as a cell, and caches are cold for every cell all the same.

Results are appended to DIR/results.jsonl when a cell ends. A run that dies, or is stopped, keeps what it
has; the same command on the same DIR then runs only the cells that are missing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from agentspec_runtime.bench.engine_process import engine_events
from agentspec_runtime.bench.measure import CellKey, ResultRow
from agentspec_runtime.bench.methods import Method, parse_method
from agentspec_runtime.bench.pace import Pace
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.bench.replay_engine import CellJob, Job, select_trajectories, sums_file
from agentspec_runtime.bench.replay_plan import (
    ReplayPlan,
    check_continues,
    check_folders,
    check_plan,
    mode_of,
    notes_of,
)
from agentspec_runtime.bench.results import finished_cells, measure_raw
from agentspec_runtime.bench.scheduler_records import read_scheduler_records
from agentspec_runtime.bench.tokens import TokenTrajectory
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.engine.compat import on_cpu

if TYPE_CHECKING:
    from agentspec_runtime.bench.limits import Limits

__all__ = [
    "EngineEvents",
    "Progress",
    "recorded_trajectories",
    "replay",
    "replay_together",
]

_RECORDING_SCHEDULER: Final = "agentspec_runtime.bench.replay_scheduler.RecordingScheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is going on: shown to the user, never needed for a result."""

    method: str
    repeat: int
    workload: str
    event: Literal["start", "ready", "begin", "turn", "cell"]
    concurrency: int = 0
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    row: ResultRow | None = None


EngineEvents = Callable[[Path, Path, Mapping[str, str]], Iterator[Mapping[str, JsonValue]]]
"""Runs the job of a file in an engine process and tells its events: `engine_events`, or a scripted one."""


def replay(
    plan: ReplayPlan,
    report: Callable[[Progress], None] = lambda _progress: None,
    *,
    pace: Pace | None = None,
    engines: EngineEvents = engine_events,
) -> list[ResultRow]:
    """Run a plan; rows of this run in the order in which they were measured.

    Args:
        plan: what to run.
        report: told of everything that happens.
        pace: asked before each engine which of its cells are run; None runs all.
        engines: what runs a job.

    Raises:
        ConfigurationError: settings that do not fit.
        RecordingError: a recording that cannot be read.
        ServerError: an engine process ended early; everything measured before is in the results file.
    """
    return replay_together([plan], report, pace=pace, engines=engines)


def replay_together(
    plans: Sequence[ReplayPlan],
    report: Callable[[Progress], None] = lambda _progress: None,
    *,
    pace: Pace | None = None,
    engines: EngineEvents = engine_events,
) -> list[ResultRow]:
    """Run plans that differ only in their recordings and folders, in the same engine processes.

    Arguments and errors are those of `replay`.
    """
    for plan in plans:
        check_plan(plan)
        check_continues(plan)
    check_folders(plans)
    common = plans[0]
    methods = [parse_method(label, reuse=common.reuse, cpu=on_cpu()) for label in common.methods]
    for plan in plans:
        _write_provenance(plan, methods)
    rows: list[ResultRow] = []
    for repeat in range(common.repeat):
        for method in methods if repeat % 2 == 0 else reversed(methods):
            for plan, row in _run_method(plans, method, repeat, report, pace, engines):
                with (plan.out / "results.jsonl").open("a", encoding="utf-8") as results:
                    results.write(json.dumps(asdict(row)) + "\n")
                rows.append(row)
    for plan in plans:
        _write_limits(plan)
    return rows


def recorded_trajectories(plan: ReplayPlan, count: int | None = None) -> list[TokenTrajectory]:
    """The first `count` trajectories of a plan (None: all that fit the context limit), copies left out.

    Raises:
        RecordingError: a recording that cannot be read, or that the chat template refuses.
        ConfigurationError: the model has no usable tokenizer or template.
    """
    job = _job(plan, engine={}, hints=False, reuse=True, records=None, cells=[])
    cell = _cell(plan, 0, repeat=0, stem="recorded", folder=plan.out)
    return select_trajectories(job, replace(cell, trajectories=count, copies=False))


def _write_provenance(plan: ReplayPlan, methods: Sequence[Method]) -> None:
    """Written before anything runs. What earlier runs of this folder were is kept beside it."""
    plan.out.mkdir(parents=True, exist_ok=True)
    file = plan.out / "provenance.json"
    before = (
        json.loads(file.read_text(encoding="utf-8")) if finished_cells(plan.out) and file.is_file() else None
    )
    engine = {method.label: {**plan.engine, **method.engine} for method in methods}
    provenance = collect_provenance(
        files=plan.files,
        seeds=[plan.seed + repeat for repeat in range(plan.repeat)],
        engine={**before["engine"], **engine} if before else engine,
        notes=notes_of(plan),
    )
    if before:
        run = {name: before[name] for name in ("started", "argv", "git", "packages")}
        provenance = replace(provenance, earlier=[*before.get("earlier", []), run])
    file.write_text(json.dumps(asdict(provenance), indent=1, default=str) + "\n", encoding="utf-8")


def _write_limits(plan: ReplayPlan) -> None:
    """Limits of what was replayed, for the report's waterfall; once per number of trajectories."""
    from agentspec_runtime.bench.limits import compute_limits, read_limits, write_limits

    if read_limits(plan.out / "limits.json").keys() >= set(plan.concurrency):
        return
    by_count: dict[int | None, Limits] = {}
    limits = []
    for index, concurrency in enumerate(plan.concurrency):
        count = plan.trajectories_at(index)
        if count not in by_count:
            by_count[count] = compute_limits(concurrency, recorded_trajectories(plan, count), plan.model)
        limits.append(replace(by_count[count], concurrency=concurrency))
    write_limits(plan.out / "limits.json", limits)


def _job(
    plan: ReplayPlan,
    *,
    engine: Mapping[str, JsonValue],
    hints: bool,
    reuse: bool,
    records: Path | None,
    cells: list[CellJob],
    until_s: float | None = None,
) -> Job:
    return Job(
        engine={**plan.engine, **engine},
        model=plan.model,
        chat_template=str(plan.chat_template) if plan.chat_template else None,
        max_model_len=plan.max_model_len,
        hints=hints,
        reuse=reuse,
        records_file=str(records) if records else None,
        cells=cells,
        until_s=until_s,
    )


def _cell(plan: ReplayPlan, index: int, *, repeat: int, stem: str, folder: Path) -> CellJob:
    concurrency = plan.concurrency[index]
    return CellJob(
        concurrency=concurrency,
        files=[str(file) for file in plan.files],
        trajectories=plan.trajectories_at(index),
        max_turns=plan.max_turns,
        part=plan.part,
        rate_per_s=plan.rate_per_s,
        honour_waits=plan.honour_waits,
        seed=plan.seed + repeat,
        # Not the same in two runs: a server-wide store of an earlier run cannot warm this one.
        salt=f"bench-{plan.workload}-{stem}-c{concurrency}-{os.getpid()}"[-128:],
        raw_file=str(folder / f"{stem}-c{concurrency}.json"),
        copies=plan.copies,
        shuffled=plan.shuffled,
    )


def _run_method(
    plans: Sequence[ReplayPlan],
    method: Method,
    repeat: int,
    report: Callable[[Progress], None],
    pace: Pace | None,
    engines: EngineEvents,
) -> Iterator[tuple[ReplayPlan, ResultRow]]:
    """One engine process; a row whenever one of its cells is over."""
    common = plans[0]
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', method.label)}-r{repeat}"
    todo = [
        (plan, _cell(plan, i, repeat=repeat, stem=stem, folder=f))
        for plan, i, f in _todo(plans, method, repeat)
    ]
    grant = (
        pace.grant(method.label, repeat, [cell.concurrency for _, cell in todo]) if pace and todo else None
    )
    if grant is not None:
        todo = [(plan, cell) for plan, cell in todo if cell.concurrency in grant.concurrency]
    if not todo:
        return
    folder = _cells_folder(common)
    records = folder / f"{stem}.records" if method.ours else None
    job = _job(
        common,
        engine=_recorded(method, records),
        hints=method.hints,
        reuse=method.reuse,
        records=records,
        cells=[cell for _, cell in todo],
        until_s=grant.until if grant else None,
    )
    job_file = folder / f"{stem}.job.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    report(Progress(method=method.label, repeat=repeat, workload="", event="start"))
    for event in engines(job_file, common.out / f"{stem}.log", method.environment):
        plan, cell = todo[number] if isinstance(number := event.get("cell"), int) else (common, None)
        shown = _progress(method.label, repeat, plan.workload, cell, event)
        if event["event"] == "cell" and cell is not None:
            row = _row(plan, method, repeat, cell)
            yield plan, row
            shown = replace(shown, row=row)
        report(shown)


def _todo(plans: Sequence[ReplayPlan], method: Method, repeat: int) -> Iterator[tuple[ReplayPlan, int, Path]]:
    """Cells that have no result yet: plan, index of the concurrency, folder of the raw record."""
    for plan in plans:
        finished = finished_cells(plan.out)
        for index, concurrency in enumerate(plan.concurrency):
            if (method.label, concurrency, repeat) not in finished:
                yield plan, index, _cells_folder(plan)


def _cells_folder(plan: ReplayPlan) -> Path:
    folder = plan.out / "cells"
    folder.mkdir(exist_ok=True)
    return folder


def _row(plan: ReplayPlan, method: Method, repeat: int, cell: CellJob) -> ResultRow:
    key = CellKey(
        method=method.label,
        concurrency=cell.concurrency,
        repeat=repeat,
        workload=plan.workload,
        mode=mode_of(plan),
    )
    raw_file = Path(cell.raw_file)
    sums = read_scheduler_records(sums_file(raw_file)) if method.ours else None
    return measure_raw(key, raw_file, sums)


def _recorded(method: Method, records: Path | None) -> Mapping[str, JsonValue]:
    """Engine arguments of a method; ours with the scheduler that also writes down what it did."""
    if records is None:
        return method.engine
    additional = method.engine.get("additional_config")
    assert isinstance(additional, dict)  # noqa: S101 - `engine_args` sets it
    return {
        **method.engine,
        "scheduler_cls": _RECORDING_SCHEDULER,
        "additional_config": {**additional, "agentspec_bench_records": str(records.resolve())},
    }


def _progress(
    label: str, repeat: int, workload: str, cell: CellJob | None, event: Mapping[str, JsonValue]
) -> Progress:
    kind = cast("Literal['ready', 'begin', 'turn', 'cell']", event["event"])  # written by replay_engine.py
    turns, tokens, seconds = (event.get(name) for name in ("turns", "tokens", "seconds"))
    return Progress(
        method=label,
        repeat=repeat,
        workload=workload,
        event=kind,
        concurrency=cell.concurrency if cell else 0,
        turns=turns if isinstance(turns, int) else 0,
        tokens=tokens if isinstance(tokens, int) else 0,
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
    )
