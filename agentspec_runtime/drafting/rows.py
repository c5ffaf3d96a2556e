"""State of running requests as lines of flat arrays, so that one compiled call serves a batch.

A row is a place, not an identity: requests are known by id, `Drafter` maps ids to rows, and a row is
wiped when its request ends.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.blocks import STATE_SIZE
from agentspec_runtime.drafting.draft import Float32Array, Int32Array, Int64Array
from agentspec_runtime.drafting.survival import NUM_KEYS
from agentspec_runtime.drafting.walk import NUM_FIELDS, RANKS

__all__ = ["Rows"]

_T = TypeVar("_T", bound=np.generic)


class Rows:
    """N rows. With S = (K + 1) * RANKS scored candidates per draft of at most K tokens:

    `fields` int64[N, NUM_FIELDS] (`walk.Field`); `block_state` int32[N, STATE_SIZE];
    `slot_key` int64[N, S, NUM_KEYS], `slot_input` float32[N, S, NUM_KEYS], `slot_p` float32[N, S],
    `slot_selector` and `slot_token` int64[N, S]: what the verdict is learned from;
    `slot_ranks` int64[N, K + 1]: candidates scored per depth; `num_slots` int64[N]: depths scored;
    `last_draft` int32[N, K + 1].
    """

    def __init__(self, num_rows: int, max_draft: int) -> None:
        k = max_draft + 1
        s = k * RANKS
        self.num = num_rows
        self.fields: Int64Array = np.zeros((num_rows, NUM_FIELDS), np.int64)
        self.block_state: Int32Array = np.zeros((num_rows, STATE_SIZE), np.int32)
        self.slot_key: Int64Array = np.zeros((num_rows, s, NUM_KEYS), np.int64)
        self.slot_input: Float32Array = np.zeros((num_rows, s, NUM_KEYS), np.float32)
        self.slot_p: Float32Array = np.zeros((num_rows, s), np.float32)
        self.slot_selector: Int64Array = np.zeros((num_rows, s), np.int64)
        self.slot_token: Int64Array = np.zeros((num_rows, s), np.int64)
        self.slot_ranks: Int64Array = np.zeros((num_rows, k), np.int64)
        self.num_slots: Int64Array = np.zeros(num_rows, np.int64)
        self.last_draft: Int32Array = np.zeros((num_rows, k), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        """A wiped row; the arrays double when all are taken."""
        if not self._free:
            self._double()
        row = self._free.pop()
        self.fields[row] = 0
        self.num_slots[row] = 0
        return row

    def give_back(self, row: int) -> None:
        """End of a request."""
        self.fields[row] = 0
        self._free.append(row)

    def _double(self) -> None:
        old = self.num
        self.num = 2 * old
        self.fields = _doubled(self.fields)
        self.block_state = _doubled(self.block_state)
        self.slot_key = _doubled(self.slot_key)
        self.slot_input = _doubled(self.slot_input)
        self.slot_p = _doubled(self.slot_p)
        self.slot_selector = _doubled(self.slot_selector)
        self.slot_token = _doubled(self.slot_token)
        self.slot_ranks = _doubled(self.slot_ranks)
        self.num_slots = _doubled(self.num_slots)
        self.last_draft = _doubled(self.last_draft)
        self._free.extend(range(self.num - 1, old - 1, -1))


def _doubled(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate([array, np.zeros_like(array)])
