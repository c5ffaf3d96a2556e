"""Getting traces and sending them on: OTLP JSON files, the query API of Jaeger, OTLP endpoints.

Jaeger's `/api/v3` is its stable API (`/api/traces` is the UI's own). Parameters are written in snake_case,
which every 2.x and the last 1.x releases understand. Standard library only: this is a tool for people.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from agentspec_runtime.errors import ConfigurationError, MissingDependencyError, RecordingError, ServerError
from agentspec_runtime.telemetry.destination import destination
from agentspec_runtime.telemetry.otlp import parse_documents, read_jsonl, span_records
from agentspec_runtime.telemetry.turn import Trace, group_traces

__all__ = ["Jaeger", "find_trace", "load_target", "traces_in_file", "upload"]

_TIMEOUT_S: Final = 10.0
_LOOK_BACK: Final = timedelta(hours=24)
_MAX_SERVICES: Final = 16
_MAX_TRACES: Final = 20


class Jaeger:
    """Reads traces from a Jaeger query service."""

    def __init__(self, url: str) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigurationError(
                f"{url!r} is no Jaeger URL: expected something like http://localhost:16686"
            )
        self._url = url.rstrip("/")

    def trace(self, trace_id: str) -> Trace:
        """One trace by its full id.

        Raises:
            RecordingError: there is none.
            ServerError: Jaeger does not answer.
        """
        traces = self._traces(f"/api/v3/traces/{urllib.parse.quote(trace_id, safe='')}", {})
        if not traces:
            raise RecordingError(f"{self._url} has no trace {trace_id!r}")
        return traces[-1]

    def newest(self, service: str | None = None) -> Trace:
        """The trace that started last, within a day.

        Raises:
            RecordingError: there is none.
            ServerError: Jaeger does not answer.
        """
        now = datetime.now(UTC)
        found: list[Trace] = []
        for name in [service] if service else self._services():
            query = {
                "query.service_name": name,
                "query.start_time_min": _rfc3339(now - _LOOK_BACK),
                "query.start_time_max": _rfc3339(now + timedelta(minutes=1)),
                "query.num_traces": str(_MAX_TRACES),
            }
            found += self._traces("/api/v3/traces", query)
        if not found:
            raise RecordingError(
                f"{self._url} has no traces of the last {_LOOK_BACK.total_seconds() / 3600:.0f} h"
            )
        return max(found, key=lambda trace: trace.start_ns)

    def _services(self) -> list[str]:
        body = self._get("/api/v3/services", {})
        document = json.loads(body) if body else {}
        names = document.get("services") or [] if isinstance(document, dict) else []
        # Jaeger traces itself; that is never what somebody looks for here.
        return [str(name) for name in names if name != "jaeger"][:_MAX_SERVICES]

    def _traces(self, path: str, query: Mapping[str, str]) -> list[Trace]:
        requests = parse_documents(self._get(path, query), where=f"{self._url}{path}")
        return group_traces(span for request in requests for span in span_records(request))

    def _get(self, path: str, query: Mapping[str, str]) -> str:
        url = self._url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http(s), see __init__
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise ServerError(
                f"{url} answered {error.code}: is this a Jaeger query service (port 16686)?"
            ) from None
        except OSError as error:
            raise ServerError(
                f"{self._url} does not answer ({_reason(error)}): start Jaeger, or name a file"
            ) from None
        return body.decode("utf-8", "replace")


def traces_in_file(path: Path) -> list[Trace]:
    """Traces of an OTLP JSON file, the newest last.

    Raises:
        RecordingError: cannot be read, or has no spans.
    """
    traces = group_traces(span for request in read_jsonl(path) for span in span_records(request))
    if not traces:
        raise RecordingError(f"{path}: no spans in this file")
    return traces


def find_trace(traces: Sequence[Trace], prefix: str | None, *, where: str) -> Trace:
    """The trace whose id begins so, or the newest.

    Raises:
        RecordingError: none or several begin so; the message lists what is there.
    """
    if not prefix:
        return traces[-1]
    found = [trace for trace in traces if trace.trace_id.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(trace.trace_id[:12] for trace in traces[-8:])
    what = "no trace" if not found else f"{len(found)} traces"
    raise RecordingError(f"{where}: {what} with an id that begins with {prefix!r}; the newest are {listed}")


def load_target(target: str | None, *, jaeger: str, service: str | None = None) -> Trace:
    """The trace that a person means: FILE, FILE#ID, an id in Jaeger, or nothing for Jaeger's newest.

    Raises:
        RecordingError: no such trace.
        ServerError: Jaeger does not answer.
    """
    if not target:
        return Jaeger(jaeger).newest(service)
    name, _, prefix = target.partition("#")
    if Path(name).exists():
        return find_trace(traces_in_file(Path(name)), prefix or None, where=name)
    if len(target) == 32 and all(letter in "0123456789abcdefABCDEF" for letter in target):
        return Jaeger(jaeger).trace(target.lower())
    raise RecordingError(
        f"{target!r} is neither a file nor a trace id of 32 hex digits (FILE#ID picks in a file)"
    )


def upload(path: Path, endpoint: str) -> int:
    """Send the spans of a file to an OTLP endpoint; returns how many.

    Raises:
        RecordingError: the file cannot be read.
        ServerError: the endpoint does not take them.
    """
    target = destination(endpoint)
    if target is None:
        raise ConfigurationError("an endpoint is needed, for example http://localhost:4318")
    count = 0
    for request in read_jsonl(path):
        body = request.SerializeToString()
        if target.protocol == "grpc":
            _send_grpc(target.endpoint, body)
        else:
            _send_http(target.endpoint, body)
        count += sum(1 for _ in span_records(request))
    return count


def _send_http(url: str, body: bytes) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigurationError(f"{url!r} is no OTLP URL: expected something like http://localhost:4318")
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url, data=body, headers={"Content-Type": "application/x-protobuf"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 - the scheme was checked
            return
    except urllib.error.HTTPError as error:
        raise ServerError(
            f"{url} answered {error.code}: OTLP over HTTP is on port 4318, path /v1/traces"
        ) from None
    except OSError as error:
        raise ServerError(f"{url} does not answer ({_reason(error)}): is the collector running?") from None


def _send_grpc(target: str, body: bytes) -> None:
    try:
        import grpc
    except ImportError as error:
        raise MissingDependencyError("grpcio", "otel") from error
    where = urllib.parse.urlsplit(target).netloc or target
    with grpc.insecure_channel(where) as channel:
        export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
        )
        try:
            export(body, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise ServerError(f"{where} did not take the spans over gRPC: {error.code().name}") from None


def _reason(error: OSError) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(inner, "strerror", None) or inner)


def _rfc3339(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
