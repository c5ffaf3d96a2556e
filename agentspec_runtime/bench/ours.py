"""Our drafter as a rival: the same seam that the scheduler drives, one threshold per rival.

Every threshold has a drafter of its own, because what it learns depends on which of its slots were
verified. The threshold stands for the price of a slot, which the budget would set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from agentspec_runtime.bench.chat_tokens import Tokens
from agentspec_runtime.bench.rivals import Candidate
from agentspec_runtime.drafting import BLOCK_KINDS, Drafter, DraftingConfig, DraftScope, TokenTable

__all__ = ["OurRival"]

_CAP: Final = 32
"""Draft length, as for the compared drafters."""

_BLOCK_TOKENS: Final = 16
"""Tokens per chained hash, as in vLLM's prefix cache, from which the engine knows what a prompt shares
with the turn before it."""

_REACH: Final[Mapping[str, Literal["corpus", "session", "request"]]] = {
    "agentspec": "corpus",
    "agentspec-nohints": "corpus",
    "agentspec-session": "session",
    "agentspec-request": "request",
}


class OurRival:
    """`method` names the widest text that drafts come from: corpus (default), session or request.

    `agentspec-nohints` gets the corpus too, and is not told which requests are of one session.
    """

    def __init__(
        self, method: str, threshold: float, vocabulary: TokenTable, *, use_prior: bool = True
    ) -> None:
        self.method = method
        self.settings: Sequence[str] = (f"S >= {threshold:g}",)
        self.threshold = threshold
        self._reach = _REACH[method]
        config = DraftingConfig(num_speculative_tokens=_CAP, max_requests=1)
        self._drafter = Drafter(config, vocabulary, use_prior=use_prior)
        self._req_id = ""
        self._text: list[Tokens] = []
        self._draft: Tokens = np.empty(0, dtype=np.int32)
        self._by_block: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    @property
    def by_block(self) -> Mapping[str, list[int]]:
        """[drafted, accepted] by kind of block. A rejected one counts for the block of what came instead."""
        return self._by_block

    def start(self, req_id: str, session: str, prompt_ids: Tokens) -> None:
        """A request begins, in the session of its trajectory. Its prompt is indexed during prefill."""
        self._req_id = req_id
        self._draft = self._draft[:0]
        self._text = [prompt_ids]
        told = session if self.method != "agentspec-nohints" else None
        scope = DraftScope(namespace="bench", session=told, reach=self._reach)
        keys = chained_keys(prompt_ids)
        self._drafter.start(req_id, prompt_ids, scope=scope, keys=keys, block_tokens=_BLOCK_TOKENS)
        while self._drafter.work():
            pass

    def extend(self, token_ids: Tokens) -> None:
        """Verdict on the last draft."""
        self._text.append(token_ids)
        observed = self._drafter.observe_batch([self._req_id], [token_ids.tolist()])
        drafted = len(self._draft)
        if drafted:
            for position in range(drafted):
                kind = BLOCK_KINDS[int(observed.kinds[min(position, len(token_ids) - 1)])]
                counts = self._by_block[str(kind)]
                counts[0] += 1
                if position >= len(token_ids) or self._draft[position] != token_ids[position]:
                    counts[0] += drafted - position - 1
                    break
                counts[1] += 1
        self._draft = self._draft[:0]

    def draft(self, setting: int) -> Candidate:  # noqa: ARG002 - one setting only
        """Draft of the slots whose survival reaches the threshold."""
        self._drafter.work()
        draft = self._drafter.draft_batch([self._req_id], [_CAP], self.threshold).draft(0)
        self._draft = draft.token_ids
        return Candidate(token_ids=draft.token_ids, survival=draft.survival, sources=draft.sources)

    def finish(self) -> None:
        """The request is over; its output joins the corpus."""
        self._drafter.finish(self._req_id, keys=chained_keys(np.concatenate(self._text)))

    def export_prior(self, path: Path, tables: tuple[int, ...]) -> None:
        """Write what was learned as a prior (`SurvivalModels.export_prior`)."""
        model = self._drafter.memory.namespaces["bench"].model
        self._drafter.models.export_prior(model, path, tables)


def chained_keys(token_ids: Tokens) -> list[int]:
    """One hash per full block of tokens, each standing for the whole text up to there."""
    raw = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    size = _BLOCK_TOKENS * 4
    keys: list[int] = []
    previous = 0
    for start in range(0, len(raw) - size + 1, size):
        previous = hash((previous, raw[start : start + size]))
        keys.append(previous)
    return keys
