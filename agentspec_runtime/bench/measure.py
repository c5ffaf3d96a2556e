"""Every metric of a replay, defined once. docs/measuring.md says the same in words.

Latencies are in seconds, measured where the tokens arrive, over the turns of one cell:

    ttft   first token - sent
    tpot   (end - first token) / (tokens - 1), over turns of two tokens or more: time per output token,
           whatever the size of the chunks that the tokens came in
    gap    (end - first token) / (chunks - 1): time between chunks, which speculation makes longer
    turn   end - sent
    task   end of the last turn - due time of the first, waits included

Percentiles interpolate linearly between the two nearest ranks (numpy's default). A turn without any token
has no ttft: it is left out there and counted as mismatched.

    tok_s             output tokens / wall time of the cell
    decode_tok_s      output tokens of steps without prompt tokens / time of those steps
    tokens_per_step   output tokens / (request, step) pairs that sampled, with drafts or without
    rejected          drafted - accepted; tokens behind the end of an answer are rejected
    fillers           tokens that vLLM verified in place of drafts near the context limit; not in drafted
    grammar_cut       draft tokens of ours that a grammar did not allow; cut before the step, not in drafted
    internal_errors   errors of our scheduler that were survived without drafts
    batch_histogram   engine steps by number of requests that sampled
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from agentspec_runtime.bench.load import CellLoad, TurnRecord

__all__ = ["CellKey", "DraftCounts", "OwnSums", "ResultRow", "StepRecord", "measure_cell", "percentiles"]

_PERCENTS: Final = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step. `rows` holds (drafted, accepted, emitted) of every request that sampled.

    `begin_s` is when the worker got the step, `sampled_s` when its tokens were sampled (in asynchronous
    scheduling: when that was queued), `draft_s` the time that drafting for the next step took.
    """

    begin_s: float
    sampled_s: float
    draft_s: float
    tokens: int
    prompt_tokens: int
    preempted: int
    fillers: int
    rows: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Drafted and accepted tokens of one block kind or source."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSums:
    """Sums over a cell that only our scheduler knows. `draft_s`: seconds; None where another method ran."""

    draft_s: float | None = None
    grammar_cut: int = 0
    internal_errors: int = 0
    by_block: Mapping[str, DraftCounts] = field(default_factory=dict)
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Which cell: a method at one concurrency in one repeat."""

    method: str
    concurrency: int
    repeat: int
    workload: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One line of results.jsonl. Seconds and tokens; `draft_ms_per_step` in milliseconds."""

    method: str
    concurrency: int
    repeat: int
    workload: str
    mode: str
    trajectories: int
    turns: int
    out_tokens: int
    prompt_tokens: int
    wall_s: float
    tok_s: float
    decode_tok_s: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    tpot_p99: float | None
    gap_p50: float | None
    gap_p95: float | None
    gap_p99: float | None
    turn_p50: float | None
    turn_p95: float | None
    turn_p99: float | None
    task_p50: float | None
    task_p95: float | None
    task_p99: float | None
    slip_p95: float | None
    steps: int
    tokens_per_step: float
    drafted: int
    accepted: int
    rejected: int
    rejected_share: float
    draft_ms_per_step: float
    step_ms_p50: float | None
    by_block: Mapping[str, DraftCounts] = field(default_factory=dict)
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)
    batch_histogram: Mapping[str, int] = field(default_factory=dict)
    tokens_histogram: Mapping[str, int] = field(default_factory=dict)
    turn_quantiles: tuple[float, ...] = ()
    mismatched: int = 0
    preemptions: int = 0
    prefix_hit_rate: float = 0.0
    fillers: int = 0
    grammar_cut: int = 0
    internal_errors: int = 0


def percentiles(values: Iterable[float]) -> tuple[float | None, float | None, float | None]:
    """P50, P95 and P99; None each where there is no value."""
    sample = np.fromiter(values, dtype=np.float64)
    if len(sample) == 0:
        return None, None, None
    p50, p95, p99 = (round(float(value), 6) for value in np.percentile(sample, _PERCENTS))
    return p50, p95, p99


def measure_cell(
    key: CellKey,
    load: CellLoad,
    steps: Sequence[StepRecord],
    *,
    ours: OwnSums | None = None,
) -> ResultRow:
    """The result row of one cell. `ours`: what only our scheduler knows, for a method that drafts there."""
    ours = ours or OwnSums()
    turns = load.turns
    wall_s = load.end_s - load.begin_s
    out_tokens = sum(turn.out_tokens for turn in turns)
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    rows = [row for step in steps for row in step.rows]
    drafted, accepted = sum(row[0] for row in rows), sum(row[1] for row in rows)
    sampling = [step for step in steps if step.rows]
    drafting_s = sum(step.draft_s for step in steps) if ours.draft_s is None else ours.draft_s
    answered = [turn for turn in turns if turn.first_s is not None]
    latencies = {
        "ttft": percentiles(_since_sent(turn) for turn in answered),
        "tpot": percentiles(_per(turn, turn.out_tokens) for turn in answered if turn.out_tokens > 1),
        "gap": percentiles(_per(turn, turn.chunks) for turn in answered if turn.chunks > 1),
        "turn": percentiles(turn.end_s - turn.sent_s for turn in turns),
        "task": percentiles(_task_times(turns)),
    }
    named = {
        f"{name}_p{percent}": value
        for name, values in latencies.items()
        for percent, value in zip(_PERCENTS, values, strict=True)
    }
    return ResultRow(
        method=key.method,
        concurrency=key.concurrency,
        repeat=key.repeat,
        workload=key.workload,
        mode=key.mode,
        trajectories=len({turn.trajectory for turn in turns}),
        turns=len(turns),
        out_tokens=out_tokens,
        prompt_tokens=prompt_tokens,
        wall_s=round(wall_s, 4),
        tok_s=round(out_tokens / wall_s, 3) if wall_s > 0 else 0.0,
        decode_tok_s=_decode_rate(steps),
        **named,
        slip_p95=percentiles(turn.sent_s - turn.due_s for turn in turns)[1],
        steps=len(rows),
        tokens_per_step=round(sum(row[2] for row in rows) / len(rows), 4) if rows else 0.0,
        drafted=drafted,
        accepted=accepted,
        rejected=drafted - accepted,
        rejected_share=round((drafted - accepted) / drafted, 4) if drafted else 0.0,
        draft_ms_per_step=round(1e3 * drafting_s / len(sampling), 4) if sampling else 0.0,
        step_ms_p50=_step_ms(sampling),
        by_block=ours.by_block,
        by_source=ours.by_source,
        batch_histogram=_histogram(len(step.rows) for step in sampling),
        tokens_histogram=_histogram(row[2] for row in rows),
        turn_quantiles=_quantiles(turns),
        mismatched=sum(turn.mismatched for turn in turns),
        preemptions=sum(step.preempted for step in steps),
        fillers=sum(step.fillers for step in steps),
        grammar_cut=ours.grammar_cut,
        internal_errors=ours.internal_errors,
        prefix_hit_rate=round(sum(t.cached_tokens for t in turns) / prompt_tokens, 4)
        if prompt_tokens
        else 0.0,
    )


def _since_sent(turn: TurnRecord) -> float:
    return (turn.end_s if turn.first_s is None else turn.first_s) - turn.sent_s


def _per(turn: TurnRecord, count: int) -> float:
    return (turn.end_s - turn.sent_s - _since_sent(turn)) / (count - 1)


def _task_times(turns: Sequence[TurnRecord]) -> list[float]:
    begin: dict[str, float] = {}
    end: defaultdict[str, float] = defaultdict(float)
    for turn in turns:
        begin[turn.trajectory] = min(turn.due_s, begin.get(turn.trajectory, turn.due_s))
        end[turn.trajectory] = max(turn.end_s, end[turn.trajectory])
    return [end[name] - begin[name] for name in begin]


def _decode_rate(steps: Sequence[StepRecord]) -> float | None:
    """Tokens per second of the steps that held no prompt; a step lasts until the next one begins.

    A pause (nothing to run) is no step time: the last step before one is left out, seen by an interval of
    more than ten times the step's own duration.
    """
    tokens, spent_s = 0, 0.0
    for step, following in pairwise(steps):
        interval = following.begin_s - step.begin_s
        if step.prompt_tokens == 0 and step.rows and interval < 10 * (step.sampled_s - step.begin_s + 1e-3):
            tokens += sum(row[2] for row in step.rows)
            spent_s += interval
    return round(tokens / spent_s, 3) if spent_s > 0 else None


def _step_ms(steps: Sequence[StepRecord]) -> float | None:
    intervals = [1e3 * (after.begin_s - before.begin_s) for before, after in pairwise(steps)]
    return percentiles(intervals)[0]


def _histogram(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def _quantiles(turns: Sequence[TurnRecord]) -> tuple[float, ...]:
    """0 %, 2 %, ... 100 % of turn latency, for the distribution in the report."""
    times = [turn.end_s - turn.sent_s for turn in turns]
    if not times:
        return ()
    return tuple(round(float(value), 4) for value in np.percentile(times, np.arange(0, 101, 2)))
