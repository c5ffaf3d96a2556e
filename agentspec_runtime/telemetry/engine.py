"""The observer of the engine process: what a step and a request leave behind for people to see.

On the step's path `on_step` and `on_request` only append to a bounded queue. One background thread turns
records into Prometheus values, a slice at a time: every thread of the process shares the interpreter lock,
so a slice of work is the longest that a step can be made to wait. Spans are made and sent by a process of
their own (`span_process.py`), because that takes two milliseconds per request.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from agentspec_runtime.errors import AgentSpecError, MissingDependencyError
from agentspec_runtime.observe import Observer, RequestReport, StepReport
from agentspec_runtime.telemetry.metrics import EngineMetrics, Losses, engine_metrics, multiprocess_too_late
from agentspec_runtime.telemetry.queue import BoundedQueue, Worker

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from agentspec_runtime.telemetry.span_process import SpanProcess

__all__ = ["EngineObserver", "build_engine_observer"]

_log = logging.getLogger("agentspec.telemetry")

_STEP_RECORDS: Final = 8192
"""About a minute of a fast engine's steps (one record is half a kilobyte)."""
_REQUEST_RECORDS: Final = 2048
_STEP_SLICE: Final = 64
_PERIOD_S: Final = 0.25


class EngineObserver:
    """Implements `observe.Observer`. Make it through `build_engine_observer`."""

    def __init__(
        self,
        *,
        metrics: EngineMetrics | None,
        spans: SpanProcess | None,
        close_timeout_s: float,
        step_records: int = _STEP_RECORDS,
        request_records: int = _REQUEST_RECORDS,
    ) -> None:
        self._metrics = metrics
        self._spans = spans
        self._close_timeout_s = close_timeout_s
        self._closed = False
        self._busy = False
        self._faults = (0, 0)
        self._steps: BoundedQueue[StepReport] = BoundedQueue(step_records)
        self._requests: BoundedQueue[RequestReport] = BoundedQueue(request_records)
        self._worker = Worker("agentspec-telemetry", self._drain, period_s=_PERIOD_S)

    def on_step(self, report: StepReport) -> None:
        """Queue one step: an append, no lock, no wake-up."""
        if self._metrics is not None:
            self._steps.put(report)

    def on_request(self, report: RequestReport) -> None:
        """Queue one finished request."""
        self._requests.put(report)

    @property
    def losses(self) -> Losses:
        """Records lost so far."""
        return Losses(
            steps=self._steps.dropped,
            requests=self._requests.dropped + (self._spans.reports_lost if self._spans is not None else 0),
            spans=self._spans.spans_lost if self._spans is not None else 0,
        )

    def close(self) -> None:
        """Count and send what is queued, within the bound. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._worker.stop(self._close_timeout_s / 4)
        if self._spans is not None:
            self._spans.close()
        if self._metrics is not None:
            self._metrics.set_losses(self.losses)

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the span worker is up; nothing has to wait for it, tests and benchmarks do."""
        return self._spans is None or self._spans.wait_started(timeout_s)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything observed so far is counted and sent (tests, benchmarks)."""
        deadline_s = time.monotonic() + timeout_s
        self._worker.wake()
        while (len(self._steps) or len(self._requests) or self._busy) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        if self._spans is not None:
            return self._spans.flush(max(0.0, deadline_s - time.monotonic()))
        return time.monotonic() < deadline_s

    def _drain(self) -> None:
        self._busy = True
        try:
            while steps := self._steps.take(_STEP_SLICE):
                if self._metrics is not None:
                    self._metrics.add_steps(steps)
                    self._add_faults(self._metrics, steps[-1])
                time.sleep(0)  # give the interpreter lock back between slices
            while requests := self._requests.take(1):
                self._add_request(requests[0])
                time.sleep(0)
            if self._metrics is not None:
                self._metrics.set_losses(self.losses)
        finally:
            self._busy = False

    def _add_faults(self, metrics: EngineMetrics, last: StepReport) -> None:
        # The reports hold totals since the start of this engine; another engine may share the registry.
        hints, errors = self._faults
        self._faults = (last.dropped_hints, last.internal_errors)
        metrics.add_faults(
            dropped_hints=max(0, last.dropped_hints - hints),
            internal_errors=max(0, last.internal_errors - errors),
        )

    def _add_request(self, report: RequestReport) -> None:
        if self._metrics is not None:
            self._metrics.add_request(report)
        if self._spans is not None:
            self._spans.put(report)


def build_engine_observer(
    *,
    endpoint: str | None = None,
    service_name: str = "agentspec-engine",
    registry: CollectorRegistry | None = None,
    metrics: bool = True,
    close_timeout_s: float = 2.0,
    environ: Mapping[str, str] = os.environ,
) -> Observer:
    """Observer for the engine process.

    Args:
        endpoint: OTLP endpoint for spans; None takes the standard variables
            (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`), and without those there
            are no spans.
        service_name: service of the spans unless `OTEL_SERVICE_NAME` says otherwise.
        registry: Prometheus registry, default the process's.
        metrics: False leaves Prometheus out.
        close_timeout_s: longest time that `close` may take to send what is left.
        environ: where the standard variables are looked up.

    Raises:
        AgentSpecError: `endpoint` was given and cannot be used. What only the environment asks for and
            cannot be had is logged as one warning instead: a variable meant for another program must not
            keep a server from starting.
    """
    counted = engine_metrics(registry) if metrics else None
    if counted is not None and registry is None and multiprocess_too_late():
        _log.warning(
            "telemetry: PROMETHEUS_MULTIPROC_DIR was set after prometheus_client was imported;"
            " the metrics of this process will not show under /metrics"
        )
    try:
        spans = _span_process(endpoint, service_name, close_timeout_s, environ)
    except AgentSpecError as error:
        if endpoint is not None:
            raise
        _log.warning("telemetry: no spans: %s", error)
        spans = None
    observer = EngineObserver(metrics=counted, spans=spans, close_timeout_s=close_timeout_s)
    # For engines inside a script. A child of multiprocessing runs no atexit functions: there the scheduler's
    # shutdown must call close().
    atexit.register(observer.close)
    return observer


def _span_process(
    endpoint: str | None, service_name: str, close_timeout_s: float, environ: Mapping[str, str]
) -> SpanProcess | None:
    asked = endpoint or any(name.startswith("OTEL_EXPORTER_OTLP") for name in environ)
    if not asked:
        return None
    try:
        from agentspec_runtime.telemetry.destination import destination, require_exporter, tracing_disabled
        from agentspec_runtime.telemetry.span_process import SpanProcess
    except ImportError as error:
        raise MissingDependencyError("opentelemetry-sdk", "otel") from error
    target = None if tracing_disabled(environ) else destination(endpoint, environ)
    if target is None:
        return None
    require_exporter(target)
    return SpanProcess(
        endpoint=target.endpoint,
        protocol=target.protocol,
        service=environ.get("OTEL_SERVICE_NAME") or service_name,
        close_timeout_s=close_timeout_s,
    )
