"""A model drafter of vLLM's worker (EAGLE-3 and others) beside our drafts: glue for `speculation.py`.

vLLM's own means: its speculative method is configured as usual, the worker hands its drafts over after each
step (`Scheduler.update_draft_token_ids`), and the scheduler tells it with each step how many tokens to draft
(`SchedulerOutput.num_spec_tokens_to_schedule`; 0 runs the drafter's first pass only, which keeps its KV cache
right). What is chosen, and how deep it drafts, is decided in `drafting.assist` and `budget.depth`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentspec_runtime.budget import AssistPrices, BudgetPolicy
from agentspec_runtime.budget.depth import AssistDepth
from agentspec_runtime.drafting import BatchDraft, BatchObserved
from agentspec_runtime.drafting.assist import Arbiter, Merged

__all__ = ["Assist"]


class Assist:
    """The drafter of one engine. `max_depth`: most tokens that it is asked for."""

    def __init__(self, vocab_size: int, budget: BudgetPolicy, max_depth: int) -> None:
        self.arbiter = Arbiter(vocab_size)
        self.asked = 0
        """Depth of the step before: its drafts are there now."""
        self._budget = budget
        self._depth = AssistDepth(max_depth)
        self._prices: AssistPrices | None = None
        self._merged: Merged | None = None

    @property
    def gain(self) -> float:
        """Tokens per request and step that the drafter is expected to add."""
        return self._depth.gain

    def depth(self, num_requests: int, num_attended: int, *, fits: bool) -> int:
        """How many tokens per request the worker shall draft in the step that starts now.

        `num_requests`: of those that sample, the ones that may use a draft; `num_attended`: their context, in
        tokens. `fits`: no request of the step is near the context limit, where vLLM's worker leaves its
        drafter out for all of them.
        """
        self.arbiter.forget_offer()
        self._prices = self._budget.assist_prices(num_requests, num_attended, self._depth.max_depth)
        token, drafter, _ = self._prices
        self.asked = self._depth.choose(num_requests if fits else 0, token, drafter)
        return self.asked

    def offer(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The worker's drafts; none where it was not asked for any."""
        self.arbiter.offer(req_ids, [draft[: self.asked] for draft in drafts])

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
