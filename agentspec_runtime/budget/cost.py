"""How long an engine step takes, learned from the steps themselves.

    T(n, a, r, v, d) = base + per_request * r + per_attended * a + f(n)
                       + verify * (v > 0) + per_slot * v
                       + (run + run_token * n) * (d >= 0)
                       + first * r * (d > 0) + (pass + per_draft * r) * max(d - 1, 0)

`n`: tokens in the step (prompt chunks, one per decoding request, drafts); `a`: attended tokens, the sum
over those n of the context they look back on (on a CPU, and for long contexts anywhere, attention is
not free); `r`: requests that sample; `v`: draft tokens to verify. A step with any takes other kernels and the
rejection sampler, whatever its size: on a 2-core CPU, 96 ms with one draft token where a step without took 70
(4k context), and every further token 5. And each of them is a row of logits that is sampled from, which a
token of a prompt is not: with short prompts in most steps and some requests that ask for log probabilities or
penalties, a draft token took 5 to 6 ms on that CPU and a token of a prompt 1.6 (without this term drafts were
priced like prompts, and 300 such requests took 1.15 to 1.3 times as long as without drafts). `d`: tokens that
a model drafter in the worker makes for each of those requests, -1 where it does not run. When it runs
(`budget.depth`), its first pass takes in every token of the step; then the first draft token costs a sample
of each request, and every further one a pass. `f` is piecewise linear with bends at fixed sizes.

All coefficients are at least zero, so T rises and is convex in n: flat while the machine is
memory-bound, then steeper, which is what GPUs and CPUs do apart from the padding to graph sizes. They
are fitted by least squares on relative errors over a fading past, with a pull of half an observation
towards a plain first guess, so that directions that the load never varies in stay where they are.
Non-negative least squares by coordinate descent, warm-started (Franc, Hlavac, Navara, "Sequential
Coordinate-Wise Algorithm for the Non-negative Least Squares Problem", 2005).

A step that is far off (a compile, a page fault, another process) is not learned, and several are clipped.

What the steps did not tell is known too (`unsure_seconds`): while no drafts are made and every step has the
same size, nobody can say what a draft token costs, and only drafting would tell.
Units: seconds and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CostCurve", "StepCost", "StepShape"]

_FloatArray = npt.NDArray[np.float64]

_FORGET: Final = 0.998
"""Half-life of about 350 steps: follows a change of load within seconds, averages out noise."""
_CLIP: Final = 3.0
"""Once learned, a step counts as at most 3 times longer or shorter than predicted, and not at all if it is
the only such step for some time."""
_ALONE: Final = 16
"""Steps. Something that lasts is far off again within so many; a stall is not. Learned as the only step of
its size, it would make that size look dear for thousands of steps."""
_LEARNED: Final = 24
_PULL: Final = 0.5
_SOLVE_EVERY: Final = 8
"""Steps between solutions once learned: one costs about 0.2 ms."""
_SWEEPS: Final = 12
_LEAST_NOISE: Final = 0.03
"""Relative error of a step time that `unsure_seconds` reckons with at least: that of a calm machine."""
_NOISE_RATE: Final = 0.02

_BENDS: Final = (8, 16, 32, 64, 128, 256, 512, 1024)
_BEND_SIZES: Final = np.array(_BENDS, np.float64)
_BASE: Final = 0
_REQUEST: Final = 1
_ATTENDED: Final = 2
_VERIFY: Final = 3
_FIRST: Final = 4
_PASS: Final = 5
_DRAFT: Final = 6
_RUN: Final = 7
_RUN_TOKEN: Final = 8
_ASSIST: Final = [_FIRST, _PASS, _DRAFT, _RUN, _RUN_TOKEN]
_SLOT: Final = 9
_TOKEN: Final = 10
_NUM: Final = _TOKEN + 1 + len(_BENDS)
_ATTENDED_SCALE: Final = 1e-3

_FIRST_BASE: Final = 1e-2
_FIRST_SLOPE: Final = 1e-2
"""First guess: steps of 10 ms that grow by 1 % of that per token; its scale follows the measured level."""
_FLOOR: Final = 1e-6
_SHORTEST: Final = 1e-6
_LONGEST: Final = 1e3
"""No step takes a microsecond or a quarter of an hour; such a number is a broken clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step holds; see the module docstring for the letters. `assist_depth`: -1 where no model drafter
    runs, be there none or be it left out.
    """

    num_tokens: int
    num_attended: int
    num_requests: int
    num_drafts: int = 0
    assist_depth: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """A curve to start from: measured by `agentspec bench calibrate`, or learned earlier.

    `coefficients`: base, per token, per 1,000 attended tokens, per request; seconds. `bends`: what a token
    costs more from each bend on, in the order of the bends; missing ones are zero. `verify`: seconds that a
    step with drafts takes longer, whatever their number; `slot`: that each of them takes beyond a token of a
    prompt. `assist`: of a model drafter the first token per request, a further pass, that pass per request,
    its first pass, and that one per token of the step; zero where missing.
    """

    coefficients: tuple[float, float, float, float]
    bends: tuple[float, ...] = ()
    verify: float = 0.0
    slot: float = 0.0
    assist: tuple[float, ...] = ()


class StepCost:
    """Online estimate of the step time, starting from a curve or from a guess."""

    def __init__(self, start: CostCurve | None = None) -> None:
        guess = np.zeros(_NUM)
        if start is None:
            guess[[_BASE, _TOKEN]] = _FIRST_BASE, _FIRST_BASE * _FIRST_SLOPE
        else:
            guess[[_BASE, _TOKEN, _ATTENDED, _REQUEST]] = np.maximum(start.coefficients, 0.0)
            guess[[_VERIFY, _SLOT]] = max(start.verify, 0.0), max(start.slot, 0.0)
            known = start.assist[: len(_ASSIST)]
            guess[_ASSIST[: len(known)]] = np.maximum(known, 0.0)
            bends = np.maximum(start.bends[: len(_BENDS)], 0.0)
            guess[_TOKEN + 1 : _TOKEN + 1 + bends.size] = bends
        self._guess = guess
        self._theta = guess.copy()
        self._information: _FloatArray = np.zeros((_NUM, _NUM))
        self._target: _FloatArray = np.zeros(_NUM)
        self._weight = 0.0
        # Of theta, for relative errors of 1.
        self._covariance: _FloatArray = np.zeros((_NUM, _NUM))
        self._noise = _LEAST_NOISE**2
        # Running sums that scale the guess to the measured level: <y, guess> and <guess, guess>.
        self._level = np.zeros(2)
        self.num_steps = 0
        self._far_off = -_ALONE

    def predict(self, shape: StepShape) -> float:
        """Expected seconds of a step."""
        return max(float(_features(shape) @ self._theta), _FLOOR)

    def curve(self) -> CostCurve:
        """What has been learned, to start from another time."""
        base, per_token, per_attended, per_request = self._theta[
            [_BASE, _TOKEN, _ATTENDED, _REQUEST]
        ].tolist()
        return CostCurve(
            coefficients=(base, per_token, per_attended, per_request),
            bends=tuple(self._theta[_TOKEN + 1 :].tolist()),
            verify=self.verify_seconds,
            slot=float(self._theta[_SLOT]),
            assist=tuple(self._theta[_ASSIST].tolist()),
        )

    @property
    def verify_seconds(self) -> float:
        """Seconds that a step with drafts takes longer, whatever their number."""
        return float(self._theta[_VERIFY])

    def assist_seconds(self, num_requests: int, max_depth: int) -> _FloatArray:
        """Seconds that a model drafter takes for 0 to `max_depth` tokens of so many requests, beside those of
        its first pass.
        """
        depths = np.arange(max_depth + 1)
        per_pass = self._theta[_PASS] + self._theta[_DRAFT] * num_requests
        first = self._theta[_FIRST] * num_requests
        seconds: _FloatArray = first * (depths > 0) + per_pass * np.maximum(depths - 1, 0)
        return seconds

    def assist_standing(self, num_tokens: int) -> float:
        """Seconds of a model drafter's first pass over the tokens of a step, taken unless it is left out."""
        return float(self._theta[_RUN] + self._theta[_RUN_TOKEN] * num_tokens)

    def slope(self, shape: StepShape) -> tuple[float, float]:
        """Seconds that one more draft token costs at this shape: by itself, and per attended token."""
        per_token = self._theta[_TOKEN] + self._theta[_SLOT]
        for i, bend in enumerate(_BENDS, start=_TOKEN + 1):
            if shape.num_tokens >= bend:
                per_token += self._theta[i]
        return float(per_token), float(self._theta[_ATTENDED]) * _ATTENDED_SCALE

    def added_seconds(self, shape: StepShape, more_tokens: _FloatArray) -> _FloatArray:
        """Seconds that `more_tokens` float64[D] draft tokens add here, without attention and `verify`."""
        n = shape.num_tokens
        seconds: _FloatArray = (self._theta[_TOKEN] + self._theta[_SLOT]) * more_tokens
        for i, bend in enumerate(_BENDS, start=_TOKEN + 1):
            if self._theta[i] > 0.0:
                seconds += self._theta[i] * (np.maximum(n + more_tokens - bend, 0.0) - max(n - bend, 0))
        return seconds

    def unsure_seconds(
        self, shape: StepShape, more_tokens: _FloatArray, attended: _FloatArray
    ) -> _FloatArray:
        """How far off (one standard deviation) the seconds may be that draft tokens add to this shape.

        `more_tokens` float64[D]: how many; `attended` float64[D]: what they look back on together. Verifying
        is included. Zero before the first step: a curve that was given counts until steps tell more.
        """
        n = shape.num_tokens
        added = np.zeros((more_tokens.size, _NUM))
        added[:, _VERIFY] = more_tokens > 0.0
        added[:, _ATTENDED] = attended * _ATTENDED_SCALE
        added[:, _TOKEN] = added[:, _SLOT] = more_tokens
        bent = np.maximum(n + more_tokens[:, None] - _BEND_SIZES, 0.0)
        added[:, _TOKEN + 1 :] = bent - np.maximum(n - _BEND_SIZES, 0.0)
        variance: _FloatArray = np.einsum("ij,ij->i", added @ self._covariance, added)
        unsure: _FloatArray = self.noise * np.sqrt(np.maximum(variance, 0.0))
        return unsure

    def unsure_slope(self, shape: StepShape, context: float) -> float:
        """The same for the cost of one more draft token that looks back on `context`."""
        token = np.zeros(_NUM)
        token[[_TOKEN, _SLOT]], token[_ATTENDED] = 1.0, context * _ATTENDED_SCALE
        token[_TOKEN + 1 :] = shape.num_tokens >= _BEND_SIZES
        return self.noise * math.sqrt(max(float(token @ self._covariance @ token), 0.0))

    @property
    def noise(self) -> float:
        """Relative error of the last predictions, one standard deviation."""
        return math.sqrt(self._noise)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one measured step."""
        if not (math.isfinite(seconds) and _SHORTEST < seconds < _LONGEST):
            return
        x = _features(shape)
        self.num_steps += 1
        if self.num_steps > _LEARNED:
            expected = self.predict(shape)
            believed = min(max(seconds, expected / _CLIP), expected * _CLIP)
            if believed != seconds:
                before, self._far_off = self._far_off, self.num_steps
                if self.num_steps - before > _ALONE:
                    return
            error = min(abs(believed / expected - 1.0), 1.0)
            self._noise += _NOISE_RATE * (max(error, _LEAST_NOISE) ** 2 - self._noise)
            seconds = believed
        # Relative errors: a 1 s prefill step must not drown a 20 ms decode step.
        x /= seconds
        self._information *= _FORGET
        self._information += np.outer(x, x)
        self._target *= _FORGET
        self._target += x
        self._weight = self._weight * _FORGET + 1.0
        guessed = float(x @ self._guess)
        self._level *= _FORGET
        self._level += (guessed, guessed * guessed)
        if self.num_steps < _LEARNED or self.num_steps % _SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Minimise the fading squared error plus the pull towards the scaled guess, all coefficients >= 0."""
        scale = self._level[0] / self._level[1]
        pull = _PULL * np.diag(self._information) / self._weight + 1e-18
        matrix = self._information + np.diag(pull)
        target = self._target + pull * (self._guess * scale)
        theta = self._theta
        gradient = matrix @ theta - target
        diagonal = np.diag(matrix)
        for _ in range(_SWEEPS):
            for j in range(_NUM):
                step = max(theta[j] - gradient[j] / diagonal[j], 0.0) - theta[j]
                if step != 0.0:
                    theta[j] += step
                    gradient += step * matrix[j]
        self._covariance = np.linalg.inv(matrix).astype(np.float64)


def _features(shape: StepShape) -> _FloatArray:
    x = np.empty(_NUM)
    n = shape.num_tokens
    x[_BASE] = 1.0
    x[_REQUEST] = shape.num_requests
    x[_ATTENDED] = shape.num_attended * _ATTENDED_SCALE
    x[_VERIFY] = shape.num_drafts > 0
    x[_SLOT] = shape.num_drafts
    x[_RUN] = shape.assist_depth >= 0
    x[_RUN_TOKEN] = n if shape.assist_depth >= 0 else 0
    x[_FIRST] = shape.num_requests if shape.assist_depth > 0 else 0
    x[_PASS] = max(shape.assist_depth - 1, 0)
    x[_DRAFT] = x[_PASS] * shape.num_requests
    x[_TOKEN] = n
    for i, bend in enumerate(_BENDS, start=_TOKEN + 1):
        x[i] = n - bend if n > bend else 0.0
    return x
