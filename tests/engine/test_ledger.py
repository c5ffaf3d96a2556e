"""Accounts of drafts and verdicts: the promises of `observe.py`, exact, over random steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import BLOCK_KINDS, SOURCES, BlockSpan
from agentspec_runtime.engine.ledger import RequestLedger, StepContext, VerdictCounts
from agentspec_runtime.hints import Hint, SegmentKind
from agentspec_runtime.observe import DraftSource, RequestReport

TEXT, CODE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did: blocks of its tokens, sources of its draft, verdict."""

    spans: tuple[BlockSpan, ...]
    sources: tuple[int, ...]
    accepted: int
    discarded: int

    @property
    def emitted(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Steps of one request, as they can happen: blocks go on or new ones begin, drafts of any sources."""
    out, block, kind = [], 0, 0
    for _ in range(draw(st.integers(0, 30))):
        spans = []
        for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
            spans.append(BlockSpan(block, kind, size))
            if draw(st.booleans()):
                block += 1
                kind = draw(st.integers(0, len(BLOCK_KINDS) - 1))
        # The same block twice in a row would be one span.
        merged: list[BlockSpan] = []
        for span in spans:
            if merged and merged[-1].block == span.block:
                merged[-1] = merged[-1]._replace(num_tokens=merged[-1].num_tokens + span.num_tokens)
            else:
                merged.append(span)
        emitted = sum(span.num_tokens for span in merged)
        sources = tuple(draw(st.lists(st.integers(0, len(SOURCES) - 1), max_size=12)))
        accepted = draw(st.integers(0, min(len(sources), emitted)))
        discarded = draw(st.integers(0, len(sources) - accepted))
        out.append(Step(spans=tuple(merged), sources=sources, accepted=accepted, discarded=discarded))
    return out


def context(number: int = 0, *, batch: int = 4, budget: int = 10) -> StepContext:
    return StepContext(end_s=100.0 + number, duration_s=0.5 + number, batch=batch, budget=budget)


def account(story: list[Step]) -> tuple[RequestReport, VerdictCounts]:
    totals = VerdictCounts()
    ledger = RequestLedger(hint=None, num_prompt_tokens=7, arrival_s=99.0)
    for number, step in enumerate(story):
        ledger.add_step(step.spans, step.sources, step.accepted, step.discarded, context(number), totals)
    report = ledger.report(
        req_id="r",
        trace_headers=None,
        session=None,
        end_s=1000.0,
        num_cached_tokens=3,
        num_preemptions=1,
        finish_reason="stop",
        model="m",
    )
    return report, totals


@given(steps())
@settings(max_examples=200, deadline=None)
def test_sums_are_exact(story: list[Step]) -> None:
    report, totals = account(story)
    emitted = sum(step.emitted for step in story)
    assert report.num_output_tokens == emitted
    assert sum(block.num_tokens for block in report.blocks) == emitted
    assert report.per_step_drafted == tuple(len(step.sources) for step in story)
    assert report.per_step_accepted == tuple(step.accepted for step in story)
    assert sum(block.num_steps for block in report.blocks) == len(story)

    drafted: Counter[DraftSource] = Counter()
    accepted: Counter[DraftSource] = Counter()
    discarded: Counter[DraftSource] = Counter()
    for step in story:
        for position, source in enumerate(step.sources):
            drafted[SOURCES[source]] += 1
            accepted[SOURCES[source]] += position < step.accepted
            discarded[SOURCES[source]] += step.accepted <= position < step.accepted + step.discarded
    for source in SOURCES:
        verdicts = [b.verdicts[source] for b in report.blocks if source in b.verdicts]
        assert sum(v.drafted for v in verdicts) == drafted[source]
        assert sum(v.accepted for v in verdicts) == accepted[source]
        assert sum(v.discarded for v in verdicts) == discarded[source]
        assert all(v.accepted + v.rejected == v.drafted for v in verdicts)
        assert all(v.accepted + v.discarded <= v.drafted for v in verdicts)

    by_kind: Counter[tuple[SegmentKind, DraftSource, str]] = Counter()
    for block in report.blocks:
        for source, verdict in block.verdicts.items():
            by_kind[block.kind, source, "drafted"] += verdict.drafted
            by_kind[block.kind, source, "accepted"] += verdict.accepted
    for (kind, source), verdict in totals.verdicts().items():
        assert by_kind[kind, source, "drafted"] == verdict.drafted
        assert by_kind[kind, source, "accepted"] == verdict.accepted
    assert sum(v.drafted for v in totals.verdicts().values()) == sum(len(s.sources) for s in story)


@given(steps())
@settings(max_examples=50, deadline=None)
def test_blocks_follow_each_other_in_time(story: list[Step]) -> None:
    report, _ = account(story)
    for block in report.blocks:
        assert block.start_s <= block.end_s
    for before, after in zip(report.blocks, report.blocks[1:], strict=False):
        assert before.end_s <= after.end_s
        assert after.start_s >= before.start_s


def test_accepted_tokens_belong_to_the_block_they_were_emitted_in() -> None:
    """Three accepted tokens over two blocks, one rejected: charged where the draft ended."""
    step = Step(
        spans=(BlockSpan(0, TEXT, 2), BlockSpan(1, CODE, 2)), sources=(0, 0, 2, 2), accepted=3, discarded=0
    )
    report, _ = account([step])
    text, code = report.blocks
    assert (text.kind, code.kind) == (SegmentKind.TEXT, SegmentKind.CODE)
    assert {s: (v.drafted, v.accepted) for s, v in text.verdicts.items()} == {DraftSource.REQUEST: (2, 2)}
    assert {s: (v.drafted, v.accepted) for s, v in code.verdicts.items()} == {DraftSource.CORPUS: (2, 1)}
    assert (text.num_steps, code.num_steps) == (1, 0), "a step over two blocks counts for the first"


def test_an_end_inside_an_accepted_draft() -> None:
    """FR-13: five verified, the third was the end of the answer. Three accepted, two discarded."""
    step = Step(spans=(BlockSpan(0, TEXT, 3),), sources=(0,) * 5, accepted=3, discarded=2)
    report, _ = account([step])
    verdict = report.blocks[0].verdicts[DraftSource.REQUEST]
    assert (verdict.drafted, verdict.accepted, verdict.discarded, verdict.rejected) == (5, 3, 2, 2)
    assert report.num_output_tokens == 3


def test_times_and_load_of_a_block() -> None:
    ledger = RequestLedger(hint=None, num_prompt_tokens=1, arrival_s=0.0)
    for number in range(20):
        ledger.add_step(
            [BlockSpan(0, TEXT, 1)],
            [],
            0,
            0,
            StepContext(end_s=10.0 + number, duration_s=1.0 + number, batch=number, budget=2 * number),
            VerdictCounts(),
        )
    report = ledger.report(
        req_id="r",
        trace_headers=None,
        session=None,
        end_s=30.0,
        num_cached_tokens=0,
        num_preemptions=0,
        finish_reason="length",
        model="m",
    )
    (block,) = report.blocks
    assert (block.start_s, block.end_s) == (9.0, 29.0)
    assert block.mean_batch == pytest.approx(9.5)
    assert block.mean_budget == pytest.approx(19.0)
    # Of the steps that took 2 to 20 s: the first one carried the prompt.
    assert block.step_s_p50 == pytest.approx(11.0)
    assert block.step_s_p95 == pytest.approx(19.1)
    assert report.first_token_s == 10.0


def test_the_step_of_the_prompt_is_no_step_time_of_a_block() -> None:
    """A prefill of ten seconds, two steps of 50 ms, and a second block: only steps that decoded count."""
    ledger = RequestLedger(hint=None, num_prompt_tokens=1, arrival_s=0.0)
    story = ((10.0, BlockSpan(0, TEXT, 1)), (0.05, BlockSpan(0, TEXT, 1)), (0.05, BlockSpan(1, CODE, 1)))
    for number, (duration_s, span) in enumerate(story):
        step = StepContext(end_s=20.0 + number, duration_s=duration_s, batch=1, budget=0)
        ledger.add_step([span], [], 0, 0, step, VerdictCounts())
    report = ledger.report(
        req_id="r", trace_headers=None, session=None, end_s=30.0, num_cached_tokens=0, num_preemptions=0,
        finish_reason="stop", model="m",
    )  # fmt: skip
    assert [block.step_s_p95 for block in report.blocks] == [0.05, 0.05]
    assert [block.num_steps for block in report.blocks] == [2, 1]
    (alone,) = account([Step(spans=(BlockSpan(0, TEXT, 1),), sources=(), accepted=0, discarded=0)])[0].blocks
    assert alone.step_s_p50 == alone.step_s_p95 == 0.0, "none is left: not reported"


def test_an_answer_with_thousands_of_blocks_keeps_its_sums() -> None:
    """The list of blocks is bounded, the tokens are all there."""
    story = [
        Step(spans=(BlockSpan(i, i % 2, 1),), sources=(0, 0), accepted=i % 2, discarded=0)
        for i in range(3000)
    ]
    report, _ = account(story)
    assert len(report.blocks) == 1024
    assert sum(b.num_tokens for b in report.blocks) == 3000
    assert sum(v.drafted for b in report.blocks for v in b.verdicts.values()) == 6000


def test_a_request_that_never_ran() -> None:
    report, _ = account([])
    assert report.blocks == ()
    assert report.num_output_tokens == 0
    assert report.first_token_s == 0.0
    assert report.per_step_drafted == ()


def test_the_hint_is_told_with_the_report() -> None:
    ledger = RequestLedger(hint=Hint(agent="coder", turn=4), num_prompt_tokens=1, arrival_s=0.0)
    report = ledger.report(
        req_id="r",
        trace_headers={"traceparent": "00-1-2-01"},
        session="s",
        end_s=1.0,
        num_cached_tokens=0,
        num_preemptions=0,
        finish_reason="abort",
        model="m",
    )
    assert (report.agent, report.turn, report.session) == ("coder", 4, "s")
    assert report.trace_headers == {"traceparent": "00-1-2-01"}
    assert report.finish_reason == "abort"
