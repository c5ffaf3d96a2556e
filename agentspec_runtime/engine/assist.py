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

from agentspec_runtime.budget import BudgetPolicy
from agentspec_runtime.budget.depth import AssistDepth
from agentspec_runtime.drafting import BatchDraft, BatchObserved
from agentspec_runtime.drafting.assist import Arbiter

__all__ = ["Assist"]


class Assist:
    """The drafter of one engine. `max_depth`: most tokens that it is asked for."""

    def __init__(self, vocab_size: int, budget: BudgetPolicy, max_depth: int) -> None:
        self.arbiter = Arbiter(vocab_size)
        self._budget = budget
        self._depth = AssistDepth(max_depth)
        self._asked = 0

    @property
    def gain(self) -> float:
        """Tokens per request and step that the drafter is expected to add."""
        return self._depth.gain

    def depth(self, num_sampling: int, num_attended: int) -> int:
        """How many tokens per request the worker shall draft in the step that starts now.

        `num_attended`: context tokens of its decoding requests.
        """
        token_s, pass_s = self._budget.assist_seconds(num_sampling, num_attended)
        self._asked = self._depth.choose(num_sampling, token_s, pass_s)
        return self._asked

    def offer(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The worker's drafts. Near the context limit it puts zeros there, as many as its configured most."""
        usual = [draft if len(draft) <= self._asked else () for draft in drafts]
        self.arbiter.offer(req_ids, usual)

    def merge(
        self,
        req_ids: Sequence[str],
        ours: BatchDraft,
        caps: Sequence[int],
        prices: npt.NDArray[np.float64],
    ) -> BatchDraft:
        """One draft per request, of both."""
        batch, gains = self.arbiter.merge(req_ids, ours, caps, prices)
        if gains.size:
            self._depth.observe(gains)
        return batch

    def observe(self, req_ids: Sequence[str], observed: BatchObserved) -> None:
        """What the target model emitted."""
        self.arbiter.observe(req_ids, observed)
