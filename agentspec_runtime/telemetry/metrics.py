"""Prometheus metrics of the engine, beside vLLM's own, under the prefix `agentspec_`.

Labels are block kind (9 values), draft source (4) and finish reason only; never a session, a model of a
tenant or anything else a client can invent. The classes of prometheus_client find out by themselves
whether `PROMETHEUS_MULTIPROC_DIR` is set: then this process writes to files there and vLLM's API process,
which has the same directory, serves them under `/metrics`. The variable must be set before
prometheus_client is imported for the first time (`prepare_multiprocess`).

Called from the telemetry thread only. Counters are summed over a slice of steps before they are written,
because a write to a multiprocess file costs about a microsecond.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agentspec_runtime.errors import MissingDependencyError
from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.observe import DraftSource, RequestReport, StepReport, sum_verdicts

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["EngineMetrics", "Losses", "engine_metrics", "prepare_multiprocess"]

_MULTIPROC: Final = "PROMETHEUS_MULTIPROC_DIR"

# Factors of about 1.6: a GPU step of a small model takes 3 ms, a CPU step under load up to seconds.
_STEP_BUCKETS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08,
    0.12, 0.2, 0.3, 0.5, 0.8, 1.25, 2.0, 5.0,
)  # fmt: skip
_DRAFT_BUCKETS: Final = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
_TOKEN_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_DEPTH_BUCKETS: Final = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
_BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
_RATIO_BUCKETS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)

_KNOWN_REASONS: Final = frozenset({"stop", "length", "abort", "error", "ignored", "repetition"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Telemetry records lost since the start, by kind."""

    steps: int = 0
    requests: int = 0
    spans: int = 0


def prepare_multiprocess(environ: MutableMapping[str, str] = os.environ) -> str:
    """Directory through which the engine process and the API process share metrics; call before vLLM starts.

    An existing setting is kept. A new directory is made for this run, because files of an earlier run
    would be added to the sums; the caller removes it after the server has ended.
    """
    existing = environ.get(_MULTIPROC)
    if existing:
        return existing
    directory = tempfile.mkdtemp(prefix="agentspec-prometheus-")
    environ[_MULTIPROC] = directory
    return directory


class EngineMetrics:
    """All metrics of one engine process in one registry. Make it through `engine_metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        try:
            from prometheus_client import Counter, Gauge, Histogram
        except ImportError as error:
            raise MissingDependencyError("prometheus_client", "engine") from error

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"agentspec_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"agentspec_{name}", text, registry=registry, buckets=buckets)

        by_source = ("block", "source")
        self._drafted = counter("draft_tokens", "Draft tokens verified; accepted + rejected.", *by_source)
        self._accepted = counter("accepted_tokens", "Draft tokens that became output.", *by_source)
        self._rejected = counter("rejected_tokens", "Draft tokens that gave nothing.", *by_source)
        self._discarded = counter(
            "discarded_tokens", "Rejected tokens that were equal but lay behind the end.", *by_source
        )
        self._steps = counter("steps", "Engine steps that sampled.")
        self._silent = counter("silent_steps", "Engine steps that sampled and verified no draft.")
        self._price = Gauge(
            "agentspec_slot_price", "Least survival a slot needed in the last step.",
            registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self._index_bytes = Gauge(
            "agentspec_index_bytes", "Draft memory in use.", registry=registry, multiprocess_mode="livesum"
        )
        self._budget = histogram("step_draft_tokens", "Draft tokens per step, whole batch.", _TOKEN_BUCKETS)
        self._batch = histogram("step_batch_requests", "Requests that sampled in a step.", _BATCH_BUCKETS)
        self._measured = histogram("step_seconds", "Measured step time.", _STEP_BUCKETS)
        self._predicted = histogram("step_predicted_seconds", "Step time by the cost model.", _STEP_BUCKETS)
        self._error = histogram(
            "step_prediction_ratio", "Measured step time / predicted step time.", _RATIO_BUCKETS
        )
        self._draft = histogram("draft_seconds", "Time spent making drafts in a step.", _DRAFT_BUCKETS)
        self._index = histogram("index_seconds", "Time spent indexing text in a step.", _DRAFT_BUCKETS)
        self._cut = counter(
            "grammar_cut_tokens", "Draft tokens that a grammar did not allow; never verified."
        )
        self._assist_depth = histogram(
            "assist_depth",
            "Tokens that the worker's model drafter made per request in a step.",
            _DEPTH_BUCKETS,
        )
        self._assist_left_out = counter(
            "assist_left_out_steps", "Steps in which the worker's model drafter did not run at all."
        )
        self._assist_gain = Gauge(
            "agentspec_assist_gain",
            "Tokens per request and step that the model drafter is expected to add, price subtracted.",
            registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self._hints = counter("dropped_hints", "Hints that could not be used and were ignored.")
        self._errors = counter(
            "internal_errors", "Errors caught in our part of a step; it went on without drafts."
        )
        self._requests = counter("requests", "Finished requests by finish reason.", "finish_reason")
        self._lost = counter("telemetry_dropped", "Telemetry records lost, by kind.", "record")
        self._lost_before = Losses()
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        # A counter that appears with its first value has no rate for that first value.
        for source in DraftSource:
            for kind in (SegmentKind.TEXT, SegmentKind.CODE, SegmentKind.TOOL_CALL):
                for family in (self._drafted, self._accepted, self._rejected):
                    family.labels(kind, source)
        for record in ("step", "request", "span"):
            self._lost.labels(record)

    def add_steps(self, reports: Sequence[StepReport]) -> None:
        """Count a slice of steps."""
        sampling = [report for report in reports if report.num_sampling]
        self._steps.inc(len(sampling))
        self._cut.inc(sum(report.grammar_cut for report in reports))
        self._silent.inc(sum(not report.num_draft_tokens for report in sampling))
        for report in sampling:
            self._batch.observe(report.num_sampling)
            self._budget.observe(report.num_draft_tokens)
            self._measured.observe(report.measured_s)
            self._draft.observe(report.draft_s)
            self._index.observe(report.index_s)
            if report.assist_depth is not None:
                self._assist_depth.observe(max(report.assist_depth, 0))
                self._assist_left_out.inc(report.assist_depth < 0)
            if report.predicted_s > 0.0:
                self._predicted.observe(report.predicted_s)
                self._error.observe(report.measured_s / report.predicted_s)
        self._add_verdicts(reports)
        if reports:
            self._price.set(reports[-1].price)
            self._index_bytes.set(reports[-1].index_bytes)
            if reports[-1].assist_gain is not None:
                self._assist_gain.set(reports[-1].assist_gain)

    def _add_verdicts(self, reports: Iterable[StepReport]) -> None:
        total = sum_verdicts([report.verdicts for report in reports if report.num_draft_tokens])
        for (kind, source), verdict in total.items():
            self._drafted.labels(kind, source).inc(verdict.drafted)
            self._accepted.labels(kind, source).inc(verdict.accepted)
            self._rejected.labels(kind, source).inc(verdict.rejected)
            if verdict.discarded:
                self._discarded.labels(kind, source).inc(verdict.discarded)

    def add_request(self, report: RequestReport) -> None:
        """Count a finished request."""
        reason = report.finish_reason if report.finish_reason in _KNOWN_REASONS else "other"
        self._requests.labels(reason).inc()

    def add_faults(self, *, dropped_hints: int, internal_errors: int) -> None:
        """Count faults that are new."""
        self._hints.inc(dropped_hints)
        self._errors.inc(internal_errors)

    def set_losses(self, losses: Losses) -> None:
        """Bring the loss counters up to these totals."""
        before, self._lost_before = self._lost_before, losses
        self._lost.labels("step").inc(losses.steps - before.steps)
        self._lost.labels("request").inc(losses.requests - before.requests)
        self._lost.labels("span").inc(losses.spans - before.spans)


_made: dict[int, tuple[CollectorRegistry, EngineMetrics]] = {}


def engine_metrics(registry: CollectorRegistry | None = None) -> EngineMetrics:
    """The metrics of a registry (default: the process's), made once: names may not be registered twice."""
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise MissingDependencyError("prometheus_client", "engine") from error
    target = registry if registry is not None else REGISTRY
    if id(target) not in _made:
        _made[id(target)] = (target, EngineMetrics(target))
    return _made[id(target)][1]


def multiprocess_too_late() -> bool:
    """Whether prometheus_client was imported before `PROMETHEUS_MULTIPROC_DIR` was set in this process."""
    values = sys.modules.get("prometheus_client.values")
    in_memory = getattr(getattr(values, "ValueClass", None), "_multiprocess", None) is False
    return _MULTIPROC in os.environ and in_memory
