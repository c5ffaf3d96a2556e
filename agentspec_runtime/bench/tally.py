"""Counts of one drafter setting over many requests, and the figures made from them.

One definition for the simulator and the replay (docs/measuring.md repeats it for users):
    a step is every engine step that samples for a request, drafts or not, the end of the prompt included;
    accepted counts draft tokens that became output, so a match behind the end of the answer is rejected;
    accepted + rejected = drafted, and steps + accepted >= output tokens, the difference being steps whose
    last draft token ended the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tally", "WireTally"]

_BINS: Final = 20
"""Calibration bins of equal width over 0..1."""

MAX_STEP_TOKENS: Final = 64
"""Last bucket of the histogram of tokens per step: longer steps are counted there."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running counts. `by_source` and `by_block` map a name to [drafted, accepted]."""

    requests: int = 0
    out_tokens: int = 0
    steps: int = 0
    steps_with_draft: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    index_s: float = 0.0
    by_source: dict[str, list[int]] = field(default_factory=dict)
    by_block: Mapping[str, list[int]] = field(default_factory=dict)
    step_tokens: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(MAX_STEP_TOKENS + 1, dtype=np.int64)
    )
    calibration: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, _BINS)))
    """Rows: slots, sum of stated survival, slots that survived."""

    def add_request(self, out_tokens: int) -> None:
        """A request begins: its first token comes from the last step of its prompt, without a draft."""
        self.requests += 1
        self.out_tokens += out_tokens
        self.steps += 1
        self.step_tokens[1] += 1

    def add_step(self, drafted: int, accepted: int, emitted: int) -> None:
        """One decode step of one request."""
        self.steps += 1
        self.steps_with_draft += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.step_tokens[min(emitted, MAX_STEP_TOKENS)] += 1

    def add_survival(self, survival: NDArray[np.float32], accepted: int) -> None:
        """What a draft claimed for each of its slots, and how many of them were accepted."""
        bins = np.minimum((survival * _BINS).astype(np.int64), _BINS - 1)
        np.add.at(self.calibration[0], bins, 1.0)
        np.add.at(self.calibration[1], bins, survival)
        np.add.at(self.calibration[2], bins[:accepted], 1.0)

    @property
    def rejected(self) -> int:
        """Draft tokens that gave nothing."""
        return self.drafted - self.accepted

    @property
    def rejected_share(self) -> float:
        """Rejected / drafted; 0 where nothing was drafted."""
        return self.rejected / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Output tokens / all steps."""
        return self.out_tokens / self.steps if self.steps else 0.0

    @property
    def calibration_error(self) -> float | None:
        """Mean |stated survival - share that survived| over slots, by bin; None without drafts."""
        slots, stated, survived = self.calibration
        total = slots.sum()
        return float(np.abs(stated - survived).sum() / total) if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTally:
    """A finished tally as it stands in the JSON result. Times in microseconds, rates per output token."""

    requests: int
    out_tokens: int
    steps: int
    drafted: int
    accepted: int
    rejected: int
    rejected_share: float
    accepted_per_token: float
    rejected_per_token: float
    tokens_per_step: float
    draft_us_per_step: float
    index_us_per_token: float
    calibration_error: float | None
    by_source: Mapping[str, list[int]]
    by_block: Mapping[str, list[int]]
    step_tokens: list[int]
    calibration: list[list[float]]

    @staticmethod
    def of(tally: Tally) -> WireTally:
        """Figures of a tally."""
        tokens = max(tally.out_tokens, 1)
        return WireTally(
            requests=tally.requests,
            out_tokens=tally.out_tokens,
            steps=tally.steps,
            drafted=tally.drafted,
            accepted=tally.accepted,
            rejected=tally.rejected,
            rejected_share=round(tally.rejected_share, 4),
            accepted_per_token=round(tally.accepted / tokens, 4),
            rejected_per_token=round(tally.rejected / tokens, 4),
            tokens_per_step=round(tally.tokens_per_step, 4),
            draft_us_per_step=round(1e6 * tally.draft_s / max(tally.steps, 1), 2),
            index_us_per_token=round(1e6 * tally.index_s / tokens, 2),
            calibration_error=None if (e := tally.calibration_error) is None else round(e, 4),
            by_source=tally.by_source,
            by_block=dict(tally.by_block),
            step_tokens=np.trim_zeros(tally.step_tokens, "b").tolist(),
            calibration=np.round(tally.calibration, 1).tolist(),
        )
