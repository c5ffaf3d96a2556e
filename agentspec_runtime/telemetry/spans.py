"""From a finished request's report to its spans.

Shape, all times taken from the report, so that building it late changes nothing::

    agentspec.request                 child of the caller's span (W3C headers), kind SERVER
    ├── agentspec.queue               arrival -> scheduled
    ├── agentspec.prefill             scheduled -> first token
    ├── agentspec.block text
    ├── agentspec.block code
    └── agentspec.block tool_call     one per block, at most `MAX_BLOCK_SPANS`

Never a span or an event per step: a span keeps 128 events and drops the oldest. Steps are int arrays on the
request span, folded to `MAX_STEPS_REPORTED` entries so that their sums stay exact whatever the length.
Uses the OpenTelemetry API only; which SDK and exporter stand behind the tracer is its caller's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentspec_runtime.observe import BlockReport, DraftSource, RequestReport, Verdict, add_verdicts
from agentspec_runtime.telemetry import attributes as names

__all__ = ["MAX_BLOCK_SPANS", "MAX_STEPS_REPORTED", "emit_request", "fold_steps", "merge_blocks"]

MAX_BLOCK_SPANS: Final = 64
"""An answer rarely has ten blocks; one that alternates on every line must not flood the backend."""
MAX_STEPS_REPORTED: Final = 1024
"""Jaeger shows a 1024-entry array as one tag of about 3 KB; beyond that the page becomes unreadable."""
_HISTOGRAM_ENTRIES: Final = 65
_MIXED: Final = "mixed"
_NS: Final = 1_000_000_000

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What is drawn as one block span: one reported block, or several folded together."""

    kind: str
    index: int
    start_s: float
    end_s: float
    num_tokens: int
    num_steps: int
    verdicts: Mapping[DraftSource, Verdict]
    mean_batch: float
    mean_budget: float
    step_s_p50: float
    step_s_p95: float
    num_merged: int = 0


def emit_request(tracer: Tracer, report: RequestReport) -> int:
    """Write the spans of one request; returns how many were recorded (0 if the sampler said no)."""
    parent = _propagator.extract(report.trace_headers or {}, context=Context())
    start_s, end_s = _bounds(report)
    span = tracer.start_span(
        "agentspec.request",
        context=parent,
        kind=SpanKind.SERVER,
        # At creation, because a sampler may look at them.
        attributes=names.clean(_identity(report)),
        start_time=_ns(start_s),
    )
    count = 0
    if span.is_recording():
        blocks = merge_blocks(report.blocks, MAX_BLOCK_SPANS)
        span.set_attributes(names.clean(_request_attributes(report, blocks)))
        if report.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR, "the engine ended the request with an error"))
        inside = trace.set_span_in_context(span, Context())
        count = 1 + _emit_children(tracer, inside, report, blocks, end_s)
    span.end(end_time=_ns(end_s))
    return count


def _emit_children(
    tracer: Tracer, inside: Context, report: RequestReport, blocks: Sequence[_Block], end_s: float
) -> int:
    count = 0
    if report.arrival_s:
        queue_end_s = report.scheduled_s or end_s
        _child(tracer, inside, "agentspec.queue", report.arrival_s, queue_end_s, {})
        count += 1
    if report.scheduled_s:
        prefill = {
            names.PROMPT_TOKENS: report.num_prompt_tokens,
            names.CACHED_TOKENS: report.num_cached_tokens,
        }
        _child(
            tracer, inside, "agentspec.prefill", report.scheduled_s, report.first_token_s or end_s, prefill
        )
        count += 1
    for block in blocks:
        # The first block's first step is the one that ended the prefill: that time is the prefill's.
        start_s = max(block.start_s, report.first_token_s)
        name = f"agentspec.block {block.kind}"
        _child(tracer, inside, name, start_s, block.end_s, _block_attributes(block))
    return count + len(blocks)


def _child(
    tracer: Tracer, inside: Context, name: str, start_s: float, end_s: float, values: Mapping[str, object]
) -> None:
    span = tracer.start_span(name, context=inside, attributes=names.clean(values), start_time=_ns(start_s))
    span.end(end_time=_ns(max(start_s, end_s)))


def _identity(report: RequestReport) -> dict[str, object]:
    return {
        names.REQUEST_ID: report.req_id,
        names.MODEL: report.model or None,
        names.SESSION: report.session,
        names.AGENT: report.agent,
        names.TURN: report.turn,
    }


def _request_attributes(report: RequestReport, blocks: Sequence[_Block]) -> dict[str, object]:
    verdicts = add_verdicts(block.verdicts for block in blocks)
    # The arrays may have been cut after 65,536 steps, the blocks never are.
    num_steps = max(len(report.per_step_drafted), sum(block.num_steps for block in blocks))
    values: dict[str, object] = {
        names.OUTPUT_TOKENS: report.num_output_tokens,
        names.PROMPT_TOKENS: report.num_prompt_tokens,
        names.CACHED_TOKENS: report.num_cached_tokens,
        names.PREEMPTIONS: report.num_preemptions,
        names.FINISH_REASON: report.finish_reason,
        names.BLOCKS_MERGED: blocks[-1].num_merged if blocks else 0,
        names.QUEUE_S: _span_s(report.arrival_s, report.scheduled_s),
        names.PREFILL_S: _span_s(report.scheduled_s, report.first_token_s),
        names.DECODE_S: _span_s(report.first_token_s, report.end_s),
        names.FIRST_TOKEN_S: _span_s(report.arrival_s, report.first_token_s),
        **_speculation(verdicts, num_steps, report.num_output_tokens),
    }
    if report.per_step_drafted:
        values[names.STEP_DRAFTED], stride = fold_steps(report.per_step_drafted)
        values[names.STEP_ACCEPTED], _ = fold_steps(report.per_step_accepted)
        values[names.STEP_STRIDE] = stride
        values[names.ACCEPTED_HISTOGRAM] = accepted_histogram(report.per_step_accepted)
    return values


def _block_attributes(block: _Block) -> dict[str, object]:
    return {
        names.BLOCK_KIND: block.kind,
        names.BLOCK_INDEX: block.index,
        names.OUTPUT_TOKENS: block.num_tokens,
        **_speculation(block.verdicts, block.num_steps, block.num_tokens),
        names.MEAN_BATCH: block.mean_batch,
        names.MEAN_BUDGET: block.mean_budget,
        names.STEP_P50: block.step_s_p50 or None,
        names.STEP_P95: block.step_s_p95 or None,
    }


def _speculation(
    verdicts: Mapping[DraftSource, Verdict], num_steps: int, num_tokens: int
) -> dict[str, object]:
    drafted = sum(verdict.drafted for verdict in verdicts.values())
    accepted = sum(verdict.accepted for verdict in verdicts.values())
    values: dict[str, object] = {
        names.STEPS: num_steps,
        names.STEPS_SAVED: num_tokens - num_steps,
        names.DRAFTED: drafted,
        names.ACCEPTED: accepted,
        names.REJECTED: drafted - accepted,
        names.DISCARDED: sum(verdict.discarded for verdict in verdicts.values()),
        names.ACCEPTANCE_RATE: accepted / drafted if drafted else None,
        names.TOKENS_PER_STEP: num_tokens / num_steps if num_steps else None,
    }
    for source, verdict in verdicts.items():
        if verdict.drafted:
            values[names.SOURCE_DRAFTED[source]] = verdict.drafted
            values[names.SOURCE_ACCEPTED[source]] = verdict.accepted
            values[names.SOURCE_REJECTED[source]] = verdict.rejected
    return values


def fold_steps(per_step: Sequence[int], limit: int = MAX_STEPS_REPORTED) -> tuple[list[int], int]:
    """At most `limit` entries with the same sum, and how many steps each entry stands for."""
    stride = -(-len(per_step) // limit) or 1
    if stride == 1:
        return list(per_step), 1
    return [sum(per_step[at : at + stride]) for at in range(0, len(per_step), stride)], stride


def accepted_histogram(per_step_accepted: Iterable[int]) -> list[int]:
    """Entry k counts the steps that accepted k draft tokens; what exceeds the last entry counts there."""
    counted = Counter(per_step_accepted)
    last = min(max(counted, default=0), _HISTOGRAM_ENTRIES - 1)
    histogram = [0] * (last + 1)
    for accepted, count in counted.items():
        histogram[min(max(accepted, 0), last)] += count
    return histogram


def merge_blocks(blocks: Sequence[BlockReport], limit: int) -> list[_Block]:
    """Blocks as they are drawn: at most `limit`, the tail folded into the last. All sums stay exact.

    Of the folded tail, means are weighted by steps, p50 is the step-weighted mean of the medians and p95
    the greatest one: percentiles cannot be added.
    """
    keep = blocks if len(blocks) <= limit else blocks[: limit - 1]
    drawn = [
        _Block(
            kind=str(block.kind),
            index=index,
            start_s=block.start_s,
            end_s=block.end_s,
            num_tokens=block.num_tokens,
            num_steps=block.num_steps,
            verdicts=block.verdicts,
            mean_batch=block.mean_batch,
            mean_budget=block.mean_budget,
            step_s_p50=block.step_s_p50,
            step_s_p95=block.step_s_p95,
        )
        for index, block in enumerate(keep)
    ]
    if len(keep) < len(blocks):
        drawn.append(_fold(blocks[limit - 1 :], index=limit - 1))
    return drawn


def _fold(tail: Sequence[BlockReport], *, index: int) -> _Block:
    num_steps = sum(block.num_steps for block in tail)
    weight = max(1, num_steps)
    kinds = {str(block.kind) for block in tail}
    return _Block(
        kind=kinds.pop() if len(kinds) == 1 else _MIXED,
        index=index,
        start_s=min(block.start_s for block in tail),
        end_s=max(block.end_s for block in tail),
        num_tokens=sum(block.num_tokens for block in tail),
        num_steps=num_steps,
        verdicts=add_verdicts(block.verdicts for block in tail),
        mean_batch=sum(block.mean_batch * block.num_steps for block in tail) / weight,
        mean_budget=sum(block.mean_budget * block.num_steps for block in tail) / weight,
        step_s_p50=sum(block.step_s_p50 * block.num_steps for block in tail) / weight,
        step_s_p95=max(block.step_s_p95 for block in tail),
        num_merged=len(tail),
    )


def _bounds(report: RequestReport) -> tuple[float, float]:
    """Start and end that hold every child, whichever times the request never reached."""
    seen = [moment for moment in (report.arrival_s, report.scheduled_s, report.first_token_s) if moment]
    seen += [block.start_s for block in report.blocks[:1]]
    end_s = max([report.end_s, *seen])
    return min(seen, default=end_s), end_s


def _span_s(start_s: float, end_s: float) -> float | None:
    return max(0.0, end_s - start_s) if start_s and end_s else None


def _ns(seconds: float) -> int:
    # Two steps, because a float of seconds since the epoch times 1e9 would lose the last 100 ns twice.
    whole = int(seconds)
    return whole * _NS + round((seconds - whole) * _NS)
