"""What a run of `controller.py` says: does the budget settle, swing, starve, or cost more than it brings?

over_plain    virtual seconds that plain would have taken for the same tokens at the same load, step by
              step, over the seconds that it took: the factor of goodput
of_optimum    tokens per second that the choices promised, over what the optimum promised, from the same
              survivals: 1.0 is a budget that knows the curve
settled       steps after a jump until the budget stays within a fifth of the optimum for 50 steps (or
              within one token, or a twentieth of a token per request; smoothed over 16 steps)
swings        changes between too much and too little by more than that
longest_wait  see `controller.Run`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.controller import Run, Step

__all__ = [
    "WINDOW",
    "ClassRow",
    "Figures",
    "LoadRow",
    "WindowRow",
    "columns",
    "figures",
    "over_plain",
    "smoothed",
]

WINDOW: Final = 50
"""Steps per window of goodput."""

_SMOOTH: Final = 16
_WITHIN: Final = 0.2
_STAYS: Final = 50
_LOADS: Final = ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """Means over a window: requests in flight, draft tokens per step of the budget and of the optimum."""

    first_step: int
    in_flight: float
    drafted: float
    optimum: float
    over_plain: float
    of_optimum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """Draft tokens per request and step while the load rose through a range, and while it fell through it."""

    least: int
    most: int
    drafted_up: float
    optimum_up: float
    drafted_down: float
    optimum_down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """Per request and step, of one latency class."""

    drafted: float
    emitted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """See the module docstring. `settled` has one entry per jump, None where it never did; `by_load` has rows
    where the load rises and falls slowly; `prediction_error` is the mean of |predicted / true - 1|.
    """

    programme: str
    steps: int
    over_plain: float
    of_optimum: float
    worst_window: float
    settled: tuple[int | None, ...]
    swings: int
    longest_wait: int
    prediction_error: float
    windows: tuple[WindowRow, ...]
    by_load: tuple[LoadRow, ...]
    by_class: Mapping[str, ClassRow]


def figures(run: Run) -> Figures:
    """All figures of a run."""
    steps = run.steps
    windows = tuple(_windows(run))
    error = np.mean([abs(step.predicted_s / step.true_s - 1.0) for step in steps])
    return Figures(
        programme=run.programme.name,
        steps=len(steps),
        over_plain=round(over_plain(steps), 4),
        of_optimum=round(_of_optimum(steps), 4),
        worst_window=min(window.over_plain for window in windows),
        settled=tuple(_settled(steps[a:b]) for a, b in pairwise((*run.programme.jumps, len(steps)))),
        swings=sum(_swings(steps[a:b]) for a, b in pairwise((0, *run.programme.jumps, len(steps)))),
        longest_wait=run.longest_wait,
        prediction_error=round(float(error), 4),
        windows=windows,
        by_load=() if run.programme.jumps else tuple(_by_load(steps)),
        by_class={
            name: ClassRow(
                drafted=round(counts.drafted / counts.steps, 4),
                emitted=round(counts.emitted / counts.steps, 4),
            )
            for name, counts in run.by_class.items()
            if counts.steps
        },
    )


def over_plain(steps: Sequence[Step]) -> float:
    """Goodput over that of never drafting."""
    plain_s = sum(step.emitted / step.in_flight * step.plain_s for step in steps)
    return plain_s / sum(step.true_s for step in steps)


def _of_optimum(steps: Sequence[Step]) -> float:
    return sum(step.expected / step.best_rate for step in steps) / sum(step.true_s for step in steps)


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Mean of each value and up to 15 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _SMOOTH, 0)
    means: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def columns(steps: Sequence[Step]) -> dict[str, list[float]]:
    """The record of every step, by field, with five significant digits."""
    return {
        name: [float(f"{value:.5g}") for value in values]
        for name, values in zip(Step._fields, zip(*steps, strict=True), strict=True)
    }


def _off(steps: Sequence[Step]) -> NDArray[np.int64]:
    """Of each step: 0 where the smoothed budget is near the optimum, else the sign of the difference."""
    drafted = smoothed([step.drafted for step in steps])
    optimum = smoothed([step.optimum for step in steps])
    requests = np.array([step.in_flight for step in steps])
    band = np.maximum(np.maximum(_WITHIN * optimum, 1.0), 0.05 * requests)
    off: NDArray[np.int64] = np.where(np.abs(drafted - optimum) > band, np.sign(drafted - optimum), 0)
    return off.astype(np.int64)


def _settled(steps: Sequence[Step]) -> int | None:
    near = _off(steps) == 0
    for step in range(len(steps) - _STAYS + 1):
        if near[step : step + _STAYS].all():
            return step
    return None


def _swings(steps: Sequence[Step]) -> int:
    off = _off(steps)
    signs = off[off != 0]
    return int((signs[1:] != signs[:-1]).sum())


def _windows(run: Run) -> Iterator[WindowRow]:
    for first in range(0, len(run.steps), WINDOW):
        steps = run.steps[first : first + WINDOW]
        yield WindowRow(
            first_step=first,
            in_flight=round(float(np.mean([step.in_flight for step in steps])), 1),
            drafted=round(float(np.mean([step.drafted for step in steps])), 2),
            optimum=round(float(np.mean([step.optimum for step in steps])), 2),
            over_plain=round(over_plain(steps), 4),
            of_optimum=round(_of_optimum(steps), 4),
        )


def _by_load(steps: Sequence[Step]) -> Iterator[LoadRow]:
    middle = len(steps) // 2
    for least, most in _LOADS:
        up = [step for step in steps[:middle] if least <= step.in_flight <= most]
        down = [step for step in steps[middle:] if least <= step.in_flight <= most]
        if up and down:
            yield LoadRow(
                least=least,
                most=most,
                drafted_up=_per_request([step.drafted for step in up], up),
                optimum_up=_per_request([step.optimum for step in up], up),
                drafted_down=_per_request([step.drafted for step in down], down),
                optimum_down=_per_request([step.optimum for step in down], down),
            )


def _per_request(tokens: Sequence[int], steps: Sequence[Step]) -> float:
    return round(sum(tokens) / sum(step.in_flight for step in steps), 3)
