"""A model drafter of vLLM's worker (EAGLE-3 and others) beside our drafts: glue for `speculation.py`.

vLLM's own means: its speculative method is configured as usual, the worker hands its drafts over after each
step (`Scheduler.update_draft_token_ids`), and the scheduler tells it with each step how many tokens to draft
(`SchedulerOutput.num_spec_tokens_to_schedule`; 0 runs the drafter's first pass only, which keeps its KV cache
right; with our worker, `worker.py`, -1 runs nothing of it). What is chosen, and how deep it drafts, is
decided in `drafting.assist` and `budget.depth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from agentspec_runtime.budget import AssistPrices, BudgetPolicy
from agentspec_runtime.budget.depth import LEFT_OUT, AssistDepth
from agentspec_runtime.drafting import BatchDraft, BatchObserved
from agentspec_runtime.drafting.assist import Arbiter, Merged

__all__ = ["LEFT_OUT", "Assist"]


class Assist:
    """The drafter of one engine. `max_depth`: most tokens that it is asked for. `may_leave_out`: whether the
    worker understands -1.
    """

    def __init__(
        self, vocab_size: int, budget: BudgetPolicy, max_depth: int, *, may_leave_out: bool = False
    ) -> None:
        self.arbiter = Arbiter(vocab_size)
        self.asked = 0
        """Depth of the step before: its drafts are there now. -1: it was left out."""
        self._budget = budget
        self._depth = AssistDepth(max_depth, may_leave_out=may_leave_out)
        self._missed: set[str] = set()
        """Running requests of which the drafter has missed a step: its drafts for them are worth nothing."""
        self._prices: AssistPrices | None = None
        self._merged: Merged | None = None

    @property
    def gain(self) -> float:
        """Tokens per request and step that the drafter is expected to add."""
        return self._depth.gain

    def start(self, req_id: str, namespace: str, kind: int) -> None:
        """A request begins, in a block of that kind."""
        self.arbiter.start(req_id, namespace, kind)

    def finish(self, req_id: str) -> None:
        """A request is over, or has lost its place in the accounts."""
        self.arbiter.finish(req_id)
        self._missed.discard(req_id)

    def depth(
        self,
        step: Mapping[str, int],
        asking: Sequence[str],
        num_attended: int,
        *,
        fits: bool,
    ) -> int:
        """How many tokens per request the worker shall draft in the step that starts now; -1: leave it out.

        `step`: tokens per request of the step. `asking`: of those that sample, the ones that may use a draft;
        `num_attended`: their context, in tokens. `fits`: no request of the step is near the context limit,
        where vLLM's worker leaves its drafter out for all of them.
        """
        self.arbiter.forget_offer()
        self._prices = self._budget.assist_prices(
            len(asking), num_attended, sum(step.values()), self._depth.max_depth
        )
        self.asked = self._depth.choose(
            len(asking) if fits else 0,
            self._prices.token,
            self._prices.drafter,
            num_whole=sum(req_id not in self._missed for req_id in asking),
            standing=self._prices.standing,
        )
        if self.asked == LEFT_OUT or not fits:
            self._missed.update(step)
        return self.asked

    def offer(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The worker's drafts; none where it was not asked for any, or has missed a step."""
        asked = max(self.asked, 0)
        known = [req_id not in self._missed for req_id in req_ids]
        self.arbiter.offer(req_ids, [d[:asked] if k else () for d, k in zip(drafts, known, strict=True)])

    def merge(
        self,
        req_ids: Sequence[str],
        ours: BatchDraft,
        caps: Sequence[int],
        prices: npt.NDArray[np.float64],
    ) -> BatchDraft:
        """One draft per request, of both."""
        self._merged = self.arbiter.merge(req_ids, ours, caps, prices)
        return self._merged.batch

    def settle(self, lengths: npt.NDArray[np.int64]) -> None:
        """What the budget made of the merged drafts: a drafter whose tokens are not drafted gains nothing,
        and one that alone makes a step verify pays for that.
        """
        merged, self._merged = self._merged, None
        if merged is None or not merged.offered.any():
            return
        placed = lengths > 0
        gains = np.where(placed[:, None], merged.gains, 0.0)[merged.offered].mean(axis=0)
        if self._prices is not None and placed.any() and not (placed & ~merged.taken).any():
            gains = gains - self._prices.verify / self._prices.token / merged.offered.sum()
        self._depth.observe(gains)

    def observe(self, req_ids: Sequence[str], observed: BatchObserved) -> None:
        """What the target model emitted."""
        self.arbiter.observe(req_ids, observed)
