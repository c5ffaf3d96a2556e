"""A model drafter in the worker (EAGLE-3 and others) beside ours: whose tokens to take.

For each request two chains of tokens begin at the same place: ours, found in text, and the drafter's. As long
as they are alike they are one chain, and each vouches for the other; where they part, at most one is right.
So both are calibrated anew by what stands beside them: how likely ours was by itself, and whether the other
agrees. The chain with the higher expected gain under the price of a slot is taken. A chain of the drafter
that begins like ours is ours, continued by the drafter's where ours ends; its tokens keep our source.

Acceptance is counted per namespace, from every token that the target model emitted where a chain was known,
drafted or not. A draft is a function of the prefix alone (the drafter's tokens are its most likely ones, not
sampled), so choosing and cutting by such counts does not bias sampling (docs/adr/0003).

Arrays: R requests, D positions of the drafter, K of ours.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.draft import BLOCK_KINDS, SOURCES, BatchDraft, Int32Array, Int64Array
from agentspec_runtime.drafting.drafter import BatchObserved
from agentspec_runtime.observe import DraftSource

__all__ = ["Arbiter", "Merged"]

_FloatArray: TypeAlias = npt.NDArray[np.float64]

_ASSIST: Final = SOURCES.index(DraftSource.ASSIST)

_EDGES: Final = np.array([0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.985])
"""Between buckets of our own conditional acceptance, finer where the price of a slot often lies."""
_BUCKETS: Final = len(_EDGES) + 1
_CENTRES: Final = np.array([0.05, 0.2, 0.4, 0.6, 0.78, 0.9, 0.97, 0.993])
_NONE: Final = 0
_AGREE: Final = 1
_DISAGREE: Final = 1 + _BUCKETS
_RELATIONS: Final = 1 + 2 * _BUCKETS

_POSITIONS: Final = 5
"""Acceptance of EAGLE-3 falls over the first positions and is level from the fifth on."""
_RECENT: Final = 3
"""First token of the drafter in the request's last step: not known, missed, hit."""

_PRIOR: Final = np.concatenate([[0.4], 1 - 0.5 * (1 - _CENTRES), 0.4 * (1 - _CENTRES)])
"""Where nothing is known: 0.4 alone (a weak head), more beside agreement, the rest's share beside a rival."""
_PARENT_WEIGHT: Final = 8.0
_CELL_WEIGHT: Final = 12.0
"""Observations that the wider cell counts for in the narrower one."""
_LIMIT: Final = 1024.0
"""Counts are halved there: the horizon in which a change of traffic is followed."""

_MAX_NAMESPACES: Final = 64
_UNCOUNTED: Final = _MAX_NAMESPACES
"""The row of requests that come while every counted namespace has a request running: always at the prior."""


class Merged(NamedTuple):
    """One draft per request, and what the drafter was worth.

    `gains` float64[R, D]: tokens, price of slots subtracted, that a drafter of depth 1 to D is expected to
    add to our own draft. `offered` bool[R]: where it had a draft; `taken` bool[R]: where that was chosen.
    """

    batch: BatchDraft
    gains: _FloatArray
    offered: npt.NDArray[np.bool_]
    taken: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Known:
    """A running request: its row of counts, the block it is in, and how the drafter's last token fared."""

    row: int
    kind: int = 0
    recent: int = 0


@dataclass(frozen=True, slots=True)
class _Offer:
    """Both chains of the step under way, to be scored. Arrays have R lines.

    `theirs` and `ours` int32[R, D], -1 behind the end; `relations` int64[R, D]; `cells` int64[R, 3]: row,
    kind, recent.
    """

    lines: dict[str, int]
    theirs: Int32Array
    ours: Int32Array
    relations: Int64Array
    cells: Int64Array


class Arbiter:
    """See the module docstring. Not thread-safe: one engine loop owns it. Ids below `vocab_size` exist."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[str, _Known] = {}
        self._rows: OrderedDict[str, int] = OrderedDict()
        self._running: Counter[int] = Counter()
        narrow = (_MAX_NAMESPACES + 1, _RELATIONS, _POSITIONS, len(BLOCK_KINDS), _RECENT)
        # [hits, trials] of the drafter's tokens, in narrow cells and over blocks; and of ours beside them.
        self._narrow = np.zeros((2, *narrow))
        self._wide = np.zeros((2, *narrow[:3]))
        self._own = np.zeros((2, _MAX_NAMESPACES + 1, _RELATIONS))
        self._waiting: dict[str, Sequence[int]] = {}
        self._offer: _Offer | None = None

    def start(self, req_id: str, namespace: str, kind: int = 0) -> None:
        """A request begins; counts are shared within its namespace only."""
        self.finish(req_id)
        row = self._row_of(namespace)
        self._running[row] += 1
        self._known[req_id] = _Known(row, kind)

    def finish(self, req_id: str) -> None:
        """A request is over; unknown ids are ignored."""
        known = self._known.pop(req_id, None)
        if known is not None:
            self._running[known.row] -= 1
        self._waiting.pop(req_id, None)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._known

    def offer(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The worker's drafts for the next step. They replace all earlier ones."""
        self._offer = None
        self._waiting = {r: d for r, d in zip(req_ids, drafts, strict=True) if r in self._known and len(d)}

    def forget_offer(self) -> None:
        """Drafts that were not merged are too old for any other step."""
        self._waiting = {}

    def merge(
        self, req_ids: Sequence[str], ours: BatchDraft, caps: Sequence[int], prices: _FloatArray
    ) -> Merged:
        """Choose for every request. `caps[i]`: most tokens; `prices` float64[R]: of a slot, in tokens."""
        self._offer = None
        waiting, self._waiting = self._waiting, {}
        theirs = self._as_array(req_ids, waiting, caps)
        depth = theirs.shape[1]
        offered = theirs[:, :1].ravel() >= 0 if depth else np.zeros(len(req_ids), np.bool_)
        if not offered.any():
            return Merged(ours, np.zeros((len(req_ids), 0)), offered, offered)
        own_ids = np.full_like(theirs, -1)
        width = min(depth, ours.token_ids.shape[1])
        columns = np.arange(width)
        own_ids[:, :width] = np.where(
            columns < ours.lengths[:, None], ours.token_ids[:, :width], np.int32(-1)
        )
        cells = np.array([self._cell(r) for r in req_ids], np.int64).reshape(-1, 3)
        own, their, relations = self._survivals(ours, own_ids, theirs, cells)
        self._offer = _Offer({r: i for i, r in enumerate(req_ids)}, theirs, own_ids, relations, cells)
        return _choose(ours, own, theirs, their, relations, offered, prices)

    def observe(self, req_ids: Sequence[str], observed: BatchObserved) -> None:
        """What the target model emitted: a verdict on every token of both chains as far as it reaches."""
        for i, req_id in enumerate(req_ids):
            known = self._known.get(req_id)
            end = int(observed.offsets[i + 1])
            if known is not None and end > observed.offsets[i]:
                known.kind = int(observed.kinds[end - 1])
                known.recent = 0
        offer, self._offer = self._offer, None
        if offer is None:
            return
        depth = offer.theirs.shape[1]
        truth = np.full_like(offer.theirs, -2)
        for i, req_id in enumerate(req_ids):
            line = offer.lines.get(req_id)
            if line is not None:
                part = observed.tokens[observed.offsets[i] : observed.offsets[i + 1]][:depth]
                truth[line, : len(part)] = part
        self._score(offer, truth)
        for req_id, line in offer.lines.items():
            known = self._known.get(req_id)
            if known is not None and offer.theirs[line, 0] >= 0 and truth[line, 0] >= 0:
                known.recent = 2 if offer.theirs[line, 0] == truth[line, 0] else 1

    # Internals

    def _row_of(self, namespace: str) -> int:
        row = self._rows.pop(namespace, None)
        if row is None and len(self._rows) < _MAX_NAMESPACES:
            row = len(self._rows)
        elif row is None:
            oldest = next((name for name, used in self._rows.items() if not self._running[used]), None)
            if oldest is None:
                return _UNCOUNTED
            row = self._rows.pop(oldest)
            for counts in (self._narrow, self._wide, self._own):
                counts[:, row] = 0.0
        self._rows[namespace] = row
        return row

    def _cell(self, req_id: str) -> tuple[int, int, int]:
        known = self._known.get(req_id)
        return (_UNCOUNTED, 0, 0) if known is None else (known.row, known.kind, known.recent)

    def _as_array(
        self, req_ids: Sequence[str], waiting: dict[str, Sequence[int]], caps: Sequence[int]
    ) -> Int32Array:
        """int32[R, D], -1 behind the end of each draft; what no vocabulary holds ends one."""
        depth = max((len(d) for d in waiting.values()), default=0)
        theirs = np.full((len(req_ids), depth), -1, np.int32)
        for i, req_id in enumerate(req_ids):
            draft = waiting.get(req_id, ())[: caps[i]]
            for j, token in enumerate(draft):
                if not 0 <= token < self._vocab_size:
                    break
                theirs[i, j] = token
        return theirs

    def _survivals(
        self, ours: BatchDraft, own_ids: Int32Array, theirs: Int32Array, cells: Int64Array
    ) -> tuple[_FloatArray, _FloatArray, Int64Array]:
        """Survival of our chain float64[R, K] and of theirs float64[R, D], and relations int64[R, D]."""
        alone = ours.survival.astype(np.float64)
        before = np.concatenate([np.ones((len(alone), 1)), alone[:, :-1]], axis=1)
        conditional = np.clip(alone / np.maximum(before, 1e-9), 1e-4, 1.0)
        count, depth = theirs.shape
        own, their = alone.copy(), np.zeros((count, depth))
        relations = np.zeros((count, depth), np.int64)
        own_so_far, their_so_far, changed = np.ones(count), np.ones(count), np.ones(count)
        together = np.ones(count, np.bool_)
        for j in range(depth):
            both = together & (own_ids[:, j] >= 0) & (theirs[:, j] >= 0)
            same = own_ids[:, j] == theirs[:, j]
            q = conditional[:, j] if j < alone.shape[1] else np.ones(count)
            bucket = np.searchsorted(_EDGES, q)
            relations[:, j] = np.where(both, np.where(same, _AGREE, _DISAGREE) + bucket, _NONE)
            their_so_far = their_so_far * self._rate(relations[:, j], j, cells)
            their[:, j] = np.where(theirs[:, j] >= 0, their_so_far, 0.0)
            rate = np.where(both, self._own_rate(relations[:, j], q, cells), q)
            own_so_far = own_so_far * rate
            if j < alone.shape[1]:
                changed = own_so_far / np.maximum(alone[:, j], 1e-9)
                own[:, j] = own_so_far
            together = both & same
        own[:, depth:] *= changed[:, None]
        return np.minimum.accumulate(own, axis=1), their, relations

    def _rate(self, relations: Int64Array, position: int, cells: Int64Array) -> _FloatArray:
        j = min(position, _POSITIONS - 1)
        row, kind, recent = cells.T
        hits, trials = self._wide[:, row, relations, j]
        wide = (hits + _PARENT_WEIGHT * _PRIOR[relations]) / (trials + _PARENT_WEIGHT)
        hits, trials = self._narrow[:, row, relations, j, kind, recent]
        rate: _FloatArray = (hits + _CELL_WEIGHT * wide) / (trials + _CELL_WEIGHT)
        return rate

    def _own_rate(self, relations: Int64Array, alone: _FloatArray, cells: Int64Array) -> _FloatArray:
        hits, trials = self._own[:, cells[:, 0], relations]
        rate: _FloatArray = (hits + _CELL_WEIGHT * alone) / (trials + _CELL_WEIGHT)
        return rate

    def _score(self, offer: _Offer, truth: Int32Array) -> None:
        row, kind, recent = offer.cells.T
        alive = row != _UNCOUNTED
        own_alive = alive.copy()
        for j in range(truth.shape[1]):
            relation = offer.relations[:, j]
            position = np.full(len(truth), min(j, _POSITIONS - 1))
            known = truth[:, j] >= 0
            alive &= known & (offer.theirs[:, j] >= 0)
            hit = alive & (offer.theirs[:, j] == truth[:, j])
            _count(self._wide, (row, relation, position), alive, hit)
            _count(self._narrow, (row, relation, position, kind, recent), alive, hit)
            own_alive &= known & (relation != _NONE)
            own_hit = own_alive & (offer.ours[:, j] == truth[:, j])
            _count(self._own, (row, relation), own_alive, own_hit)
            alive, own_alive = hit, own_hit


def _count(
    counts: _FloatArray,
    cells: tuple[Int64Array, ...],
    asked: npt.NDArray[np.bool_],
    hit: npt.NDArray[np.bool_],
) -> None:
    """Add to `counts` float64[2, ...] (hits, trials) what was asked; halve cells that are full."""
    if not asked.any():
        return
    chosen = tuple(part[asked] for part in cells)
    np.add.at(counts[0], chosen, hit[asked])
    np.add.at(counts[1], chosen, 1.0)
    full = counts[1][chosen] > _LIMIT
    if full.any():
        cell = tuple(part[full] for part in chosen)
        counts[0][cell] *= 0.5
        counts[1][cell] *= 0.5


def _choose(
    ours: BatchDraft,
    own: _FloatArray,
    theirs: Int32Array,
    their: _FloatArray,
    relations: Int64Array,
    offered: npt.NDArray[np.bool_],
    prices: _FloatArray,
) -> Merged:
    """Per request the chain with the higher gain; see `Arbiter.merge`."""
    count, depth = theirs.shape
    price = prices[:, None]
    used = (np.arange(own.shape[1]) < ours.lengths[:, None]) & (own > price)
    own_gain = np.where(used, own - price, 0.0).sum(axis=1)
    their_gains = np.cumsum(np.maximum(their - price, 0.0), axis=1)
    taken = offered & (their_gains[:, -1] > own_gain)

    width = max(depth, own.shape[1])
    ids = np.zeros((count, width), np.int32)
    survival = np.zeros((count, width), np.float32)
    sources = np.zeros((count, width), np.int8)
    ids[:, : own.shape[1]] = ours.token_ids
    survival[:, : own.shape[1]] = own
    sources[:, : own.shape[1]] = ours.sources
    lengths = np.where(offered, used.sum(axis=1), ours.lengths)
    alike = (relations >= _AGREE) & (relations < _DISAGREE)
    shared = min(depth, own.shape[1])
    ids[taken, :depth] = np.maximum(theirs[taken], 0)
    survival[taken, :depth] = their[taken]
    sources[taken, :depth] = _ASSIST
    sources[taken, :shared] = np.where(alike[taken, :shared], ours.sources[taken, :shared], np.int8(_ASSIST))
    lengths[taken] = (their[taken] > price[taken]).sum(axis=1)
    gains = _gains(ours, own, their_gains, prices)
    return Merged(BatchDraft(ids, survival, sources, lengths), gains, offered, taken)


def _gains(ours: BatchDraft, own: _FloatArray, their_gains: _FloatArray, prices: _FloatArray) -> _FloatArray:
    """What a drafter of each depth adds, float64[R, D].

    Without it, those of our slots would be drafted that seem worth it by themselves, and each has the worth
    that is known now. A drafter of less depth tells less: behind its end our survival is what it was alone.
    """
    price = prices[:, None]
    alone = ours.survival.astype(np.float64)
    used = np.arange(own.shape[1]) < ours.lengths[:, None]
    without = np.where(used & (alone > price), own - price, 0.0).sum(axis=1)
    gains = np.empty_like(their_gains)
    for j in range(their_gains.shape[1]):
        known = own.copy()
        if j < own.shape[1]:
            known[:, j + 1 :] = own[:, j : j + 1] * (
                alone[:, j + 1 :] / np.maximum(alone[:, j : j + 1], 1e-9)
            )
        mine = np.where(used, np.maximum(known - price, 0.0), 0.0).sum(axis=1)
        gains[:, j] = np.maximum(their_gains[:, j], mine) - without
    return gains
