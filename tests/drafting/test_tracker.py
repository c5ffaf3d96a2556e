"""Which block a token is reported in: markers whole, every answer, any number of answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from drafting_support import begin, make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import BLOCK_KINDS, BlockSpan, TokenTable
from agentspec_runtime.drafting.blocks import kind_code
from agentspec_runtime.drafting.tracker import BlockTracker

PIECES = (
    *("Hello", " ", "\n", "```", "`", "``", "py", "x=1", "\n```", "{}", "<tool_call>", "</tool_call>"),
    *("<", "tool", "_call", ">", ">\n<", "</", "see <tool", "<think>", "</think>", "[TOOL_CALLS]", "é", ""),
)
VOCABULARY = TokenTable([piece.encode() for piece in PIECES])
NAMES = "TCFR"  # text, code, tool call, reasoning: in the order of the codes


def tokens(pieces: Sequence[str]) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def blocks_of(*steps: Sequence[str], kind: str = "text") -> str:
    """Kind of each token as one letter, a stroke between blocks, of an answer that came in these steps."""
    tracker = BlockTracker(VOCABULARY)
    tracker.start("r", kind_code(kind))
    out, last = "", -1
    for step in steps:
        (spans,) = tracker.advance(["r"], [tokens(step)])
        assert sum(span.num_tokens for span in spans) == len(step)
        for span in spans:
            assert span.block >= last, "numbers never fall"
            out += "|" * (out != "" and span.block != last) + NAMES[span.kind] * span.num_tokens
            last = span.block
    return out


def one_each(pieces: Sequence[str]) -> list[list[str]]:
    return [[piece] for piece in pieces]


SPLIT = ["Hello", "<", "tool", "_call", ">", "\n", "{}", "</", "tool", "_call", ">", "\n"]


def test_a_marker_of_several_tokens_belongs_to_its_block() -> None:
    """In one step. The closing marker ends the block, its last token included."""
    assert blocks_of(SPLIT) == "T|FFFFFFFFFF|T"


def test_what_an_earlier_step_emitted_stays_where_it_was() -> None:
    assert blocks_of(SPLIT[:3], SPLIT[3:]) == "TTT|FFFFFFFF|T"
    assert blocks_of(*one_each(SPLIT)) == "TTTT|FFFFFFF|T"


def test_a_token_with_text_and_the_start_of_a_marker_belongs_to_the_marker() -> None:
    assert blocks_of(["Hello", "see <tool", "_call", ">", "{}"]) == "T|FFFF"


def test_an_answer_that_begins_with_a_marker_has_no_block_before_it() -> None:
    assert blocks_of(["<", "tool", "_call", ">", "{}"]) == "FFFFF"
    assert blocks_of(["`", "``", "py", "\n", "x=1", "\n", "```", "\n", "Hello"]) == "CCCCCCCC|T"


def test_a_token_that_closed_a_block_is_not_taken_out_of_it() -> None:
    """`>\\n<` ends one call and begins the next marker: it stays with the call that it ends."""
    answer = ["<tool_call>", "{}", "</", "tool", "_call", ">\n<", "tool", "_call", ">", "{}"]
    assert blocks_of(answer) == "FFFFFF|FFFF"


def test_fences() -> None:
    """All backticks and the line end of the closing fence are code; indentation before it is not."""
    assert blocks_of(["Hello", "\n", " ", "`", "``", "py", "\n", "x=1", "\n```", "\n", "Hello"]) == (
        "TTT|CCCCCCC|T"
    )
    assert blocks_of(["Hello", "\n", "`", "`", "Hello"]) == "TTTTT", "two backticks open nothing"


@pytest.mark.parametrize("together", [True, False])
def test_markers_of_one_token_are_the_same_in_any_steps(together: bool) -> None:
    answer = ["<think>", "Hello", "</think>", "Hello", "\n", "```", "py", "\n", "x=1", "\n```", "\n",
              "<tool_call>", "{}", "</tool_call>", ""]  # fmt: skip
    steps = [answer] if together else one_each(answer)
    assert blocks_of(*steps) == "RRR|TT|CCCCCC|FFF|T"


def test_code_that_was_only_announced_ends_where_a_call_opens() -> None:
    assert blocks_of(["x=1", "\n", "<", "tool", "_call", ">", "{}"], kind="code") == "CC|FFFFF"


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.lists(st.integers(0, 40), max_size=10))
@settings(max_examples=200, deadline=None)
def test_it_says_what_the_drafter_says_but_for_markers(answer: list[str], cuts: list[int]) -> None:
    """The drafter tells blocks at each token, so its steps do not matter. Ours differ from that only by
    tokens that moved forward, out of a block into the one that follows it.
    """
    drafter = make_drafter(vocabulary=VOCABULARY)
    begin(drafter, "r", [0])
    tracker = BlockTracker(VOCABULARY)
    tracker.start("r", 0)
    bounds = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    told: list[tuple[int, int]] = []
    plain: list[tuple[int, int]] = []
    for start, end in pairwise(bounds):
        step = tokens(answer[start:end])
        for spans, out in (
            (tracker.advance(["r"], [step])[0], told),
            (drafter.observe("r", step, 0).spans, plain),
        ):
            for span in spans:
                out += [(span.block, span.kind)] * span.num_tokens
    assert len(told) == len(plain) == len(answer)
    assert [block for block, _ in told] == sorted(block for block, _ in told)
    for (block, kind), (block_before, kind_before) in zip(told, plain, strict=True):
        assert (block, kind) == (block_before, kind_before) or (block == block_before + 1 and kind != 0)


def test_answers_do_not_mix_and_rows_are_used_again() -> None:
    """Two hundred answers, each with a block of its own, in one step each; ids come back fresh."""
    tracker = BlockTracker(VOCABULARY)
    names = [f"r{i}" for i in range(200)]
    for i, name in enumerate(names):
        tracker.start(name, i % len(BLOCK_KINDS))
    hello = tokens(["Hello"])
    assert tracker.advance(names, [hello] * 200) == [
        (BlockSpan(0, i % len(BLOCK_KINDS), 1),) for i in range(200)
    ]
    assert tracker.advance(names[::3], [tokens(["<tool_call>"])] * 67)[0] == (BlockSpan(1, 2, 1),)
    for name in names:
        tracker.finish(name)
        tracker.finish(name)
    assert len(tracker) == 0
    tracker.start("r0", 0)
    tracker.start("r0", 0)
    assert len(tracker) == 1
    assert tracker.advance(["r0"], [hello]) == [(BlockSpan(0, 0, 1),)]


def test_what_is_not_known_is_prose() -> None:
    """An answer that was not started, ids outside of the vocabulary, a step without tokens."""
    tracker = BlockTracker(VOCABULARY)
    tracker.start("r", 1)
    assert tracker.advance(["ghost", "r"], [tokens(["<tool_call>", "{}"]), []]) == [(BlockSpan(0, 0, 2),), ()]
    assert tracker.advance(["r"], [[-1, 10**9]]) == [(BlockSpan(0, 1, 2),)]
    opaque = BlockTracker(TokenTable.opaque(8))
    opaque.start("r", 0)
    assert opaque.advance(["r"], [[1, 2, 3]]) == [(BlockSpan(0, 0, 3),)]
