"""The engine's end of the pipe to the span worker (`span_worker.py`).

Handing over a report costs the engine its pickling, some 30 microseconds on a background thread. The pipe
may fill (the worker is still starting, or the machine is starved): then the writing thread waits, the queue
fills, and further reports are dropped and counted. Nothing of this reaches the step.
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
import time
from typing import BinaryIO, Final, cast

from agentspec_runtime.observe import RequestReport
from agentspec_runtime.telemetry.queue import BoundedQueue, Worker
from agentspec_runtime.telemetry.span_frames import Flush, Frame, WorkerCounts, write_frame

__all__ = ["SpanProcess"]

_log = logging.getLogger("agentspec.telemetry")

_QUEUE_REPORTS: Final = 2048
_PERIOD_S: Final = 0.2
_MODULE: Final = "agentspec_runtime.telemetry.span_worker"


class SpanProcess:
    """Starts the worker, feeds it, and knows what became of the spans."""

    def __init__(self, *, endpoint: str, protocol: str, service: str, close_timeout_s: float) -> None:
        self._close_timeout_s = close_timeout_s
        self._counts = WorkerCounts()
        self._unsent = 0
        self._flush_number = 0
        self._broken = False
        self._started = threading.Event()
        self._ended = threading.Event()
        self._queue: BoundedQueue[Frame] = BoundedQueue(_QUEUE_REPORTS)
        options = ["--endpoint", endpoint, "--protocol", protocol, "--service", service]
        options += ["--close-timeout", str(close_timeout_s / 2)]
        self._process = subprocess.Popen(
            # -P: no module of the working directory may stand in for one of the worker's imports.
            [sys.executable, "-P", "-m", _MODULE, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is for the engine
        )
        threading.Thread(target=self._listen, name="agentspec-span-counts", daemon=True).start()
        self._writer = Worker("agentspec-spans", self._write, period_s=_PERIOD_S)

    @property
    def spans_lost(self) -> int:
        """Spans that the worker could not send."""
        return self._counts.lost

    @property
    def reports_lost(self) -> int:
        """Reports that never became spans."""
        return self._queue.dropped + self._unsent

    def wait_started(self, timeout_s: float) -> bool:
        """Whether the worker is ready; it takes a second or two, and nothing has to wait for it."""
        return self._started.wait(timeout_s)

    def put(self, report: RequestReport) -> None:
        """Queue a report, or drop and count it."""
        self._queue.put(report)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is sent, or lost."""
        deadline_s = time.monotonic() + timeout_s
        self._flush_number += 1
        self._queue.put(Flush(self._flush_number))
        self._writer.wake()
        while self._counts.flushed < self._flush_number and time.monotonic() < deadline_s:
            if self._broken or self._process.poll() is not None:
                return False
            time.sleep(0.005)
        return self._counts.flushed >= self._flush_number

    def close(self) -> None:
        """Hand over what is queued and wait, within the bound, until the worker has sent it.

        A worker that is not done by then is left to its own bound: it ends by itself.
        """
        deadline_s = time.monotonic() + self._close_timeout_s
        if self._writer.stop(self._close_timeout_s / 2):
            self._close_stdin()
        self._unsent += len(self._queue.take(_QUEUE_REPORTS))
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("telemetry: the last spans are still being sent; the worker ends by itself")
        else:
            self._ended.wait(0.1)  # the last counts are in the pipe

    def _close_stdin(self) -> None:
        try:
            self._stdin.close()
        except OSError:
            self._broken = True

    @property
    def _stdin(self) -> BinaryIO:
        return cast("BinaryIO", self._process.stdin)  # PIPE was asked for

    def _write(self) -> None:
        while items := self._queue.take(16):
            for item in items:
                self._write_one(item)
            time.sleep(0)  # give the interpreter lock back between slices

    def _write_one(self, item: Frame) -> None:
        if self._broken:
            self._unsent += 1
            return
        try:
            write_frame(self._stdin, item)
        except (OSError, ValueError) as error:
            self._broken = True
            self._unsent += 1
            _log.warning("telemetry: the span worker is gone (%s); no more spans", type(error).__name__)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._unsent += 1
            _log.debug("telemetry: a report that cannot be handed over: %s", error)

    def _listen(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._counts = WorkerCounts.parse(line)
                self._started.set()
        self._ended.set()
