"""A drafter beside a naive model of which text each request may draft from.

The model keeps plain lists: what each request has said, and the texts that finished requests left to
their session and to the corpus of their namespace, in that order. Whatever is drafted must be a copy of
an occurrence in one of those lists, found by a quadratic scan, and of the kind that its source says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafting_support import copies, follows, make_drafter, settle

from agentspec_runtime.drafting import SOURCES, Draft, DraftScope
from agentspec_runtime.observe import DraftSource

K = 8
VOCAB = 30
PHRASES = [list(range(start, start + 5)) for start in range(0, VOCAB, 5)]
"""Whole and broken ones make the texts: the end of one is then often found in others, not in its own."""
_HEADER = 4
"""Prompt tokens in front of an output in the corpus."""


@dataclass(slots=True)
class _Running:
    scope: DraftScope
    text: list[int]
    num_prompt: int
    draft: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Shared:
    """Texts of a namespace: by session, and outputs."""

    sessions: dict[str, list[int]] = field(default_factory=dict)
    corpus: list[int] = field(default_factory=list)


class Explained:
    """Every call goes to the drafter and to the model, and is checked."""

    def __init__(self, *, learning: bool, use_prior: bool) -> None:
        # Few rows, so that they double and are reused.
        self.drafter = make_drafter(vocab=VOCAB, k=K, max_requests=2, learning=learning, use_prior=use_prior)
        self.running: dict[str, _Running] = {}
        self._shared: dict[str, _Shared] = {}
        self._settled = True
        self.num_from = dict.fromkeys(SOURCES, 0)
        """Draft tokens by source, so that a test can tell that it met all of them."""

    def start(self, name: str, prompt: Sequence[int], scope: DraftScope, *, sampled: int, wait: bool) -> None:
        """Also with an id that is running: the old one is gone without a trace."""
        assert self.drafter.start(name, prompt, scope=scope, sampled=sampled)
        self.running[name] = _Running(scope, list(prompt), len(prompt))
        self._shared.setdefault(scope.namespace, _Shared())
        self._settled = False
        if not wait:
            self.settle()

    def work(self, budget: int) -> None:
        before = self._settled
        done = self.drafter.work(budget)
        assert done <= budget or done <= 2
        self._settled = before

    def settle(self) -> None:
        settle(self.drafter)
        self._settled = True

    def draft(self, names: Sequence[str], caps: Sequence[int], price: float) -> None:
        drafts = self.drafter.draft(names, caps, price)
        assert len(drafts) == len(names)
        for name, cap, draft in zip(names, caps, drafts, strict=True):
            if name in self.running:
                self._check(self.running[name], draft, cap, price)
                self.running[name].draft = draft.token_ids.tolist()
            else:
                assert len(draft) == 0

    def observe(self, names: Sequence[str], new_ids: Sequence[Sequence[int]]) -> None:
        observed = self.drafter.observe_batch(names, new_ids)
        for i, (name, new) in enumerate(zip(names, new_ids, strict=True)):
            assert sum(span.num_tokens for span in observed.spans(i)) == len(new)
            if name in self.running:
                self.running[name].text += new
                self.running[name].draft = []

    def finish(self, name: str, *, keep: bool) -> None:
        self.settle()  # text that was not taken in yet is not kept; make that plain
        request = self.running.pop(name)
        self.drafter.finish(name, keep=keep)
        self._settled = False
        if not keep:
            return
        shared, scope = self._shared[request.scope.namespace], request.scope
        if scope.reach == "corpus" and len(request.text) > request.num_prompt:
            shared.corpus += request.text[max(request.num_prompt - _HEADER, 0) :]
        if scope.reach != "request" and scope.session is not None:
            shared.sessions.setdefault(scope.session, []).extend(request.text)

    def check_known(self) -> None:
        assert len(self.drafter) == len(self.running)
        assert all(name in self.drafter for name in self.running)

    def _allowed(self, request: _Running) -> dict[DraftSource, list[int]]:
        scope, shared = request.scope, self._shared[request.scope.namespace]
        texts = {DraftSource.REQUEST: request.text}
        if scope.reach != "request" and scope.session is not None:
            texts[DraftSource.SESSION] = shared.sessions.get(scope.session, [])
        if scope.reach == "corpus":
            texts[DraftSource.CORPUS] = shared.corpus
        return texts

    def _check(self, request: _Running, draft: Draft, cap: int, price: float) -> None:
        n = len(draft)
        assert n <= max(min(cap, K), 0)
        drafted: list[int] = draft.token_ids.tolist()
        assert all(0 <= t < VOCAB for t in drafted)
        survival: list[float] = draft.survival.tolist()
        assert all(price <= s <= 1.0 for s in survival)
        assert survival == sorted(survival, reverse=True)
        texts = self._allowed(request)
        for d in range(n):
            source = SOURCES[int(draft.sources[d])]
            assert source in texts, f"{source} is out of reach"
            own = source is DraftSource.REQUEST
            assert copies(request.text, texts[source], drafted[: d + 1], own=own), (d, drafted, source)
            self.num_from[source] += 1
        if self._settled and price == 0.0 and cap > 0:
            assert (n > 0) == follows(request.text, texts.values())
