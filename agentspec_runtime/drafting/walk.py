"""Compiled kernels of the vote-walk: from occurrences of the present context to drafts, and back.

`draft_rows` walks all requests of a step. At each depth the occurrences that are still in agreement
with the draft vote on the next token, each with weight (match / longest match)^8, so the longest wins
nearly always and ties are voted. A match counts with what agrees beyond its first difference, so that a
copy in which something was changed wins over a passage that has the last words in common. The two
best-voted tokens are scored by the survival model, the more probable one is drafted, the occurrences that
disagree drop out. The walk ends where survival falls below the price, and scores one slot beyond it, for
the label that comes for free.

`observe_rows` takes the emitted tokens back in: labels for the scored slots, the block automaton, the
request's own text and index.

Requests are lines of one table, `rows` int64[N, NUM_FIELDS], with the columns named by `Field`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numba import njit

from agentspec_runtime.drafting.arrays import RANKS
from agentspec_runtime.drafting.blocks import advance_block
from agentspec_runtime.drafting.index import agree_beyond, find_candidates, insert_positions
from agentspec_runtime.drafting.survival import (
    calibrate,
    depth_bucket,
    learn,
    learn_calibration,
    mix,
    slot_keys,
)

__all__ = ["NUM_FIELDS", "Field", "draft_rows", "observe_rows"]

_MIN_SHARE: Final = 0.02
"""A second token with less than 2 % of the votes is not worth scoring."""
_DISTINCT: Final = 12
"""Distinct continuations told apart per depth; more than that is noise."""

_OWN: Final = 0
_SESSION: Final = 1
_CORPUS: Final = 2


class Field(IntEnum):
    """Columns of the request table. Extents: base, size, tokens stored, tokens indexed."""

    BASE = 0
    SIZE = 1
    LENGTH = 2
    INDEXED = 3
    SESSION_BASE = 4
    SESSION_SIZE = 5
    SESSION_LENGTH = 6
    CORPUS_BASE = 7
    CORPUS_SIZE = 8
    CORPUS_LENGTH = 9
    MODEL = 10
    RUN = 11
    KIND = 12
    SAMPLED = 13
    OWN_LOW = 14
    OWN_HIGH = 15
    BLOCK = 16


NUM_FIELDS: Final = len(Field)
_BASE = int(Field.BASE)
_SIZE = int(Field.SIZE)
_LENGTH = int(Field.LENGTH)
_INDEXED = int(Field.INDEXED)
_SESSION_BASE = int(Field.SESSION_BASE)
_SESSION_SIZE = int(Field.SESSION_SIZE)
_SESSION_LENGTH = int(Field.SESSION_LENGTH)
_CORPUS_BASE = int(Field.CORPUS_BASE)
_CORPUS_SIZE = int(Field.CORPUS_SIZE)
_CORPUS_LENGTH = int(Field.CORPUS_LENGTH)
_MODEL = int(Field.MODEL)
_RUN = int(Field.RUN)
_KIND = int(Field.KIND)
_SAMPLED = int(Field.SAMPLED)
_OWN_LOW = int(Field.OWN_LOW)
_OWN_HIGH = int(Field.OWN_HIGH)
_BLOCK = int(Field.BLOCK)


@njit(cache=True)
def draft_rows(
    rows, asked, caps, prices, limit, text, models, classes, slots, ids, survival, source, lengths
):
    """Draft for the rows in `asked`, each down to its own price and at most `caps[i]` tokens.

    `text`, `models`, `slots`: the groups of `arrays`. Results, one line per asked row: `ids` int32,
    `survival` float32, `source` int8, all [R, K + 1], and `lengths` int64[R].
    """
    pos = np.empty(3 * limit, np.int64)
    match = np.empty(3 * limit, np.int64)
    beyond = np.empty(3 * limit, np.int64)
    where = np.empty(3 * limit, np.int64)
    alive = np.empty(3 * limit, np.int64)
    proposals = np.empty(3 * limit, np.int64)
    ballot = np.empty((4, _DISTINCT), np.int64)
    weight = np.empty(_DISTINCT, np.float64)
    for a in range(asked.size):
        r = asked[a]
        row = rows[r]
        n = _gather(text, row, limit, pos, match, where)
        for i in range(n):
            alive[i] = i
            beyond[i] = 0
        weighed = False
        drafted = ids[a]
        raw = 1.0
        survives = 1.0
        length = 0
        num = 0
        # One slot more than may be drafted: the shadow slot.
        for d in range(min(caps[a] + 1, drafted.size)):
            n = _propose(text.tokens, row, pos, where, d, drafted, alive, proposals, n)
            if n == 0:
                break
            if not weighed and _disagree(proposals, n):
                _weigh(text.tokens, row, pos, where, match, alive, n, beyond)
                weighed = True
            distinct, total = _vote(proposals, alive, n, match, beyond, ballot, weight)
            u, p = _choose(
                r,
                row,
                d,
                distinct,
                total,
                ballot,
                weight,
                where,
                text.tokens,
                drafted,
                models,
                classes,
                slots,
            )
            t = ballot[0, u]
            i = ballot[3, u]
            raw *= p
            cell = depth_bucket(d) * 2 + (1 if where[i] == _CORPUS else 0)
            slots.raw[r, d] = raw
            slots.cell[r, d] = cell
            slots.draft[r, d] = t
            num = d + 1
            survives = min(survives, calibrate(models.curves[row[_MODEL], cell], raw))
            drafted[d] = t
            survival[a, d] = survives
            source[a, d] = where[i]
            if where[i] == _SESSION and row[_OWN_LOW] <= pos[i] + d < row[_OWN_HIGH]:
                source[a, d] = _OWN
            if survives < prices[a] or d >= caps[a]:
                break
            length = d + 1
            kept = 0
            for j in range(n):
                if proposals[j] == t:
                    alive[kept] = alive[j]
                    kept += 1
            n = kept
        slots.num[r] = num
        lengths[a] = length


@njit(cache=True)
def _gather(text, row, limit, pos, match, where):
    """Occurrences of the present context in the request's own text, its session and the corpus."""
    n = 0
    if row[_INDEXED] > 0:
        n = find_candidates(
            text, row[_BASE], row[_LENGTH], row[_BASE], row[_SIZE], row[_LENGTH], limit, _OWN, pos, match,
            where, n
        )  # fmt: skip
    if row[_SESSION_LENGTH] > 0:
        n = find_candidates(
            text, row[_BASE], row[_LENGTH], row[_SESSION_BASE], row[_SESSION_SIZE], row[_SESSION_LENGTH],
            limit, _SESSION, pos, match, where, n
        )  # fmt: skip
    if row[_CORPUS_LENGTH] > 0:
        n = find_candidates(
            text, row[_BASE], row[_LENGTH], row[_CORPUS_BASE], row[_CORPUS_SIZE], row[_CORPUS_LENGTH],
            limit, _CORPUS, pos, match, where, n
        )  # fmt: skip
    return n


@njit(cache=True)
def _propose(tokens, row, pos, where, d, drafted, alive, proposals, n):
    """Next token of each living occurrence at depth `d`; those at the end of their text drop out.

    An occurrence in the request's own text may run into the draft itself: that is how periodic text
    continues (LZ77's overlapping copy).
    """
    kept = 0
    for j in range(n):
        i = alive[j]
        q = pos[i] + d
        t = -1
        if where[i] == _OWN:
            length = row[_LENGTH]
            if q < length:
                t = tokens[row[_BASE] + q]
            elif q - length < d:
                t = drafted[q - length]
        elif where[i] == _SESSION:
            if q < row[_SESSION_LENGTH]:
                t = tokens[row[_SESSION_BASE] + q]
        elif q < row[_CORPUS_LENGTH]:
            t = tokens[row[_CORPUS_BASE] + q]
        if t >= 0:
            alive[kept] = i
            proposals[kept] = t
            kept += 1
    return kept


@njit(cache=True)
def _disagree(proposals, n):
    """Whether it matters who votes with what weight."""
    for j in range(1, n):  # noqa: SIM110 - numba compiles no generator expressions
        if proposals[j] != proposals[0]:
            return True
    return False


@njit(cache=True)
def _weigh(tokens, row, pos, where, match, alive, n, beyond):
    """What agrees beyond the first difference, for the living occurrences; all later ones are among them."""
    for j in range(n):
        i = alive[j]
        base = row[_BASE]
        if where[i] == _SESSION:
            base = row[_SESSION_BASE]
        elif where[i] == _CORPUS:
            base = row[_CORPUS_BASE]
        beyond[i] = agree_beyond(tokens, row[_BASE], row[_LENGTH], base, pos[i], match[i])


@njit(cache=True)
def _vote(proposals, alive, n, match, beyond, ballot, weight):
    """Tally proposals; returns (distinct tokens, total weight).

    `ballot` lines: token, votes, longest match among its voters, the voter that has it.
    """
    top = 0
    for j in range(n):
        top = max(top, match[alive[j]] + beyond[alive[j]])
    distinct = 0
    total = 0.0
    for j in range(n):
        i = alive[j]
        w = (match[i] + beyond[i]) / top
        w *= w
        w *= w
        w *= w
        total += w
        u = 0
        while u < distinct and ballot[0, u] != proposals[j]:
            u += 1
        if u == distinct:
            if distinct == _DISTINCT:
                continue
            ballot[0, u] = proposals[j]
            ballot[1, u] = 0
            ballot[2, u] = 0
            weight[u] = 0.0
            distinct += 1
        weight[u] += w
        ballot[1, u] += 1
        if match[i] > ballot[2, u]:
            ballot[2, u] = match[i]
            ballot[3, u] = i
    return distinct, total


@njit(cache=True)
def _choose(r, row, d, distinct, total, ballot, weight, where, tokens, drafted, models, classes, slots):
    """Score the best-voted tokens; returns the line of the most probable one and its probability."""
    end = row[_BASE] + row[_LENGTH]
    prev = drafted[d - 1] if d > 0 else tokens[end - 1]
    prev2 = prev
    if d > 1:
        prev2 = drafted[d - 2]
    elif row[_LENGTH] > 1 - d:
        prev2 = tokens[end - 2 + d]
    model = row[_MODEL]
    best = 0
    best_p = -1.0
    ranks = 0
    for rank in range(RANKS):
        u = -1
        for v in range(distinct):
            if weight[v] > 0.0 and (u < 0 or weight[v] > weight[u]):
                u = v
        if u < 0 or (rank > 0 and weight[u] < _MIN_SHARE * total):
            break
        rival = 0
        for v in range(distinct):
            if v != u:
                rival = max(rival, ballot[2, v])
        share = weight[u] / total
        weight[u] = -weight[u]
        source = 1 if where[ballot[3, u]] == _CORPUS else 0
        x = d * RANKS + rank
        selector = slot_keys(
            slots.key[r], x, ballot[0, u], prev, prev2, ballot[2, u], rival, share, ballot[1, u], source, d,
            row[_RUN], row[_KIND], row[_SAMPLED], classes
        )  # fmt: skip
        if rank > 0:
            selector += 2
        p = mix(
            slots.key[r], slots.input[r], x, selector, models.rates[model], models.counts[model],
            models.weights[model]
        )  # fmt: skip
        slots.p[r, x] = p
        slots.selector[r, x] = selector
        slots.token[r, x] = ballot[0, u]
        ranks = rank + 1
        if p > best_p:
            best_p = p
            best = u
    slots.ranks[r, d] = ranks
    return best, best_p


@njit(cache=True)
def _learn_row(r, row, new, models, slots):
    """Label the scored slots of one row with the tokens that came.

    Behind a miss, acceptance stays unknown, but nothing survives there: that much is known.
    """
    model = row[_MODEL]
    missed = False
    for d in range(slots.num[r]):
        if not missed:
            if d >= new.size:
                break
            for rank in range(slots.ranks[r, d]):
                x = d * RANKS + rank
                learn(
                    slots.key[r], slots.input[r], x, slots.selector[r, x], slots.p[r, x],
                    slots.token[r, x] == new[d], models.rates[model], models.counts[model],
                    models.weights[model]
                )  # fmt: skip
            missed = slots.draft[r, d] != new[d]
        learn_calibration(models.curves[model, slots.cell[r, d]], slots.raw[r, d], not missed)
    row[_RUN] = 0 if missed or slots.num[r] == 0 else row[_RUN] + new.size


@njit(cache=True)
def observe_rows(
    rows, asked, new_tokens, offsets, text, models, vocabulary, slots, learning, block_state, kinds, blocks
):
    """Take in the emitted tokens `new_tokens[offsets[i]:offsets[i + 1]]` of each row in `asked`.

    The caller has made room in the rows' extents. `kinds` and `blocks` get the block of each token.
    """
    for a in range(asked.size):
        r = asked[a]
        row = rows[r]
        begin = offsets[a]
        new = new_tokens[begin : offsets[a + 1]]
        if learning and new.size > 0:
            _learn_row(r, row, new, models, slots)
        slots.num[r] = 0
        length = row[_LENGTH]
        for i in range(new.size):
            t = new[i]
            text.tokens[row[_BASE] + length + i] = t
            before = row[_KIND]
            if 0 <= t < vocabulary.classes.size:
                advance_block(
                    block_state[r], vocabulary.text, vocabulary.offsets[t], vocabulary.offsets[t + 1]
                )
            after = block_state[r, 0]
            row[_KIND] = after
            # A token that opens a block belongs to it; the one that closes a block ends it.
            if after != before and after != 0:
                row[_BLOCK] += 1
            kinds[begin + i] = before if after == 0 else after
            blocks[begin + i] = row[_BLOCK]
            if after != before and after == 0:
                row[_BLOCK] += 1
        row[_LENGTH] = length + new.size
        if row[_INDEXED] == length:
            insert_positions(text, row[_BASE], row[_SIZE], length, length + new.size)
            row[_INDEXED] = length + new.size
