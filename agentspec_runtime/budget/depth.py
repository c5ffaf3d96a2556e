"""How many tokens a model drafter in the worker should make for the next step; 0 leaves it out.

The drafter is worth its gain: the tokens that it is expected to add to our own drafts, price of their slots
already subtracted (`drafting.assist`), times the seconds that a token costs without it. It costs the seconds
of its passes, one per token of depth, which the step time tells (`budget.cost`). The depth with the highest
difference is taken, if that is positive by a margin.

While it is left out nothing is seen of its gain, and while it always runs nothing of its cost: every
`_PROBE_EVERY`-th step does the opposite. A probe costs at most a few per cent of one step in so many. The
worker still runs the drafter's first pass over new tokens at depth 0, so its state is right when it returns.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["AssistDepth"]

_FloatArray = npt.NDArray[np.float64]

_SMOOTH: Final = 0.05
"""Of a new gain: twenty observations, as a step's gain is a mean over few requests."""
_PROBE_EVERY: Final = 48
_FIRST_STEPS: Final = 16
"""Depths alternate at first, so that both gain and cost are known soon."""
_MARGIN: Final = 0.1
"""A change of depth must be worth a tenth of the drafter's cost; less is noise, and would flap."""


class AssistDepth:
    """See the module docstring. `max_depth`: most tokens of one draft, at least 1."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._gains: _FloatArray = np.zeros(max_depth)
        self._seen = np.zeros(max_depth)
        self._steps = 0
        self._depth = max_depth

    @property
    def gain(self) -> float:
        """Expected tokens per request and step at the depth in use (at full depth while it is 0)."""
        return float(self._gains[(self._depth or self.max_depth) - 1])

    def choose(self, num_requests: int, token_seconds: float, pass_seconds: float) -> int:
        """Depth for the step that is about to run.

        Args:
            num_requests: requests that sample in it; none, no draft.
            token_seconds: what a token costs without the drafter.
            pass_seconds: one pass of the drafter over so many requests.
        """
        if num_requests == 0:
            return 0
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return self.max_depth if self._steps % 2 else 0
        depths = np.arange(self.max_depth + 1)
        worth = np.concatenate([[0.0], self._gains]) * num_requests * token_seconds
        surplus = worth - depths * pass_seconds
        best = int(np.argmax(surplus))
        if surplus[best] - surplus[self._depth] > _MARGIN * max(best, self._depth) * pass_seconds:
            self._depth = best
        if self._steps % _PROBE_EVERY == 0:
            return 0 if self._depth == self.max_depth else self.max_depth
        return self._depth

    def observe(self, gains: _FloatArray) -> None:
        """Gains of drafts that were there: float64[D] for depth 1 to D, none where there were none."""
        num = min(gains.size, self.max_depth)
        self._seen[:num] += 1
        rate = np.maximum(_SMOOTH, 1.0 / np.maximum(self._seen[:num], 1.0))
        self._gains[:num] += rate * (gains[:num] - self._gains[:num])
