"""Compiled kernels of the n-gram index: insert positions, find occurrences of the present context.

The index is that of an LZ77 compressor: a hash of the last `order` tokens leads to the newest position
that followed the same hash, links lead to older ones. Hash collisions are harmless, since every
candidate is compared token by token, which also yields its exact match length. Where occurrences disagree
on what comes next it counts how far they agree beyond their first difference (`agree_beyond`): a copy in
which a name was changed is told from an accident.
"""

from __future__ import annotations

from typing import Final

from numba import int64, njit, uint32

from agentspec_runtime.drafting.slab import ORDERS

__all__ = ["MAX_MATCH", "agree_beyond", "find_candidates", "insert_positions"]

MAX_MATCH: Final = 48
"""Match lengths are counted up to here; longer ones are as good as certain and cost time to count."""

_ENOUGH_LONG: Final = 8
"""Occurrences with a match of `MAX_MATCH` after which the search stops: in repetitive text there are
thousands, and they agree."""

_GAP_OWN: Final = (1, 0, 1, 2, 1, 2, 0, 2, 3, 1, 3)
_GAP_OTHER: Final = (1, 1, 0, 1, 2, 2, 2, 0, 1, 3, 3)
"""Tokens left out on either side of a gap: one for one, put in, taken out, and so on up to three. The order
decides nothing, the longest agreement beyond does."""

_MAX_BEYOND: Final = 16
_MIN_BEYOND: Final = 3
"""Fewer tokens agree by chance. Two gaps instead of one, or 32 tokens beyond, gained nothing."""

_ORDERS = ORDERS
_NUM_ORDERS = len(ORDERS)


@njit(cache=True, inline="always")
def _bucket(tokens, end, order, mask):
    x = uint32(2166136261)
    for i in range(order):
        x = uint32((x ^ uint32(tokens[end - 1 - i])) * uint32(16777619))
        x = uint32(x ^ (x >> uint32(15)))
    x = uint32(x * uint32(2654435761))
    return int64(x >> uint32(5)) & mask


@njit(cache=True)
def insert_positions(text, base, size, start, end):
    """Index positions [start, end) of the extent: each as the continuation of the tokens before it."""
    tokens, links, heads = text
    mask = size - 1
    for p in range(start, end):
        for k in range(_NUM_ORDERS):
            order = _ORDERS[k]
            if p >= order:
                b = base + _bucket(tokens, base + p, order, mask)
                links[k, base + p] = heads[k, b]
                heads[k, b] = p + 1


@njit(cache=True)
def agree_beyond(tokens, own_base, own_len, base, at, match):
    """Tokens in which the own extent's end and position `at` of another agree beyond their first difference.

    `match`: length of their common context. 0 for fewer than `_MIN_BEYOND`, at most `_MAX_BEYOND`.
    """
    if match >= MAX_MATCH:
        return 0
    own = own_base + own_len - 1 - match
    other = base + at - 1 - match
    best = 0
    for gap in range(len(_GAP_OWN)):
        i = own - _GAP_OWN[gap]
        j = other - _GAP_OTHER[gap]
        n = 0
        while n < _MAX_BEYOND and i - n >= own_base and j - n >= base and tokens[i - n] == tokens[j - n]:
            n += 1
        best = max(best, n)
    return best if best >= _MIN_BEYOND else 0


@njit(cache=True)
def find_candidates(text, own_base, own_len, base, size, length, limit, arena, pos, match, where, count):
    """Occurrences of the last tokens of the own extent in another extent (or in itself).

    Fills `pos` (position of the continuation), `match` (length of the common context, at most
    `MAX_MATCH`) and `where` (= `arena`) from `count` on, newest first, at most `limit` of them, all
    found by the longest context order that occurs. Returns the new count.
    """
    tokens, links, heads = text
    first = count
    mask = size - 1
    for k in range(_NUM_ORDERS):
        order = _ORDERS[k]
        if own_len < order:
            continue
        p = heads[k, base + _bucket(tokens, own_base + own_len, order, mask)]
        long_ones = 0
        # Twice the limit: links that only share a hash bucket count as visits too.
        for _ in range(2 * limit):
            if p <= 0 or count - first >= limit:
                break
            q = int64(p) - 1
            reach = min(q, own_len, MAX_MATCH)
            m = 0
            while m < reach and tokens[own_base + own_len - 1 - m] == tokens[base + q - 1 - m]:
                m += 1
            if m >= order and q < length:
                pos[count] = q
                match[count] = m
                where[count] = arena
                count += 1
                if m >= MAX_MATCH:
                    long_ones += 1
                    if long_ones >= _ENOUGH_LONG:
                        break
            p = links[k, base + q]
        if count > first:
            break
    return count
