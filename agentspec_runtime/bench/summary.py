"""Results of a replay put together for a decision: repeats merged, methods compared, doubts listed.

Comparisons pair cells of the same repeat, because a machine drifts: the speedup over plain is the median of
the ratios within repeats, its spread their minimum and maximum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from agentspec_runtime.bench.measure import DraftCounts, ResultRow

__all__ = ["CellSummary", "Cost", "agents", "doubts", "ratio", "summarise", "verdict"]

_REFERENCE = "plain"
_FEW_TURNS = 30
"""Below, even P95 is one of the two slowest turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Price of a machine hour, in any currency; None where nobody said."""

    per_hour: float
    currency: str = "$"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One method at one concurrency over all repeats: medians, and (least, most) over repeats."""

    method: str
    concurrency: int
    repeats: int
    tok_s: float
    tok_s_range: tuple[float, float]
    speedup: float | None
    speedup_range: tuple[float, float] | None
    ttft_p50: float | None
    tpot_p50: float | None
    turn_p50: float | None
    turn_p95: float | None
    turn_p99: float | None
    task_p50: float | None
    task_p99: float | None
    tokens_per_step: float
    rejected_share: float
    out_tokens: int
    drafted_per_token: float
    draft_ms_per_step: float
    fillers: int
    internal_errors: int
    turns: int
    mean_batch: float
    prefix_hit_rate: float
    preemptions: int
    mismatched: int
    tasks_per_hour: float
    batch_histogram: Mapping[int, int]
    tokens_histogram: Mapping[int, int]
    by_block: Mapping[str, DraftCounts]
    by_source: Mapping[str, DraftCounts]
    turn_quantiles: tuple[float, ...]
    tok_s_by_repeat: Mapping[int, float]
    turn_p99_by_repeat: Mapping[int, float]


def summarise(rows: Sequence[ResultRow]) -> list[CellSummary]:
    """Summaries by method (plain, others, ours) and concurrency."""
    cells: defaultdict[tuple[str, int], list[ResultRow]] = defaultdict(list)
    for row in rows:
        cells[row.method, row.concurrency].append(row)
    reference = {(row.concurrency, row.repeat): row.tok_s for row in rows if row.method == _REFERENCE}
    order = sorted(dict.fromkeys(row.method for row in rows), key=_place)
    return [
        _summary(cells[key], reference)
        for key in sorted(cells, key=lambda key: (order.index(key[0]), key[1]))
    ]


def verdict(cells: Sequence[CellSummary]) -> list[str]:
    """What the numbers say, one sentence per concurrency: ours against plain and against the best other."""
    sentences: list[str] = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        here = {cell.method: cell for cell in cells if cell.concurrency == concurrency}
        ours, plain = here.get("agentspec"), here.get(_REFERENCE)
        if ours is None or plain is None:
            best = max(here.values(), key=lambda cell: cell.tok_s)
            sentences.append(
                f"At {agents(concurrency)}: {best.method} was fastest with {best.tok_s:.0f} tok/s."
            )
            continue
        rivals = [cell for name, cell in here.items() if not name.startswith(("agentspec", "plain"))]
        gain = ratio(ours.tok_s_by_repeat, plain.tok_s_by_repeat)
        sentence = f"At {agents(concurrency)}: agentspec gave {_times(gain)} the throughput of plain"
        if rivals:
            best = max(rivals, key=lambda cell: cell.speedup or 0.0)
            over = ratio(ours.tok_s_by_repeat, best.tok_s_by_repeat)
            sentence += f" and {_times(over)} that of {best.method}, the best other method"
        if (late := ratio(ours.turn_p99_by_repeat, plain.turn_p99_by_repeat)) is not None:
            sentence += f"; P99 turn latency {_times(late)} of plain's"
        sentences.append(sentence + ".")
    return sentences


def ratio(of: Mapping[int, float], to: Mapping[int, float]) -> float | None:
    """Median of the ratios within repeats; None where no repeat has both."""
    ratios = [of[repeat] / to[repeat] for repeat in of if to.get(repeat)]
    return median(ratios) if ratios else None


def _times(factor: float | None) -> str:
    return "?" if factor is None else f"{factor:.2f}x"


def doubts(cells: Sequence[CellSummary], rows: Sequence[ResultRow]) -> list[str]:
    """Reasons to trust a result less, each with what to do about it."""
    found = [*_defects(cells, rows), *_filled(cells)]
    if few := sorted({cell.concurrency for cell in cells if cell.turns < _FEW_TURNS}):
        found.append(
            f"Fewer than {_FEW_TURNS} turns at a concurrency of {' and '.join(map(str, few))}: P99 there is "
            "nearly the slowest turn. More --trajectories make it firm."
        )
    if not any(cell.method == _REFERENCE for cell in cells):
        found.append("There is no plain row, so no speedup can be stated: add plain to --methods.")
    if max(cell.repeats for cell in cells) == 1:
        found.append(
            "One repeat: there is no spread. Differences of a few per cent may be noise; --repeat 3."
        )
    if any(cell.preemptions for cell in cells):
        found.append("Requests were preempted: the KV cache was too small for this concurrency.")
    for concurrency in sorted({cell.concurrency for cell in cells}):
        batch = max(cell.mean_batch for cell in cells if cell.concurrency == concurrency)
        if concurrency > 1 and batch < 0.6 * concurrency:
            found.append(
                f"At {concurrency} agents only {batch:.1f} requests sampled per step on average: agents wait "
                "for prompts, and the last ones run alone. More trajectories make that tail shorter."
            )
    slipped = [row.slip_p95 for row in rows if row.mode != "closed loop" and row.slip_p95]
    if slipped and max(slipped) > 1.0:
        found.append(
            f"The arrival schedule slipped by up to {max(slipped):.1f} s (P95): the server was overloaded. "
            "Task latency counts from the schedule, as a user would see it."
        )
    return found


def _defects(cells: Sequence[CellSummary], rows: Sequence[ResultRow]) -> list[str]:
    """What makes rows invalid."""
    found: list[str] = []
    if wrong := [cell for cell in cells if cell.mismatched]:
        names = ", ".join(sorted({cell.method for cell in wrong}))
        found.append(f"Turns of {names} did not emit the recorded tokens exactly: those rows are invalid.")
    if failed := [cell for cell in cells if cell.internal_errors]:
        names = ", ".join(sorted({cell.method for cell in failed}))
        found.append(f"Errors of ours were survived in runs of {names}, without drafts: see their logs.")
    return [*found, *_miscounted(rows), *_lost(rows)]


def _filled(cells: Sequence[CellSummary]) -> list[str]:
    """Methods that verified more than a few zeros near the context limit."""
    filled = [cell for cell in cells if cell.fillers > 0.05 * cell.drafted_per_token * cell.out_tokens]
    if not filled:
        return []
    worst = max(filled, key=lambda cell: cell.fillers)
    what = f"{worst.method} at {agents(worst.concurrency)} verified {worst.fillers} zeros instead of drafts"
    return [f"{what}, as vLLM does when a request is near the context limit: raise --max-model-len."]


def _lost(rows: Sequence[ResultRow]) -> list[str]:
    """Every token that arrived was emitted in a step that was seen; preemption may repeat some."""
    for row in rows:
        seen = sum(int(size) * count for size, count in row.tokens_histogram.items())
        if seen != row.out_tokens and not (row.preemptions or row.mismatched):
            where = f"{row.method} at {agents(row.concurrency)}"
            arrived = f"{row.out_tokens} tokens arrived and {seen} were emitted in steps"
            return [f"{where}: {arrived}: counted wrongly, please report it."]
    return []


def _miscounted(rows: Sequence[ResultRow]) -> list[str]:
    """Without drafts a step samples one token for a request: known beforehand, so it checks the counting.

    A request that was preempted may sample a token again, and a wrong answer is told anyway.
    """
    wrong = [
        row
        for row in rows
        if row.method.startswith(_REFERENCE) and not (row.preemptions or row.mismatched)
        if row.steps != row.out_tokens
    ]
    if not wrong:
        return []
    worst = max(wrong, key=lambda row: abs(row.steps - row.out_tokens))
    counted = f"{worst.out_tokens} tokens in {worst.steps} steps at {agents(worst.concurrency)}"
    return [
        f"{worst.method} emitted {counted}, and needs a step for each: counted wrongly, please report it."
    ]


def _place(method: str) -> int:
    """Plain methods first, then others, then ours: the order in which a reader compares."""
    return 0 if method.startswith("plain") else 2 if method.startswith("agentspec") else 1


def agents(concurrency: int) -> str:
    """ "1 agent", "8 agents"."""
    return "1 agent" if concurrency == 1 else f"{concurrency} agents"


def _summary(rows: Sequence[ResultRow], reference: Mapping[tuple[int, int], float]) -> CellSummary:
    first = rows[0]
    rates = [row.tok_s for row in rows]
    ratios = [
        row.tok_s / reference[row.concurrency, row.repeat]
        for row in rows
        if reference.get((row.concurrency, row.repeat))
    ]
    batch = _added([row.batch_histogram for row in rows])
    out_tokens = sum(row.out_tokens for row in rows)
    return CellSummary(
        method=first.method,
        concurrency=first.concurrency,
        repeats=len(rows),
        tok_s=median(rates),
        tok_s_range=(min(rates), max(rates)),
        speedup=median(ratios) if ratios else None,
        speedup_range=(min(ratios), max(ratios)) if ratios else None,
        ttft_p50=_middle([row.ttft_p50 for row in rows]),
        tpot_p50=_middle([row.tpot_p50 for row in rows]),
        turn_p50=_middle([row.turn_p50 for row in rows]),
        turn_p95=_middle([row.turn_p95 for row in rows]),
        turn_p99=_middle([row.turn_p99 for row in rows]),
        task_p50=_middle([row.task_p50 for row in rows]),
        task_p99=_middle([row.task_p99 for row in rows]),
        tokens_per_step=median(row.tokens_per_step for row in rows),
        rejected_share=median(row.rejected_share for row in rows),
        out_tokens=out_tokens,
        drafted_per_token=sum(row.drafted for row in rows) / out_tokens if out_tokens else 0.0,
        draft_ms_per_step=median(row.draft_ms_per_step for row in rows),
        fillers=sum(row.fillers for row in rows),
        internal_errors=sum(row.internal_errors for row in rows),
        turns=min(row.turns for row in rows),
        mean_batch=sum(size * count for size, count in batch.items()) / max(sum(batch.values()), 1),
        prefix_hit_rate=median(row.prefix_hit_rate for row in rows),
        preemptions=sum(row.preemptions for row in rows),
        mismatched=sum(row.mismatched for row in rows),
        tasks_per_hour=median(3600 * row.trajectories / row.wall_s for row in rows),
        batch_histogram=batch,
        tokens_histogram=_added([row.tokens_histogram for row in rows]),
        by_block=_counted([row.by_block for row in rows]),
        by_source=_counted([row.by_source for row in rows]),
        turn_quantiles=tuple(
            median(values) for values in zip(*(row.turn_quantiles for row in rows), strict=False)
        ),
        tok_s_by_repeat={row.repeat: row.tok_s for row in rows},
        turn_p99_by_repeat={row.repeat: row.turn_p99 for row in rows if row.turn_p99 is not None},
    )


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _added(histograms: Sequence[Mapping[str, int]]) -> dict[int, int]:
    total: defaultdict[int, int] = defaultdict(int)
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] += count
    return dict(sorted(total.items()))


def _counted(counts: Sequence[Mapping[str, DraftCounts]]) -> dict[str, DraftCounts]:
    names = dict.fromkeys(name for mapping in counts for name in mapping)
    return {
        name: DraftCounts(
            drafted=sum(mapping[name].drafted for mapping in counts if name in mapping),
            accepted=sum(mapping[name].accepted for mapping in counts if name in mapping),
        )
        for name in names
    }
