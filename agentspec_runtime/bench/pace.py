"""A time limit for a replay: which cells still run, decided before each engine starts.

Time goes to what a reader wants to know first. The engines run in the order of the plan, so the reference and
the method that is checked come before their rivals; those two get a double share, because nothing can be said
without a load that both have run. A load that the reference did not get to is left out for everybody.

An engine that was started runs one cell at least: its start is the expensive part. So a run ends late by one
cell at most, and by what an engine takes to start if that was longer than any start before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from agentspec_runtime.bench.replay import Progress

__all__ = ["Grant", "Pace", "TimeBudget"]

_SHARES: Final = {"plain": 2.0, "agentspec": 2.0}
"""Weights of the time that is left; 1 for every other method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What an engine may do: the concurrencies to run, and when it begins no further one.

    `until` is on the clock of `time.time`; no cells means that the engine is not started.
    """

    concurrency: tuple[int, ...]
    until: float


class Pace(Protocol):
    """Asked before each engine of a replay starts."""

    def grant(self, method: str, repeat: int, concurrency: Sequence[int]) -> Grant:
        """What may run of the cells that are left to do for this method in this repeat."""
        ...


class TimeBudget:
    """Shares out a number of seconds, which begin with the construction.

    Args:
        seconds: time for everything, starts of engines included.
        engines: (method, repeat) in the order in which they will be asked for.
        measured: cells that are finished already: (method, concurrency, repeat).
        reference: the method that all others are compared with.
        clock: seconds, as `time.time`.
    """

    def __init__(
        self,
        seconds: float,
        engines: Sequence[tuple[str, int]],
        measured: Iterable[tuple[str, int, int]] = (),
        *,
        reference: str = "plain",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._ahead = list(engines)
        self._reference = reference
        self._loads = {concurrency for method, concurrency, _ in measured if method == reference}
        self._started: float | None = None
        self._cell_began = 0.0
        self._longest_start = 0.0
        self._shortest_cell: float | None = None

    @property
    def longest_start_s(self) -> float:
        """Seconds that the slowest engine so far took to start."""
        return self._longest_start

    def grant(self, method: str, repeat: int, concurrency: Sequence[int]) -> Grant:
        """A share of the time that is left; nothing where no start and cell would fit into that."""
        while self._ahead and self._ahead[0] != (method, repeat):
            self._ahead.pop(0)
        now = self._clock()
        left = self._end - now
        wanted = tuple(c for c in concurrency if method == self._reference or c in self._loads)
        if left <= self._longest_start + (self._shortest_cell or 0.0):
            wanted = ()
        shares = sum(_share(name) for name, _ in self._ahead) or _share(method)
        return Grant(concurrency=wanted, until=now + max(left, 0.0) * _share(method) / shares)

    def seen(self, progress: Progress) -> None:
        """Learn from what happens; to be told everything that a replay reports."""
        now = self._clock()
        if progress.event == "start":
            self._started = now
        elif progress.event == "begin":
            if self._started is not None:
                self._longest_start = max(self._longest_start, now - self._started)
                self._started = None
            self._cell_began = now
        elif progress.event == "cell":
            took = now - self._cell_began
            self._shortest_cell = took if self._shortest_cell is None else min(self._shortest_cell, took)
            if progress.method == self._reference:
                self._loads.add(progress.concurrency)


def _share(method: str) -> float:
    return _SHARES.get(method, 1.0)
