"""How many tokens a model drafter in the worker should make for the next step; 0 leaves it out.

The drafter is worth its gain: the tokens that it adds to our own drafts by expectation, price of their slots
already subtracted (`drafting.assist`), times the seconds that a token costs without it. It costs the seconds
that the step time tells (`budget.cost`). The depth with the highest difference is taken, if that differs by a
margin from the one in use.

While it is left out nothing is seen of its gain, and while it always runs nothing of its cost: one step in
`_PROBE_EVERY` does the opposite. The worker runs the drafter's first pass over new tokens at depth 0 as well,
so that its state is right when it returns.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["AssistDepth"]

_FloatArray = npt.NDArray[np.float64]

_SMOOTH: Final = 0.05
"""Of a new gain: twenty observations, as a step's gain is a mean over few requests."""
_SMOOTH_PROBES: Final = 0.2
"""Of depths beyond the one in use, which only probes see: known again after five of them, some 250 steps."""
_PROBE_EVERY: Final = 48
_FIRST_STEPS: Final = 16
"""Depths alternate at first, so that both gain and cost are known soon: in pairs, because the drafts of one
step are verified in the next, and what verifying costs must not look like what drafting costs."""
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

    def choose(self, num_requests: int, token_seconds: float, seconds: _FloatArray) -> int:
        """Depth for the step that is about to run.

        Args:
            num_requests: requests of it that may use a draft; none, no draft.
            token_seconds: what a token costs without the drafter.
            seconds: of the drafter, float64[max_depth + 1] for depths from 0.
        """
        if num_requests == 0:
            return 0
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return self.max_depth if (self._steps - 1) // 2 % 2 == 0 else 0
        worth = np.concatenate([[0.0], self._gains]) * num_requests * token_seconds
        surplus = worth - seconds
        best = int(np.argmax(surplus))
        if surplus[best] - surplus[self._depth] > _MARGIN * max(seconds[best], seconds[self._depth]):
            self._depth = best
        if self._steps % _PROBE_EVERY == 0:
            return 0 if self._depth == self.max_depth else self.max_depth
        return self._depth

    def observe(self, gains: _FloatArray) -> None:
        """Gains of drafts that were there: float64[D] for depth 1 to D, none where there were none."""
        num = min(gains.size, self.max_depth)
        self._seen[:num] += 1
        usual = np.where(np.arange(num) < self._depth, _SMOOTH, _SMOOTH_PROBES)
        rate = np.maximum(usual, 1.0 / np.maximum(self._seen[:num], 1.0))
        self._gains[:num] += rate * (gains[:num] - self._gains[:num])
