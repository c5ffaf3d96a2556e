"""The process that turns request reports into spans and sends them; started by `span_process.py`.

It reads frames from stdin, writes its counts to stdout when they change, and ends when stdin does, within
a bound: also when the engine was killed, and then still sends what it had got. It runs apart from the
engine because building and encoding the spans of one request takes about two milliseconds of an
interpreter that the engine's step needs.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from typing import BinaryIO, Final, TextIO, cast

from agentspec_runtime.telemetry.destination import Destination, Protocol
from agentspec_runtime.telemetry.export import BoundedSpanProcessor, make_exporter
from agentspec_runtime.telemetry.span_frames import Flush, WorkerCounts, read_frame

__all__ = ["main"]

_REPORT_PERIOD_S: Final = 0.25
_FLUSH_TIMEOUT_MS: Final = 10_000
SCOPE: Final = "agentspec.engine"


class _Status:
    """Writes the counts to stdout while they change."""

    def __init__(self, processor: BoundedSpanProcessor, out: TextIO) -> None:
        self.flushed = 0
        self._processor = processor
        self._out = out
        self._last: WorkerCounts | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="agentspec-status", daemon=True).start()

    def write(self) -> None:
        """Write the counts if they have changed."""
        with self._lock:
            counts = WorkerCounts(
                exported=self._processor.exported, lost=self._processor.lost, flushed=self.flushed
            )
            if counts == self._last:
                return
            self._last = counts
            try:
                self._out.write(counts.line())
                self._out.flush()
            except OSError:  # the engine is gone; what is left is still sent
                self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_REPORT_PERIOD_S):
            self.write()


def main() -> None:
    """Run until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--close-timeout", type=float, required=True)
    options = parser.parse_args()
    # A Ctrl-C or a stop of the group is for the engine; this process ends with its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="agentspec: %(message)s", stream=sys.stderr)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    target = Destination(endpoint=options.endpoint, protocol=cast("Protocol", options.protocol))
    processor = BoundedSpanProcessor(
        make_exporter(target), endpoint=target.endpoint, close_timeout_s=options.close_timeout
    )
    status = _Status(processor, sys.stdout)
    _run(sys.stdin.buffer, processor, status, service=options.service)
    processor.shutdown()
    status.write()
    # A gRPC or socket thread that still waits for a collector must not keep this process.
    os._exit(0)


def _run(stream: BinaryIO, processor: BoundedSpanProcessor, status: _Status, *, service: str) -> None:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from agentspec_runtime.telemetry.spans import emit_request

    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer(SCOPE)
    while (frame := read_frame(stream)) is not None:
        if isinstance(frame, Flush):
            processor.force_flush(_FLUSH_TIMEOUT_MS)
            status.flushed = frame.number
            status.write()
        else:
            emit_request(tracer, frame)


if __name__ == "__main__":
    main()
