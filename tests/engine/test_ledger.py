"""Accounts of drafts and verdicts: the promises of `observe.py`, exact, over random steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import BLOCK_KINDS, SOURCES, TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.engine import ledger as ledger_module
from agentspec_runtime.engine.ledger import RequestLedger, StepVerdicts
from agentspec_runtime.hints import Hint, SegmentKind
from agentspec_runtime.observe import (
    BlockReport,
    DraftSource,
    RequestReport,
    StepVerdictMap,
    Verdict,
    sum_verdicts,
)

WORD, OPEN, CLOSE, THINK, THOUGHT, BEGIN, END = range(7)
TEXTS = [b"x", b"<tool_call>", b"</tool_call>", b"<think>", b"</think>", b"<tool", b"_call>"]
VOCABULARY = TokenTable(TEXTS)
MAX_DRAFT = 12
KINDS = {OPEN: SegmentKind.TOOL_CALL, THINK: SegmentKind.REASONING}
ENDS = {SegmentKind.TOOL_CALL: CLOSE, SegmentKind.REASONING: THOUGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did: tokens, sources of its draft, how many of them the worker took."""

    tokens: tuple[int, ...] = (WORD,)
    sources: tuple[int, ...] = ()
    verified: int = 0

    @property
    def accepted(self) -> int:
        return min(self.verified, len(self.tokens))

    @property
    def discarded(self) -> int:
        """Equal to what the model says, but behind the end of the answer."""
        return self.verified - self.accepted


@st.composite
def stories(draw: st.DrawFn) -> list[Step]:
    """Steps of one request, as they can happen: blocks go on or new ones begin, drafts of any sources."""
    out = []
    for _ in range(draw(st.integers(0, 30))):
        tokens = draw(st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=MAX_DRAFT + 1))
        sources = draw(st.lists(st.integers(0, len(SOURCES) - 1), max_size=MAX_DRAFT))
        verified = draw(st.integers(0, len(sources)))
        out.append(Step(tokens=tuple(tokens), sources=tuple(sources), verified=verified))
    return out


def context(number: int) -> StepContext:
    return StepContext(end_s=100.0 + number, duration_s=0.5 + number % 7, batch=number, budget=2 * number)


def enter(answers: Answers, req_id: str, steps: Sequence[Step], first: int = 0) -> list[dict]:
    """Enter steps of one request; returns what is told of each."""
    told = []
    for number, step in enumerate(steps, start=first):
        totals = answers.add_step(
            [req_id],
            np.array(step.tokens, np.int32),
            np.array([0, len(step.tokens)]),
            context(number),
            {req_id: bytes(step.sources)} if step.sources else {},
            {req_id: step.verified + 1} if step.sources else {},
        )
        told.append(dict(StepVerdicts(totals)))
    return told


def report_of(answers: Answers, req_id: str, *, num_cut: int = 0, hint: Hint | None = None) -> RequestReport:
    ledger = RequestLedger(hint=hint, num_prompt_tokens=7, arrival_s=99.0, num_cached_tokens=3)
    return ledger.report(
        answers.read(req_id, num_cut=num_cut),
        req_id=req_id,
        trace_headers={"traceparent": "00-1-2-01"},
        session="s",
        end_s=1000.0,
        num_preemptions=1,
        finish_reason="stop",
        model="m",
    )


@cache
def shared() -> Answers:
    return Answers(VOCABULARY, MAX_DRAFT)


def account(story: list[Step], *, num_cut: int = 0) -> RequestReport:
    answers = shared()
    answers.start("r", 0)
    enter(answers, "r", story)
    return report_of(answers, "r", num_cut=num_cut)


@dataclass(slots=True)
class Block:
    """A block as the oracle has it."""

    kind: SegmentKind
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    charges: list[tuple[int, bool, bool]] = field(default_factory=list)
    last_step: int | None = None

    def report(self, start_s: float) -> BlockReport:
        contexts = [context(number) for number in self.steps]
        times = [context(number).duration_s for number in self.steps if number > 0]
        verdicts = {}
        for source in sorted({source for source, _, _ in self.charges}):
            mine = [charge for charge in self.charges if charge[0] == source]
            verdicts[SOURCES[source]] = Verdict(
                drafted=len(mine), accepted=sum(c[1] for c in mine), discarded=sum(c[2] for c in mine)
            )
        return BlockReport(
            kind=self.kind,
            start_s=start_s,
            end_s=context(self.last_step or 0).end_s,
            num_tokens=self.tokens,
            num_steps=len(self.steps),
            verdicts=verdicts,
            mean_batch=sum(c.batch for c in contexts) / len(contexts) if contexts else 0.0,
            mean_budget=sum(c.budget for c in contexts) / len(contexts) if contexts else 0.0,
            step_s_p50=pytest.approx(np.percentile(times, 50) if times else 0.0),
            step_s_p95=pytest.approx(np.percentile(times, 95) if times else 0.0),
        )


def begins_of(tokens: Sequence[int]) -> list[tuple[int, SegmentKind]]:
    """Where blocks begin, and of which kind; of two that begin at the same token the second counts."""
    begins = [(0, SegmentKind.TEXT)]
    kind = SegmentKind.TEXT
    for position, token in enumerate(tokens):
        if kind == SegmentKind.TEXT and token in KINDS:
            kind = KINDS[token]
            begins.append((position, kind))
        elif kind == SegmentKind.TEXT and token == END and tokens[max(position - 1, 0)] == BEGIN:
            kind = SegmentKind.TOOL_CALL
            begins.append((position - 1, kind))
        elif token == ENDS.get(kind):
            kind = SegmentKind.TEXT
            begins.append((position + 1, kind))
    return begins


def oracle(story: Sequence[Step], *, num_cut: int = 0) -> tuple[BlockReport, ...]:
    """Token by token, with lists."""
    begins = begins_of([token for step in story for token in step.tokens])
    blocks = [Block(kind) for _, kind in begins]
    kept = sum(len(step.tokens) for step in story) - num_cut
    position = 0
    for number, step in enumerate(story):
        emitted_in = [
            blocks[max(i for i, (begin, _) in enumerate(begins) if begin <= position + at)]
            for at in range(len(step.tokens))
        ]
        for at, block in enumerate(emitted_in):
            block.tokens += position + at < kept
            block.last_step = number
        emitted_in[0].steps.append(number)
        for at, source in enumerate(step.sources):
            accepted = at < step.accepted and position + at < kept
            block = emitted_in[min(at, len(emitted_in) - 1)]
            block.charges.append((source, accepted, not accepted and at < step.verified))
        position += len(step.tokens)
    start_s, reports = context(0).end_s - context(0).duration_s, []
    for block in blocks:
        if block.last_step is not None:
            reports.append(block.report(start_s))
            start_s = reports[-1].end_s
    return tuple(reports)


@given(stories(), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_it_is_what_a_naive_account_says(story: list[Step], num_cut: int) -> None:
    num_cut = min(num_cut, sum(len(step.tokens) for step in story))
    assert account(story, num_cut=num_cut).blocks == oracle(story, num_cut=num_cut)


@given(stories())
@settings(max_examples=50, deadline=None)
def test_sums_are_exact(story: list[Step]) -> None:
    answers = shared()
    answers.start("r", 0)
    told = enter(answers, "r", story)
    report = report_of(answers, "r")
    emitted = sum(len(step.tokens) for step in story)
    assert report.num_output_tokens == emitted
    assert sum(block.num_tokens for block in report.blocks) == emitted
    assert report.per_step_drafted == tuple(len(step.sources) for step in story)
    assert report.per_step_accepted == tuple(step.accepted for step in story)
    assert sum(block.num_steps for block in report.blocks) == len(story)

    counted: Counter[tuple[DraftSource, str]] = Counter()
    for step in story:
        for position, source in enumerate(step.sources):
            counted[SOURCES[source], "drafted"] += 1
            counted[SOURCES[source], "accepted"] += position < step.accepted
            counted[SOURCES[source], "discarded"] += step.accepted <= position < step.verified
    for source in SOURCES:
        verdicts = [b.verdicts[source] for b in report.blocks if source in b.verdicts]
        for name in ("drafted", "accepted", "discarded"):
            assert sum(getattr(v, name) for v in verdicts) == counted[source, name]
        assert all(v.accepted + v.rejected == v.drafted for v in verdicts)
        assert all(v.accepted + v.discarded <= v.drafted for v in verdicts)

    # Steps know no better than the block that was open then, so only the sums over all blocks are the same.
    by_step: Counter[tuple[DraftSource, str]] = Counter()
    by_block: Counter[tuple[DraftSource, str]] = Counter()
    cells = chain.from_iterable(verdicts.items() for verdicts in told)
    of_blocks = (((b.kind, s), v) for b in report.blocks for s, v in b.verdicts.items())
    for counter, found in ((by_step, cells), (by_block, of_blocks)):
        for (_, source), verdict in found:
            counter[source, "drafted"] += verdict.drafted
            counter[source, "accepted"] += verdict.accepted
            counter[source, "discarded"] += verdict.discarded
    assert by_step == by_block == counted


@given(stories())
@settings(max_examples=20, deadline=None)
def test_blocks_follow_each_other_in_time(story: list[Step]) -> None:
    report = account(story)
    for block in report.blocks:
        assert block.start_s <= block.end_s
    for before, after in zip(report.blocks, report.blocks[1:], strict=False):
        assert before.end_s <= after.end_s
        assert after.start_s >= before.start_s


@given(st.lists(stories(), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_answers_of_one_step_do_not_mix(several: list[list[Step]]) -> None:
    """All in the same steps as long as they last, some without a draft: each as if it were alone."""
    answers = shared()
    names = [f"r{i}" for i in range(len(several))]
    for name in names:
        answers.start(name, 0)
    for number in range(max(map(len, several))):
        now = [
            (name, story[number]) for name, story in zip(names, several, strict=True) if number < len(story)
        ]
        answers.add_step(
            [name for name, _ in now],
            np.array([token for _, step in now for token in step.tokens], np.int32),
            np.cumsum([0, *(len(step.tokens) for _, step in now)]),
            context(number),
            {name: bytes(step.sources) for name, step in now if step.sources},
            {name: step.verified + 1 for name, step in now if step.sources},
        )
    for name, story in zip(names, several, strict=True):
        report = report_of(answers, name)
        assert report.blocks == oracle(story)
        assert report.per_step_drafted == tuple(len(step.sources) for step in story)
        assert report.per_step_accepted == tuple(step.accepted for step in story)


def test_accepted_tokens_belong_to_the_block_they_were_emitted_in() -> None:
    """Three accepted tokens over two blocks, one rejected: charged where the draft ended."""
    step = Step(tokens=(WORD, WORD, OPEN, WORD), sources=(0, 0, 2, 2), verified=3)
    text, call = account([step]).blocks
    assert (text.kind, call.kind) == (SegmentKind.TEXT, SegmentKind.TOOL_CALL)
    assert {s: (v.drafted, v.accepted) for s, v in text.verdicts.items()} == {DraftSource.REQUEST: (2, 2)}
    assert {s: (v.drafted, v.accepted) for s, v in call.verdicts.items()} == {DraftSource.CORPUS: (2, 1)}
    assert (text.num_steps, call.num_steps) == (1, 0), "a step over two blocks counts for the first"


def test_a_step_is_told_by_the_blocks_it_knows_of() -> None:
    """The same as the request in the end, but for the first half of a marker that another step completed."""
    answers = shared()
    answers.start("r", 0)
    told = enter(
        answers,
        "r",
        [
            Step(tokens=(WORD, BEGIN, END, CLOSE), sources=(0,) * 4, verified=3),
            Step(tokens=(WORD, BEGIN), sources=(0, 0), verified=2),
            Step(tokens=(END, WORD), sources=(0, 0), verified=1),
        ],
    )
    cells = [{str(kind): (v.drafted, v.accepted) for (kind, _), v in step.items()} for step in told]
    assert cells == [{"text": (1, 1), "tool_call": (3, 2)}, {"text": (2, 2)}, {"tool_call": (2, 1)}]
    blocks = report_of(answers, "r").blocks
    assert [(str(b.kind), b.num_tokens, b.num_steps) for b in blocks] == [
        ("text", 1, 1), ("tool_call", 3, 0), ("text", 1, 1), ("tool_call", 3, 1)
    ]  # fmt: skip
    verdicts = [b.verdicts[DraftSource.REQUEST] for b in blocks]
    assert [(v.drafted, v.accepted) for v in verdicts] == [(1, 1), (3, 2), (1, 1), (3, 2)]


def test_an_end_inside_an_accepted_draft() -> None:
    """FR-13: five verified, the third was the end of the answer. Three accepted, two discarded."""
    report = account([Step(tokens=(WORD,) * 3, sources=(0,) * 5, verified=5)])
    verdict = report.blocks[0].verdicts[DraftSource.REQUEST]
    assert (verdict.drafted, verdict.accepted, verdict.discarded, verdict.rejected) == (5, 3, 2, 2)
    assert report.num_output_tokens == 3


def add_plain(answers: Answers, token: int, step: StepContext) -> None:
    answers.add_step(["r"], np.array([token], np.int32), np.array([0, 1]), step)


def test_times_and_load_of_a_block() -> None:
    answers = Answers(VOCABULARY, MAX_DRAFT)
    for number in range(20):
        step = StepContext(end_s=10.0 + number, duration_s=1.0 + number, batch=number, budget=2 * number)
        add_plain(answers, WORD, step)
    report = report_of(answers, "r")
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
    answers = Answers(VOCABULARY, MAX_DRAFT)
    for number, (duration_s, token) in enumerate(((10.0, WORD), (0.05, WORD), (0.05, OPEN))):
        add_plain(answers, token, StepContext(end_s=20.0 + number, duration_s=duration_s, batch=1, budget=0))
    report = report_of(answers, "r")
    assert [block.step_s_p95 for block in report.blocks] == [0.05, 0.05]
    assert [block.num_steps for block in report.blocks] == [2, 1]
    (alone,) = account([Step()]).blocks
    assert alone.step_s_p50 == alone.step_s_p95 == 0.0, "none is left: not reported"


def test_an_answer_with_thousands_of_blocks_keeps_its_sums() -> None:
    """The list of blocks is bounded, the tokens are all there."""
    story = [Step(tokens=((WORD, OPEN, CLOSE)[i % 3],), sources=(0, 0), verified=i % 2) for i in range(3000)]
    report = account(story)
    assert len(report.blocks) == 1024
    assert sum(b.num_tokens for b in report.blocks) == 3000
    assert sum(v.drafted for b in report.blocks for v in b.verdicts.values()) == 6000


def test_a_very_long_answer_is_whole_and_its_memory_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 steps with sources that alternate, beside a short answer: rows do not grow, nothing stays."""
    story = [
        Step(tokens=(WORD,) * (1 + i % 3), sources=(0, 2) * (i % 7), verified=min(i % 7, 2))
        for i in range(5000)
    ]
    answers = Answers(VOCABULARY, MAX_DRAFT)
    answers.start("short", 0)
    size = sum(part.nbytes for part in answers._arrays)
    enter(answers, "r", story)
    report = report_of(answers, "r")
    assert report.per_step_drafted == tuple(len(step.sources) for step in story)
    assert report.per_step_accepted == tuple(step.accepted for step in story)
    (block,) = report.blocks
    assert (block.num_tokens, block.num_steps) == (sum(len(step.tokens) for step in story), 5000)
    assert sum(v.drafted for v in block.verdicts.values()) == sum(len(step.sources) for step in story)
    assert sum(part.nbytes for part in answers._arrays) == size
    monkeypatch.setattr(ledger_module, "_MAX_STEPS", 100)
    cut = report_of(answers, "r")
    assert cut.per_step_drafted == report.per_step_drafted[:100]
    assert cut.per_step_accepted == report.per_step_accepted[:100]
    assert cut.blocks == report.blocks
    assert report_of(answers, "short").blocks == ()
    answers.finish("r")
    assert not answers._moved


def test_a_request_that_never_ran() -> None:
    for report in (account([]), report_of(Answers(VOCABULARY, MAX_DRAFT), "unknown")):
        assert report.blocks == ()
        assert report.num_output_tokens == 0
        assert report.first_token_s == 0.0
        assert report.per_step_drafted == ()


def test_what_is_known_of_a_request_is_told_with_its_account() -> None:
    report = report_of(Answers(VOCABULARY, MAX_DRAFT), "r", hint=Hint(agent="coder", turn=4))
    assert (report.agent, report.turn, report.session) == ("coder", 4, "s")
    assert report.trace_headers == {"traceparent": "00-1-2-01"}
    assert report.finish_reason == "stop"
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_preemptions) == (7, 3, 1)


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5), st.booleans())
def test_verdicts_of_several_steps_add_up_either_way(cells: list[list[int]], mixed: bool) -> None:
    """Unnamed and summed in one go, as the engine hands them over, or named one by one."""
    tables = []
    for number, (accepted, rejected, discarded) in enumerate(cells):
        totals = np.zeros((len(BLOCK_KINDS), len(SOURCES), 3), np.int64)
        totals[number % 2, number % 3] = accepted + rejected + discarded, accepted, discarded
        tables.append(StepVerdicts(totals))
    parts: list[StepVerdictMap] = [*tables, {}] if mixed else [*tables]
    total = sum_verdicts(parts)
    expected: Counter[tuple[object, ...]] = Counter()
    for table in tables:
        for key, verdict in table.items():
            for name in ("drafted", "accepted", "discarded", "rejected"):
                expected[(*key, name)] += getattr(verdict, name)
    found = {
        (*key, name): getattr(verdict, name)
        for key, verdict in total.items()
        for name in ("drafted", "accepted", "discarded", "rejected")
    }
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}
