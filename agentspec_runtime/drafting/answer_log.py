"""How the accounts of running answers lie in memory, and the two compiled calls that write and read them.

`answers.py` says what is kept and why; it owns the arrays.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from agentspec_runtime.drafting.draft import SOURCES, Int32Array, Int64Array
from agentspec_runtime.drafting.tracker import follow_blocks

__all__ = [
    "BETWEEN",
    "BLOCK_SIZE",
    "LINE_SIZE",
    "TOKENS",
    "Float64Array",
    "RowArrays",
    "enter_step",
    "read_log",
]

Float64Array: TypeAlias = npt.NDArray[np.float64]

# A line. Of the first of a step: emitted tokens; run of draft tokens of one source; accepted and discarded
# tokens of the whole draft; requests and draft tokens of the whole step. Of the others only the run.
TOKENS: Final = 0
_DRAFTED = 1
_SOURCE = 2
_ACCEPTED = 3
_DISCARDED = 4
_BATCH = 5
_BUDGET = 6
LINE_SIZE: Final = 7
_GOES_ON = -1
"""In place of emitted tokens: another run of the same step's draft."""

# A block that is being read: tokens, steps, number of its first step, sums over its steps, and from `_CELLS`
# on drafted, accepted, discarded by source.
_STEPS = 1
_FIRST_STEP = 2
_SUM_BATCH = 3
_SUM_BUDGET = 4
_CELLS = 5
_NUM_SOURCES: Final = len(SOURCES)
BLOCK_SIZE: Final = _CELLS + 3 * _NUM_SOURCES

BETWEEN: Final = b"\xff"
"""Behind the sources of a draft: no code of `SOURCES`."""


class RowArrays(NamedTuple):
    """N rows: `state` int32[N, STATE_SIZE], `place` int64[N, NUM_PLACES], `bounds` int64[N, MAX_BLOCKS],
    `num_lines` int64[N], `lines` int32[N, L, LINE_SIZE], `times` float64[N, L, 2]: end and duration.
    """

    state: Int32Array
    place: Int64Array
    bounds: Int64Array
    num_lines: Int64Array
    lines: Int32Array
    times: Float64Array


@njit(cache=True)
def enter_step(
    arrays, rows, tokens, offsets, text, ends, plain, codes, num_sampled,
    end_s, duration_s, batch, budget, limit, totals,
):  # fmt: skip
    """See `Answers.add_step`; returns how many rows have to be moved. `codes`: sources of the drafts, behind
    each of them a `BETWEEN`; empty where nobody had one.
    """
    kinds = np.empty(tokens.size, np.int8)
    num_full = 0
    drafts_end = -1
    for a in range(rows.size):
        drafts_begin = drafts_end + 1
        if codes.size:
            drafts_end = drafts_begin
            while drafts_end < codes.size and codes[drafts_end] >= 0:
                drafts_end += 1
        first, last = offsets[a], offsets[a + 1]
        if first == last:
            continue
        r = rows[a]
        follow_blocks(
            arrays.state[r], arrays.place[r], arrays.bounds[r], tokens, first, last, text, ends, plain, kinds
        )
        num = arrays.num_lines[r]
        line = arrays.lines[r, num]
        line[:] = 0
        line[TOKENS] = last - first
        line[_BATCH] = batch
        line[_BUDGET] = budget
        arrays.times[r, num, 0] = end_s
        arrays.times[r, num, 1] = duration_s
        num += 1
        if codes.size:
            draft = codes[drafts_begin:drafts_end]
            verified = min(max(num_sampled[a] - 1, 0), draft.size)
            accepted = min(verified, last - first)
            line[_ACCEPTED] = accepted
            line[_DISCARDED] = verified - accepted
            for i in range(draft.size):
                source = draft[i]
                cell = totals[kinds[min(first + i, last - 1)], source]
                cell[0] += 1
                cell[1] += i < accepted
                cell[2] += accepted <= i < verified
                if line[_DRAFTED] == 0:
                    line[_SOURCE] = source
                elif line[_SOURCE] != source and num < arrays.lines.shape[1]:
                    line = arrays.lines[r, num]
                    line[:] = 0
                    line[TOKENS] = _GOES_ON
                    line[_SOURCE] = source
                    num += 1
                line[_DRAFTED] += 1
        arrays.num_lines[r] = num
        num_full += num >= limit
    return num_full


@njit(cache=True)
def read_log(lines, times, bounds, kept, table, ends, drafted, accepted, durations):
    """Charge every token of an answer to its block and step; see `Answers.read`. Returns the steps."""
    position = 0
    step = 0
    b = 0
    at = 0
    while at < lines.shape[0]:
        num = lines[at, TOKENS]
        verified = lines[at, _ACCEPTED] + lines[at, _DISCARDED]
        good = min(lines[at, _ACCEPTED], max(kept - position, 0))
        run = at
        left = lines[run, _DRAFTED]
        i = 0
        while i < num or left > 0:
            if i < num:
                while b + 1 < table.shape[0] and bounds[b + 1] >> 2 <= position + i:
                    b += 1
                table[b, TOKENS] += position + i < kept
                ends[b] = times[at, 0]
            if i == 0:
                if table[b, _STEPS] == 0:
                    table[b, _FIRST_STEP] = step
                table[b, _STEPS] += 1
                table[b, _SUM_BATCH] += lines[at, _BATCH]
                table[b, _SUM_BUDGET] += lines[at, _BUDGET]
            if left > 0:
                cell = _CELLS + 3 * lines[run, _SOURCE]
                table[b, cell] += 1
                table[b, cell + 1] += i < good
                table[b, cell + 2] += good <= i < verified
                drafted[step] += 1
                left -= 1
                if left == 0 and run + 1 < lines.shape[0] and lines[run + 1, TOKENS] == _GOES_ON:
                    run += 1
                    left = lines[run, _DRAFTED]
            i += 1
        accepted[step] = good
        durations[step] = times[at, 1]
        position += num
        step += 1
        at = run + 1
    return step
