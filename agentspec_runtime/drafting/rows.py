"""State of running requests as lines of flat arrays, so that one compiled call serves a batch.

A row is a place, not an identity: requests are known by id, `Drafter` maps ids to rows, and a row is
wiped when its request ends.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.arrays import RANKS, SlotArrays
from agentspec_runtime.drafting.blocks import STATE_SIZE
from agentspec_runtime.drafting.draft import Int32Array, Int64Array
from agentspec_runtime.drafting.survival import NUM_KEYS
from agentspec_runtime.drafting.walk import NUM_FIELDS

__all__ = ["Rows"]

_T = TypeVar("_T", bound=np.generic)


class Rows:
    """`fields` int64[N, NUM_FIELDS] (`walk.Field`), `block_state` int32[N, STATE_SIZE], `slots`."""

    def __init__(self, num_rows: int, max_draft: int) -> None:
        k = max_draft + 1
        s = k * RANKS
        self.num = num_rows
        self.fields: Int64Array = np.zeros((num_rows, NUM_FIELDS), np.int64)
        self.block_state: Int32Array = np.zeros((num_rows, STATE_SIZE), np.int32)
        self.slots = SlotArrays(
            key=np.zeros((num_rows, s, NUM_KEYS), np.int64),
            input=np.zeros((num_rows, s, NUM_KEYS), np.float32),
            p=np.zeros((num_rows, s), np.float32),
            selector=np.zeros((num_rows, s), np.int64),
            token=np.zeros((num_rows, s), np.int64),
            ranks=np.zeros((num_rows, k), np.int64),
            cell=np.zeros((num_rows, k), np.int64),
            raw=np.zeros((num_rows, k), np.float32),
            draft=np.zeros((num_rows, k), np.int32),
            num=np.zeros(num_rows, np.int64),
        )
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        """A wiped row; the arrays double when all are taken."""
        if not self._free:
            self._double()
        row = self._free.pop()
        self.fields[row] = 0
        self.slots.num[row] = 0
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
        self.slots = SlotArrays._make(_doubled(part) for part in self.slots)
        self._free.extend(range(self.num - 1, old - 1, -1))


def _doubled(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate([array, np.zeros_like(array)])
