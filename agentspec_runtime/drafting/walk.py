"""Compiled kernels of the vote-walk: from occurrences of the present context to drafts, and back.

`draft_rows` walks all requests of a step. At each depth the occurrences that are still in agreement
with the draft vote on the next token, each with weight (match / longest match)^8, so the longest wins
nearly always and ties are voted. The two best-voted tokens are scored by the survival model, the more
probable one is drafted, the occurrences that disagree drop out. The walk ends where survival falls
below the price, and scores one slot beyond it, for the label that comes for free.

`observe_rows` takes the emitted tokens back in: labels for the scored slots, the block automaton, the
request's own text and index.

Requests are lines of one table, `rows` int64[N, NUM_FIELDS], with the columns named by `Field`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numba import njit

from agentspec_runtime.drafting.blocks import advance_block
from agentspec_runtime.drafting.index import find_candidates, insert_positions
from agentspec_runtime.drafting.survival import NUM_KEYS, learn, mix, slot_keys

__all__ = ["NUM_FIELDS", "RANKS", "Field", "draft_rows", "observe_rows"]

RANKS: Final = 2
"""Best-voted tokens that are scored per depth. A third one brought nothing measurable."""
_MIN_SHARE: Final = 0.02
_DISTINCT: Final = 12
"""Distinct continuations told apart per depth; more than that is noise."""
_NUM_KEYS = NUM_KEYS


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


NUM_FIELDS: Final = 17
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
def _token_at(tokens, row, where, p, d, drafted):  # type: ignore[no-untyped-def]
    """Token that the occurrence at `p` proposes for depth `d`, or -1 where its text ends.

    An occurrence in the request's own text may run into the draft itself: that is how periodic text
    continues (LZ77's overlapping copy).
    """
    q = p + d
    if where == 0:
        length = row[_LENGTH]
        if q < length:
            return tokens[row[_BASE] + q]
        return drafted[q - length] if q - length < d else -1
    if where == 1:
        return tokens[row[_SESSION_BASE] + q] if q < row[_SESSION_LENGTH] else -1
    return tokens[row[_CORPUS_BASE] + q] if q < row[_CORPUS_LENGTH] else -1


@njit(cache=True)
def _vote(proposals, alive, num, match, ids, weight, count, longest, first):  # type: ignore[no-untyped-def]
    """Tally proposals. Fills the per-token columns and returns (distinct tokens, total weight)."""
    top = 0
    for j in range(num):
        top = max(top, match[alive[j]])
    distinct = 0
    total = 0.0
    for j in range(num):
        i = alive[j]
        t = proposals[j]
        r = match[i] / top
        r *= r
        r *= r
        r *= r
        total += r
        u = 0
        while u < distinct and ids[u] != t:
            u += 1
        if u == distinct:
            if distinct == _DISTINCT:
                continue
            ids[u] = t
            weight[u] = 0.0
            count[u] = 0
            longest[u] = 0
            distinct += 1
        weight[u] += r
        count[u] += 1
        if match[i] > longest[u]:
            longest[u] = match[i]
            first[u] = i
    return distinct, total


@njit(cache=True)
def _gather(tokens, links, heads, row, limit, pos, match, where):  # type: ignore[no-untyped-def]
    base = row[_BASE]
    length = row[_LENGTH]
    size = row[_SIZE]
    n = 0
    if row[_INDEXED] > 0:
        n = find_candidates(
            tokens, links, heads, base, length, base, size, length, limit, 0, pos, match, where, n
        )
    if row[_SESSION_LENGTH] > 0:
        n = find_candidates(
            tokens,
            links,
            heads,
            base,
            length,
            row[_SESSION_BASE],
            row[_SESSION_SIZE],
            row[_SESSION_LENGTH],
            limit,
            1,
            pos,
            match,
            where,
            n,
        )
    if row[_CORPUS_LENGTH] > 0:
        n = find_candidates(
            tokens,
            links,
            heads,
            base,
            length,
            row[_CORPUS_BASE],
            row[_CORPUS_SIZE],
            row[_CORPUS_LENGTH],
            limit,
            2,
            pos,
            match,
            where,
            n,
        )
    return n


@njit(cache=True)
def draft_rows(  # type: ignore[no-untyped-def]
    rows,
    asked,
    caps,
    prices,
    limit,
    tokens,
    links,
    heads,
    rates,
    counts,
    weights,
    classes,
    slot_key,
    slot_input,
    slot_p,
    slot_selector,
    slot_token,
    slot_ranks,
    num_slots,
    out_token,
    out_survival,
    out_source,
    out_length,
):
    """Draft for the rows in `asked`, each down to its own price and at most `caps[i]` tokens.

    The `slot_*` arrays keep, per row, what the verdict will be learned from; the `out_*` arrays have
    one line per asked row.
    """
    pos = np.empty(3 * limit, np.int64)
    match = np.empty(3 * limit, np.int64)
    where = np.empty(3 * limit, np.int64)
    alive = np.empty(3 * limit, np.int64)
    proposals = np.empty(3 * limit, np.int64)
    ids = np.empty(_DISTINCT, np.int64)
    weight = np.empty(_DISTINCT, np.float64)
    count = np.empty(_DISTINCT, np.int64)
    longest = np.empty(_DISTINCT, np.int64)
    first = np.empty(_DISTINCT, np.int64)
    for a in range(asked.size):
        r = asked[a]
        row = rows[r]
        n = _gather(tokens, links, heads, row, limit, pos, match, where)
        for i in range(n):
            alive[i] = i
        survival = 1.0
        drafted = out_token[a]
        length = 0
        slots = 0
        model = row[_MODEL]
        # One slot more than may be drafted: the shadow slot.
        for d in range(min(caps[a] + 1, out_token.shape[1])):
            kept = 0
            for j in range(n):
                i = alive[j]
                t = _token_at(tokens, row, where[i], pos[i], d, drafted)
                if t >= 0:
                    alive[kept] = i
                    proposals[kept] = t
                    kept += 1
            if kept == 0:
                break
            distinct, total = _vote(proposals, alive, kept, match, ids, weight, count, longest, first)
            best_p = -1.0
            best_u = 0
            end = row[_BASE] + row[_LENGTH]
            prev = drafted[d - 1] if d > 0 else tokens[end - 1]
            prev2 = prev
            if d > 1:
                prev2 = drafted[d - 2]
            elif row[_LENGTH] > 1 - d:
                prev2 = tokens[end - 2 + d]
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
                        rival = max(rival, longest[v])
                share = weight[u] / total
                weight[u] = -weight[u]
                source = 1 if where[first[u]] == 2 else 0
                x = d * RANKS + rank
                selector = slot_keys(
                    slot_key[r],
                    x,
                    ids[u],
                    prev,
                    prev2,
                    longest[u],
                    rival,
                    share,
                    count[u],
                    source,
                    d,
                    row[_RUN],
                    row[_KIND],
                    row[_SAMPLED],
                    classes,
                )
                if rank > 0:
                    selector += 2
                p = mix(slot_key[r], slot_input[r], x, selector, rates[model], counts[model], weights[model])
                slot_p[r, x] = p
                slot_selector[r, x] = selector
                slot_token[r, x] = ids[u]
                ranks = rank + 1
                if p > best_p:
                    best_p = p
                    best_u = u
            slot_ranks[r, d] = ranks
            slots = d + 1
            survival *= best_p
            t = ids[best_u]
            drafted[d] = t
            out_survival[a, d] = survival
            w = where[first[best_u]]
            if w == 1:
                q = pos[first[best_u]] + d
                out_source[a, d] = 0 if row[_OWN_LOW] <= q < row[_OWN_HIGH] else 1
            else:
                out_source[a, d] = w
            if survival < prices[a] or d >= caps[a]:
                break
            length = d + 1
            kept2 = 0
            for j in range(kept):
                if proposals[j] == t:
                    alive[kept2] = alive[j]
                    kept2 += 1
            n = kept2
        num_slots[r] = slots
        out_length[a] = length


@njit(cache=True)
def _learn_row(  # type: ignore[no-untyped-def]
    r,
    row,
    new,
    drafted,
    rates,
    counts,
    weights,
    slot_key,
    slot_input,
    slot_p,
    slot_selector,
    slot_token,
    slot_ranks,
    num_slots,
):
    """Label the scored slots of one row with the tokens that came; slots behind a miss stay unknown."""
    model = row[_MODEL]
    missed = num_slots == 0
    for d in range(min(num_slots, new.size)):
        for rank in range(slot_ranks[r, d]):
            x = d * RANKS + rank
            learn(
                slot_key[r],
                slot_input[r],
                x,
                slot_selector[r, x],
                slot_p[r, x],
                slot_token[r, x] == new[d],
                rates[model],
                counts[model],
                weights[model],
            )
        if drafted[d] != new[d]:
            missed = True
            break
    row[_RUN] = 0 if missed else row[_RUN] + new.size


@njit(cache=True)
def observe_rows(  # type: ignore[no-untyped-def]
    rows,
    asked,
    new_tokens,
    offsets,
    tokens,
    links,
    heads,
    rates,
    counts,
    weights,
    classes,
    slot_key,
    slot_input,
    slot_p,
    slot_selector,
    slot_token,
    slot_ranks,
    num_slots,
    last_draft,
    learning,
    text,
    text_offsets,
    block_state,
    out_kind,
    out_block,
):
    """Take in the emitted tokens `new_tokens[offsets[i]:offsets[i + 1]]` of each row in `asked`.

    The caller has made room in the rows' extents. `out_kind` and `out_block` get the block of each
    token.
    """
    vocab = classes.size
    for a in range(asked.size):
        r = asked[a]
        row = rows[r]
        new = new_tokens[offsets[a] : offsets[a + 1]]
        if learning and new.size > 0:
            _learn_row(
                r, row, new, last_draft[r], rates, counts, weights, slot_key, slot_input, slot_p,
                slot_selector, slot_token, slot_ranks, num_slots[r]
            )  # fmt: skip
        num_slots[r] = 0
        length = row[_LENGTH]
        whole = row[_INDEXED] == length
        for i in range(new.size):
            t = new[i]
            tokens[row[_BASE] + length + i] = t
            before = row[_KIND]
            if 0 <= t < vocab:
                advance_block(block_state[r], text, text_offsets[t], text_offsets[t + 1])
            after = block_state[r, 0]
            if after != before:
                # A token that opens a block belongs to it; the one that closes a block ends it.
                row[_KIND] = after
                if after != 0:
                    row[_BLOCK] += 1
                    out_kind[offsets[a] + i] = after
                    out_block[offsets[a] + i] = row[_BLOCK]
                else:
                    out_kind[offsets[a] + i] = before
                    out_block[offsets[a] + i] = row[_BLOCK]
                    row[_BLOCK] += 1
            else:
                out_kind[offsets[a] + i] = before
                out_block[offsets[a] + i] = row[_BLOCK]
        row[_LENGTH] = length + new.size
        if whole:
            insert_positions(tokens, links, heads, row[_BASE], row[_SIZE], length, length + new.size)
            row[_INDEXED] = length + new.size
