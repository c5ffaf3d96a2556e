"""Accounts of drafts and verdicts, per request and block, and the reports made from them.

It keeps the promises of `observe.py`: tokens over blocks add up to the output, accepted plus rejected
to drafted, in every dimension. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agentspec_runtime.drafting import BLOCK_KINDS, SOURCES, BlockSpan
from agentspec_runtime.hints import Hint, SegmentKind
from agentspec_runtime.observe import BlockReport, DraftSource, RequestReport, Verdict

__all__ = ["RequestLedger", "StepContext", "VerdictCounts"]

_MAX_STEPS: Final = 65_536
_TAIL_STEPS: Final = 64
"""Steps that can be taken back: how far the engine may run ahead of the API that finds a stop string."""
_MAX_BLOCKS: Final = 1_024
"""An answer with more blocks than that puts the rest into its last one; the sums stay exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What all requests of a step share. Seconds since the epoch, seconds, requests, tokens."""

    end_s: float
    duration_s: float
    batch: int
    budget: int


class VerdictCounts:
    """Draft tokens by block kind and source: drafted, accepted, discarded."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], list[int]] = {}

    def add(self, kind: int, source: int, drafted: int, accepted: int, discarded: int) -> None:
        """Add to one cell."""
        cell = self._counts.get((kind, source))
        if cell is None:
            self._counts[kind, source] = [drafted, accepted, discarded]
        else:
            cell[0] += drafted
            cell[1] += accepted
            cell[2] += discarded

    def verdicts(self) -> dict[tuple[SegmentKind, DraftSource], Verdict]:
        """The cells under their names."""
        return {
            (BLOCK_KINDS[kind], SOURCES[source]): Verdict(drafted=d, accepted=a, discarded=x)
            for (kind, source), (d, a, x) in self._counts.items()
        }


@dataclass(slots=True)
class _Block:
    kind: int
    start_s: float
    end_s: float
    tokens: int = 0
    steps: int = 0
    batch: int = 0
    budget: int = 0
    durations: list[float] = field(default_factory=list)
    counts: VerdictCounts = field(default_factory=VerdictCounts)

    def report(self) -> BlockReport:
        p50, p95 = np.percentile(self.durations, (50, 95)) if self.durations else (0.0, 0.0)
        by_source = {source: verdict for (_, source), verdict in self.counts.verdicts().items()}
        return BlockReport(
            kind=BLOCK_KINDS[self.kind],
            start_s=self.start_s,
            end_s=self.end_s,
            num_tokens=self.tokens,
            num_steps=self.steps,
            verdicts=by_source,
            mean_batch=self.batch / self.steps if self.steps else 0.0,
            mean_budget=self.budget / self.steps if self.steps else 0.0,
            step_s_p50=float(p50),
            step_s_p95=float(p95),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TailStep:
    """A step that may have to be taken back: the block of each emitted token, and the accepted drafts."""

    blocks: tuple[_Block, ...]
    sources: tuple[int, ...]
    num_accepted: int
    index: int


class RequestLedger:
    """Account of one request from arrival to its end. Times in seconds since the epoch.

    With `can_cut` the last steps are remembered token by token, for `cut`.
    """

    def __init__(
        self, *, hint: Hint | None, num_prompt_tokens: int, arrival_s: float, can_cut: bool = False
    ) -> None:
        self.hint = hint
        self.num_prompt_tokens = num_prompt_tokens
        self.arrival_s = arrival_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self._blocks: list[_Block] = []
        self._last_block = -1
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._num_tokens = 0
        self._tail: deque[_TailStep] | None = deque(maxlen=_TAIL_STEPS) if can_cut else None

    @property
    def num_recent(self) -> int:
        """Tokens of the remembered steps."""
        return sum(len(step.blocks) for step in self._tail or ())

    def cut(self, num_tokens: int) -> None:
        """Take back the last tokens: they were emitted, and lie behind the end of the answer.

        Their steps were run and stay counted; accepted draft tokens among them become discarded.
        """
        while num_tokens > 0 and self._tail:
            step = self._tail.pop()
            keep = max(len(step.blocks) - num_tokens, 0)
            for position in range(keep, len(step.blocks)):
                block = step.blocks[position]
                block.tokens -= 1
                if position < step.num_accepted:
                    block.counts.add(block.kind, step.sources[position], 0, -1, 1)
            if step.index < len(self._accepted):
                self._accepted[step.index] = min(step.num_accepted, keep)
            self._num_tokens -= len(step.blocks) - keep
            num_tokens -= len(step.blocks) - keep

    def add_step(
        self,
        spans: Sequence[BlockSpan],
        sources: Sequence[int],
        num_accepted: int,
        num_discarded: int,
        step: StepContext,
        totals: VerdictCounts,
    ) -> None:
        """One step that sampled: `sources` of the drafted tokens, how many of them were accepted or
        verified in vain, and how the emitted tokens divide into blocks. Also adds to `totals`.
        """
        is_first = self.first_token_s == 0.0
        if is_first:
            self.first_token_s = step.end_s
        index = len(self._drafted)
        emitted: list[_Block] = []
        if index < _MAX_STEPS:
            self._drafted.append(len(sources))
            self._accepted.append(num_accepted)
        position = 0
        for i, span in enumerate(spans):
            block = self._open(span, step)
            block.tokens += span.num_tokens
            block.end_s = step.end_s
            if i == 0:
                block.steps += 1
                block.batch += step.batch
                block.budget += step.budget
                if not is_first:  # that one carried the prompt: its time is the prefill's
                    block.durations.append(step.duration_s)
            self._num_tokens += span.num_tokens
            if self._tail is not None:
                emitted += [block] * span.num_tokens
            # Accepted draft tokens are the first emitted ones; what was not accepted is charged to the
            # block in which the draft ended.
            end = position + span.num_tokens
            last = i == len(spans) - 1
            self._charge(
                block, sources, position, len(sources) if last else end, num_accepted, num_discarded, totals
            )
            position = end
        if self._tail is not None:
            self._tail.append(
                _TailStep(
                    blocks=tuple(emitted), sources=tuple(sources), num_accepted=num_accepted, index=index
                )
            )

    def _open(self, span: BlockSpan, step: StepContext) -> _Block:
        if span.block != self._last_block and len(self._blocks) < _MAX_BLOCKS:
            start = self._blocks[-1].end_s if self._blocks else step.end_s - step.duration_s
            self._blocks.append(_Block(kind=span.kind, start_s=start, end_s=step.end_s))
        self._last_block = span.block
        return self._blocks[-1]

    @staticmethod
    def _charge(
        block: _Block,
        sources: Sequence[int],
        start: int,
        end: int,
        num_accepted: int,
        num_discarded: int,
        totals: VerdictCounts,
    ) -> None:
        part = sources[start : min(end, len(sources))]
        if not part:
            return
        if part.count(part[0]) == len(part):  # almost always: a draft is copied from one place
            accepted = min(max(num_accepted - start, 0), len(part))
            discarded = min(max(num_accepted + num_discarded - start, 0), len(part)) - accepted
            block.counts.add(block.kind, part[0], len(part), accepted, discarded)
            totals.add(block.kind, part[0], len(part), accepted, discarded)
            return
        for position, source in enumerate(part, start=start):
            accepted = int(position < num_accepted)
            discarded = int(num_accepted <= position < num_accepted + num_discarded)
            block.counts.add(block.kind, source, 1, accepted, discarded)
            totals.add(block.kind, source, 1, accepted, discarded)

    def report(
        self,
        *,
        req_id: str,
        trace_headers: Mapping[str, str] | None,
        session: str | None,
        end_s: float,
        num_cached_tokens: int,
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
            first_token_s=self.first_token_s,
            end_s=end_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=self._num_tokens,
            num_preemptions=num_preemptions,
            finish_reason=finish_reason,
            blocks=tuple(block.report() for block in self._blocks),
            per_step_drafted=tuple(self._drafted),
            per_step_accepted=tuple(self._accepted),
            model=model,
        )
