"""What the engine tells the outside about its work: frozen records and the protocol that takes them.

The scheduler builds these records and hands them to one `Observer`; it knows no exporter, no span and
no metric. Observers run in the engine process on the step's path: they must return in microseconds
(put the record on a bounded queue) and whatever they raise is counted and dropped by the caller.

Exact sums, by construction, in tokens:
    accepted + rejected = drafted, per request, block and source;
    the sum of `BlockReport.num_tokens` = output tokens of the request after stop handling;
    every output token was either accepted from a draft or sampled (one per step and request).
A draft token that was verified as equal but lies behind the end of the answer (a stop token inside an
accepted draft) is counted as `discarded`, not as accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from agentspec_runtime.hints import SegmentKind

__all__ = [
    "BlockReport",
    "DraftSource",
    "Observer",
    "RequestReport",
    "StepReport",
    "StepVerdictMap",
    "Summable",
    "Verdict",
    "add_verdicts",
    "sum_verdicts",
]


class DraftSource(StrEnum):
    """Where the text of a draft token was found."""

    REQUEST = "request"
    """This request's own prompt or output."""
    SESSION = "session"
    """Text of earlier requests of the same session that is not in this prompt."""
    CORPUS = "corpus"
    """Outputs of other sessions of the same application (same model, adapter and cache salt)."""
    ASSIST = "assist"
    """A model drafter of the worker (EAGLE-3 and others)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Draft tokens of one source and what the target model said. Counts in tokens."""

    drafted: int = 0
    accepted: int = 0
    discarded: int = 0

    @property
    def rejected(self) -> int:
        """Draft tokens that cost verification and gave nothing."""
        return self.drafted - self.accepted


_Key = TypeVar("_Key")
StepVerdictMap: TypeAlias = Mapping[tuple[SegmentKind, DraftSource], Verdict]


@runtime_checkable
class Summable(Protocol):
    """Verdicts of a step that are cheaper to add up than to read."""

    @classmethod
    def sum_of(cls, parts: Sequence[StepVerdictMap]) -> StepVerdictMap:
        """Their sum; all parts are of this class."""
        ...


def sum_verdicts(parts: Sequence[StepVerdictMap]) -> StepVerdictMap:
    """Verdicts of several steps together."""
    if parts and isinstance(parts[0], Summable) and len(set(map(type, parts))) == 1:
        total: StepVerdictMap = type(parts[0]).sum_of(parts)
        return total
    return add_verdicts(parts)


def add_verdicts(parts: Iterable[Mapping[_Key, Verdict]]) -> dict[_Key, Verdict]:
    """Verdicts under the same key together."""
    sums: dict[_Key, Verdict] = {}
    for part in parts:
        for key, v in part.items():
            before = sums.get(key, Verdict())
            sums[key] = Verdict(
                drafted=before.drafted + v.drafted,
                accepted=before.accepted + v.accepted,
                discarded=before.discarded + v.discarded,
            )
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """One structural block of an answer (a run of prose, a code fence, a tool call, ...).

    Times are seconds since the epoch. `num_steps` counts the engine steps that emitted a token of this
    block; a step whose tokens span two blocks counts for the first. `step_s_p50` and `step_s_p95` are
    over those steps, without the request's first step, which carries its prompt; 0.0 where none is left.
    `mean_batch` is the mean number of requests that sampled in those steps and
    `mean_budget` the mean number of draft tokens that the whole batch was allowed.
    """

    kind: SegmentKind
    start_s: float
    end_s: float
    num_tokens: int
    num_steps: int
    verdicts: Mapping[DraftSource, Verdict]
    mean_batch: float = 0.0
    mean_budget: float = 0.0
    step_s_p50: float = 0.0
    step_s_p95: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One finished (or aborted) request. Times are seconds since the epoch; 0.0 means "did not happen".

    `req_id` is the engine's id (unique per sampled sequence: n > 1 gives several).
    `per_step_drafted` and `per_step_accepted` have one entry per step that sampled, drafts or not, and
    are cut at `MAX_STEPS_REPORTED` entries of the telemetry layer, never here.
    """

    req_id: str
    trace_headers: Mapping[str, str] | None
    session: str | None
    agent: str | None
    turn: int | None
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    end_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    finish_reason: str
    blocks: tuple[BlockReport, ...]
    per_step_drafted: tuple[int, ...] = ()
    per_step_accepted: tuple[int, ...] = ()
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One engine step. Durations in seconds, sizes in tokens.

    `price` is the least survival a slot needed in order to be drafted; `predicted_s` the cost model's
    time for what was scheduled, `measured_s` what it took. `draft_s` is time spent making drafts on
    the step's path, `index_s` time spent indexing. `grammar_cut` are draft tokens that a grammar did not
    allow: never verified, not in `num_draft_tokens`. `dropped_hints` and `internal_errors` are totals
    since the engine started. `assist_depth`: tokens that the worker's model drafter made per request in this
    step, for the next one, -1 if it did not run at all; `assist_gain`: tokens per request and step that it is
    expected to add, price of their slots subtracted; both None where there is no such drafter. `verdicts` is
    keyed by (block, source).
    """

    num_sampling: int
    num_prefill_tokens: int
    num_draft_tokens: int
    num_waiting: int
    price: float
    predicted_s: float
    measured_s: float
    draft_s: float
    index_s: float
    index_bytes: int
    grammar_cut: int = 0
    dropped_hints: int = 0
    internal_errors: int = 0
    assist_depth: int | None = None
    assist_gain: float | None = None
    verdicts: StepVerdictMap = field(default_factory=dict)


class Observer(Protocol):
    """Takes records as they come. Called from the engine loop: return at once, keep no reference cycle."""

    def on_step(self, report: StepReport) -> None:
        """One engine step is over."""
        ...

    def on_request(self, report: RequestReport) -> None:
        """One request is over, in whatever way."""
        ...

    def close(self) -> None:
        """The engine is shutting down: flush within a bounded time."""
        ...
