"""Which block a token is reported in: markers whole, every answer, any number of answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from drafting_support import begin, make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import BLOCK_KINDS, TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.drafting.blocks import kind_code

PIECES = (
    *("Hello", " ", "\n", "```", "`", "``", "py", "x=1", "\n```", "{}", "<tool_call>", "</tool_call>"),
    *("<", "tool", "_call", ">", ">\n<", "</", "see <tool", "<think>", "</think>", "[TOOL_CALLS]", "é", ""),
)
VOCABULARY = TokenTable([piece.encode() for piece in PIECES])
NAMES = "TCFR"  # text, code, tool call, reasoning: in the order of the codes


def tokens(pieces: Sequence[str]) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def emit(answers: Answers, **new_ids: Sequence[int]) -> None:
    """One step, without drafts."""
    ids = [token for tokens in new_ids.values() for token in tokens]
    offsets = np.cumsum([0, *map(len, new_ids.values())])
    step = StepContext(end_s=1.0, duration_s=0.1, batch=len(new_ids), budget=0)
    answers.add_step(list(new_ids), np.array(ids, np.int32), offsets, step)


def told(answers: Answers, req_id: str) -> list[tuple[int, int]]:
    """Kind and number of tokens of each block."""
    return [(block.kind, block.num_tokens) for block in answers.read(req_id).blocks]


@cache
def shared() -> Answers:
    return Answers(VOCABULARY, 8)


def blocks_of(*steps: Sequence[str], kind: str = "text") -> str:
    """Kind of each token as one letter, a stroke between blocks, of an answer that came in these steps."""
    answers = shared()
    answers.start("r", kind_code(kind))
    for step in steps:
        emit(answers, r=tokens(step))
    return "|".join(NAMES[kind] * num_tokens for kind, num_tokens in told(answers, "r"))


def one_each(pieces: Sequence[str]) -> list[list[str]]:
    return [[piece] for piece in pieces]


SPLIT = ["Hello", "<", "tool", "_call", ">", "\n", "{}", "</", "tool", "_call", ">", "\n"]


def test_a_marker_of_several_tokens_belongs_to_its_block() -> None:
    """In one step or several. The closing marker ends the block, its last token included."""
    assert blocks_of(SPLIT) == "T|FFFFFFFFFF|T"
    assert blocks_of(*one_each(SPLIT)) == "T|FFFFFFFFFF|T"
    for cut in range(len(SPLIT)):
        assert blocks_of(SPLIT[:cut], SPLIT[cut:]) == "T|FFFFFFFFFF|T"


def test_a_marker_that_comes_to_nothing_is_text() -> None:
    assert blocks_of(*one_each(["Hello", "<", "tool", "_call", "Hello", ">"])) == "TTTTTT"
    assert blocks_of(*one_each(["<", "<", "tool", "_call", ">", "{}"])) == "T|FFFFF"


def test_a_marker_of_single_bytes_is_whole() -> None:
    """The longest one there is, byte by byte, a step each."""
    marker = "<|python_tag|>"
    answers = Answers(TokenTable([bytes([byte]) for byte in range(128)]), 8)
    answers.start("r", 0)
    for char in f"say: {marker}go":
        emit(answers, r=[ord(char)])
    assert told(answers, "r") == [(0, 5), (2, len(marker) + 2)]


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
@settings(max_examples=100, deadline=None)
def test_steps_do_not_matter(answer: list[str], cuts: list[int]) -> None:
    """However an answer was cut into steps, its blocks are the same."""
    bounds = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    assert blocks_of(*(answer[a:b] for a, b in pairwise(bounds))) == blocks_of(answer)


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.lists(st.integers(0, 40), max_size=10))
@settings(max_examples=100, deadline=None)
def test_it_says_what_the_drafter_says_but_for_markers(answer: list[str], cuts: list[int]) -> None:
    """The drafter tells blocks at each token, so its steps do not matter. Ours differ from that only by
    tokens that moved forward, out of a block into the one that follows it.
    """
    drafter = make_drafter(vocabulary=VOCABULARY)
    begin(drafter, "r", [0])
    answers = shared()
    answers.start("r", 0)
    bounds = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    plain: list[tuple[int, int]] = []
    for start, end in pairwise(bounds):
        step = tokens(answer[start:end])
        emit(answers, r=step)
        for span in drafter.observe("r", step, 0).spans:
            plain += [(span.block, span.kind)] * span.num_tokens
    ours = [kind for kind, num_tokens in told(answers, "r") for _ in range(num_tokens)]
    assert len(ours) == len(plain) == len(answer)
    follows = dict(reversed(plain))
    for kind, (block, kind_before) in zip(ours, plain, strict=True):
        assert kind == kind_before or (kind == follows[block + 1] and kind != 0)


def test_answers_do_not_mix_and_rows_are_used_again() -> None:
    """Two hundred answers, each with a block of its own, in one step each; ids come back fresh."""
    answers = Answers(VOCABULARY, 8)
    names = [f"r{i}" for i in range(200)]
    for i, name in enumerate(names):
        answers.start(name, i % len(BLOCK_KINDS))
    hello = tokens(["Hello"])
    emit(answers, **dict.fromkeys(names, hello))
    assert [told(answers, name) for name in names] == [[(i % len(BLOCK_KINDS), 1)] for i in range(200)]
    emit(answers, **dict.fromkeys(names[::4], tokens(["<tool_call>"])))
    assert told(answers, "r0") == told(answers, "r196") == [(0, 1), (2, 1)]
    assert told(answers, "r1") == [(1, 1)]
    for name in names:
        answers.finish(name)
        answers.finish(name)
    assert len(answers) == 0
    answers.start("r0", 0)
    answers.start("r0", 0)
    assert len(answers) == 1
    emit(answers, r0=hello)
    assert told(answers, "r0") == [(0, 1)]


def test_the_same_answers_step_after_step_until_one_ends() -> None:
    """Rows go to others, the order changes, a step has none."""
    answers = Answers(VOCABULARY, 8)
    hello, call = tokens(["Hello"]), tokens(["<tool_call>"])
    emit(answers, a=hello, b=hello)
    emit(answers, a=hello, b=call)
    emit(answers, b=hello, a=call)
    assert (told(answers, "a"), told(answers, "b")) == ([(0, 2), (2, 1)], [(0, 1), (2, 2)])
    answers.finish("a")
    emit(answers)
    answers.start("c", 1)
    emit(answers, c=hello, b=hello)
    answers.start("c", 3)
    emit(answers, c=hello, b=hello)
    assert (told(answers, "c"), told(answers, "b")) == ([(3, 1)], [(0, 1), (2, 4)])
    assert told(answers, "a") == []


def test_lengths_that_do_not_fit_are_refused() -> None:
    """A kernel that read beyond the end of an array would take the engine with it."""
    answers = Answers(VOCABULARY, 8)
    step = StepContext(end_s=1.0, duration_s=0.1, batch=1, budget=0)
    for req_ids, num_tokens in ((["a"], 2), (["a", "b"], 3), ([], 3), (["a"], 4)):
        with pytest.raises(ValueError, match=f"{len(req_ids)} answers"):
            answers.add_step(req_ids, np.zeros(num_tokens, np.int32), np.array([0, 3]), step)
    assert len(answers) == 0


def test_what_is_not_known_is_prose() -> None:
    """An answer that was not started, ids outside of the vocabulary, a step without tokens."""
    answers = Answers(VOCABULARY, 8)
    answers.start("r", 1)
    emit(answers, ghost=tokens(["Hello", "{}"]), r=[])
    assert (told(answers, "ghost"), told(answers, "r")) == ([(0, 2)], [])
    emit(answers, r=[-1, 10**9])
    assert told(answers, "r") == [(1, 2)]
    opaque = Answers(TokenTable.opaque(8), 8)
    opaque.start("r", 0)
    emit(opaque, r=[1, 2, 3])
    assert told(opaque, "r") == [(0, 3)]
