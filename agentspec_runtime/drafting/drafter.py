"""The drafter: life cycle of requests over the token memory, the walk and the survival model.

    drafter = Drafter(DraftingConfig(), vocabulary)
    drafter.start(req_id, prompt_ids, scope=DraftScope(session="s-1"))
    while ...:
        drafter.work()                                    # index what waits, a bounded slice
        drafts = drafter.draft_batch([req_id], [32], 0.3)
        ...                                               # the target model verifies
        drafter.observe_batch([req_id], [new_ids])
    drafter.finish(req_id)

Guarantees: a draft holds only ids in [0, vocab_size) and at most `caps[i]` of them; state follows the
request id, never a batch row; the same calls give the same drafts; no call takes time in proportion to
a prompt (long prompts are taken in by `work`, a slice per step); unknown ids are ignored.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.draft import (
    BatchDraft,
    BlockSpan,
    Draft,
    DraftingConfig,
    DraftScope,
    Int32Array,
    Int64Array,
    Observed,
)
from agentspec_runtime.drafting.memory import as_tokens
from agentspec_runtime.drafting.requests import DraftingRequest, RequestTable
from agentspec_runtime.drafting.survival import SurvivalModels
from agentspec_runtime.drafting.vocabulary import TokenTable
from agentspec_runtime.drafting.walk import draft_rows, observe_rows

__all__ = ["BatchObserved", "Drafter"]


class BatchObserved(NamedTuple):
    """Blocks of the tokens of one step, all requests behind each other.

    `tokens` int32[T], `kinds` int8[T] and `blocks` int32[T]; request `i` has `offsets[i]:offsets[i + 1]`,
    int64[R + 1].
    """

    tokens: Int32Array
    kinds: npt.NDArray[np.int8]
    blocks: Int32Array
    offsets: Int64Array

    def spans(self, i: int) -> tuple[BlockSpan, ...]:
        """Runs of tokens of one block, for request `i`."""
        out: list[BlockSpan] = []
        for j in range(int(self.offsets[i]), int(self.offsets[i + 1])):
            block, kind = int(self.blocks[j]), int(self.kinds[j])
            if out and out[-1].block == block:
                out[-1] = BlockSpan(block, kind, out[-1].num_tokens + 1)
            else:
                out.append(BlockSpan(block, kind, 1))
        return tuple(out)


class Drafter:
    """Drafts for many requests; see the module docstring. Not thread-safe: one engine loop owns it."""

    def __init__(
        self, config: DraftingConfig, vocabulary: TokenTable, *, use_prior: bool = True, learning: bool = True
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.models = SurvivalModels(config.max_namespaces, use_prior=use_prior)
        self._learning = learning
        self._requests = RequestTable(config, vocabulary.vocab_size, self.models)
        self.memory = self._requests.memory
        self._rows = self._requests.rows

    # Life cycle of a request

    def start(
        self,
        req_id: str,
        prompt: Sequence[int] | Int32Array,
        *,
        scope: DraftScope,
        block_kind: int = 0,
        sampled: int = 0,
        keys: Sequence[Hashable] = (),
        block_tokens: int = 0,
    ) -> bool:
        """Begin a request. False when there is no memory for it: it will get no drafts.

        `block_kind`: block that the answer begins in. `sampled`: temperature bucket, 0 (greedy) to 3.
        `keys`, `block_tokens`: chained block hashes of the prompt, used to share text with earlier
        requests of the session and, where no session is named, to find it.
        """
        return self._requests.start(
            req_id,
            prompt,
            scope=scope,
            block_kind=block_kind,
            sampled=sampled,
            keys=keys,
            block_tokens=block_tokens,
        )

    def finish(self, req_id: str, *, keep: bool = True, keys: Sequence[Hashable] = ()) -> None:
        """End a request; its text goes to its session and its output to the corpus, if it may.

        `keys`: block hashes of prompt and output together, as in `start`.
        """
        self._requests.finish(req_id, keep=keep, keys=keys)

    def forget(self, namespace: str) -> None:
        """Drop everything that a namespace has stored and learned; its running requests keep theirs."""
        found = self.memory.namespaces.get(namespace)
        if found is not None and not found.rows:
            self.memory.forget(found)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def memory_bytes(self) -> int:
        """Bytes of text and index in use."""
        return self.memory.slab.used_bytes

    # Work on the step

    def work(self, budget: int | None = None) -> int:
        """Take in prompts and index finished text, at most `budget` tokens. Returns how many."""
        limit = self.config.index_tokens_per_step if budget is None else budget
        return self._requests.work(limit, self._store)

    def draft_batch(
        self, req_ids: Sequence[str], caps: Sequence[int], min_survival: float | npt.NDArray[np.float64]
    ) -> BatchDraft:
        """Drafts for the given requests, each cut where its survival falls below `min_survival`.

        `caps[i]`: most tokens for request i. `min_survival` may be given per request. Requests that are
        unknown or still being taken in get none.
        """
        k = self.config.num_speculative_tokens
        n = len(req_ids)
        lengths = np.zeros(n, np.int64)
        ids = np.zeros((n, k + 1), np.int32)
        survival = np.zeros((n, k + 1), np.float32)
        sources = np.zeros((n, k + 1), np.int8)
        known = [self._requests.get(r) for r in req_ids]
        lines = [i for i, r in enumerate(known) if r is not None and r.ready]
        if lines:
            rows = np.array([known[i].row for i in lines], np.int64)  # type: ignore[union-attr]
            limits = np.clip(np.asarray(caps, np.int64)[lines], 0, k)
            prices = np.broadcast_to(np.asarray(min_survival, np.float64), (n,))[lines]
            out = (ids, survival, sources, lengths)
            if len(lines) < n:
                m = len(lines)
                out = (ids[:m].copy(), survival[:m].copy(), sources[:m].copy(), lengths[:m].copy())
            self._walk(rows, limits, np.ascontiguousarray(prices), out)
            if len(lines) < n:
                ids[lines], survival[lines], sources[lines], lengths[lines] = out
        return BatchDraft(ids[:, :k], survival[:, :k], sources[:, :k], lengths)

    def observe_batch(self, req_ids: Sequence[str], new_ids: Sequence[Sequence[int]]) -> BatchObserved:
        """Take in what the target model emitted (stop handling done), one sequence per request."""
        offsets = np.zeros(len(req_ids) + 1, np.int64)
        np.cumsum([len(ids) for ids in new_ids], out=offsets[1:])
        tokens = as_tokens(
            np.fromiter(chain.from_iterable(new_ids), np.int64, int(offsets[-1])), self.vocabulary.vocab_size
        )
        kinds = np.zeros(tokens.size, np.int8)
        blocks = np.zeros(tokens.size, np.int32)
        rows: list[int] = []
        for i, req_id in enumerate(req_ids):
            request = self._requests.get(req_id)
            if request is None:
                rows.append(-1)
            elif not request.ready:
                if not request.cut_off:
                    request.early.extend(new_ids[i])
                rows.append(-1)
            else:
                rows.append(request.row if self._requests.make_room(req_id, request, len(new_ids[i])) else -1)
        if rows and min(rows) >= 0:
            self._take_verdicts(np.array(rows, np.int64), tokens, offsets, kinds, blocks)
        else:
            self._take_some(rows, tokens, offsets, kinds, blocks)
        return BatchObserved(tokens, kinds, blocks, offsets)

    # The same for one request, for tests, the simulator and readers

    def draft(self, req_ids: Sequence[str], caps: Sequence[int], min_survival: float) -> list[Draft]:
        """`draft_batch` as a list of drafts."""
        batch = self.draft_batch(req_ids, caps, min_survival)
        drafts = [batch.draft(i) for i in range(len(req_ids))]
        for req_id, draft in zip(req_ids, drafts, strict=True):
            request = self._requests.get(req_id)
            if request is not None:
                request.draft = draft
        return drafts

    def observe(self, req_id: str, new_ids: Sequence[int], num_drafted: int) -> Observed:
        """`observe_batch` for one request whose first `num_drafted` draft tokens were verified."""
        request = self._requests.get(req_id)
        draft = request.draft if request is not None else None
        accepted = 0
        if draft is not None:
            limit = min(num_drafted, len(draft), len(new_ids))
            while accepted < limit and draft.token_ids[accepted] == new_ids[accepted]:
                accepted += 1
        batch = self.observe_batch([req_id], [new_ids])
        return Observed(accepted=accepted, discarded=0, spans=batch.spans(0))

    # Internals

    def _walk(
        self,
        rows: Int64Array,
        caps: Int64Array,
        prices: npt.NDArray[np.float64],
        out: tuple[Int32Array, npt.NDArray[np.float32], npt.NDArray[np.int8], Int64Array],
    ) -> None:
        draft_rows(
            self._rows.fields,
            rows,
            caps,
            prices,
            self.config.candidates_per_source,
            self.memory.slab.text,
            self.models.arrays,
            self.vocabulary.classes,
            self._rows.slots,
            *out,
        )

    def _take_verdicts(
        self,
        rows: Int64Array,
        tokens: Int32Array,
        offsets: Int64Array,
        kinds: npt.NDArray[np.int8],
        blocks: Int32Array,
    ) -> None:
        observe_rows(
            self._rows.fields,
            rows,
            tokens,
            offsets,
            self.memory.slab.text,
            self.models.arrays,
            self.vocabulary.arrays,
            self._rows.slots,
            self._learning,
            self._rows.block_state,
            kinds,
            blocks,
        )

    def _take_some(
        self,
        rows: Sequence[int],
        tokens: Int32Array,
        offsets: Int64Array,
        kinds: npt.NDArray[np.int8],
        blocks: Int32Array,
    ) -> None:
        """`_take_verdicts` for those lines of a step that have a row."""
        for i, row in enumerate(rows):
            if row >= 0:
                a, b = int(offsets[i]), int(offsets[i + 1])
                part = np.array([0, b - a], np.int64)
                self._take_verdicts(np.array([row]), tokens[a:b], part, kinds[a:b], blocks[a:b])

    def _store(self, req_id: str, request: DraftingRequest, tokens: Int32Array) -> None:
        """Add text to a request's extent without a verdict."""
        if not self._requests.make_room(req_id, request, tokens.size):
            return
        kinds, blocks = np.zeros(tokens.size, np.int8), np.zeros(tokens.size, np.int32)
        self._rows.slots.num[request.row] = 0
        self._take_verdicts(
            np.array([request.row]), tokens, np.array([0, tokens.size], np.int64), kinds, blocks
        )
