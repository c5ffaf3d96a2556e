"""Collectors that are down, hang or cannot be reached: the exit is bounded and nothing else notices."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_records import make_request
from prometheus_client import CollectorRegistry

from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer

EXIT_BOUND_S = 4.0
"""The close timeout of 2 s, and the interpreter's own time on a busy machine."""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield int(listener.getsockname()[1])


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def endpoints(silent: int) -> dict[str, str]:
    # 192.0.2.0/24 is reserved for documentation: packets to it go nowhere.
    return {
        "closed": f"http://127.0.0.1:{closed_port()}/v1/traces",
        "silent": f"http://127.0.0.1:{silent}/v1/traces",
        "unroutable": "http://192.0.2.1:4318/v1/traces",
    }


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("kind", ["closed", "silent", "unroutable"])
def test_close_is_bounded_and_losses_are_counted(kind: str, protocol: str, silent_port: int) -> None:
    """close() returns within its bound; every span is counted as lost; metrics are complete."""
    registry = CollectorRegistry()
    endpoint = endpoints(silent_port)[kind]
    if protocol == "grpc":
        endpoint = endpoint.removesuffix("/v1/traces")
    observer = build_engine_observer(
        endpoint=endpoint, registry=registry, environ={"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    )
    assert isinstance(observer, EngineObserver)
    for number in range(50):
        observer.on_request(make_request(req_id=str(number)).request)
    time.sleep(0.6)  # an export is under way
    began = time.monotonic()
    observer.close()
    assert time.monotonic() - began < 2.5
    assert observer.losses.spans == 300
    assert registry.get_sample_value("agentspec_requests_total", {"finish_reason": "stop"}) == 50
    assert registry.get_sample_value("agentspec_telemetry_dropped_total", {"record": "span"}) == 300


def test_a_hanging_collector_does_not_slow_on_request(silent_port: int) -> None:
    """While the exporter hangs, handing over 2,000 requests stays a matter of microseconds each."""
    made = make_request().request
    observer = build_engine_observer(
        endpoint=endpoints(silent_port)["silent"], registry=CollectorRegistry(), environ={}
    )
    observer.on_request(made)
    time.sleep(0.8)
    slowest = 0.0
    for _ in range(2000):
        began = time.perf_counter()
        observer.on_request(made)
        slowest = max(slowest, time.perf_counter() - began)
    observer.close()
    # One switch interval of the interpreter (5 ms) plus scheduling noise on a shared machine.
    assert slowest < 0.1


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning of ours, and none of the exporter's lines per retry."""
    caplog.set_level(logging.WARNING)
    endpoint = f"http://127.0.0.1:{closed_port()}/v1/traces"
    observer = build_engine_observer(
        endpoint=endpoint, registry=CollectorRegistry(), environ={}, close_timeout_s=4.0
    )
    for number in range(5):
        observer.on_request(make_request(req_id=str(number)).request)
    observer.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, warnings
    assert endpoint in warnings[0]


SCRIPT = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from engine_records import make_request
    from agentspec_runtime.telemetry.engine import build_engine_observer
    observer = build_engine_observer(endpoint=sys.argv[2], environ={})
    for number in range(100):
        observer.on_request(make_request(req_id=str(number)).request)
    if sys.argv[3] == "closed":
        observer.close()
    print("done", flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("ending", ["closed", "forgotten"])
@pytest.mark.parametrize("kind", ["closed", "silent", "unroutable"])
def test_a_process_exits_in_bounded_time_with_its_own_code(kind: str, ending: str, silent_port: int) -> None:
    """With and without close(): no hang, no changed exit code, no traceback."""
    arguments = [str(Path(__file__).parent), endpoints(silent_port)[kind], ending]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < EXIT_BOUND_S
    assert process.returncode == 7
    assert "Traceback" not in errors
