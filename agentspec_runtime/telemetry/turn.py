"""A trace as a person looks at it: the tree of its spans and what its tokens cost. Pure, no I/O.

Numbers come from the engine's spans where there are any, because only they know blocks, sources and every
step; otherwise from the `chat` spans of the agent. Never from both: they describe the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentspec_runtime.observe import DraftSource
from agentspec_runtime.telemetry import attributes as names
from agentspec_runtime.telemetry.otlp import SpanRecord

__all__ = ["BlockTotals", "SourceTotals", "Speculation", "Trace", "TraceTotals", "group_traces", "totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Spans of one trace. A span whose parent was not recorded counts as a root."""

    trace_id: str
    spans: tuple[SpanRecord, ...]

    @property
    def start_ns(self) -> int:
        """Start of the first span."""
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        """End of the last span."""
        return max(span.end_ns for span in self.spans)

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end."""
        return (self.end_ns - self.start_ns) / 1e9

    def walk(self) -> Iterator[tuple[int, SpanRecord]]:
        """Every span with its depth, parents before children, siblings by start."""
        known = {span.span_id for span in self.spans}
        children: dict[str, list[SpanRecord]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start_ns, -span.end_ns)):
            children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
        stack = [(0, span) for span in reversed(children.get("", []))]
        seen: set[str] = set()
        while stack:
            depth, span = stack.pop()
            if span.span_id in seen:  # a damaged file may hold a cycle or a span twice
                continue
            seen.add(span.span_id)
            yield depth, span
            stack += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]

    def named(self, first_word: str) -> list[SpanRecord]:
        """Spans whose name starts with this word, by start."""
        found = [span for span in self.spans if span.name.split(" ", 1)[0] == first_word]
        return sorted(found, key=lambda span: span.start_ns)


def group_traces(spans: Iterable[SpanRecord]) -> list[Trace]:
    """Traces, the newest last."""
    by_id: dict[str, list[SpanRecord]] = {}
    for span in spans:
        by_id.setdefault(span.trace_id, []).append(span)
    traces = [Trace(trace_id=trace_id, spans=tuple(found)) for trace_id, found in by_id.items()]
    return sorted(traces, key=lambda trace: trace.start_ns)


@dataclass(slots=True, kw_only=True)
class Speculation:
    """Sums over some spans, in tokens and engine steps."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    time_s: float = 0.0

    @property
    def rejected(self) -> int:
        """Draft tokens that gave nothing."""
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted, None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per engine step, None without steps."""
        return self.tokens / self.steps if self.steps else None

    @property
    def s_per_token(self) -> float | None:
        """Seconds per output token, None without tokens."""
        return self.time_s / self.tokens if self.tokens else None

    def add(self, span: SpanRecord) -> None:
        """Add what one span says."""
        self.tokens += _int(span, names.OUTPUT_TOKENS)
        self.steps += _int(span, names.STEPS)
        self.drafted += _int(span, names.DRAFTED)
        self.accepted += _int(span, names.ACCEPTED)
        self.time_s += span.duration_s


@dataclass(slots=True, kw_only=True)
class BlockTotals(Speculation):
    """All blocks of one kind. `time_s` is the sum of their durations."""

    kind: str
    count: int = 0


@dataclass(slots=True, kw_only=True)
class SourceTotals:
    """Drafts whose text came from one source."""

    source: str
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True, kw_only=True)
class TraceTotals:
    """What a trace amounts to. `from_engine` tells whether engine spans were there; `all` spans decoding."""

    duration_s: float
    num_calls: int
    num_tools: int
    from_engine: bool
    queue_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    all: Speculation = field(default_factory=Speculation)
    blocks: list[BlockTotals] = field(default_factory=list)
    sources: list[SourceTotals] = field(default_factory=list)


def totals(trace: Trace) -> TraceTotals:
    """Sums over a trace."""
    requests = trace.named("agentspec.request")
    chats = trace.named("chat") or trace.named("text_completion")
    found = TraceTotals(
        duration_s=trace.duration_s,
        num_calls=len(chats) or len(requests),
        num_tools=len(trace.named("execute_tool")),
        from_engine=bool(requests),
    )
    for span in requests or chats:
        found.prompt_tokens += _int(span, names.PROMPT_TOKENS)
        found.queue_s += _float(span, names.QUEUE_S)
        found.prefill_s += _float(span, names.PREFILL_S)
        found.all.add(span)
    if requests:
        found.all.time_s = sum(_float(span, names.DECODE_S) for span in requests)
    found.blocks = _block_totals(trace.named("agentspec.block"))
    found.sources = _source_totals(requests)
    return found


def _block_totals(spans: Sequence[SpanRecord]) -> list[BlockTotals]:
    by_kind: dict[str, BlockTotals] = {}
    for span in spans:
        kind = str(span.attributes.get(names.BLOCK_KIND, "?"))
        entry = by_kind.setdefault(kind, BlockTotals(kind=kind))
        entry.count += 1
        entry.add(span)
    return sorted(by_kind.values(), key=lambda entry: -entry.time_s)


def _source_totals(spans: Sequence[SpanRecord]) -> list[SourceTotals]:
    found = [
        SourceTotals(
            source=str(source),
            drafted=sum(_int(span, names.SOURCE_DRAFTED[source]) for span in spans),
            accepted=sum(_int(span, names.SOURCE_ACCEPTED[source]) for span in spans),
        )
        for source in DraftSource
    ]
    return sorted((entry for entry in found if entry.drafted), key=lambda entry: -entry.drafted)


def _int(span: SpanRecord, name: str) -> int:
    value = span.attributes.get(name)
    return value if isinstance(value, int) else 0


def _float(span: SpanRecord, name: str) -> float:
    value = span.attributes.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
