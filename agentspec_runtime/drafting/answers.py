"""Accounts of the answers under way: the block of each token, what was drafted, what became of it.

A step enters all of its answers with one compiled call (`Answers.add_step`), and what a person reads is made
once, when an answer ends (`Answers.read`). Until then an answer is a row of flat arrays: where its blocks
begin (`tracker.py`), and a line for each step, or several where a draft was copied from several sources.
Who is charged with what is decided when it is read, token by token:

- A draft token that was accepted belongs to the block it was emitted in; what was not accepted is charged
  to the block in which the draft ended.
- A step counts for the block of its first token.

A row has room for some lines; the full ones move to arrays of their own answer, so memory goes with it. An
answer has no more steps than tokens, and a line is smaller than what an engine keeps of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.answer_log import (
    BETWEEN,
    BLOCK_SIZE,
    LINE_SIZE,
    TOKENS,
    Float64Array,
    RowArrays,
    enter_step,
    read_log,
)
from agentspec_runtime.drafting.blocks import STATE_SIZE, plain_tokens
from agentspec_runtime.drafting.draft import BLOCK_KINDS, SOURCES, Int32Array, Int64Array
from agentspec_runtime.drafting.tracker import (
    MAX_BLOCKS,
    NUM_BLOCKS,
    NUM_PLACES,
    NUM_TOKENS,
    start_answer,
)
from agentspec_runtime.drafting.vocabulary import TokenTable

__all__ = ["AnswerAccount", "Answers", "BlockAccount", "StepContext"]

_ROWS: Final = 64
"""Answers that there is room for at first; it doubles."""
_LINES: Final = 96
"""Lines of a row, beside the room for one more step: every 96 steps an answer's lines are moved."""

_NO_IDS: Int64Array = np.zeros(0, np.int64)
_NO_SOURCES: npt.NDArray[np.int8] = np.zeros(0, np.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What all requests of a step share. Seconds since the epoch, seconds, requests, tokens."""

    end_s: float
    duration_s: float
    batch: int
    budget: int


class BlockAccount(NamedTuple):
    """One block of an answer. `kind` is a code of `BLOCK_KINDS`.

    `batch` and `budget` are sums over its `num_steps` steps, the first of which is step `first_step` of the
    answer. `verdicts[source]`: tokens drafted, accepted, discarded. `end_s`: of the last step that emitted
    a token of it, in seconds since the epoch.
    """

    kind: int
    num_tokens: int
    num_steps: int
    first_step: int
    batch: int
    budget: int
    verdicts: tuple[tuple[int, int, int], ...]
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAccount:
    """An answer as far as it has come. Arrays have an entry per step.

    `drafted` and `accepted` int32[S] in tokens; `duration_s` float64[S]; `first_end_s`: end of the first
    step in seconds since the epoch, 0.0 without one.
    """

    num_tokens: int
    blocks: tuple[BlockAccount, ...]
    drafted: Int32Array
    accepted: Int32Array
    duration_s: Float64Array
    first_end_s: float


class Answers:
    """See the module docstring. Not thread-safe: one engine loop owns it.

    `max_draft`: longest draft of one request and step, in tokens.
    """

    def __init__(self, vocabulary: TokenTable, max_draft: int) -> None:
        self._texts = (vocabulary.text, vocabulary.offsets, plain_tokens(vocabulary.text, vocabulary.offsets))
        num_lines = _LINES + max(max_draft, 1)
        self._arrays = RowArrays(
            state=np.zeros((_ROWS, STATE_SIZE), np.int32),
            place=np.zeros((_ROWS, NUM_PLACES), np.int64),
            bounds=np.zeros((_ROWS, MAX_BLOCKS), np.int64),
            num_lines=np.zeros(_ROWS, np.int64),
            lines=np.zeros((_ROWS, num_lines, LINE_SIZE), np.int32),
            times=np.zeros((_ROWS, num_lines, 2), np.float64),
        )
        self._rows: dict[str, int] = {}
        self._moved: dict[int, list[tuple[Int32Array, Float64Array]]] = {}
        self._free = list(range(_ROWS - 1, -1, -1))
        self._last_ids: list[str] | None = None
        self._last_rows = _NO_IDS
        self._compile()

    def __len__(self) -> int:
        return len(self._rows)

    def start(self, req_id: str, kind: int) -> None:
        """An answer begins, in a block of this kind (a code of `BLOCK_KINDS`)."""
        self.finish(req_id)
        self._begin(req_id, kind)

    def finish(self, req_id: str) -> None:
        """An answer is over and its account forgotten; unknown ids are ignored."""
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._moved.pop(row, None)
            self._free.append(row)
            self._last_ids = None

    def add_step(
        self,
        req_ids: Sequence[str],
        tokens: Int32Array,
        offsets: Int64Array,
        step: StepContext,
        sources: Mapping[str, bytes] = {},
        sampled: Mapping[str, int] = {},
    ) -> Int64Array:
        """Enter one step. Returns its sums, int64[kinds, sources, 3]: drafted, accepted, discarded.

        Answer `i` emitted `tokens[offsets[i]:offsets[i + 1]]`, stop handling done. `sources`: of each draft
        token, as bytes (codes of `SOURCES`). `sampled`: tokens that the worker returned before stop
        handling; 1 where it is not told. An answer that was not started begins as prose.

        Raises:
            ValueError: the lengths do not fit; nothing was entered.
        """
        if len(offsets) != len(req_ids) + 1 or offsets[-1] != len(tokens):
            raise ValueError(
                f"{len(req_ids)} answers, {len(offsets)} offsets up to {offsets[-1]}, {len(tokens)} tokens"
            )
        if req_ids != self._last_ids:  # in most steps they are the same
            self._last_rows = np.array([self._row_of(req_id) for req_id in req_ids], np.int64)
            self._last_ids = list(req_ids)
        rows = self._last_rows
        totals = np.zeros((len(BLOCK_KINDS), len(SOURCES), 3), np.int64)
        if sources:
            # Of a bytearray, because that of bytes is read-only: another type, to compile anew for.
            joined = bytearray(BETWEEN).join(map(sources.get, req_ids, repeat(b"")))
            codes = np.frombuffer(joined + BETWEEN, np.int8)
            num_sampled = np.fromiter(map(sampled.get, req_ids, repeat(1)), np.int64, len(req_ids))
        else:
            codes, num_sampled = _NO_SOURCES, _NO_IDS
        num_full = enter_step(
            self._arrays, rows, tokens, offsets, *self._texts, codes, num_sampled,
            float(step.end_s), float(step.duration_s), step.batch, step.budget, _LINES, totals,
        )  # fmt: skip
        if num_full:
            self._move_lines(rows)
        return totals

    def num_recent(self, req_id: str, num_steps: int) -> int:
        """Tokens that the last steps of an answer emitted, at most so many steps."""
        row = self._rows.get(req_id)
        if row is None:
            return 0
        emitted = self._log(row)[0][:, TOKENS]
        return int(emitted[emitted >= 0][-num_steps:].sum())

    def read(self, req_id: str, *, num_cut: int = 0) -> AnswerAccount:
        """The account of an answer; of an unknown one, that of an answer without a step.

        `num_cut`: so many of its last tokens lie behind its end and are left out. Their steps were run and
        stay counted; accepted draft tokens among them become discarded.
        """
        row = self._rows.get(req_id)
        if row is None:
            num_tokens, (lines, times, bounds) = 0, _EMPTY_LOG
        else:
            place = self._arrays.place[row]
            num_tokens = int(place[NUM_TOKENS])
            lines, times = self._log(row)
            bounds = self._arrays.bounds[row, : place[NUM_BLOCKS]]
        kept = max(num_tokens - num_cut, 0)
        num_blocks = len(bounds) - int(bounds[-1] >> 2 >= num_tokens)
        table = np.zeros((num_blocks, BLOCK_SIZE), np.int64)
        ends = np.zeros(num_blocks)
        drafted, accepted = np.zeros((2, len(lines)), np.int32)
        durations = np.zeros(len(lines))
        num_steps = read_log(lines, times, bounds, kept, table, ends, drafted, accepted, durations)
        return AnswerAccount(
            num_tokens=kept,
            blocks=tuple(map(_block, bounds.tolist(), table.tolist(), ends.tolist())),
            drafted=drafted[:num_steps],
            accepted=accepted[:num_steps],
            duration_s=durations[:num_steps],
            first_end_s=float(times[0, 0]) if num_steps else 0.0,
        )

    # Internals

    def _compile(self) -> None:
        """Compile the kernels (or load them) now, and not in the step of the first answer."""
        step = StepContext(end_s=0.0, duration_s=0.0, batch=0, budget=0)
        self.add_step([], np.zeros(0, np.int32), np.zeros(1, np.int64), step)
        self.read("")

    def _row_of(self, req_id: str) -> int:
        row = self._rows.get(req_id)
        return self._begin(req_id, 0) if row is None else row

    def _begin(self, req_id: str, kind: int) -> int:
        if not self._free:
            num = len(self._arrays.num_lines)
            self._arrays = RowArrays._make(
                np.concatenate([part, np.zeros_like(part)]) for part in self._arrays
            )
            self._free = list(range(2 * num - 1, num - 1, -1))
        row = self._rows[req_id] = self._free.pop()
        arrays = self._arrays
        start_answer(arrays.state[row], arrays.place[row], arrays.bounds[row], kind)
        arrays.num_lines[row] = 0
        return row

    def _log(self, row: int) -> tuple[Int32Array, Float64Array]:
        """All lines of an answer."""
        num = self._arrays.num_lines[row]
        lines, times = self._arrays.lines[row, :num], self._arrays.times[row, :num]
        if row not in self._moved:
            return lines, times
        moved = self._moved[row]
        return (
            np.concatenate([*(part for part, _ in moved), lines]),
            np.concatenate([*(part for _, part in moved), times]),
        )

    def _move_lines(self, rows: Int64Array) -> None:
        """Make room in the rows that are full."""
        arrays = self._arrays
        for row in rows[arrays.num_lines[rows] >= _LINES].tolist():
            num = arrays.num_lines[row]
            part = (arrays.lines[row, :num].copy(), arrays.times[row, :num].copy())
            self._moved.setdefault(row, []).append(part)
            arrays.num_lines[row] = 0


_EMPTY_LOG: Final = (
    np.zeros((0, LINE_SIZE), np.int32),
    np.zeros((0, 2), np.float64),
    np.zeros(1, np.int64),
)


def _block(bound: int, counts: Sequence[int], end_s: float) -> BlockAccount:
    num_tokens, num_steps, first_step, batch, budget, *cells = counts
    by_source = iter(cells)
    verdicts = tuple(zip(by_source, by_source, by_source, strict=True))
    return BlockAccount(bound & 3, num_tokens, num_steps, first_step, batch, budget, verdicts, end_s)
