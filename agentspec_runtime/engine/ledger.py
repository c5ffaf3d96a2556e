"""What is known of a request from its arrival to its end, and the reports made from it and its account.

The account itself, step by step, is `drafting.answers`; it keeps the promises of `observe.py`. Knows nothing
of vLLM.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Final

import numpy as np

from agentspec_runtime.drafting import BLOCK_KINDS, SOURCES
from agentspec_runtime.drafting.answers import AnswerAccount, BlockAccount
from agentspec_runtime.drafting.draft import Int64Array
from agentspec_runtime.hints import Hint, SegmentKind
from agentspec_runtime.observe import BlockReport, DraftSource, RequestReport, StepVerdictMap, Verdict

__all__ = ["RequestLedger", "StepVerdicts"]

_MAX_STEPS: Final = 65_536
"""Steps that a report tells one by one; its blocks hold them all."""


@dataclass(slots=True, kw_only=True)
class RequestLedger:
    """A request from its arrival on. Times in seconds since the epoch, 0.0: has not happened."""

    hint: Hint | None
    num_prompt_tokens: int
    arrival_s: float
    scheduled_s: float = 0.0
    num_cached_tokens: int = 0

    def report(
        self,
        account: AnswerAccount,
        *,
        req_id: str,
        trace_headers: Mapping[str, str] | None,
        session: str | None,
        end_s: float,
        num_preemptions: int,
        finish_reason: str,
        model: str,
    ) -> RequestReport:
        """The finished account."""
        hint = self.hint
        return RequestReport(
            req_id=req_id,
            trace_headers=trace_headers,
            session=session,
            agent=hint.agent if hint else None,
            turn=hint.turn if hint else None,
            arrival_s=self.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=account.first_end_s,
            end_s=end_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=account.num_tokens,
            num_preemptions=num_preemptions,
            finish_reason=finish_reason,
            blocks=tuple(_block_reports(account)),
            per_step_drafted=tuple(account.drafted[:_MAX_STEPS].tolist()),
            per_step_accepted=tuple(account.accepted[:_MAX_STEPS].tolist()),
            model=model,
        )


class StepVerdicts(Mapping[tuple[SegmentKind, DraftSource], Verdict]):
    """Sums of a step (`Answers.add_step`) under their names.

    They are named when they are read, which an observer does in a thread of its own: to name them costs
    more than to count them.
    """

    def __init__(self, totals: Int64Array) -> None:
        self.totals = totals
        self._named: dict[tuple[SegmentKind, DraftSource], Verdict] | None = None

    @classmethod
    def sum_of(cls, parts: Sequence[StepVerdictMap]) -> StepVerdicts:
        """Sums of several steps, not named yet."""
        return cls(np.add.reduce([part.totals for part in parts if isinstance(part, cls)]))

    def __getitem__(self, key: tuple[SegmentKind, DraftSource]) -> Verdict:
        return self._read()[key]

    def __iter__(self) -> Iterator[tuple[SegmentKind, DraftSource]]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def items(self) -> ItemsView[tuple[SegmentKind, DraftSource], Verdict]:
        """Those of a dict, which are faster than what `Mapping` makes of the methods above."""
        return self._read().items()

    def values(self) -> ValuesView[Verdict]:
        """As `items`."""
        return self._read().values()

    def _read(self) -> dict[tuple[SegmentKind, DraftSource], Verdict]:
        if self._named is None:
            self._named = {
                (BLOCK_KINDS[kind], SOURCES[source]): Verdict(drafted=d, accepted=a, discarded=x)
                for kind, by_source in enumerate(self.totals.tolist())
                for source, (d, a, x) in enumerate(by_source)
                if d
            }
        return self._named


def _block_reports(account: AnswerAccount) -> Iterable[BlockReport]:
    # A block begins where the one before it ends; the first one with the step that brought its first token.
    start_s = account.first_end_s - float(account.duration_s[0]) if account.duration_s.size else 0.0
    for block in account.blocks:
        p50, p95 = _percentiles(account, block)
        yield BlockReport(
            kind=BLOCK_KINDS[block.kind],
            start_s=start_s,
            end_s=block.end_s,
            num_tokens=block.num_tokens,
            num_steps=block.num_steps,
            verdicts={
                SOURCES[source]: Verdict(drafted=d, accepted=a, discarded=x)
                for source, (d, a, x) in enumerate(block.verdicts)
                if d
            },
            mean_batch=block.batch / block.num_steps if block.num_steps else 0.0,
            mean_budget=block.budget / block.num_steps if block.num_steps else 0.0,
            step_s_p50=p50,
            step_s_p95=p95,
        )
        start_s = block.end_s


def _percentiles(account: AnswerAccount, block: BlockAccount) -> tuple[float, float]:
    """50th and 95th of the times of a block's steps, as `np.percentile` has them, at a tenth of its price.

    The answer's first step is left out: it carried the prompt, and its time is the prefill's.
    """
    first, end = max(block.first_step, 1), block.first_step + block.num_steps
    times = np.sort(account.duration_s[first:end])
    if not times.size:
        return 0.0, 0.0
    found: list[float] = []
    for rank in (0.50, 0.95):
        at, part = divmod(rank * (times.size - 1), 1.0)
        low, high = float(times[int(at)]), float(times[min(int(at) + 1, times.size - 1)])
        found.append(low + (high - low) * part)
    return found[0], found[1]
