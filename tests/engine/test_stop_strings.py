"""A stop string ends an answer in the API; the engine's account ends at the same token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.engine.ledger import RequestLedger
from agentspec_runtime.engine.stop_strings import StopStrings

TOKENS = ("", "a", "b", "ab", "ba", "c", "é", "\n\n")
STEP = StepContext(end_s=10.0, duration_s=0.5, batch=2, budget=8)


def text_of(token_id: int, /) -> bytes:
    return TOKENS[token_id].encode()


def by_the_letter(ids: list[int], stops: list[str], min_tokens: int) -> int | None:
    """One token at a time over the whole text: slow and plain."""
    text = ""
    for index, token_id in enumerate(ids):
        before = len(text)
        text += TOKENS[token_id]
        fresh = [stop for stop in stops if text.find(stop, max(0, before - len(stop) + 1)) >= 0]
        if index >= min_tokens and fresh:
            return index + 1
    return None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, len(TOKENS) - 1), max_size=30),
    st.lists(st.sampled_from(["ab", "aba", "c", "bé", "\n\nab"]), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_the_token_is_that_of_a_plain_scan(ids: list[int], stops: list[str], min_tokens: int) -> None:
    """With all tokens recent, the result equals a scan from the beginning."""
    found = StopStrings(stops=tuple(stop.encode() for stop in stops), min_tokens=min_tokens)
    assert found.num_kept(ids, text_of, num_recent=len(ids)) == by_the_letter(ids, stops, min_tokens)


def test_only_recent_tokens_can_complete_it_older_ones_can_begin_it() -> None:
    """The stop begins in an old token and ends in the one recent one."""
    stops = StopStrings(stops=(b"cab",), min_tokens=0)
    assert stops.num_kept([1, 5, 3, 2], text_of, num_recent=2) == 3
    assert stops.num_kept([1, 5, 3, 2], text_of, num_recent=1) is None


@pytest.mark.parametrize("num_tokens", range(9))
def test_a_cut_keeps_every_sum(num_tokens: int) -> None:
    """Tokens go, accepted drafts among them become discarded, drafted and steps stay."""
    answers = Answers(TokenTable([b"x", b"<think>"]), 8)
    offsets = np.array([0, 3])
    answers.add_step(["r"], np.zeros(3, np.int32), offsets, STEP, {"r": bytes([0, 0, 1])}, {"r": 3})
    second, offsets = np.array([0, 0, 1, 0, 0], np.int32), np.array([0, 5])
    answers.add_step(["r"], second, offsets, STEP, {"r": bytes([0, 0, 0, 2, 2])}, {"r": 5})
    assert [answers.num_recent("r", n) for n in (1, 2, 64)] == [5, 8, 8]
    assert answers.num_recent("unknown", 64) == 0
    report = RequestLedger(hint=None, num_prompt_tokens=5, arrival_s=1.0).report(
        answers.read("r", num_cut=num_tokens),
        req_id="r", trace_headers=None, session=None, end_s=11.0, num_preemptions=0, finish_reason="stop",
        model="m",
    )  # fmt: skip
    verdicts = [verdict for block in report.blocks for verdict in block.verdicts.values()]
    accepted = sum(verdict.accepted for verdict in verdicts)
    assert report.num_output_tokens == sum(block.num_tokens for block in report.blocks) == 8 - num_tokens
    assert sum(verdict.drafted for verdict in verdicts) == 8
    assert accepted == sum(report.per_step_accepted)
    assert accepted + sum(verdict.discarded for verdict in verdicts) == 6
    assert sum(block.num_steps for block in report.blocks) == 2
    # The second step's own token goes first, then its four accepted ones, then the same of the first step.
    assert report.per_step_accepted == (min(2, 8 - num_tokens), max(0, min(4, 5 - num_tokens)))
