"""Our claim put to the test: at no load slower than plain vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Final, Literal

from agentspec_runtime.bench.summary import CellSummary, agents

__all__ = ["AS_FAST", "Judgement", "judge", "listed"]

AS_FAST: Final = 0.98
"""Factor over plain that still counts as equal. Runs of one cell can differ by more: --repeat shows it."""

_OURS: Final = "agentspec"
_REFERENCE: Final = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What came out. `open`: no load has both numbers. `void`: answers were not the recorded ones."""

    verdict: Literal["held", "broken", "open", "void"]
    sentence: str


def judge(cells: Sequence[CellSummary], planned: Iterable[int]) -> Judgement:
    """Whether ours was as fast as plain in every cell that has both, in words for people.

    Args:
        cells: summaries of a replay; factors over plain are medians of the ratios within repeats.
        planned: the concurrencies that were to be measured.
    """
    wrong = [cell for cell in cells if cell.mismatched and cell.method in (_OURS, _REFERENCE)]
    if wrong:
        names = " and ".join(sorted({cell.method for cell in wrong}))
        turns = sum(cell.mismatched for cell in wrong)
        return Judgement(
            verdict="void",
            sentence=f"Void: {turns} turns of {names} did not emit the recorded tokens. Please report it.",
        )
    factors = {
        cell.concurrency: cell.speedup for cell in cells if cell.method == _OURS and cell.speedup is not None
    }
    if not factors:
        return Judgement(
            verdict="open",
            sentence="Never slower than plain: cannot be said, no load was measured with both methods.",
        )
    missing = sorted(set(planned) - set(factors))
    unmeasured = f" Not measured: {_loads(missing)}." if missing else ""
    slower = {size: factor for size, factor in sorted(factors.items()) if factor < AS_FAST}
    if slower:
        # Rounded down: 0.9799 must not read as the 0.980 that would have been enough.
        found = ", ".join(
            f"{floor(1e3 * factor) / 1e3:.3f}x at {agents(size)}" for size, factor in slower.items()
        )
        return Judgement(
            verdict="broken",
            sentence=f"Never slower than plain: NOT held. agentspec gave {found}, "
            f"which is below {AS_FAST}x.{unmeasured}",
        )
    span = " to ".join(
        dict.fromkeys(f"{factor:.3f}x" for factor in (min(factors.values()), max(factors.values())))
    )
    return Judgement(
        verdict="held",
        sentence=f"Never slower than plain: held at {_loads(sorted(factors))}, where agentspec gave "
        f"{span} of plain's throughput ({AS_FAST}x counts as equal).{unmeasured}",
    )


def _loads(sizes: Sequence[int]) -> str:
    return agents(sizes[0]) if len(sizes) == 1 else f"{listed(sizes)} agents"


def listed(numbers: Sequence[int]) -> str:
    """ "1", "1 and 8", "1, 8 and 32"."""
    words = [str(number) for number in numbers]
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)
