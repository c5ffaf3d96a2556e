"""Requests that are running, and where their text lies: taking prompts in, keeping text for others.

Owns the token memory and the rows of the kernels; `drafter.py` owns the kernels. A prompt is taken in by
slices; what a request leaves behind goes to its session's log and to the corpus of its namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agentspec_runtime.drafting.blocks import start_block
from agentspec_runtime.drafting.draft import Draft, DraftingConfig, DraftScope, Int32Array, Int64Array
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
from agentspec_runtime.drafting.walk import Field

__all__ = ["DraftingRequest", "RequestTable"]

_OVERLAP: Final = 48
"""Tokens of shared text repeated at the start of a request's own extent, so that contexts reach back:
the longest match that is counted."""
_HEADER: Final = 4
"""Prompt tokens kept before an output in the corpus, so that beginnings of answers can be found."""
_RESERVE: Final = 256
"""Room for output at first; an answer that outgrows it moves to an extent of twice the size."""


@dataclass(slots=True)
class DraftingRequest:
    """One request that is running: where its text lies and how much of it is stored."""

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
        """Whether it may be drafted for: all of its text is stored."""
        return self.taken >= self.prompt_len and not self.early and not self.cut_off


class RequestTable:
    """Running requests by id. Not thread-safe, as the drafter that owns it."""

    def __init__(self, config: DraftingConfig, vocab_size: int, models: SurvivalModels) -> None:
        self.memory = DraftMemory(config)
        self.rows = Rows(config.max_requests, config.num_speculative_tokens)
        self._models = models
        self._vocab_size = vocab_size
        self._requests: dict[str, DraftingRequest] = {}
        self._intake: deque[str] = deque()

    def get(self, req_id: str) -> DraftingRequest | None:
        """A running request."""
        return self._requests.get(req_id)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def start(
        self,
        req_id: str,
        prompt: Sequence[int] | Int32Array,
        *,
        scope: DraftScope,
        block_kind: int,
        sampled: int,
        keys: Sequence[Hashable],
        block_tokens: int,
    ) -> bool:
        """See `Drafter.start`."""
        if req_id in self._requests:
            self.finish(req_id, keep=False)
        namespace, new = self.memory.namespace(scope.namespace)
        if namespace is None:
            return False
        if new:
            self._models.reset(namespace.model)
        session = self._find_session(namespace, scope, req_id, keys)
        row = self.rows.take()
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
        fields = self.rows.fields[row]
        fields[Field.BASE], fields[Field.SIZE] = extent
        fields[Field.MODEL] = namespace.model
        fields[Field.SAMPLED] = sampled
        fields[Field.KIND] = block_kind
        if shared:
            offset, length = shared[-1]
            fields[Field.OWN_LOW], fields[Field.OWN_HIGH] = offset, offset + length
        start_block(self.rows.block_state[row], block_kind)
        self._requests[req_id] = DraftingRequest(
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
        """See `Drafter.finish`."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        fields = self.rows.fields[request.row]
        try:
            if keep and request.ready:
                self._keep_text(request, fields, keys)
        finally:
            self.memory.slab.release(int(fields[Field.BASE]), int(fields[Field.SIZE]))
            self._let_go(request.row, request.namespace, request.session)

    def work(self, budget: int, store_early: Callable[[str, DraftingRequest, Int32Array], None]) -> int:
        """Take in prompts, then index finished text, at most `budget` tokens. Returns how many.

        `store_early` takes the output that came before its prompt was stored.
        """
        left = budget
        while self._intake and left > 0:
            req_id = self._intake[0]
            request = self._requests.get(req_id)
            if request is None:
                self._intake.popleft()
                continue
            left -= self._take_in(request, left)
            fields = self.rows.fields[request.row]
            if request.taken >= request.prompt_len and fields[Field.INDEXED] == fields[Field.LENGTH]:
                self._intake.popleft()
                if request.early:
                    early, request.early = request.early, []
                    store_early(req_id, request, as_tokens(early, self._vocab_size))
        if left > 0:
            done, changed = self.memory.index_slice(left)
            left -= done
            for owner in changed:
                if isinstance(owner, Session):
                    self._point_at_session(owner)
                else:
                    self._point_at_corpus(owner, owner.readers)
        return budget - left

    def make_room(self, req_id: str, request: DraftingRequest, num_tokens: int) -> bool:
        """Room for so many more tokens of a request's text; False when there is no memory."""
        fields = self.rows.fields[request.row]
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

    def _let_go(self, row: int, namespace: Namespace, session: Session | None) -> None:
        namespace.rows.discard(row)
        namespace.readers.discard(row)
        if session is not None:
            session.rows.discard(row)
        self.rows.give_back(row)

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

    def _take_in(self, request: DraftingRequest, budget: int) -> int:
        """Store the next slice of a prompt and index what is stored. Returns the tokens handled."""
        fields = self.rows.fields[request.row]
        slab = self.memory.slab
        base, size = int(fields[Field.BASE]), int(fields[Field.SIZE])
        length, indexed = int(fields[Field.LENGTH]), int(fields[Field.INDEXED])
        end = min(request.taken + budget, request.prompt_len)
        if end > request.taken:
            tokens = as_tokens(request.prompt[request.taken : end], self._vocab_size)
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

    def _keep_text(self, request: DraftingRequest, fields: Int64Array, keys: Sequence[Hashable]) -> None:
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
                self.rows.fields[row, Field.OWN_LOW] = self.rows.fields[row, Field.OWN_HIGH] = 0
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
            fields = self.rows.fields[row]
            fields[Field.SESSION_BASE] = session.log.base
            fields[Field.SESSION_SIZE] = session.log.size
            fields[Field.SESSION_LENGTH] = session.log.indexed

    def _point_at_corpus(self, namespace: Namespace, rows: Iterable[int]) -> None:
        log = namespace.corpus
        for row in rows:
            fields = self.rows.fields[row]
            fields[Field.CORPUS_BASE] = log.base
            fields[Field.CORPUS_SIZE] = log.size
            fields[Field.CORPUS_LENGTH] = log.indexed
