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

import numpy as np

from agentspec_runtime.bench.costs import CostCurve
from agentspec_runtime.bench.engine_process import engine_events
from agentspec_runtime.bench.measure import StepRecord
from agentspec_runtime.bench.methods import Method, parse_method
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.bench.replay_engine import CellJob, Job, PeriodicLoad
from agentspec_runtime.bench.results import read_raw
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.errors import ServerError

__all__ = ["CalibrationPlan", "MeasuredStep", "calibrate", "fit_coefficients", "step_seconds"]

_DRAFT_LENGTH: Final = 15
"""Drafts of the second pass: 16 tokens per request and step."""

_STEPS: Final = 24
"""Steps per point; the median of about 20 is steady within a few per cent."""

_SHORTER: Final = 4
"""The second context is a quarter of the first: two are needed to tell attention from the rest."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Median time of a decode step of `tokens` tokens for `requests` requests with such a context."""

    requests: int
    tokens: int
    context_tokens: int
    seconds: float


def calibrate(plan: CalibrationPlan, progress: Callable[[str], None] = lambda _text: None) -> CostCurve:
    """Measure a curve on this machine.

    Raises:
        ServerError: the engine did not start or ended early.
    """
    ngram = f"ngram:num_speculative_tokens={_DRAFT_LENGTH},prompt_lookup_min=5,prompt_lookup_max=5"
    measured: list[MeasuredStep] = []
    with TemporaryDirectory(prefix="agentspec-calibrate-") as folder:
        for label, per_request in (("plain-sync", 1), (ngram, 1 + _DRAFT_LENGTH)):
            progress(f"starting the engine for {per_request} token(s) per request and step")
            sizes = plan.requests if per_request == 1 else tuple(n for n in plan.requests if 2 <= n <= 32)
            measured += _measure(plan, parse_method(label), sizes, per_request, Path(folder), progress)
    if not measured:
        raise ServerError("no step was measured: the engine ran fewer requests at a time than asked for")
    machine = collect_provenance(files=()).machine
    return CostCurve(
        model=Path(plan.model).name,
        machine=str(machine.get("gpus") or f"{machine['processor']}, {machine['cpus']} cores"),
        points=_rising([step for step in measured if step.context_tokens == plan.context_tokens]),
        context_tokens=plan.context_tokens,
        coefficients=fit_coefficients(measured),
    )


def fit_coefficients(measured: Sequence[MeasuredStep]) -> tuple[float, float, float, float]:
    """Seconds: base, per token, per 1,000 attended tokens, per request. None of them is negative.

    Least squares on relative errors, since a step of 300 ms must not drown one of 10 ms. A term that comes
    out negative is left out and the rest fitted again. This is the form that the scheduler's budget starts
    from; it goes on learning.
    """
    terms = np.array(
        [[1.0, m.tokens, m.tokens * m.context_tokens / 1e3, m.requests] for m in measured], dtype=np.float64
    )
    seconds = np.array([m.seconds for m in measured])
    weighted = terms / seconds[:, None]
    used = list(range(4))
    while True:
        solution = np.linalg.lstsq(weighted[:, used], np.ones(len(measured)), rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0 or len(used) == 1:
            break
        used.pop(worst)
    found = np.zeros(4)
    found[used] = np.maximum(solution, 0.0)
    base, per_token, per_attended, per_request = (float(value) for value in found)
    return base, per_token, per_attended, per_request


def step_seconds(steps: Sequence[StepRecord], requests: int) -> float | None:
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
) -> list[MeasuredStep]:
    output_tokens = _STEPS * per_request
    contexts = (plan.context_tokens, max(plan.context_tokens // _SHORTER, 64))
    shapes = [(size, context) for context in contexts for size in sizes]
    cells = [
        CellJob(
            concurrency=size,
            files=[],
            trajectories=size,
            max_turns=None,
            part="all",
            rate_per_s=None,
            honour_waits=False,
            seed=0,
            salt=f"calibrate-{per_request}-{size}-{context}",
            raw_file=str(folder / f"{per_request}-{size}-{context}.json"),
            periodic=PeriodicLoad(
                context_tokens=context, output_tokens=output_tokens, vocab_size=plan.vocab_size
            ),
        )
        for size, context in shapes
    ]
    job = Job(
        engine={**plan.engine, **method.engine},
        model=plan.model,
        chat_template=None,
        max_model_len=plan.context_tokens + output_tokens + 64,
        hints=False,
        reuse=True,
        records_file=None,
        cells=cells,
    )
    job_file = folder / f"job-{per_request}.json"

    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    done: list[MeasuredStep] = []
    for event in engine_events(job_file, folder / f"engine-{per_request}.log", method.environment):
        if event["event"] == "cell" and isinstance(number := event.get("cell"), int):
            size, context = shapes[number]
            _, steps = read_raw(Path(cells[number].raw_file))
            if (seconds := step_seconds(steps, size)) is not None:
                done.append(
                    MeasuredStep(
                        requests=size, tokens=size * per_request, context_tokens=context, seconds=seconds
                    )
                )
            progress(f"{size} request(s), {per_request} token(s) each, context {context}: measured")
    return done


def _rising(measured: Sequence[MeasuredStep]) -> tuple[tuple[int, float], ...]:
    """Points by size, the fastest of equal sizes, never falling."""
    best: dict[int, float] = {}
    for step in measured:
        best[step.tokens] = min(step.seconds, best.get(step.tokens, step.seconds))
    rising: list[tuple[int, float]] = []
    for tokens, seconds in sorted(best.items()):
        rising.append((tokens, max(seconds, rising[-1][1]) if rising else seconds))
    return tuple(rising)
