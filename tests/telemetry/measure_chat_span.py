"""What a chat span costs the agent, per model call: `python tests/telemetry/measure_chat_span.py`.

A call with 50 messages and 150 verify steps, without the network: the time between the caller and the SDK.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentspec_runtime.client.observer import CallStart, CallWatch
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.telemetry.client import install_span_observers
from agentspec_runtime.telemetry.export import BoundedSpanProcessor

CALLS: Final = 500
REPORT: Final = CallReport(
    operation="chat", model="m", base_url="", session="s", agent="a", parent=None, turn=1, hinted=True,
    stream=False, outcome="ok", latency_ms=1.0, prompt_tokens=10, completion_tokens=400, num_steps=200,
    num_spec_steps=150, drafted=450, accepted=300, per_step_drafted=(3,) * 150, per_step_accepted=(2,) * 150,
)  # fmt: skip


class Nowhere(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Forget."""
        return SpanExportResult.SUCCESS


def call_start() -> CallStart:
    return CallStart(
        operation="chat", model="m", base_url="http://x", server_address="x", server_port=1, stream=False,
        session="s", agent="a", parent=None, turn=1, hint=None, headers={},
        body={"messages": [{"role": "user", "content": "x"}] * 50},
    )  # fmt: skip


def median_us() -> float:
    times = []
    for _ in range(CALLS):
        call = call_start()
        began = time.perf_counter()
        watch = CallWatch(call)
        with watch.active():
            pass
        watch.finish(REPORT, None)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    print(f"no observer        {median_us():7.1f} us per call")
    remove = install_span_observers(environ={})
    print(f"no tracer provider {median_us():7.1f} us per call")
    remove()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BoundedSpanProcessor(Nowhere(), endpoint="nowhere"))
    remove = install_span_observers(provider, environ={})
    print(f"spans              {median_us():7.1f} us per call")
    remove()


if __name__ == "__main__":
    main()
