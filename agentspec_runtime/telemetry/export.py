"""Sending finished spans: which exporter, and a span processor that can neither block nor hang an exit.

Why not the SDK's BatchSpanProcessor: its shutdown joins a thread that may sit in a retry for 30 seconds
(a process that was told to stop gets killed with requests in flight), and what it drops shows in no
counter that we can publish. `BoundedSpanProcessor` has its own queue, one daemon thread and one bound.

The first success and the first failure are logged once each, so that "no spans arrive" has an answer in
the log.

This module needs the SDK; import it only where spans were asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,
    Context,
    attach,
    detach,
    set_value,
)
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentspec_runtime.errors import ConfigurationError, MissingDependencyError
from agentspec_runtime.telemetry.destination import Destination
from agentspec_runtime.telemetry.queue import BoundedQueue, Worker

__all__ = [
    "BoundedSpanProcessor",
    "JsonLinesExporter",
    "make_exporter",
]

_log = logging.getLogger("agentspec.telemetry")

CLOSE_TIMEOUT_S: Final = 2.0
"""Longest wait at exit. vLLM gives its engine process about five seconds before it kills it."""
_QUEUE_SPANS: Final = 4096
_BATCH_SPANS: Final = 64
"""Encoding 64 spans takes 2 to 4 ms; more at once would hold the interpreter lock against the step."""
_PERIOD_S: Final = 0.5
_THREAD: Final = "agentspec-export"


def make_exporter(target: Destination, environ: Mapping[str, str] = os.environ) -> SpanExporter:
    """The official exporter for a destination; headers, certificates and timeouts come from its variables.

    Raises:
        MissingDependencyError: the exporter package of this protocol is not installed.
    """
    _quiet_exporters()
    if target.protocol == "http/protobuf":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise MissingDependencyError("opentelemetry-exporter-otlp-proto-http", "otel") from error
        return OTLPSpanExporter(endpoint=target.endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcSpanExporter,
        )
    except ImportError as error:
        raise MissingDependencyError("opentelemetry-exporter-otlp-proto-grpc", "otel") from error
    secure = {"OTEL_EXPORTER_OTLP_INSECURE", "OTEL_EXPORTER_OTLP_TRACES_INSECURE"} & environ.keys()
    # "collector:4317" without a scheme: plain text, as vLLM does, unless a variable says otherwise.
    insecure = None if "://" in target.endpoint or secure else True
    return GrpcSpanExporter(endpoint=target.endpoint, insecure=insecure)


class BoundedSpanProcessor(SpanProcessor):
    """Takes ended spans on any thread in microseconds and sends them in the background.

    Spans are lost, and counted in `lost`, when the queue is full, when a batch fails, and when the
    process ends before they could be sent. Nothing else is ever affected by a collector.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        endpoint: str,
        queue_spans: int = _QUEUE_SPANS,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.exported = 0
        self._failed = 0
        self._in_flight = 0
        self._abandoned = threading.Event()
        self._exporter = exporter
        self._endpoint = endpoint
        self._close_timeout_s = close_timeout_s
        self._closed = False
        self._told: set[bool] = set()
        self._sending = threading.Lock()
        self._queue: BoundedQueue[ReadableSpan] = BoundedQueue(queue_spans)
        self._worker = Worker(_THREAD, self._send_all, period_s=_PERIOD_S)

    @property
    def lost(self) -> int:
        """Spans that will not arrive."""
        return self._queue.dropped + self._failed

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do: spans are sent when they end."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span; unsampled ones are not sent."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._closed:
            self._failed += 1
        else:
            self._queue.put(span)

    def shutdown(self) -> None:
        """Send what is queued within the bound, count the rest as lost."""
        if self._closed:
            return
        self._closed = True
        finished = self._worker.stop(self._close_timeout_s)
        # What is in flight may still arrive, or not; nobody will be there to know, so it counts as lost.
        # The thread is a daemon and is left in its request; closing the exporter ends a sleeping retry.
        if not finished:
            self._abandoned.set()
        self._failed += self._in_flight + len(self._queue.take(len(self._queue)))
        closer = threading.Thread(target=self._close_exporter, name=_THREAD, daemon=True)
        closer.start()
        closer.join(0.1)
        if not finished:
            self._tell_once(sent=False)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until the queue is empty and nothing is in flight."""
        deadline_s = time.monotonic() + timeout_millis / 1e3
        self._worker.wake()
        while time.monotonic() < deadline_s:
            if not len(self._queue) and self._sending.acquire(blocking=False):
                self._sending.release()
                return True
            time.sleep(0.005)
        return False

    def _close_exporter(self) -> None:
        try:
            self._exporter.shutdown()
        except Exception as error:  # noqa: BLE001 - a foreign exporter, at exit: the process ends anyway
            _log.debug("telemetry: exporter shutdown: %s", type(error).__name__)

    def _send_all(self) -> None:
        with self._sending:
            while not self._abandoned.is_set() and (batch := self._queue.take(_BATCH_SPANS)):
                self._in_flight = len(batch)
                sent = self._send(batch)
                if self._abandoned.is_set():
                    return
                self._in_flight = 0
                if sent:
                    self.exported += len(batch)
                else:
                    self._failed += len(batch)
                self._tell_once(sent=sent)

    def _send(self, batch: list[ReadableSpan]) -> bool:
        # The exporter's own HTTP call must not make spans of its own.
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - a foreign exporter; the spans are lost and counted
            _log.debug("telemetry: exporter raised %s", type(error).__name__)
            return False
        finally:
            detach(token)

    def _tell_once(self, *, sent: bool) -> None:
        if sent in self._told:
            return
        self._told.add(sent)
        if sent:
            _log.info("telemetry: spans arrive at %s", self._endpoint)
        else:
            _log.warning(
                "telemetry: %s takes no spans (said once; they are counted as lost). Check that the collector"
                " runs and that the protocol fits: 4317 is gRPC, 4318 is HTTP with the path /v1/traces",
                self._endpoint,
            )


class JsonLinesExporter(SpanExporter):
    """Appends OTLP JSON lines to a file, one line per batch. The Jaeger UI's "Upload" takes such a file."""

    def __init__(self, path: Path) -> None:
        # Opened now, so that a path that cannot be written is an error of the caller and not a lost span.
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write spans to {str(path)!r}: {error.strerror}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one batch and flush it."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        from agentspec_runtime.telemetry.otlp import to_json_line

        self._file.write(to_json_line(encode_spans(spans)) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


class _NotFromOurThread(logging.Filter):
    """Keeps an exporter's line per retry out of the log when the export is ours: we say it once."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != _THREAD


_quiet = _NotFromOurThread()


def _quiet_exporters() -> None:
    for name in (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.otlp.proto.grpc.exporter",
    ):
        logging.getLogger(name).addFilter(_quiet)
