"""OTLP traces as files and as typed records.

The JSON form is OTLP's, not protobuf's: ids are hex (protobuf's own JSON would write base64, which no
viewer takes) and enums are numbers. One request per line is what the Jaeger UI's "Upload" accepts.

Reading is liberal: hex or base64 ids, one document or one per line, and the `{"result": ...}` envelope of
Jaeger's query API v3.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from agentspec_runtime.errors import MissingDependencyError, RecordingError

try:
    from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span
except ImportError as error:
    raise MissingDependencyError("opentelemetry-proto", "otel") from error

__all__ = [
    "ExportTraceServiceRequest",
    "SpanEvent",
    "SpanRecord",
    "from_json",
    "read_jsonl",
    "span_records",
    "to_json_line",
]

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
AttributeData: TypeAlias = "str | int | float | bool | bytes | list[AttributeData] | dict[str, AttributeData]"

_ID_FIELDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})
_HEX_LENGTHS: Final = frozenset({16, 32})
_ID_BYTES: Final = frozenset({0, 8, 16})
_STATUS: Final = ("UNSET", "OK", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A timed event of a span; time in nanoseconds since the epoch."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeData] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One received span. Ids are lower-case hex, "" for no parent; times nanoseconds since the epoch.

    `kind` is OTLP's number without its prefix ("SERVER"), `status` is UNSET, OK or ERROR. `links` are
    (trace id, span id) pairs. `dropped` counts attributes, events and links that the sender cut off.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    service: str
    scope: str
    status: str = "UNSET"
    status_message: str = ""
    attributes: Mapping[str, AttributeData] = field(default_factory=dict)
    resource: Mapping[str, AttributeData] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    dropped: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


def span_records(request: ExportTraceServiceRequest) -> Iterator[SpanRecord]:
    """Spans of one export request, in the order sent."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        service = str(resource.get("service.name", ""))
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _record(span, resource=resource, service=service, scope=scope_spans.scope.name)


def _record(span: Span, *, resource: Mapping[str, AttributeData], service: str, scope: str) -> SpanRecord:
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        service=service,
        scope=scope,
        status=_STATUS[span.status.code] if span.status.code < len(_STATUS) else "UNSET",
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        resource=resource,
        events=tuple(
            SpanEvent(name=event.name, time_ns=event.time_unix_nano, attributes=_attributes(event.attributes))
            for event in span.events
        ),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        dropped=span.dropped_attributes_count + span.dropped_events_count + span.dropped_links_count,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, AttributeData]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> AttributeData:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case _:
            return ""


def to_json_line(request: ExportTraceServiceRequest) -> str:
    """OTLP JSON of one request on one line, without a line end."""
    document = MessageToDict(request, use_integers_for_enums=True)
    return json.dumps(_map_ids(document, _base64_to_hex), separators=(",", ":"), ensure_ascii=False)


def from_json(document: Json) -> ExportTraceServiceRequest:
    """Export request out of parsed OTLP JSON; see the module docstring for what is understood.

    Raises:
        RecordingError: not OTLP traces.
    """
    if isinstance(document, dict) and isinstance(document.get("result"), dict):
        document = document["result"]
    if not isinstance(document, dict) or "resourceSpans" not in document:
        raise RecordingError("not OTLP traces: an object with 'resourceSpans' was needed")
    try:
        converted = _map_ids({"resourceSpans": document["resourceSpans"]}, _hex_to_base64)
        return ParseDict(converted, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ParseError, binascii.Error, ValueError) as error:
        raise RecordingError(f"not OTLP traces: {str(error)[:200]}") from None


def read_jsonl(path: Path) -> list[ExportTraceServiceRequest]:
    """Requests of a file with one JSON document per line, or one document in all.

    Raises:
        RecordingError: cannot be read; the message names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: {error}") from None
    return list(parse_documents(text, where=str(path)))


def parse_documents(text: str, *, where: str) -> Iterator[ExportTraceServiceRequest]:
    """Requests of concatenated JSON documents: one, one per line, or pretty-printed ones in a row.

    Raises:
        RecordingError: naming `where`, the line and the reason.
    """
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        line = text.count("\n", 0, at) + 1
        try:
            document, at = decoder.raw_decode(text, at)
            yield from_json(document)
        except json.JSONDecodeError as error:
            raise RecordingError(f"{where}, line {line}: not JSON: {error.msg}") from None
        except RecordingError as error:
            raise RecordingError(f"{where}, line {line}: {error}") from None


def _map_ids(node: dict[str, Json], convert: Callable[[str], str]) -> dict[str, Json]:
    return {
        key: convert(value) if key in _ID_FIELDS and isinstance(value, str) else _map_inside(value, convert)
        for key, value in node.items()
    }


def _map_inside(node: Json, convert: Callable[[str], str]) -> Json:
    if isinstance(node, dict):
        return _map_ids(node, convert)
    if isinstance(node, list):
        return [_map_inside(item, convert) for item in node]
    return node


def _base64_to_hex(text: str) -> str:
    return base64.b64decode(text).hex()


def _hex_to_base64(text: str) -> str:
    if len(text) in _HEX_LENGTHS:
        return base64.b64encode(bytes.fromhex(text)).decode()
    if len(base64.b64decode(text, validate=True)) not in _ID_BYTES:
        raise ValueError(f"an id of {len(text)} characters is neither hex nor base64")
    return text
