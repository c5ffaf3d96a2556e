"""How long an engine step takes, learned from the steps themselves.

    T(n, a, r) = base + per_token * n + per_attended * a + per_request * r,   corrected by size

`n`: tokens in the step (prompt chunks, one per decoding request, drafts); `a`: attended tokens, the sum
over those n of the context they look back on (on a CPU, and for long contexts anywhere, attention is
not free); `r`: requests that sample. The linear part is recursive least squares with forgetting, its
residuals are kept per size bucket, since real steps are staircases: GPUs pad to captured graph sizes
and are flat while memory-bound.

A step that is far off (a compile, a page fault, another process) is clipped, not learned.
Units: seconds and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CostCurve", "StepCost", "StepShape"]

_FORGET: Final = 0.998
"""Half-life of about 350 steps: follows a change of load within seconds, averages out noise."""
_CLIP: Final = 0.5
"""Once learned, a step counts as at most half as long or 1.5 times as long as predicted."""
_LEARNED: Final = 24
_ATTENDED_SCALE: Final = 1e-3
_FLOOR: Final = 1e-6

_EDGES: Final = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096]
)
_BUCKET_RATE: Final = 0.05
_BUCKET_FULL: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step holds; see the module docstring for the letters."""

    num_tokens: int
    num_attended: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """A learned or measured curve, as it is written to a file and read back.

    `coefficients`: base, per token, per 1,000 attended tokens, per request; seconds.
    """

    coefficients: tuple[float, float, float, float]


class StepCost:
    """Online estimate of the step time.

    Without a curve to start from it assumes steps of 10 ms that grow by 1 % per token, and lets go of
    that within a few steps.
    """

    def __init__(self, start: CostCurve | None = None) -> None:
        first = start.coefficients if start is not None else (1e-2, 1e-4, 0.0, 1e-5)
        self._theta: npt.NDArray[np.float64] = np.array(first)
        # Prior variances: loose without a curve, tight with one. Attention and per-request costs are
        # held closer to zero, since they are hard to tell from the rest in the first steps.
        spread = np.array([1e-1, 1e-2, 1e-5, 1e-4]) * (0.05 if start is not None else 1.0)
        self._cov: npt.NDArray[np.float64] = np.diag(spread**2) / 1e-6
        self._ratio = np.ones(_EDGES.size)
        self._seen = np.zeros(_EDGES.size)
        self.num_steps = 0

    def predict(self, shape: StepShape) -> float:
        """Expected seconds of a step."""
        return float(
            self.predict_many(np.array([shape.num_tokens]), np.array([shape.num_attended]), shape)[0]
        )

    def predict_many(
        self, tokens: npt.NDArray[np.int64], attended: npt.NDArray[np.int64], shape: StepShape
    ) -> npt.NDArray[np.float64]:
        """Expected seconds for several numbers of tokens; `shape` gives the requests."""
        base, per_token, per_attended, per_request = self._theta
        linear = (
            base
            + per_token * tokens
            + per_attended * _ATTENDED_SCALE * attended
            + per_request * shape.num_requests
        )
        seconds: npt.NDArray[np.float64] = np.maximum(linear, _FLOOR) * np.interp(tokens, _EDGES, self._ratio)
        return seconds

    def slope(self, shape: StepShape, extra_tokens: int = 4) -> tuple[float, float]:
        """Seconds that one more token costs at this shape: (per token, per attended token)."""
        n = np.array([shape.num_tokens, shape.num_tokens + extra_tokens])
        a = np.full(2, shape.num_attended)
        low, high = self.predict_many(n, a, shape)
        ratio = float(np.interp(shape.num_tokens, _EDGES, self._ratio))
        per_token = max(float(high - low) / extra_tokens, 0.0)
        return per_token, max(float(self._theta[2]) * _ATTENDED_SCALE * ratio, 0.0)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one measured step."""
        if not seconds > 0.0:
            return
        expected = self.predict(shape)
        if self.num_steps >= _LEARNED:
            seconds = min(max(seconds, (1 - _CLIP) * expected), (1 + _CLIP) * expected)
        self.num_steps += 1
        x = np.array(
            [1.0, shape.num_tokens, shape.num_attended * _ATTENDED_SCALE, shape.num_requests], np.float64
        )
        # Least squares on relative errors: a 1 s prefill step must not drown a 20 ms decode step.
        weight = 1.0 / max(expected, seconds, _FLOOR)
        x *= weight
        gain_base = self._cov @ x
        gain = gain_base / (_FORGET + float(x @ gain_base))
        self._theta = self._theta + gain * (seconds * weight - float(x @ self._theta))
        self._cov = (self._cov - np.outer(gain, gain_base)) / _FORGET
        # Forgetting must not blow up directions that the load never varies in.
        np.clip(self._cov, -1e6, 1e6, out=self._cov)
        self._theta[1:] = np.maximum(self._theta[1:], 0.0)
        self._correct_bucket(shape, seconds)

    def curve(self) -> CostCurve:
        """The linear part, to be saved."""
        base, per_token, per_attended, per_request = (float(v) for v in self._theta)
        return CostCurve(coefficients=(base, per_token, per_attended, per_request))

    def _correct_bucket(self, shape: StepShape, seconds: float) -> None:
        base, per_token, per_attended, per_request = self._theta
        linear = max(
            base
            + per_token * shape.num_tokens
            + per_attended * _ATTENDED_SCALE * shape.num_attended
            + per_request * shape.num_requests,
            _FLOOR,
        )
        i = int(np.searchsorted(_EDGES, shape.num_tokens, side="right")) - 1
        i = min(max(i, 0), _EDGES.size - 1)
        self._seen[i] = min(self._seen[i] + 1.0, 1.0 / _BUCKET_RATE)
        target = min(max(seconds / linear, 0.5), 2.0)
        rate = 1.0 / (self._seen[i] + _BUCKET_FULL)
        self._ratio[i] += max(rate, _BUCKET_RATE * 0.5) * (target - self._ratio[i])
