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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from agentspec_runtime.bench.engine_process import engine_events
from agentspec_runtime.bench.measure import CellKey, ResultRow
from agentspec_runtime.bench.methods import Method, parse_method
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.bench.replay_engine import CellJob, Job, select_trajectories, sums_file
from agentspec_runtime.bench.results import finished_cells, measure_raw
from agentspec_runtime.bench.scheduler_records import read_scheduler_records
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.engine.compat import on_cpu
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec_runtime.bench.limits import Limits

__all__ = ["Progress", "ReplayPlan", "replay", "replay_together", "separated"]

_RECORDING_SCHEDULER: Final = "agentspec_runtime.bench.replay_scheduler.RecordingScheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What to replay. `trajectories` has one entry, or one per concurrency; None takes all."""

    files: tuple[Path, ...]
    model: str
    out: Path
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    trajectories: tuple[int | None, ...] = (None,)
    repeat: int = 1
    max_turns: int | None = None
    max_model_len: int = 8192
    part: Literal["all", "tune", "test"] = "all"
    rate_per_s: float | None = None
    honour_waits: bool = True
    reuse: bool = True
    seed: int = 0
    chat_template: Path | None = None
    engine: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def workload(self) -> str:
        """Name of what is replayed, from the files."""
        return "+".join(_stem(file) for file in self.files)

    def trajectories_at(self, index: int) -> int | None:
        """Number of trajectories at the concurrency with this index."""
        return self.trajectories[index if len(self.trajectories) > 1 else 0]


def _stem(file: Path) -> str:
    return file.name.split(".")[0]


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


def replay(plan: ReplayPlan, report: Callable[[Progress], None] = lambda _progress: None) -> list[ResultRow]:
    """Run a plan; rows of this run in the order in which they were measured.

    Raises:
        ConfigurationError: settings that do not fit.
        RecordingError: a recording that cannot be read.
        ServerError: an engine process ended early; everything measured before is in the results file.
    """
    return replay_together([plan], report)


def replay_together(
    plans: Sequence[ReplayPlan], report: Callable[[Progress], None] = lambda _progress: None
) -> list[ResultRow]:
    """Run plans that differ only in their recordings and folders, in the same engine processes.

    Raises: as `replay`.
    """
    for plan in plans:
        _check(plan)
    _check_folders(plans)
    common = plans[0]
    methods = [parse_method(label, reuse=common.reuse, cpu=on_cpu()) for label in common.methods]
    for plan in plans:
        _write_provenance(plan, methods)
    rows: list[ResultRow] = []
    for repeat in range(common.repeat):
        for method in methods if repeat % 2 == 0 else reversed(methods):
            for plan, row in _run_method(plans, method, repeat, report):
                with (plan.out / "results.jsonl").open("a", encoding="utf-8") as results:
                    results.write(json.dumps(asdict(row)) + "\n")
                rows.append(row)
    for plan in plans:
        _write_limits(plan)
    return rows


def separated(plan: ReplayPlan) -> list[ReplayPlan]:
    """The plan once per recording, each with a folder of its own, for `replay_together`."""
    return [replace(plan, files=(file,), out=plan.out / _stem(file)) for file in plan.files]


def _write_provenance(plan: ReplayPlan, methods: Sequence[Method]) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    provenance = collect_provenance(
        files=plan.files,
        seeds=[plan.seed + repeat for repeat in range(plan.repeat)],
        engine={method.label: {**plan.engine, **method.engine} for method in methods},
        notes=_notes(plan),
    )
    text = json.dumps(asdict(provenance), indent=1, default=str)
    (plan.out / "provenance.json").write_text(text + "\n", encoding="utf-8")


def _write_limits(plan: ReplayPlan) -> None:
    """Limits of what was replayed, for the report's waterfall; once per number of trajectories."""
    from agentspec_runtime.bench.limits import compute_limits, read_limits, write_limits

    if read_limits(plan.out / "limits.json"):
        return
    job = _job(plan, engine={}, hints=False, reuse=True, records=None, cells=[])
    by_count: dict[int | None, Limits] = {}
    limits = []
    for index, concurrency in enumerate(plan.concurrency):
        cell = _cell(plan, index, repeat=0, stem="limits", folder=plan.out)
        if cell.trajectories not in by_count:
            chosen = select_trajectories(job, cell)
            by_count[cell.trajectories] = compute_limits(concurrency, chosen, plan.model)
        limits.append(replace(by_count[cell.trajectories], concurrency=concurrency))
    write_limits(plan.out / "limits.json", limits)


def _job(
    plan: ReplayPlan,
    *,
    engine: Mapping[str, JsonValue],
    hints: bool,
    reuse: bool,
    records: Path | None,
    cells: list[CellJob],
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
    )


def _check(plan: ReplayPlan) -> None:
    if not plan.files:
        raise ConfigurationError("no recording given: --traces FILE...")
    if not plan.concurrency or min(plan.concurrency) < (0 if plan.rate_per_s else 1):
        raise ConfigurationError(f"--concurrency needs numbers from 1, got {list(plan.concurrency)}")
    if len(plan.trajectories) not in (1, len(plan.concurrency)):
        raise ConfigurationError(
            f"--trajectories takes one number, or one per concurrency ({len(plan.concurrency)}), "
            f"got {len(plan.trajectories)}"
        )
    if len(set(plan.methods)) != len(plan.methods):
        raise ConfigurationError("a method is named twice in --methods")
    for file in plan.files:
        if not file.is_file():
            raise ConfigurationError(f"{file}: no such file")


def _check_folders(plans: Sequence[ReplayPlan]) -> None:
    """Recordings in one folder would take each other's results for their own, and share a cache salt."""
    first: dict[str, ReplayPlan] = {}
    for plan in plans:
        before = first.setdefault(plan.workload, plan)
        if before is not plan:
            ours, other = (", ".join(map(str, one.files)) for one in (plan, before))
            raise ConfigurationError(
                f"--separate: {other} and {ours} have the same name, {plan.workload!r}, and would share one "
                "folder of results: rename one of them, or replay them one after the other"
            )


def _notes(plan: ReplayPlan) -> dict[str, str | int | float | bool | None]:
    return {
        "model": Path(plan.model).name,
        "mode": _mode(plan),
        "part": plan.part,
        "max_model_len": plan.max_model_len,
        "max_turns": plan.max_turns,
        "session_reuse": plan.reuse,
        "waits": plan.honour_waits,
        "trajectories": ",".join(str(count) for count in plan.trajectories),
        "forced": "recorded output of the same length for all methods; temperature 0; end token included",
    }


def _mode(plan: ReplayPlan) -> str:
    if plan.rate_per_s is None:
        return "closed loop"
    capped = "capped " if max(plan.concurrency) > 0 else ""
    return f"{capped}open loop, {plan.rate_per_s:g}/s"


def _run_method(
    plans: Sequence[ReplayPlan], method: Method, repeat: int, report: Callable[[Progress], None]
) -> Iterator[tuple[ReplayPlan, ResultRow]]:
    """One engine process; a row whenever one of its cells is over."""
    common = plans[0]
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', method.label)}-r{repeat}"
    todo = [
        (plan, _cell(plan, i, repeat=repeat, stem=stem, folder=f))
        for plan, i, f in _todo(plans, method, repeat)
    ]
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
    )
    job_file = folder / f"{stem}.job.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    report(Progress(method=method.label, repeat=repeat, workload="", event="start"))
    for event in engine_events(job_file, common.out / f"{stem}.log", method.environment):
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
        mode=_mode(plan),
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
