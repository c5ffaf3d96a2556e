"""The buddy allocator: extents never overlap, nothing is lost, buddies rejoin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting.slab import BYTES_PER_TOKEN, MIN_EXTENT, Slab

CAPACITY = Slab(1).capacity

steps = st.lists(
    st.tuples(st.just("allocate"), st.integers(0, CAPACITY)) | st.tuples(st.just("release"), st.integers(0)),
    max_size=80,
)


@given(steps=steps)
@settings(max_examples=200, deadline=None)
def test_extents_are_disjoint_aligned_and_rejoin(steps: list[tuple[str, int]]) -> None:
    slab = Slab(1)
    live: list[tuple[int, int]] = []
    for action, number in steps:
        if action == "allocate":
            extent = slab.allocate(number)
            if extent is None:
                # Refused only if no aligned place of that size is free.
                size = Slab.size_for(number)
                places = range(0, CAPACITY - size + 1, size)
                assert all(any(p < b + s and b < p + size for b, s in live) for p in places)
                continue
            base, size = extent
            assert size >= max(number, MIN_EXTENT)
            assert size & (size - 1) == 0
            assert base % size == 0
            assert base + size <= slab.capacity
            assert all(base + size <= b or b + s <= base for b, s in live)
            assert not slab.heads[:, base : base + size].any()
            slab.heads[:, base : base + size] = 7
            live.append(extent)
        elif live:
            slab.release(*live.pop(number % len(live)))
        assert slab.used_bytes == sum(s for _, s in live) * BYTES_PER_TOKEN
    for extent in live:
        slab.release(*extent)
    assert slab.used_bytes == 0
    assert slab.allocate(slab.capacity) == (0, slab.capacity)


def test_full_slab_refuses_and_recovers() -> None:
    slab = Slab(1)
    half = slab.capacity // 2
    first, second = slab.allocate(half), slab.allocate(half)
    assert first is not None
    assert second is not None
    assert slab.allocate(1) is None
    slab.release(*first)
    assert slab.allocate(1) is not None
    assert slab.allocate(half) is None


def test_a_text_larger_than_the_slab_is_refused() -> None:
    slab = Slab(1)
    assert slab.allocate(slab.capacity + 1) is None
    assert slab.used_bytes == 0


@pytest.mark.parametrize("memory_mb", [1, 8, 50])
def test_the_bound_holds_for_all_arrays_together(memory_mb: int) -> None:
    slab = Slab(memory_mb)
    reserved = slab.tokens.nbytes + slab.links.nbytes + slab.heads.nbytes
    assert reserved == slab.capacity * BYTES_PER_TOKEN
    assert memory_mb / 2 < reserved / (1 << 20) <= memory_mb


@pytest.mark.parametrize(("tokens", "size"), [(0, 512), (512, 512), (513, 1024), (1025, 2048)])
def test_extents_are_powers_of_two(tokens: int, size: int) -> None:
    assert Slab.size_for(tokens) == size
