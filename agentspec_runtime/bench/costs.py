"""Step time of an engine, and what drafts are worth under it.

T(tokens, requests) is the time of one decode step that computes `tokens` tokens for `requests` requests.
A measured curve comes from `agentspec bench calibrate`; presets for GPUs from rooflines (`presets.py`).

Goodput of a batch of b requests, in output tokens per second, for a drafter that on average has d tokens
drafted and e tokens emitted per request and step (all steps counted):

    goodput(b) = b * e / (T(b + b * d, b) + t_draft)        plain: b / T(b, b)

which is references such as TurboSpec's goodput (arXiv 2406.14066) with measured e and d. It takes the mean of
d, which is right while T is close to linear between its points, and leaves prefill out: it bounds what a
real server gains, and the replay measures that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from agentspec_runtime.bench.simulate import LaneResult
from agentspec_runtime.bench.tally import WireTally
from agentspec_runtime.errors import ConfigurationError

__all__ = ["CostCurve", "GoodputRow", "StepTime", "goodput_table", "load_curve", "save_curve"]


class StepTime(Protocol):
    """Step time in seconds."""

    @property
    def name(self) -> str:
        """Model and machine."""
        ...

    def step_s(self, tokens: float, requests: float) -> float:
        """Time of a decode step of so many tokens for so many requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """A measured curve: `points` are (tokens in the step, seconds), tokens ascending.

    Every request had `context_tokens` tokens in its KV cache. `coefficients` are the linear fit that our
    scheduler's budget starts from: seconds of base, per token, per 1,000 attended tokens, per request.
    """

    model: str
    machine: str
    points: tuple[tuple[int, float], ...]
    context_tokens: int
    coefficients: tuple[float, float, float, float] | None = None

    @property
    def name(self) -> str:
        """Model and machine."""
        return f"{self.model} on {self.machine}"

    def step_s(self, tokens: float, requests: float) -> float:
        """Linear between points and beyond the last one; below the first, the first."""
        del requests  # measured with one token per request: their KV reads are in the curve
        sizes = [point[0] for point in self.points]
        times = [point[1] for point in self.points]
        if tokens <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(tokens, sizes, times))
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + max(slope, 0.0) * (tokens - sizes[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRow:
    """Goodput of one method at one batch size, with the setting that is best there."""

    method: str
    setting: str
    batch: int
    tokens_per_s: float
    speedup: float


def load_curve(path: Path) -> CostCurve:
    """Curve of a file that `calibrate` wrote.

    Raises:
        ConfigurationError: not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        points = tuple(sorted((int(tokens), float(seconds)) for tokens, seconds in data["points"]))
        curve = CostCurve(
            model=str(data["model"]),
            machine=str(data["machine"]),
            points=points,
            context_tokens=int(data["context_tokens"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: not a cost curve of `agentspec bench calibrate` ({error})"
        ) from error
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ConfigurationError(f"{path}: a cost curve needs points with times above 0")
    return curve


def save_curve(path: Path, curve: CostCurve) -> None:
    """Write a curve as JSON."""
    path.write_text(json.dumps(asdict(curve), indent=1) + "\n", encoding="utf-8")


def goodput_table(lanes: Sequence[LaneResult], cost: StepTime, batches: Sequence[int]) -> list[GoodputRow]:
    """Goodput of every method at every batch size, each with its best setting (tuned in hindsight)."""
    rows: list[GoodputRow] = []
    for batch in batches:
        plain = batch / cost.step_s(batch, batch)
        rows.append(_row("plain", "", batch, plain, plain))
        best: dict[str, GoodputRow] = {}
        for lane in lanes:
            # Each oracle is a bound of its own; the settings of a method are alternatives.
            name = lane.setting if lane.method == "oracle" else lane.method
            row = _row(name, lane.setting, batch, _goodput(lane.figures, cost, batch), plain)
            if name not in best or row.tokens_per_s > best[name].tokens_per_s:
                best[name] = row
        rows += best.values()
    return rows


def _goodput(figures: WireTally, cost: StepTime, batch: int) -> float:
    decode_steps = figures.steps - figures.requests  # the last prompt step of a request is no decode step
    if decode_steps <= 0:
        return batch / cost.step_s(batch, batch)
    emitted = (figures.out_tokens - figures.requests) / decode_steps
    drafted = figures.drafted / decode_steps
    draft_s = 1e-6 * figures.draft_us_per_step * batch
    return batch * emitted / (cost.step_s(batch * (1 + drafted), batch) + draft_s)


def _row(method: str, setting: str, batch: int, tokens_per_s: float, plain: float) -> GoodputRow:
    return GoodputRow(
        method=method,
        setting=setting,
        batch=batch,
        tokens_per_s=round(tokens_per_s, 2),
        speedup=round(tokens_per_s / plain, 3),
    )
