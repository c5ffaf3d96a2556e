"""`agentspec bench calibrate`: how long a decode step takes here, by the number of tokens in it.

Requests of known length run at fixed concurrencies, first one token per request and step, then 1 + K tokens
(text that repeats, so that n-gram drafts are always full and always right). A point is the median interval
between the begins of steps that held no prompt and the full number of requests; the first ones are left out.

The curve is made non-decreasing: a step with more tokens is not faster, and a solver that believed otherwise
would draft for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from agentspec_runtime.bench.costs import CostCurve
from agentspec_runtime.bench.measure import StepRecord
from agentspec_runtime.bench.methods import Method, parse_method
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.bench.replay import engine_events, read_raw
from agentspec_runtime.bench.replay_engine import CellJob, Job, PeriodicLoad
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.errors import ServerError

__all__ = ["CalibrationPlan", "calibrate", "curve_from_steps"]

_DRAFT_LENGTH: Final = 15
"""Drafts of the second pass: 16 tokens per request and step."""

_STEPS: Final = 24
"""Steps per point; the median of about 20 is steady within a few per cent."""

_SKIPPED: Final = 3
"""First steps of a full batch that are left out: caches and the allocator settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """What to measure. `requests` are the concurrencies of the first pass."""

    model: str
    vocab_size: int
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context_tokens: int = 512
    engine: dict[str, JsonValue] = field(default_factory=dict)


def calibrate(plan: CalibrationPlan, progress: Callable[[str], None] = lambda _text: None) -> CostCurve:
    """Measure a curve on this machine.

    Raises:
        ServerError: the engine did not start or ended early.
    """
    ngram = f"ngram:num_speculative_tokens={_DRAFT_LENGTH},prompt_lookup_min=5,prompt_lookup_max=5"
    points: list[tuple[int, float]] = []
    with TemporaryDirectory(prefix="agentspec-calibrate-") as folder:
        for label, per_request in (("plain-sync", 1), (ngram, 1 + _DRAFT_LENGTH)):
            progress(f"starting the engine for {per_request} token(s) per request and step")
            # Fewer requests with drafts give the sizes that one token per request has measured already.
            sizes = plan.requests if per_request == 1 else [n for n in plan.requests if 2 <= n <= 32]
            steps_of = _measure(plan, parse_method(label), sizes, per_request, Path(folder), progress)
            for size, steps in steps_of:
                if (seconds := curve_from_steps(steps, size)) is not None:
                    points.append((size * per_request, seconds))
    if not points:
        raise ServerError("no step was measured: the engine ran fewer requests at a time than asked for")
    machine = collect_provenance(files=()).machine
    return CostCurve(
        model=Path(plan.model).name,
        machine=str(machine.get("gpus") or f"{machine['processor']}, {machine['cpus']} cores"),
        points=_rising(points),
        context_tokens=plan.context_tokens,
    )


def curve_from_steps(steps: Sequence[StepRecord], requests: int) -> float | None:
    """Median time of the steps that sampled for exactly `requests` requests and held no prompt."""
    intervals = [
        after.begin_s - before.begin_s
        for before, after in pairwise(steps)
        if len(before.rows) == len(after.rows) == requests and before.prompt_tokens == 0
    ]
    settled = intervals[_SKIPPED:] or intervals
    return round(median(settled), 7) if settled else None


def _measure(
    plan: CalibrationPlan,
    method: Method,
    sizes: Sequence[int],
    per_request: int,
    folder: Path,
    progress: Callable[[str], None],
) -> list[tuple[int, list[StepRecord]]]:
    output_tokens = _STEPS * per_request
    cells = [
        CellJob(
            concurrency=size,
            trajectories=size,
            rate_per_s=None,
            honour_waits=False,
            seed=0,
            salt=f"calibrate-{per_request}-{size}",
            raw_file=str(folder / f"{per_request}-{size}.json"),
        )
        for size in sizes
    ]
    job = Job(
        engine={**plan.engine, **method.engine},
        files=[],
        model=plan.model,
        chat_template=None,
        max_model_len=plan.context_tokens + output_tokens + 64,
        max_turns=None,
        part="all",
        hints=False,
        reuse=True,
        records_file=None,
        cells=cells,
        periodic=PeriodicLoad(
            context_tokens=plan.context_tokens, output_tokens=output_tokens, vocab_size=plan.vocab_size
        ),
    )
    job_file = folder / f"job-{per_request}.json"

    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    done: list[tuple[int, list[StepRecord]]] = []
    for event in engine_events(job_file, folder / f"engine-{per_request}.log", method.environment):
        if event["event"] == "cell" and isinstance(number := event.get("cell"), int):
            _, steps = read_raw(Path(cells[number].raw_file))
            done.append((sizes[number], steps))
            progress(f"{sizes[number]} request(s), {per_request} token(s) each: measured")
    return done


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points by size, the fastest of equal sizes, never falling."""
    best: dict[int, float] = {}
    for tokens, seconds in points:
        best[tokens] = min(seconds, best.get(tokens, seconds))
    rising: list[tuple[int, float]] = []
    for tokens, seconds in sorted(best.items()):
        rising.append((tokens, max(seconds, rising[-1][1]) if rising else seconds))
    return tuple(rising)
