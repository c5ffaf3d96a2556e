"""Collectors that are down, hang or cannot be reached: the exit is bounded and nothing else notices."""

from __future__ import annotations

import os
import signal
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
from agentspec_runtime.telemetry.receiver import OtlpReceiver

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
    assert observer.wait_ready(30)
    for number in range(50):
        observer.on_request(make_request(req_id=str(number)).request)
    time.sleep(1.0)  # an export is under way
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
    assert isinstance(observer, EngineObserver)
    assert observer.wait_ready(30)
    observer.on_request(made)
    time.sleep(1.0)
    slowest = 0.0
    for _ in range(2000):
        began = time.perf_counter()
        observer.on_request(made)
        slowest = max(slowest, time.perf_counter() - began)
    observer.close()
    # One switch interval of the interpreter (5 ms) plus scheduling noise on a shared machine.
    assert slowest < 0.1


def test_the_log_says_it_once(capfd: pytest.CaptureFixture[str]) -> None:
    """One warning of ours, and none of the exporter's lines per retry."""
    endpoint = f"http://127.0.0.1:{closed_port()}/v1/traces"
    observer = build_engine_observer(
        endpoint=endpoint, registry=CollectorRegistry(), environ={}, close_timeout_s=4.0
    )
    assert isinstance(observer, EngineObserver)
    assert observer.wait_ready(30)
    for number in range(5):
        observer.on_request(make_request(req_id=str(number)).request)
    observer.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert endpoint in lines[0]


def test_a_worker_that_dies_loses_only_spans(receiver: OtlpReceiver) -> None:
    """Killed from outside: counted, said once, and metrics, steps and close go on."""
    registry = CollectorRegistry()
    observer = build_engine_observer(endpoint=receiver.endpoint, registry=registry, environ={})
    assert isinstance(observer, EngineObserver)
    assert observer.wait_ready(30)
    assert observer._spans is not None
    observer._spans._process.kill()
    observer._spans._process.wait()
    for number in range(20):
        observer.on_request(make_request(req_id=str(number)).request)
    began = time.monotonic()
    observer.close()
    assert time.monotonic() - began < 2.5
    assert observer.losses.requests == 20
    assert registry.get_sample_value("agentspec_requests_total", {"finish_reason": "stop"}) == 20


def test_spans_survive_an_engine_that_is_killed(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """SIGKILL to the engine: what it had handed over still arrives, and no worker is left behind."""
    arguments = [str(Path(__file__).parent), receiver.endpoint, "killed"]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments])
    assert process.wait(60) == -signal.SIGKILL
    receiver.wait_for(lambda spans: len(spans) == 600, timeout_s=30)


SCRIPT = """
    import os, signal, sys, time
    sys.path.insert(0, sys.argv[1])
    from engine_records import make_request
    from agentspec_runtime.telemetry.engine import build_engine_observer
    observer = build_engine_observer(endpoint=sys.argv[2], environ={})
    observer.wait_ready(30)
    for number in range(100):
        observer.on_request(make_request(req_id=str(number)).request)
    if sys.argv[3] == "closed":
        observer.close()
    if sys.argv[3] == "killed":
        while len(observer._requests) or len(observer._spans._queue):
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
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
