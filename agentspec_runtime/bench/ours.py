"""Our drafter as a rival: the same seam that the scheduler drives, one threshold per rival.

Every threshold has a drafter of its own, because what it learns depends on which of its slots were
verified. The threshold stands for the price of a slot, which the budget would set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agentspec_runtime.bench.chat_tokens import Tokens
from agentspec_runtime.bench.rivals import Candidate
from agentspec_runtime.drafting import Drafter, DraftingConfig, DraftScope

__all__ = ["OurRival"]

_CAP: Final = 32
"""Draft length, as for the compared drafters."""

_REACH: Final = {"agentspec": "corpus", "agentspec-session": "session", "agentspec-request": "request"}


class OurRival:
    """`method` names the widest text that drafts come from: corpus (default), session or request."""

    def __init__(self, method: str, threshold: float) -> None:
        self.method = method
        self.settings: Sequence[str] = (f"survival >= {threshold:g}",)
        self._threshold = threshold
        self._reach = _REACH[method]
        self._drafter = Drafter(DraftingConfig(), None)
        self._req_id = ""
        self._num_drafted = 0

    def start(self, req_id: str, session: str, prompt_ids: Tokens) -> None:
        """A request begins, in the session of its trajectory."""
        self._req_id = req_id
        self._num_drafted = 0
        scope = DraftScope(namespace="bench", session=session, reach=self._reach)
        self._drafter.start(req_id, prompt_ids, scope=scope)

    def extend(self, token_ids: Tokens) -> None:
        """Verdict on the last draft."""
        self._drafter.observe(self._req_id, np.ascontiguousarray(token_ids), num_drafted=self._num_drafted)
        self._num_drafted = 0

    def draft(self, setting: int) -> Candidate:  # noqa: ARG002 - one setting only
        """Draft of the slots whose survival reaches the threshold."""
        [draft] = self._drafter.draft([self._req_id], caps=[_CAP], min_survival=self._threshold)
        self._num_drafted = len(draft.token_ids)
        return Candidate(token_ids=draft.token_ids, survival=draft.survival, sources=draft.sources)

    def finish(self) -> None:
        """The request is over; its output joins the corpus."""
        self._drafter.finish(self._req_id)
