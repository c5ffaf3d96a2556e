"""The n-gram index against a quadratic scan, and against text that is made to hurt it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from drafting_support import matches
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting.index import MAX_MATCH, agree_beyond, find_candidates, insert_positions
from agentspec_runtime.drafting.slab import ORDERS, Slab


class Extent:
    """One text in a slab of its own, inserted in the given slices."""

    def __init__(self, text: list[int], slices: list[int] | None = None) -> None:
        self.slab = Slab(1 if len(text) < 10_000 else 8)
        base_size = self.slab.allocate(max(len(text), 1))
        assert base_size is not None
        self.base, self.size = base_size
        self.length = len(text)
        self.slab.tokens[self.base : self.base + self.length] = text
        cuts = sorted({min(c, self.length) for c in slices or []} | {0, self.length})
        for start, end in pairwise(cuts):
            self.insert(start, end)

    def insert(self, start: int, end: int) -> None:
        insert_positions(self.slab.text, self.base, self.size, start, end)

    def candidates(self, limit: int) -> list[tuple[int, int]]:
        """(position, match length) of the occurrences of the text's own end."""
        pos, match, where = (np.zeros(limit, np.int64) for _ in range(3))
        n = find_candidates(
            self.slab.text,
            self.base,
            self.length,
            self.base,
            self.size,
            self.length,
            limit,
            0,
            pos,
            match,
            where,
            0,
        )
        self.beyond = [
            agree_beyond(self.slab.tokens, self.base, self.length, self.base, p, m)
            for p, m in zip(pos[:n], match[:n], strict=True)
        ]
        return [(int(p), int(m)) for p, m in zip(pos[:n], match[:n], strict=True)]


texts = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(0, 40), max_size=120)


@given(text=texts, slices=st.lists(st.integers(0, 120), max_size=5), limit=st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_equals_the_quadratic_scan(text: list[int], slices: list[int], limit: int) -> None:
    """Exact match lengths, newest first, from the longest order that occurs, complete up to the limit."""
    found = Extent(text, slices).candidates(limit)
    truth = matches(text, text, MAX_MATCH)
    positions = [p for p, _ in found]
    assert positions == sorted(positions, reverse=True)
    assert all(truth[p] == m for p, m in found)
    order = next((o for o in ORDERS if any(m >= o for m in truth.values())), None)
    wanted = sorted((p for p, m in truth.items() if order and m >= order), reverse=True)
    # A search stops after eight occurrences that match as far as is counted; they agree.
    full = [p for p in wanted if truth[p] >= MAX_MATCH]
    if len(full) >= 8:
        wanted = [p for p in wanted if p >= full[7]]
    if 2 * limit >= len(text):  # else links that merely share a bucket may use up the visits
        assert positions == wanted[:limit]
    else:
        assert set(positions) <= set(wanted)


@given(
    own=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    other=st.lists(st.integers(0, 5), max_size=100),
    indexed=st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_searches_another_extent_as_far_as_it_is_indexed(
    own: list[int], other: list[int], indexed: int
) -> None:
    """The context lies in one extent, occurrences in another; what is not indexed yet is not found."""
    indexed = min(indexed, len(other))
    slab = Slab(1)
    own_extent, extent = slab.allocate(len(own)), slab.allocate(max(len(other), 1))
    assert own_extent is not None
    assert extent is not None
    (own_base, _), (base, size) = own_extent, extent
    slab.tokens[own_base : own_base + len(own)] = own
    slab.tokens[base : base + len(other)] = other
    insert_positions(slab.text, base, size, 0, indexed)
    pos, match, where = (np.zeros(400, np.int64) for _ in range(3))
    n = find_candidates(slab.text, own_base, len(own), base, size, indexed, 200, 2, pos, match, where, 1)
    truth = matches(own, other[:indexed], MAX_MATCH)
    order = next((o for o in ORDERS if any(m >= o for m in truth.values())), None)
    wanted = sorted((p for p, m in truth.items() if order and m >= order), reverse=True)
    assert pos[1:n].tolist() == wanted
    assert match[1:n].tolist() == [truth[p] for p in wanted]
    assert set(where[1:n].tolist()) <= {2}
    found = [agree_beyond(slab.tokens, own_base, len(own), base, p, truth[p]) for p in wanted]
    assert found == [agreement_by_slices(own, other[:p], truth[p]) for p in wanted]


def agreement_by_slices(own: list[int], other: list[int], match: int) -> int:
    """By slices: the longest common end of both texts, up to three tokens beyond the match left out."""
    gaps = [(1, 1), (0, 1), (1, 0), (2, 1), (1, 2), (2, 2), (0, 2), (2, 0), (3, 1), (1, 3), (3, 3)]
    longest = 0
    for left, right in gaps if match < MAX_MATCH else []:
        a, b = own[: max(len(own) - match - left, 0)], other[: max(len(other) - match - right, 0)]
        n = 0
        while n < min(16, len(a), len(b)) and a[len(a) - 1 - n] == b[len(b) - 1 - n]:
            n += 1
        longest = max(longest, n)
    return longest if longest >= 3 else 0


def test_a_copy_with_a_changed_name_is_told_from_an_accident() -> None:
    copied = [11, 12, 13, 14, 15, 16, 1, 2]  # then 3
    accident = [21, 22, 23, 24, 25, 26, 1, 2]  # then 4
    now = [11, 12, 13, 14, 15, 17, 1, 2]
    extent = Extent([*copied, 3, 0, *accident, 4, 0, *now])
    found = dict(zip(extent.candidates(12), extent.beyond, strict=True))
    assert found == {(18, 2): 0, (8, 2): 5}


@pytest.mark.parametrize("period", [1, 2, 7])
def test_periodic_text_yields_a_few_long_matches(period: int) -> None:
    """100,000 tokens of `a b a b ...`: eight full matches end the search, however many there are."""
    extent = Extent([i % period for i in range(100_000)])
    found = extent.candidates(24)
    assert len(found) == 8
    assert all(m == MAX_MATCH for _, m in found)
    assert found[0][0] == 100_000 - period


def test_a_bucket_full_of_strangers_is_given_up() -> None:
    """The visits per search are bounded, so an old occurrence behind many newer ones is not looked for."""
    # Order 1 only: the last token 1 is always followed by something new, and never preceded alike.
    text = [t for i in range(2, 2000) for t in (i, 1)]
    found = Extent(text).candidates(24)
    assert len(found) == 24
    assert found[0] == (len(text) - 2, 1)
    assert all(m == 1 for _, m in found)


def test_random_text_finds_only_what_occurs() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 30_000, 60_000).tolist()
    found = Extent(text).candidates(24)
    truth = [p for p in range(1, len(text)) if text[p - 1] == text[-1]]
    assert {p for p, _ in found} <= set(truth)
