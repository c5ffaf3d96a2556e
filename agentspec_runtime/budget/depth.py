"""How many tokens a model drafter in the worker should make for the next step; 0 none, -1 leaves it out.

The drafter is worth its gain: the tokens that it adds to our own drafts by expectation, price of their slots
already subtracted (`drafting.assist`), times the seconds that a token costs without it. It costs the seconds
that the step time tells (`budget.cost`). The depth with the highest difference is taken, if that differs by a
margin from the one in use.

While it makes nothing, nothing is seen of its gain, and while it always does nothing of its cost: one step in
`_PROBE_EVERY` does the opposite. At depth 0 its first pass still takes in the tokens of the step, so that its
state is right when it returns, and that pass costs something in every step. A drafter that does not bring
that in is left out altogether (`LEFT_OUT`) for some hundred steps, then tried again, and left out for twice
as long if it fails again. Requests of which it has missed a step are of no use to it from then on.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["LEFT_OUT", "AssistDepth"]

_FloatArray = npt.NDArray[np.float64]

LEFT_OUT: Final = -1

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

_TRIAL: Final = 64
"""Steps before it may be left out: those that alternate, and then twice the horizon of a gain."""
_PATIENCE: Final = 512
"""Steps of a trial in which no request is of use to it: long answers that began before may run on."""
_FIRST_PAUSE: Final = 256
_LONGEST_PAUSE: Final = 8192
"""Trials then take less than 1 % of the steps; at 20 ms it is three minutes until a change is seen."""
_UNKNOWN_SHARE: Final = 0.05
"""Of a step, for the first pass of a drafter that was never left out: only that tells what it costs. One
layer beside thirty, twice as wide at its entry, is about as much."""


class AssistDepth:
    """See the module docstring. `max_depth`: most tokens of one draft, at least 1. `may_leave_out`: whether
    the worker can do without the drafter's first pass.
    """

    def __init__(self, max_depth: int, *, may_leave_out: bool = False) -> None:
        self.max_depth = max_depth
        self._may_leave_out = may_leave_out
        self._gains: _FloatArray = np.zeros(max_depth)
        self._pause_steps = 0
        self._pause = _FIRST_PAUSE
        self._was_left_out = False
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._seen = np.zeros(self.max_depth)
        self._steps = 0
        self._waited = 0
        self._depth = self.max_depth
        self._surplus = 0.0

    @property
    def gain(self) -> float:
        """Expected tokens per request and step at the depth in use (at full depth while it is 0)."""
        return float(self._gains[(self._depth or self.max_depth) - 1])

    def choose(
        self,
        num_requests: int,
        token_seconds: float,
        seconds: _FloatArray,
        *,
        num_whole: int | None = None,
        standing: float = 0.0,
    ) -> int:
        """Depth for the step that is about to run.

        Args:
            num_requests: requests of it that may use a draft; none, no draft.
            token_seconds: what a token costs without the drafter.
            seconds: of the drafter, float64[max_depth + 1] for depths from 0.
            num_whole: those of the requests of which the drafter has seen every token; None: all.
            standing: seconds that it takes at depth 0.
        """
        if self._pause_steps:
            self._pause_steps -= 1
            if self._pause_steps:
                return LEFT_OUT
            self._begin_trial()
        if num_requests == 0:
            return 0
        if num_whole == 0:
            self._waited += 1
            return self._leave_out() if self._may_leave_out and self._waited > _PATIENCE else 0
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return self.max_depth if (self._steps - 1) // 2 % 2 == 0 else 0
        worth = np.concatenate([[0.0], self._gains]) * num_requests * token_seconds
        surplus = worth - seconds
        best = int(np.argmax(surplus))
        if surplus[best] - surplus[self._depth] > _MARGIN * max(seconds[best], seconds[self._depth]):
            self._depth = best
        if self._may_leave_out and not self._pays(
            surplus[self._depth], num_requests * token_seconds, standing
        ):
            return self._leave_out()
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

    def _pays(self, surplus: float, step_seconds: float, standing: float) -> bool:
        """Whether what it brings is worth its first pass, as far as this trial has told."""
        if not self._was_left_out:
            standing = max(standing, _UNKNOWN_SHARE * step_seconds)
        # In parts of a step: a long one must not outvote the others.
        share = (surplus - standing) / max(step_seconds, 1e-9)
        self._surplus += _SMOOTH * (min(max(share, -1.0), 1.0) - self._surplus)
        if self._steps > _TRIAL + _LONGEST_PAUSE // 8:
            self._pause = _FIRST_PAUSE  # it has paid for long: when that ends, be quick to try again
        return self._steps < _TRIAL or self._surplus >= 0.0

    def _leave_out(self) -> int:
        self._was_left_out = True
        self._pause_steps = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return LEFT_OUT
