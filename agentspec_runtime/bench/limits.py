"""How far copying could have gone on exactly what a replay replayed: the upper part of the waterfall.

Tokens per step, first token of every answer included, for LZ, O3, O2/1 (exact, `oracles.py`) and O1 (our
drafter, every draft cut where it went wrong). Trajectories run one after the other here; in a replay they run
side by side, and a little less text is there to copy from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentspec_runtime.bench.chat_tokens import load_vocabulary
from agentspec_runtime.bench.ours import OurRival
from agentspec_runtime.bench.simulate import replay_request, run_oracles
from agentspec_runtime.bench.tally import Tally
from agentspec_runtime.bench.tokens import TokenTrajectory

__all__ = ["Limits", "compute_limits", "read_limits", "write_limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens per step of the oracles, for the trajectories of one concurrency."""

    concurrency: int
    lz: float
    o3: float
    o2: float
    o1: float


def compute_limits(concurrency: int, trajectories: Sequence[TokenTrajectory], model: str) -> Limits:
    """Limits of some trajectories. Takes seconds."""
    found = {lane.setting: lane.figures.tokens_per_step for lane in run_oracles(trajectories)}
    ours = OurRival("agentspec", 0.0, load_vocabulary(model))
    tally = Tally()
    for trajectory in trajectories:
        for number, request in enumerate(trajectory.requests):
            replay_request(ours, f"{trajectory.id}#{number}", trajectory.id, request, [tally])
    return Limits(
        concurrency=concurrency,
        lz=found["LZ"],
        o3=found["O3"],
        o2=found["O2/1"],
        o1=round(tally.tokens_per_step, 4),
    )


def write_limits(path: Path, limits: Sequence[Limits]) -> None:
    """Write limits as JSON."""
    path.write_text(json.dumps([asdict(limit) for limit in limits], indent=1) + "\n", encoding="utf-8")


def read_limits(path: Path) -> dict[int, Limits]:
    """Limits by concurrency; empty where none were written."""
    try:
        return {
            entry["concurrency"]: Limits(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {}
