"""Which block each token of an answer is reported in.

The drafter follows blocks too, but only of answers that it drafts for, and it has to say at each token what
the next one belongs to. A report looks back: it wants blocks of every answer, drafted or not, and a marker
whole, though its first tokens (`<`, `tool`, ...) were prose until its last one came.

- A token that holds a byte of an opening marker (`<tool_call>`, `<think>`, the backticks of a fence)
  belongs to the block that the marker opens, if it was emitted in the step that completed the marker. What
  an earlier step emitted is counted already and stays where it is.
- A token that holds the last byte of a closing marker (of a fence: its line end) ends the block it closes.
- Indentation before a fence is prose, and so is the token that ends the answer outside of a block.

Blocks are numbered from 0 in the order in which they begin; a number may have no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np
from numba import njit

from agentspec_runtime.drafting.blocks import STATE_SIZE, advance_block, start_block
from agentspec_runtime.drafting.draft import BlockSpan
from agentspec_runtime.drafting.vocabulary import TokenTable

__all__ = ["BlockTracker"]

_ROWS: Final = 64
"""Answers that there is room for at first; it doubles."""


class BlockTracker:
    """Blocks of the answers under way. Not thread-safe: one engine loop owns it."""

    def __init__(self, vocabulary: TokenTable) -> None:
        self._vocabulary = vocabulary
        self._states = np.zeros((_ROWS, STATE_SIZE), np.int32)
        self._numbers = np.zeros(_ROWS, np.int32)
        self._rows: dict[str, int] = {}
        self._free = list(range(_ROWS - 1, -1, -1))
        self.advance((), ())  # compiles (or loads) the kernel now, and not in the step of the first answer

    def __len__(self) -> int:
        return len(self._rows)

    def start(self, req_id: str, kind: int) -> None:
        """An answer begins, in a block of this kind (a code of `BLOCK_KINDS`)."""
        row = self._rows.get(req_id)
        if row is None:
            row = self._rows[req_id] = self._take()
        start_block(self._states[row], kind)
        self._numbers[row] = 0

    def finish(self, req_id: str) -> None:
        """An answer is over; unknown ids are ignored."""
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._free.append(row)

    def advance(
        self, req_ids: Sequence[str], new_ids: Sequence[Sequence[int]]
    ) -> list[tuple[BlockSpan, ...]]:
        """Blocks of the tokens that one step emitted, one tuple per request.

        An answer that was not started is one block of prose.
        """
        offsets = np.zeros(len(req_ids) + 1, np.int64)
        np.cumsum([len(ids) for ids in new_ids], out=offsets[1:])
        tokens = np.fromiter(chain.from_iterable(new_ids), np.int64, int(offsets[-1]))
        rows = np.array([self._rows.get(req_id, -1) for req_id in req_ids], np.int64)
        kinds, blocks = np.zeros(tokens.size, np.int32), np.zeros(tokens.size, np.int32)
        texts = self._vocabulary
        state = (self._states, self._numbers)
        _track_rows(*state, rows, tokens, offsets, texts.text, texts.offsets, kinds, blocks)
        kind_list, block_list = kinds.tolist(), blocks.tolist()
        return [_spans(kind_list[a:b], block_list[a:b]) for a, b in pairwise(offsets.tolist())]

    def _take(self) -> int:
        if not self._free:
            size = len(self._numbers)
            self._states = np.concatenate([self._states, np.zeros_like(self._states)])
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()


def _spans(kinds: Sequence[int], blocks: Sequence[int]) -> tuple[BlockSpan, ...]:
    """Runs of one block; numbers never fall within an answer."""
    if not blocks:
        return ()
    if blocks[0] == blocks[-1]:
        return (BlockSpan(blocks[0], kinds[0], len(blocks)),)
    spans: list[BlockSpan] = []
    for block, kind in zip(blocks, kinds, strict=True):
        if spans and spans[-1].block == block:
            spans[-1] = BlockSpan(block, kind, spans[-1].num_tokens + 1)
        else:
            spans.append(BlockSpan(block, kind, 1))
    return tuple(spans)


@njit(cache=True)
def _track_rows(states, numbers, rows, tokens, offsets, text, bounds, kinds, blocks):
    """Block of each token; row -1 is skipped. Token `t` is `text[bounds[t]:bounds[t + 1]]`."""
    size = bounds.size - 1
    for a in range(rows.size):
        r = rows[a]
        if r < 0:
            continue
        state = states[r]
        first = offsets[a]
        for i in range(first, offsets[a + 1]):
            t = tokens[i]
            before = state[0]
            missing = 0
            if 0 <= t < size:
                missing = advance_block(state, text, bounds[t], bounds[t + 1]) - (bounds[t + 1] - bounds[t])
            after = state[0]
            if after != before and after != 0:
                # The marker's earlier tokens come along, if they are in the block before and not in one
                # that was closed just now.
                j = i - 1
                while missing > 0 and j >= first and blocks[j] == numbers[r]:
                    u = tokens[j]
                    if 0 <= u < size:
                        missing -= bounds[u + 1] - bounds[u]
                    kinds[j] = after
                    blocks[j] = numbers[r] + 1
                    j -= 1
                numbers[r] += 1
            kinds[i] = before if after == 0 else after
            blocks[i] = numbers[r]
            if after != before and after == 0:
                numbers[r] += 1
