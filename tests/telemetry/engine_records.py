"""Reports as a consistent engine would make them, of any length, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.observe import BlockReport, DraftSource, RequestReport, StepReport, Verdict

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
KINDS = (SegmentKind.TEXT, SegmentKind.CODE, SegmentKind.TOOL_CALL)
EPOCH = 1_800_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A request report together with the step reports of its steps."""

    request: RequestReport
    steps: tuple[StepReport, ...]


def make_request(
    *,
    num_blocks: int = 3,
    steps_per_block: int = 5,
    seed: int = 0,
    headers: dict[str, str] | None = HEADERS,
    finish_reason: str = "stop",
    req_id: str = "req-1",
) -> Made:
    """A request in which every step of every block drafted from random sources."""
    rng = random.Random(seed)
    now = EPOCH + 1.5
    blocks: list[BlockReport] = []
    steps: list[StepReport] = []
    drafted_per_step: list[int] = []
    accepted_per_step: list[int] = []
    for index in range(num_blocks):
        kind = KINDS[index % len(KINDS)]
        start, tokens = now, 0
        verdicts: dict[DraftSource, Verdict] = {}
        for _ in range(steps_per_block):
            source = rng.choice(list(DraftSource))
            drafted = rng.randrange(0, 9)
            accepted = rng.randint(0, drafted)
            discarded = min(drafted - accepted, rng.randrange(0, 2))
            before = verdicts.get(source, Verdict())
            verdicts[source] = Verdict(
                drafted=before.drafted + drafted,
                accepted=before.accepted + accepted,
                discarded=before.discarded + discarded,
            )
            drafted_per_step.append(drafted)
            accepted_per_step.append(accepted)
            tokens += accepted + 1
            now += 0.01
            verdict = Verdict(drafted=drafted, accepted=accepted, discarded=discarded)
            steps.append(make_step(verdicts={(kind, source): verdict}, num_draft_tokens=drafted))
        blocks.append(
            BlockReport(
                kind=kind,
                start_s=start,
                end_s=now,
                num_tokens=tokens,
                num_steps=steps_per_block,
                verdicts=verdicts,
                mean_batch=4.0,
                mean_budget=12.5,
                step_s_p50=0.010,
                step_s_p95=0.012,
            )
        )
    request = RequestReport(
        req_id=req_id, trace_headers=headers, session="session-1", agent="coder", turn=3,
        arrival_s=EPOCH, scheduled_s=EPOCH + 0.5, first_token_s=EPOCH + 1.5, end_s=now,
        num_prompt_tokens=1000, num_cached_tokens=640,
        num_output_tokens=sum(block.num_tokens for block in blocks),
        num_preemptions=0, finish_reason=finish_reason, blocks=tuple(blocks),
        per_step_drafted=tuple(drafted_per_step), per_step_accepted=tuple(accepted_per_step), model="tiny",
    )  # fmt: skip
    return Made(request=request, steps=tuple(steps))


def make_step(
    *,
    verdicts: dict[tuple[SegmentKind, DraftSource], Verdict] | None = None,
    num_draft_tokens: int = 0,
    num_sampling: int = 4,
    dropped_hints: int = 0,
    internal_errors: int = 0,
    grammar_cut: int = 0,
) -> StepReport:
    """One engine step."""
    return StepReport(
        num_sampling=num_sampling, num_prefill_tokens=0, num_draft_tokens=num_draft_tokens, num_waiting=0,
        price=0.35, predicted_s=0.010, measured_s=0.011, draft_s=0.0002, index_s=0.0001, index_bytes=1 << 20,
        dropped_hints=dropped_hints, internal_errors=internal_errors, verdicts=verdicts or {},
        grammar_cut=grammar_cut,
    )  # fmt: skip
