"""Which block each token of an answer is reported in.

The drafter follows blocks too, but only of answers that it drafts for, and it has to say at each token what
the next one belongs to. A report looks back: it wants blocks of every answer, drafted or not, and a marker
whole, though its first tokens (`<`, `tool`, ...) were prose until its last one came.

- A token that holds a byte of an opening marker (`<tool_call>`, `<think>`, the backticks of a fence)
  belongs to the block that the marker opens, whichever step emitted it. So blocks do not depend on how an
  answer was cut into steps.
- A token that holds the last byte of a closing marker (of a fence: its line end) ends the block it closes.
- Indentation before a fence is prose, and so is the token that ends the answer outside of a block.

Blocks are kept as the positions at which they begin, in tokens of the answer from 0. Only the last one can
be empty: one that begins where another has just begun takes its place.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from agentspec_runtime.drafting.blocks import advance_block, advance_plain, start_block
from agentspec_runtime.drafting.draft import Int32Array, Int64Array

__all__ = ["MAX_BLOCKS", "NUM_BLOCKS", "NUM_PLACES", "NUM_TOKENS", "follow_blocks", "start_answer"]

MAX_BLOCKS: Final = 1_024
"""An answer with more blocks than that puts the rest into its last one; the sums stay exact."""

# Place of an answer, int64[NUM_PLACES]: tokens so far; blocks so far; bytes of each of the last tokens, that
# at position p in entry p modulo _REACH.
NUM_TOKENS: Final = 0
NUM_BLOCKS: Final = 1
_BYTES = 2
_REACH = 16
"""Tokens that a marker can be made of. The longest one has 14 bytes."""
NUM_PLACES: Final = _BYTES + _REACH


def start_answer(state: Int32Array, place: Int64Array, bounds: Int64Array, kind: int) -> None:
    """An answer begins, in a block of this kind (a code of `BLOCK_KINDS`). See `follow_blocks`."""
    start_block(state, kind)
    place[:] = 0
    place[NUM_BLOCKS] = 1
    bounds[0] = kind


@njit(cache=True)
def follow_blocks(state, place, bounds, tokens, first, last, text, ends, plain, kinds):
    """Follow the tokens `tokens[first:last]` of one answer; writes the kind of block of each to `kinds`.

    `state` int32[STATE_SIZE], `place` int64[NUM_PLACES], `bounds` int64[MAX_BLOCKS]: four times the
    position at which a block begins, plus its kind. Token `t` is `text[ends[t]:ends[t + 1]]`, `plain[t]` as
    of `plain_tokens`.
    """
    vocab_size = ends.size - 1
    offset = place[NUM_TOKENS] - first
    place[NUM_TOKENS] = last + offset
    for i in range(first, last):
        t = tokens[i]
        position = i + offset
        size = 0
        if 0 <= t < vocab_size:
            size = ends[t + 1] - ends[t]
        place[_BYTES + position % _REACH] = size
        if size and plain[t] and advance_plain(state):
            kinds[i] = state[0]
            continue
        before = state[0]
        missing = 0
        if size:
            missing = advance_block(state, text, ends[t], ends[t + 1]) - size
        after = state[0]
        kinds[i] = before if after == 0 else after
        if after == before:
            continue
        num = place[NUM_BLOCKS]
        begin = position + 1 if after == 0 else position
        if after != 0:
            # The marker's earlier tokens come along, if they are in the block before and not in one that
            # was closed just now.
            low = max(bounds[num - 1] >> 2, position - _REACH + 1)
            while missing > 0 and begin > low:
                begin -= 1
                missing -= place[_BYTES + begin % _REACH]
                if begin - offset >= first:
                    kinds[begin - offset] = after
        if bounds[num - 1] >> 2 >= begin:
            bounds[num - 1] = begin * 4 + after
        elif num < MAX_BLOCKS:
            bounds[num] = begin * 4 + after
            place[NUM_BLOCKS] = num + 1
