"""Train the survival prior that ships with the package: `python -m agentspec_runtime.bench.prior`.

It runs the drafter over recordings, the tuning side of the split by task only, all workloads in turn,
and keeps the mixer's weights and the rates of those tables whose keys hold no token ids, so that the
result means the same for any tokenizer. Traffic replaces it quickly: a shipped rate counts as at most
24 observations.
"""

from __future__ import annotations

import sys
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path
from typing import Final

from agentspec_runtime.bench.chat_tokens import load_vocabulary
from agentspec_runtime.bench.ours import OurRival
from agentspec_runtime.bench.simulate import replay_request, select_part
from agentspec_runtime.bench.tally import Tally
from agentspec_runtime.bench.tokens import TokenTrajectory, fit_context, load_tokens

__all__ = ["train_prior"]

_THRESHOLDS: Final = (0.1, 0.5, 0.3, 0.8)
"""Slots are verified down to different prices in turn, as they are under changing load."""

_TRAJECTORIES: Final = 40
"""Per workload, so that no workload outweighs the others."""

_MAX_CONTEXT: Final = 32_768

_SHARED_TABLES: Final = (1, 2, 4)
"""Tables of `drafting.survival` without token ids in their keys: history, votes, token classes."""


def train_prior(files: list[Path], model: str, out: Path) -> None:
    """Train on the tuning side of `files` with the tokenizer of `model` and write `out`."""
    rival = OurRival("agentspec", _THRESHOLDS[0], load_vocabulary(model), use_prior=False)
    tally = [Tally()]
    by_file = [_tuning_side(file, model) for file in files]
    in_turn = chain.from_iterable(zip_longest(*by_file))
    for trajectory, threshold in zip(in_turn, cycle(_THRESHOLDS), strict=False):
        if trajectory is not None:
            rival.threshold = threshold
            for number, request in enumerate(trajectory.requests):
                replay_request(rival, f"{trajectory.id}#{number}", trajectory.id, request, tally)
    rival.export_prior(out, _SHARED_TABLES)


def _tuning_side(file: Path, model: str) -> list[TokenTrajectory]:
    chosen = islice(select_part(load_tokens(file, model), "tune"), _TRAJECTORIES)
    return list(fit_context(list(chosen), _MAX_CONTEXT).trajectories)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python -m agentspec_runtime.bench.prior MODEL OUT.npz RECORDING...")
    train_prior([Path(name) for name in sys.argv[3:]], sys.argv[1], Path(sys.argv[2]))
