"""A small OTLP receiver inside this process, over HTTP and, with grpcio, over gRPC.

For tests, the demo and `agentspec trace`: real sockets, the real protocol, decoded by OpenTelemetry's own
message classes. It keeps everything in memory and is no collector: no retries, no limits, no security::

    with OtlpReceiver() as receiver:
        configure_tracing(endpoint=receiver.endpoint)
        ...
        receiver.wait_for(lambda spans: len(spans) == 3)
        receiver.write_jsonl("turn.jsonl")      # the Jaeger UI can upload this file
"""

from __future__ import annotations

import gzip
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentspec_runtime.errors import MissingDependencyError
from agentspec_runtime.telemetry.otlp import (
    ExportTraceServiceRequest,
    SpanRecord,
    span_records,
    to_json_line,
)

if TYPE_CHECKING:
    import grpc as grpc_module

__all__ = ["OtlpReceiver"]

_MAX_BODY_BYTES: Final = 256 << 20


class OtlpReceiver:
    """Receives spans on `endpoint` (HTTP, with path) and, if asked for, `grpc_endpoint`.

    Args:
        port: TCP port of the HTTP side, 0 for a free one.
        grpc: also serve gRPC, on `grpc_port`.
        host: address to bind; the default is reachable from this machine only.
    """

    def __init__(
        self, port: int = 0, *, grpc: bool = False, grpc_port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._requests: list[ExportTraceServiceRequest] = []
        self._bodies: list[bytes] = []
        self._http = _Server((host, port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, name="otlp-receiver", daemon=True)
        self._grpc_server: grpc_module.Server | None = None
        self._grpc_port = 0
        if grpc:
            self._grpc_server, self._grpc_port = _grpc_server(self, host, grpc_port)

    def start(self) -> Self:
        """Begin to answer; `with` does it."""
        self._thread.start()
        if self._grpc_server is not None:
            self._grpc_server.start()
        return self

    def close(self) -> None:
        """Stop both servers; what was received stays readable."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5.0)
        if self._grpc_server is not None:
            self._grpc_server.stop(grace=0.2).wait(2.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """URL for OTLP over HTTP, with its path."""
        return f"http://{self._host}:{self._http.server_address[1]}/v1/traces"

    @property
    def grpc_endpoint(self) -> str:
        """URL for OTLP over gRPC; it was asked for at construction."""
        return f"http://{self._host}:{self._grpc_port}"

    @property
    def num_requests(self) -> int:
        """Export requests received."""
        return len(self._requests)

    def accept(self, body: bytes) -> None:
        """Take one serialized export request, as the servers do.

        Raises:
            DecodeError: not an export request.
        """
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self._requests.append(request)
            self._bodies.append(body)

    def spans(self, name: str | None = None) -> list[SpanRecord]:
        """Spans so far, by start time; with `name`, those that are called so."""
        with self._lock:
            requests = list(self._requests)
        found = [span for request in requests for span in span_records(request)]
        return sorted(
            (span for span in found if name is None or span.name == name), key=lambda span: span.start_ns
        )

    def raw(self) -> bytes:
        """All bytes received, for searching."""
        with self._lock:
            return b"\n".join(self._bodies)

    def clear(self) -> None:
        """Forget what was received."""
        with self._lock:
            self._requests.clear()
            self._bodies.clear()

    def wait_for(
        self, condition: Callable[[Sequence[SpanRecord]], bool], timeout_s: float = 10.0
    ) -> list[SpanRecord]:
        """Spans, as soon as the condition holds for them.

        Raises:
            TimeoutError: it did not hold in time; the message lists the names that arrived.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            spans = self.spans()
            if condition(spans):
                return spans
            if time.monotonic() > deadline_s:
                names = sorted({span.name for span in spans})
                raise TimeoutError(
                    f"{len(spans)} spans after {timeout_s} s, not what was waited for: {names}"
                )
            time.sleep(0.02)

    def write_jsonl(self, path: str | Path) -> Path:
        """Write everything as OTLP JSON lines; returns the path."""
        target = Path(path)
        with self._lock:
            lines = [to_json_line(request) for request in self._requests]
        target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return target


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], receiver: OtlpReceiver) -> None:
        self.receiver = receiver
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MAX_BODY_BYTES:
            self._answer(413, b"")
            return
        body = self.rfile.read(length)
        if self.path.rstrip("/") != "/v1/traces":
            self._answer(404, b"")
            return
        try:
            self.server.receiver.accept(_decompress(body, self.headers.get("Content-Encoding", "")))
        except (DecodeError, OSError, zlib.error, EOFError):
            self._answer(400, b"")
            return
        self._answer(200, ExportTraceServiceResponse().SerializeToString())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the inherited signature
        """Silent: the caller reads spans, not an access log."""


def _decompress(body: bytes, encoding: str) -> bytes:
    match encoding.strip().lower():
        case "gzip":
            return gzip.decompress(body)
        case "deflate":
            return zlib.decompress(body)
        case _:
            return body


def _grpc_server(receiver: OtlpReceiver, host: str, port: int) -> tuple[grpc_module.Server, int]:
    try:
        import grpc
    except ImportError as error:
        raise MissingDependencyError("grpcio", "otel") from error

    def export(body: bytes, _: grpc.ServicerContext) -> ExportTraceServiceResponse:
        receiver.accept(body)
        return ExportTraceServiceResponse()

    # Without a request deserializer the handler gets the bytes as sent, which `raw` needs.
    method: grpc.RpcMethodHandler[bytes, ExportTraceServiceResponse] = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp-grpc"))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    return server, server.add_insecure_port(f"{host}:{port}")
