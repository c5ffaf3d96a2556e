"""The block automaton: delimiters split over tokens in any way, CommonMark's fences, calls, reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from drafting_support import begin, make_drafter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import BLOCK_KINDS, TokenTable
from agentspec_runtime.drafting.blocks import STATE_SIZE, advance_block, kind_code, start_block
from agentspec_runtime.hints import SegmentKind

TEXT, CODE, CALL, REASONING = (kind_code(kind) for kind in ("text", "code", "tool_call", "reasoning"))


def feed(state: np.ndarray, data: bytes) -> int:
    """Kind of the block after these bytes."""
    buffer = np.frombuffer(data + b"\0", np.uint8)
    advance_block(state, buffer, 0, len(data))
    return int(state[0])


def fresh(kind: int = TEXT) -> np.ndarray:
    state = np.zeros(STATE_SIZE, np.int32)
    start_block(state, kind)
    return state


def kinds_of(pieces: Sequence[str], kind: int = TEXT) -> list[int]:
    """Kind after each piece."""
    state = fresh(kind)
    return [feed(state, piece.encode()) for piece in pieces]


def lines(text: str, kind: int = TEXT) -> str:
    """Kind after each line, as one letter: Text, Code, tool_call (F), Reasoning."""
    return "".join("TCFR"[k] for k in kinds_of(text.splitlines(keepends=True), kind))


PROSE = ["\n", "\n\n", " ", "\t", "\r\n", "a", "python", "x = 1", "é", "日本", "🍸", '{"a": "']
TICKS = ["`", "``", "```", "````"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<", "<tool", "_call>", "</"]
fragments = st.sampled_from(PROSE + TICKS + MARKERS)
documents = st.lists(fragments, max_size=40).map("".join)


@given(document=documents, cuts=st.lists(st.integers(0, 400), max_size=40), kind=st.integers(0, 3))
@settings(max_examples=300, deadline=None)
@example(document="```python\nx\n```\n", cuts=list(range(20)), kind=0)
def test_any_way_of_splitting_gives_the_same_blocks(document: str, cuts: list[int], kind: int) -> None:
    """Split anywhere, also inside a character: the state after each piece is that of the whole prefix."""
    data = document.encode()
    bounds = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    piecewise = fresh(kind)
    for start, end in pairwise(bounds):
        feed(piecewise, data[start:end])
        whole = fresh(kind)
        feed(whole, data[:end])
        assert piecewise.tolist() == whole.tolist()


def commonmark(document: str) -> str:
    """Kind after each whole line by CommonMark's rules for backtick fences, with any indentation."""
    out, fence = "", 0
    for line in document.split("\n")[:-1]:
        body = line.strip(" \t\r")
        ticks = len(body) - len(body.lstrip("`"))
        if not fence:
            fence = ticks if ticks >= 3 and "`" not in body[ticks:] else 0
        elif ticks >= fence and ticks == len(body):
            fence = 0
        out += "C" if fence else "T"
    return out


@given(
    document=st.lists(
        st.sampled_from(["`", "``", "```", "````", "\n", " ", "a", "\r\n", "python", "  ", "x = `y`"]),
        max_size=40,
    ).map(lambda parts: "".join(parts) + "\n")
)
@settings(max_examples=500, deadline=None)
@example(document="```a```\ntext\n")
@example(document="``` `\n")
@example(document="````\n```\n````\n")
def test_fences_follow_commonmark(document: str) -> None:
    state, found = fresh(), ""
    for line in re.findall(r"[^\n]*\n", document):
        found += "TCFR"[feed(state, line.encode())]
    assert found == commonmark(document)


def test_a_shorter_fence_inside_a_longer_one_stays_inside() -> None:
    assert lines("````md\n```py\nx\n```\n````\nafter\n") == "CCCCTT"


def test_a_fence_must_stand_alone_to_close() -> None:
    assert lines("```\nx ```\n``` y\n```\nafter\n") == "CCCTT"


def test_inline_code_is_prose() -> None:
    assert lines("use ```x``` or\n```pip install x``` here\nand more\n") == "TTT"


def test_an_unclosed_fence_stays_code() -> None:
    assert lines("```python\nx = 1\n\n\ny = 2\n") == "CCCCC"


def test_a_fence_in_a_list_is_code() -> None:
    assert lines("1. do\n   ```sh\n   ls\n   ```\n2. done\n") == "TCCTT"


def test_windows_line_ends() -> None:
    assert kinds_of(["```py\r\n", "x\r\n", "```\r\n", "after\r\n"]) == [CODE, CODE, TEXT, TEXT]


def test_fences_inside_a_tool_call_are_text_of_the_call() -> None:
    call = json.dumps({"name": "write", "arguments": {"text": "```python\nx = 1\n```\n"}})
    assert lines(f"I write it.\n<tool_call>\n{call}\n</tool_call>\ndone\n") == "TFFTT"
    assert lines("<tool_call>\n```python\nx\n```\n</tool_call>\n") == "FFFFT"


def test_a_tool_call_after_code_and_after_another_call() -> None:
    assert lines("```\nx\n```\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>\n") == "CCTFFTFFT"


def test_call_markers_inside_code_are_code() -> None:
    """An agent that writes about agents: `<tool_call>` in a program opens nothing."""
    assert lines('```python\nprint("<tool_call>")\n```\nafter\n') == "CCTT"


def test_reasoning_with_code_in_it_is_reasoning() -> None:
    assert lines("<think>\nmaybe\n```\nx\n```\n</think>\nanswer\n```\ny\n```\n") == "RRRRRTTCCT"


@pytest.mark.parametrize(
    ("opener", "closer"),
    [
        ("<tool_call>", "</tool_call>"),
        ("<function=read>", "</function>"),
        ("[TOOL_CALLS]", None),
        ("<|python_tag|>", None),
    ],
)
def test_markers_of_other_models(opener: str, closer: str | None) -> None:
    assert kinds_of(["Sure. ", opener, '{"a": 1}']) == [TEXT, CALL, CALL]
    if closer:
        assert kinds_of([opener, "{}", closer, "ok"])[-2:] == [TEXT, TEXT]


@pytest.mark.parametrize(
    "text", ["<<tool_call>", "<tool<tool_call>", "</</tool_call><tool_call>", "a<tool_call>"]
)
def test_false_starts_before_a_marker(text: str) -> None:
    assert kinds_of([text]) == [CALL]


@pytest.mark.parametrize(
    "text", ["<tool call>", "<tool_cal>", "tool_call>", "<TOOL_CALL>", "</tool_call>", "</think>"]
)
def test_what_is_no_marker(text: str) -> None:
    assert kinds_of([text]) == [TEXT]


def test_an_answer_expected_to_be_code_stays_code_over_empty_lines() -> None:
    """A hint says that code comes, and it comes without a fence."""
    assert lines("import os\n\ndef f():\n\n    pass\n", CODE) == "CCCCC"


def test_a_fence_in_an_answer_expected_to_be_code_opens_it() -> None:
    assert lines("```python\nx\n\n```\nThat was it.\n", CODE) == "CCCTT"
    assert lines("\n```\nx\n```\nThat was it.\n", CODE) == "CCCTT"


def test_a_call_in_an_answer_expected_to_be_code_is_a_call() -> None:
    assert lines("<tool_call>\n{}\n</tool_call>\nok\n", CODE) == "FFTT"


def test_an_answer_that_begins_in_reasoning_or_a_call_ends_it() -> None:
    assert lines("hm\n</think>\nanswer\n", REASONING) == "RTT"
    assert kinds_of(["hm", "</think>", "```a", "\n"], REASONING) == [REASONING, TEXT, TEXT, TEXT], "mid-line"
    assert lines('{"name": "f"}\n</tool_call>\nok\n', CALL) == "FTT"


@pytest.mark.parametrize("kind", ["system", "file", "tool_result", "user", "a kind of the future"])
def test_kinds_that_an_answer_cannot_hold_count_as_prose(kind: str) -> None:
    assert kind_code(kind) == TEXT


def test_codes_are_positions_of_the_kinds() -> None:
    assert [BLOCK_KINDS[kind_code(k)] for k in BLOCK_KINDS] == list(BLOCK_KINDS)
    assert SegmentKind.TOOL_CALL in BLOCK_KINDS


# Through the drafter: which token belongs to which block

PIECES = [
    "Hello",
    "\n",
    "```",
    "py",
    "x=1",
    "<tool_call>",
    "{}",
    "</tool_call>",
    "\n```",
    "``",
    "`",
    "<think>",
    "</think>",
]


def spans_of(pieces: Sequence[str], *, together: bool) -> list[tuple[int, SegmentKind, int]]:
    """(block, kind, tokens) of an answer made of these tokens, in one step or in one each."""
    vocabulary = TokenTable([p.encode() for p in PIECES])
    drafter = make_drafter(vocabulary=vocabulary)
    begin(drafter, "r", [0])
    numbers = [PIECES.index(p) for p in pieces]
    steps = [numbers] if together else [[n] for n in numbers]
    runs: list[tuple[int, SegmentKind, int]] = []
    for step in steps:
        for span in drafter.observe("r", step, 0).spans:
            kind = BLOCK_KINDS[span.kind]
            if runs and runs[-1][0] == span.block:
                assert runs[-1][1] == kind, "a block has one kind"
                runs[-1] = (span.block, kind, runs[-1][2] + span.num_tokens)
            else:
                runs.append((span.block, kind, span.num_tokens))
    return runs


@pytest.mark.parametrize("together", [True, False])
def test_delimiters_belong_to_their_block(together: bool) -> None:
    answer = [
        "Hello",
        "\n",
        "```",
        "py",
        "\n",
        "x=1",
        "\n",
        "```",
        "\n",
        "<tool_call>",
        "{}",
        "</tool_call>",
        "Hello",
    ]
    assert spans_of(answer, together=together) == [
        (0, SegmentKind.TEXT, 2),
        (1, SegmentKind.CODE, 7),
        (3, SegmentKind.TOOL_CALL, 3),
        (4, SegmentKind.TEXT, 1),
    ]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
@settings(max_examples=100, deadline=None)
def test_blocks_do_not_depend_on_how_tokens_fall_into_steps(answer: list[str]) -> None:
    """And they add up: every token is in exactly one block, blocks are numbered in order."""
    together = spans_of(answer, together=True)
    assert together == spans_of(answer, together=False)
    assert sum(n for _, _, n in together) == len(answer)
    numbers = [block for block, _, _ in together]
    assert numbers == sorted(set(numbers))
