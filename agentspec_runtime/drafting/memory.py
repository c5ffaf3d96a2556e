"""Text that outlives a request: sessions and corpora, their extents, growth and eviction.

A namespace isolates tenants: each has its own sessions, its own corpus of finished outputs and its own
survival model, and nothing else in `drafting/` ever looks from one into another. All token storage
comes from one slab, so the bound of the slab bounds everything; when it is full, idle sessions go
first (least recently used), then corpora of idle namespaces.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.draft import DraftingConfig, Int32Array
from agentspec_runtime.drafting.index import insert_positions
from agentspec_runtime.drafting.slab import Slab

__all__ = ["Document", "DraftMemory", "Namespace", "Session", "TextLog"]

_MAX_DOCUMENTS: Final = 4
"""Request texts remembered per session for prefix sharing: the last one of a few parallel agents."""
_MAX_TIPS: Final = 8192


class TextLog:
    """Append-only text in one extent, indexed with delay. Offsets are tokens from the extent's start."""

    __slots__ = ("base", "epoch", "indexed", "length", "limit", "size")

    def __init__(self, limit: int) -> None:
        self.base = 0
        self.size = 0
        self.length = 0
        self.indexed = 0
        self.limit = limit
        self.epoch = 0
        """Grows whenever offsets lose their meaning."""


@dataclass(slots=True)
class Document:
    """Text of one request inside a session's log.

    `pieces`: (offset, length) in reading order; `keys`: one hashable per full block of `block_tokens`
    tokens, each standing for the whole text up to there (vLLM's chained block hashes).
    """

    pieces: tuple[tuple[int, int], ...]
    keys: Sequence[Hashable]
    block_tokens: int
    epoch: int


@dataclass(slots=True)
class Session:
    """Text of one agent run."""

    key: Hashable
    log: TextLog
    documents: deque[Document] = field(default_factory=lambda: deque(maxlen=_MAX_DOCUMENTS))
    rows: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Namespace:
    """Everything that one tenant's requests can draft from."""

    name: str
    model: int
    corpus: TextLog
    sessions: OrderedDict[Hashable, Session] = field(default_factory=OrderedDict)
    rows: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    """Rows that may draft from the corpus."""
    tips: OrderedDict[Hashable, Hashable] = field(default_factory=OrderedDict)
    """Key of a text's last block -> session that it belongs to; None where two sessions claim it."""


class DraftMemory:
    """All namespaces over one slab."""

    def __init__(self, config: DraftingConfig) -> None:
        self.config = config
        self.slab = Slab(config.memory_mb)
        self.namespaces: OrderedDict[str, Namespace] = OrderedDict()
        self.evicted_sessions = 0
        self.refused_extents = 0
        self._to_index: deque[tuple[TextLog, Session | Namespace]] = deque()
        self._free_models = list(range(config.max_namespaces - 1, -1, -1))

    def namespace(self, name: str) -> tuple[Namespace | None, bool]:
        """The namespace and whether it is new; None when all of them are busy."""
        found = self.namespaces.get(name)
        if found is not None:
            self.namespaces.move_to_end(name)
            return found, False
        if not self._free_models and not self._drop_idle_namespace():
            return None, False
        corpus = TextLog(self.config.max_corpus_tokens)
        fresh = Namespace(name=name, model=self._free_models.pop(), corpus=corpus)
        self.namespaces[name] = fresh
        return fresh, True

    def session(self, namespace: Namespace, key: Hashable) -> Session:
        """The session of this name, made if need be."""
        found = namespace.sessions.get(key)
        if found is None:
            if len(namespace.sessions) >= self.config.max_sessions:
                self._evict_session(namespace)
            found = Session(key=key, log=TextLog(self.config.max_session_tokens))
            namespace.sessions[key] = found
        namespace.sessions.move_to_end(key)
        return found

    def append(self, log: TextLog, tokens: Int32Array, owner: Session | Namespace) -> int | None:
        """Add text to a log; it is indexed later, in slices. Returns its offset, None without room.

        Text longer than half the log's limit is cut to its end; a full log loses its older half.
        """
        tokens = tokens[-(log.limit // 2) :]
        need = log.length + tokens.size
        if need > log.limit:
            keep = min(log.length, log.limit // 2)
            start = log.base + log.length - keep
            self._rebase(log, self.slab.tokens[start : start + keep].copy())
            log.epoch += 1
            need = keep + tokens.size
        if need > log.size and not self._grow(log, need):
            self._to_index.append((log, owner))  # what was kept has lost its index
            return None
        offset = log.length
        self.slab.tokens[log.base + offset : log.base + need] = tokens
        log.length = need
        self._to_index.append((log, owner))
        return offset

    def index_slice(self, budget: int) -> tuple[int, list[Session | Namespace]]:
        """Index up to `budget` waiting tokens. Returns how many, and whose searchable text grew."""
        done = 0
        changed: list[Session | Namespace] = []
        while self._to_index and done < budget:
            log, owner = self._to_index[0]
            end = min(log.length, log.indexed + budget - done)
            if end > log.indexed:
                insert_positions(self.slab.text, log.base, log.size, log.indexed, end)
                done += end - log.indexed
                log.indexed = end
                changed.append(owner)
            if log.indexed >= log.length:
                self._to_index.popleft()
        return done, changed

    def allocate(self, num_tokens: int) -> tuple[int, int] | None:
        """An extent, making room by forgetting idle text."""
        while True:
            extent = self.slab.allocate(num_tokens)
            if extent is not None:
                return extent
            if not any(self._evict_session(n) for n in self.namespaces.values()) and not self._drop_corpus():
                self.refused_extents += 1
                return None

    def free(self, log: TextLog) -> None:
        """Give a log's extent back and empty it."""
        if log.size:
            self.slab.release(log.base, log.size)
        log.base = log.size = log.length = log.indexed = 0
        log.epoch += 1

    def forget(self, namespace: Namespace) -> None:
        """Drop a namespace that has no running request."""
        for session in namespace.sessions.values():
            self.free(session.log)
        self.free(namespace.corpus)
        self._free_models.append(namespace.model)
        del self.namespaces[namespace.name]

    def add_tip(self, namespace: Namespace, key: Hashable, session: Session) -> None:
        """Remember that a text ending in this block belongs to this session."""
        known = namespace.tips.get(key, session.key)
        if known is not None and known not in namespace.sessions:
            known = session.key  # the one that it belonged to has been evicted
        namespace.tips[key] = session.key if known == session.key else None
        namespace.tips.move_to_end(key)
        if len(namespace.tips) > _MAX_TIPS:
            namespace.tips.popitem(last=False)

    def _grow(self, log: TextLog, need: int) -> bool:
        extent = self.allocate(min(max(need, 2 * log.size), max(log.limit, need)))
        if extent is None:
            return False
        if log.size == 0 and log.length == 0:
            log.base, log.size = extent
            return True
        old = self.slab.tokens[log.base : log.base + log.length].copy()
        self.slab.release(log.base, log.size)
        log.base, log.size = extent
        self.slab.tokens[log.base : log.base + old.size] = old
        log.indexed = 0
        return True

    def _rebase(self, log: TextLog, kept: Int32Array) -> None:
        self.slab.tokens[log.base : log.base + kept.size] = kept
        self.slab.heads[:, log.base : log.base + log.size] = 0
        log.length = int(kept.size)
        log.indexed = 0

    def _evict_session(self, namespace: Namespace) -> bool:
        for key, session in namespace.sessions.items():
            if not session.rows:
                self.free(session.log)
                del namespace.sessions[key]
                self.evicted_sessions += 1
                return True
        return False

    def _drop_corpus(self) -> bool:
        for namespace in self.namespaces.values():
            if not namespace.rows and namespace.corpus.size:
                self.free(namespace.corpus)
                return True
        return False

    def _drop_idle_namespace(self) -> bool:
        for namespace in self.namespaces.values():
            if not namespace.rows:
                self.forget(namespace)
                return True
        return False


def common_prefix(keys: Sequence[Hashable], known: Sequence[Hashable]) -> int:
    """Number of leading blocks that two texts share. Equal keys mean equal text up to there."""
    low, high = 0, min(len(keys), len(known))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == known[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def cut_pieces(pieces: Sequence[tuple[int, int]], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """The first `num_tokens` tokens of a document."""
    out: list[tuple[int, int]] = []
    for offset, length in pieces:
        take = min(length, num_tokens)
        if take <= 0:
            break
        out.append((offset, take))
        num_tokens -= take
    return tuple(out)


def join_pieces(
    pieces: Sequence[tuple[int, int]], offset: int, num_tokens: int
) -> tuple[tuple[int, int], ...]:
    """A document with more text behind it; adjoining pieces become one."""
    if pieces and pieces[-1][0] + pieces[-1][1] == offset:
        last = pieces[-1]
        return (*pieces[:-1], (last[0], last[1] + num_tokens))
    return (*pieces, (offset, num_tokens))


def as_tokens(values: Sequence[int] | npt.NDArray[np.integer], vocab_size: int) -> Int32Array:
    """Ids as the kernels take them, unchecked: one that the vocabulary does not have becomes 0."""
    ids = np.asarray(values, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        ids = np.where((ids < 0) | (ids >= vocab_size), 0, ids)
    return ids.astype(np.int32)
