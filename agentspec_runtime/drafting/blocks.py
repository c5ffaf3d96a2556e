"""Which structural block the next token of an answer belongs to: prose, code fence, tool call, reasoning.

An automaton over the bytes of the emitted tokens, so a delimiter may be split over tokens in any way.
Rules, in the order in which they bind:

- A tool call runs from an opener (`<tool_call>`, `[TOOL_CALLS]`, ...) to its closer. Fences inside its
  JSON are text of the call, not code.
- Reasoning runs from `<think>` to `</think>`.
- A code fence opens with three or more backticks at the start of a line and closes with at least as
  many, alone on their line (CommonMark), so a shorter fence inside a longer one stays inside. Another
  backtick on the opening line makes it inline code after all.
- An answer may begin in a block because a hint says so. Code that was only announced has no fence to
  close: it lasts until something opens.

It sees only what the model emits. Text of users and tools cannot forge a block, and a block changes
nothing but how likely a draft is thought to be.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit

from agentspec_runtime.drafting.draft import BLOCK_KINDS, Int32Array, Int64Array
from agentspec_runtime.hints import SegmentKind

__all__ = ["STATE_SIZE", "advance_block", "advance_plain", "kind_code", "plain_tokens", "start_block"]

_TEXT: Final = 0
_CODE: Final = 1
_CALL: Final = 2
_REASONING: Final = 3

_PATTERNS: Final[tuple[tuple[bytes, int, int], ...]] = (
    # delimiter, block in which it counts, block that it leads to
    (b"<tool_call>", _TEXT, _CALL),
    (b"[TOOL_CALLS]", _TEXT, _CALL),
    (b"<|python_tag|>", _TEXT, _CALL),
    (b"<function=", _TEXT, _CALL),
    (b"<think>", _TEXT, _REASONING),
    (b"</tool_call>", _CALL, _TEXT),
    (b"</function>", _CALL, _TEXT),
    (b"</think>", _REASONING, _TEXT),
)
_PATTERN_BYTES = np.frombuffer(b"".join(p for p, _, _ in _PATTERNS), np.uint8).copy()
_PATTERN_ENDS = np.cumsum([len(p) for p, _, _ in _PATTERNS]).astype(np.int64)
_PATTERN_FROM = np.array([f for _, f, _ in _PATTERNS], np.int64)
_PATTERN_TO = np.array([t for _, _, t in _PATTERNS], np.int64)
_NUM_PATTERNS = len(_PATTERNS)
_STARTS = np.zeros(256, np.bool_)
_STARTS[[p[0] for p, _, _ in _PATTERNS]] = True

# State of one answer, int32[STATE_SIZE]: block kind; backticks of the open fence (0 in code that was only
# announced); length of the present run of backticks (-1: not at the start of a line); 1 while on the line
# that opened the fence; 1 if a closing fence waits for its line end; patterns that have begun to match; then
# how far each pattern has matched.
_KIND = 0
_FENCE = 1
_TICKS = 2
_OPENING = 3
_CLOSING = 4
_MATCHING = 5
_PROGRESS = 6
STATE_SIZE: Final = _PROGRESS + _NUM_PATTERNS

_FENCE_BYTES = 3
"""Backticks with which a fence opens."""
_NEWLINE = ord("\n")
_TICK = ord("`")
_SPACE = ord(" ")
_TAB = ord("\t")
_RETURN = ord("\r")


def kind_code(kind: str) -> int:
    """Code of a block kind; a kind that an answer cannot hold counts as prose."""
    try:
        return BLOCK_KINDS.index(SegmentKind(kind))
    except ValueError:
        return _TEXT


def start_block(state: Int32Array, kind: int) -> None:
    """Begin an answer in the given block."""
    state[:] = 0
    state[_KIND] = kind


def plain_tokens(text: npt.NDArray[np.uint8], ends: Int64Array) -> npt.NDArray[np.bool_]:
    """Which tokens `text[ends[t]:ends[t + 1]]` hold no delimiter, nor the begin of one or of a line: most."""
    special = _STARTS[text] | (text == _NEWLINE) | (text == _TICK)
    blank = (text == _SPACE) | (text == _TAB) | (text == _RETURN)
    num_special, num_other = (
        np.diff(np.concatenate([[0], np.cumsum(found)])[ends]) for found in (special, ~special & ~blank)
    )
    plain: npt.NDArray[np.bool_] = (num_special == 0) & (num_other > 0)
    return plain


@njit(cache=True, inline="always")
def advance_plain(state):
    """`advance_block` with a token of `plain_tokens`; False where that does not do."""
    if state[_MATCHING] > 0:
        return False
    if state[_KIND] in (_TEXT, _CODE):
        state[_TICKS] = -1
        state[_CLOSING] = 0
    return True


@njit(cache=True, inline="always")
def _fence(state, byte):
    """Follow backticks at the start of a line; returns the block kind after this byte."""
    kind = state[_KIND]
    ticks = state[_TICKS]
    fence = state[_FENCE]
    if byte == _NEWLINE:
        closed = state[_CLOSING] == 1 or ticks >= fence
        if kind == _CODE and fence > 0 and state[_OPENING] == 0 and closed:
            kind = _TEXT
            state[_FENCE] = 0
        state[_TICKS] = 0
        state[_OPENING] = 0
        state[_CLOSING] = 0
    elif byte == _TICK and state[_OPENING] == 1 and ticks < 0:
        kind = _TEXT
        state[_FENCE] = 0
        state[_OPENING] = 0
    elif byte == _TICK and ticks >= 0 and state[_CLOSING] == 0:
        state[_TICKS] = ticks + 1
        if state[_OPENING] == 1:
            state[_FENCE] += 1
        elif fence == 0 and ticks == 2:
            kind = _CODE
            state[_FENCE] = 3
            state[_OPENING] = 1
    elif byte in (_SPACE, _TAB, _RETURN):
        if ticks > 0:
            if kind == _CODE and state[_OPENING] == 0 and ticks >= fence > 0:
                state[_CLOSING] = 1
            state[_TICKS] = -1
    else:
        state[_TICKS] = -1
        state[_CLOSING] = 0
    return kind


@njit(cache=True)
def advance_block(state, text, start, end):
    """Feed the bytes `text[start:end]` of one token to the automaton.

    Returns how many bytes back from `end` the marker began that opened a block in them; 0 if none did.
    """
    opened = 0
    for i in range(start, end):
        byte = text[i]
        kind = state[_KIND]
        if kind in (_TEXT, _CODE):
            kind = _fence(state, byte)
            if kind == _CODE and state[_KIND] == _TEXT:
                opened = _FENCE_BYTES + end - 1 - i
        if state[_MATCHING] == 0 and not _STARTS[byte]:  # nearly every byte
            state[_KIND] = kind
            continue
        state[_MATCHING] = 0
        begin = 0
        for k in range(_NUM_PATTERNS):
            size = _PATTERN_ENDS[k] - begin
            at = state[_PROGRESS + k]
            if byte == _PATTERN_BYTES[begin + at]:
                at += 1
            else:
                at = 1 if byte == _PATTERN_BYTES[begin] else 0
            if at == size:
                at = 0
                announced = kind == _CODE and state[_FENCE] == 0 and _PATTERN_FROM[k] == _TEXT
                if kind == state[_KIND] and (kind == _PATTERN_FROM[k] or announced):
                    kind = _PATTERN_TO[k]
                    state[_TICKS] = -1
                    if kind != _TEXT:
                        opened = size + end - 1 - i
            state[_PROGRESS + k] = at
            state[_MATCHING] += at > 0
            begin = _PATTERN_ENDS[k]
        state[_KIND] = kind
    return opened
