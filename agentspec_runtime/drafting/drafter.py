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

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.blocks import start_block
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
from agentspec_runtime.drafting.index import insert_positions
from agentspec_runtime.drafting.memory import (
    Document,
    DraftMemory,
    Namespace,
    Session,
    as_tokens,
    common_prefix,
    cut_pieces,
    join_pieces,
)
from agentspec_runtime.drafting.rows import Rows
from agentspec_runtime.drafting.survival import SurvivalModels
from agentspec_runtime.drafting.vocabulary import TokenTable
from agentspec_runtime.drafting.walk import Field, draft_rows, observe_rows

__all__ = ["BatchObserved", "Drafter"]

_OVERLAP: Final = 48
"""Tokens of shared text repeated at the start of a request's own extent, so that contexts reach back:
the longest match that is counted."""
_HEADER: Final = 4
"""Prompt tokens kept before an output in the corpus, so that beginnings of answers can be found."""
_RESERVE: Final = 256
"""Room for output at first; an answer that outgrows it moves to an extent of twice the size."""


class BatchObserved(NamedTuple):
    """Blocks of the tokens of one step, all requests behind each other.

    `kinds` int8[T] and `blocks` int32[T]; request `i` has `offsets[i]:offsets[i + 1]`, int64[R + 1].
    """

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


@dataclass(slots=True)
class _Request:
    row: int
    namespace: Namespace
    session: Session | None
    scope: DraftScope
    prompt: Sequence[int] | Int32Array
    prompt_len: int
    taken: int
    """Tokens of the prompt that have been stored so far."""
    start: int
    """Prompt position at which the own extent begins."""
    shared: tuple[tuple[int, int], ...]
    """Where the text before `start` (and the overlap) lies in the session's log."""
    epoch: int
    """Of the session's log when `shared` was taken from it."""
    keys: Sequence[Hashable]
    block_tokens: int
    early: list[int]
    """Output that came before the prompt was stored (a prefix-cache hit can be faster than we are)."""
    draft: Draft | None = None
    cut_off: bool = False
    """There was no memory for some of its output: a text with a hole is not drafted from, nor kept."""

    @property
    def ready(self) -> bool:
        return self.taken >= self.prompt_len and not self.early and not self.cut_off


class Drafter:
    """Drafts for many requests; see the module docstring. Not thread-safe: one engine loop owns it."""

    def __init__(
        self, config: DraftingConfig, vocabulary: TokenTable, *, use_prior: bool = True, learning: bool = True
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.memory = DraftMemory(config)
        self.models = SurvivalModels(config.max_namespaces, use_prior=use_prior)
        self._learning = learning
        self._requests: dict[str, _Request] = {}
        self._intake: deque[str] = deque()
        self._rows = Rows(config.max_requests, config.num_speculative_tokens)

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
        if req_id in self._requests:
            self.finish(req_id, keep=False)
        namespace, new = self.memory.namespace(scope.namespace)
        if namespace is None:
            return False
        if new:
            self.models.reset(namespace.model)
        session = self._find_session(namespace, scope, req_id, keys)
        row = self._rows.take()
        # Both are in use from here on: making room below must not throw them out.
        namespace.rows.add(row)
        if session is not None:
            session.rows.add(row)
        shared, num_shared = self._shared_text(session, keys, block_tokens)
        start = max(num_shared - _OVERLAP, 0)
        extent = self.memory.allocate(len(prompt) - start + _RESERVE)
        if extent is None:
            self._let_go(row, namespace, session)
            return False
        fields = self._rows.fields[row]
        fields[Field.BASE], fields[Field.SIZE] = extent
        fields[Field.MODEL] = namespace.model
        fields[Field.SAMPLED] = sampled
        fields[Field.KIND] = block_kind
        if shared:
            offset, length = shared[-1]
            fields[Field.OWN_LOW], fields[Field.OWN_HIGH] = offset, offset + length
        start_block(self._rows.block_state[row], block_kind)
        self._requests[req_id] = _Request(
            row=row,
            namespace=namespace,
            session=session,
            scope=scope,
            prompt=prompt,
            prompt_len=len(prompt),
            taken=start,
            start=start,
            shared=shared,
            epoch=session.log.epoch if session is not None else 0,
            keys=tuple(keys),  # vLLM's list grows with the output
            block_tokens=block_tokens,
            early=[],
        )
        if session is not None:
            self._point_at_session(session)
        if scope.reach == "corpus":
            namespace.readers.add(row)
            self._point_at_corpus(namespace, (row,))
        self._intake.append(req_id)
        return True

    def finish(self, req_id: str, *, keep: bool = True, keys: Sequence[Hashable] = ()) -> None:
        """End a request; its text goes to its session and its output to the corpus, if it may.

        `keys`: block hashes of prompt and output together, as in `start`.
        """
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        fields = self._rows.fields[request.row]
        try:
            if keep and request.ready:
                self._keep_text(request, fields, keys)
        finally:
            self.memory.slab.release(int(fields[Field.BASE]), int(fields[Field.SIZE]))
            self._let_go(request.row, request.namespace, request.session)

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
        left = self.config.index_tokens_per_step if budget is None else budget
        total = left
        while self._intake and left > 0:
            req_id = self._intake[0]
            request = self._requests.get(req_id)
            if request is None:
                self._intake.popleft()
                continue
            left -= self._take_in(request, left)
            fields = self._rows.fields[request.row]
            if request.taken >= request.prompt_len and fields[Field.INDEXED] == fields[Field.LENGTH]:
                self._intake.popleft()
                if request.early:
                    early, request.early = request.early, []
                    self._store(req_id, request, as_tokens(early, self.vocabulary.vocab_size))
        if left > 0:
            done, changed = self.memory.index_slice(left)
            left -= done
            for owner in changed:
                if isinstance(owner, Session):
                    self._point_at_session(owner)
                else:
                    self._point_at_corpus(owner, owner.readers)
        return total - left

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
                rows.append(request.row if self._make_room(req_id, request, len(new_ids[i])) else -1)
        if rows and min(rows) >= 0:
            self._take_verdicts(np.array(rows, np.int64), tokens, offsets, kinds, blocks)
        else:
            self._take_some(rows, tokens, offsets, kinds, blocks)
        return BatchObserved(kinds, blocks, offsets)

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

    def _let_go(self, row: int, namespace: Namespace, session: Session | None) -> None:
        namespace.rows.discard(row)
        namespace.readers.discard(row)
        if session is not None:
            session.rows.discard(row)
        self._rows.give_back(row)

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

    def _find_session(
        self, namespace: Namespace, scope: DraftScope, req_id: str, keys: Sequence[Hashable]
    ) -> Session | None:
        if scope.reach == "request":
            return None
        if scope.session is not None:
            return self.memory.session(namespace, scope.session)
        for key in reversed(keys):
            known = namespace.tips.get(key)
            if known is not None and known in namespace.sessions:
                return self.memory.session(namespace, known)
        # Named by its first request, in a tuple so that no client can name it.
        return self.memory.session(namespace, ("first request", req_id)) if keys else None

    @staticmethod
    def _shared_text(
        session: Session | None, keys: Sequence[Hashable], block_tokens: int
    ) -> tuple[tuple[tuple[int, int], ...], int]:
        best: tuple[tuple[int, int], ...] = ()
        best_tokens = 0
        if session is not None and block_tokens > 0:
            for document in session.documents:
                if document.epoch != session.log.epoch or document.block_tokens != block_tokens:
                    continue
                num = common_prefix(keys, document.keys) * block_tokens
                if num > best_tokens:
                    best, best_tokens = cut_pieces(document.pieces, num), num
        return best, best_tokens

    def _take_in(self, request: _Request, budget: int) -> int:
        """Store the next slice of a prompt and index what is stored. Returns the tokens handled."""
        fields = self._rows.fields[request.row]
        slab = self.memory.slab
        base, size = int(fields[Field.BASE]), int(fields[Field.SIZE])
        length, indexed = int(fields[Field.LENGTH]), int(fields[Field.INDEXED])
        end = min(request.taken + budget, request.prompt_len)
        if end > request.taken:
            tokens = as_tokens(request.prompt[request.taken : end], self.vocabulary.vocab_size)
            slab.tokens[base + length : base + length + tokens.size] = tokens
            length += int(tokens.size)
            fields[Field.LENGTH] = length
            request.taken = end
            if end == request.prompt_len:
                request.prompt = ()
        upto = min(length, indexed + budget)
        insert_positions(slab.text, base, size, indexed, upto)
        fields[Field.INDEXED] = upto
        return max(upto - indexed, 1)

    def _store(self, req_id: str, request: _Request, tokens: Int32Array) -> None:
        """Add text to a request's extent without a verdict."""
        if not self._make_room(req_id, request, tokens.size):
            return
        kinds, blocks = np.zeros(tokens.size, np.int8), np.zeros(tokens.size, np.int32)
        self._rows.slots.num[request.row] = 0
        self._take_verdicts(
            np.array([request.row]), tokens, np.array([0, tokens.size], np.int64), kinds, blocks
        )

    def _make_room(self, req_id: str, request: _Request, num_tokens: int) -> bool:
        fields = self._rows.fields[request.row]
        length, size = int(fields[Field.LENGTH]), int(fields[Field.SIZE])
        if length + num_tokens <= size:
            return True
        extent = self.memory.allocate(max(2 * size, length + num_tokens))
        if extent is None:
            request.cut_off = True
            return False
        slab = self.memory.slab
        base = int(fields[Field.BASE])
        slab.tokens[extent[0] : extent[0] + length] = slab.tokens[base : base + length]
        slab.release(base, size)
        fields[Field.BASE], fields[Field.SIZE] = extent
        # Hash buckets depend on the size: index anew, in slices like a prompt.
        fields[Field.INDEXED] = 0
        self._intake.append(req_id)
        return True

    def _keep_text(self, request: _Request, fields: Int64Array, keys: Sequence[Hashable]) -> None:
        base, length = int(fields[Field.BASE]), int(fields[Field.LENGTH])
        own = self.memory.slab.tokens[base : base + length].copy()
        output_start = request.prompt_len - request.start
        if request.scope.reach == "corpus" and length > output_start:
            text = own[max(output_start - _HEADER, 0) :]
            self.memory.append(request.namespace.corpus, text, request.namespace)
            self._point_at_corpus(request.namespace, request.namespace.readers)
        session = request.session
        if session is None:
            return
        num_shared = sum(n for _, n in request.shared)
        fresh = own[num_shared - request.start :]
        offset = self.memory.append(session.log, fresh, session)
        intact = request.epoch == session.log.epoch
        if not intact:
            for row in session.rows:
                # Other text lies there now.
                self._rows.fields[row, Field.OWN_LOW] = self._rows.fields[row, Field.OWN_HIGH] = 0
        self._point_at_session(session)
        if offset is None or not keys:
            return
        for tip in (request.keys[-1:], keys[-1:]):
            if tip:
                self.memory.add_tip(request.namespace, tip[0], session)
        # What was shared is still where it was only if the log did not move, and a text that was cut to
        # its end has no start to share.
        if intact and fresh.size <= session.log.limit // 2:
            pieces = join_pieces(request.shared, offset, int(fresh.size))
            session.documents.append(Document(pieces, tuple(keys), request.block_tokens, session.log.epoch))

    def _point_at_session(self, session: Session) -> None:
        for row in session.rows:
            fields = self._rows.fields[row]
            fields[Field.SESSION_BASE] = session.log.base
            fields[Field.SESSION_SIZE] = session.log.size
            fields[Field.SESSION_LENGTH] = session.log.indexed

    def _point_at_corpus(self, namespace: Namespace, rows: Iterable[int]) -> None:
        log = namespace.corpus
        for row in rows:
            fields = self._rows.fields[row]
            fields[Field.CORPUS_BASE] = log.base
            fields[Field.CORPUS_SIZE] = log.size
            fields[Field.CORPUS_LENGTH] = log.indexed
