"""The one conversion of values: what comes out is always something SDK, protobuf and backends take."""

from __future__ import annotations

import logging
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.telemetry.attributes import ATTRIBUTES, MAX_STRING, attribute_value, clean


class Hostile:
    """Raises wherever it can."""

    def __repr__(self) -> str:
        raise RuntimeError("CANARY repr")

    def __iter__(self) -> object:
        raise RuntimeError("CANARY iter")


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (True, True),
        (3, 3),
        (2.5, 2.5),
        ("x", "x"),
        (SegmentKind.CODE, "code"),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (b"secret", None),
        (Decimal("1.5"), None),
        (Hostile(), None),
        (object(), None),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2, 3]), [1, 2, 3]),
        ([1, 2.0], [1.0, 2.0]),
        ([1, 2.0, None], "[1, 2.0, null]"),
        ([True, False], [True, False]),
        ([1, True], "[1, true]"),
        (["a", 1], '["a", 1]'),
        ((), []),
        ({"a": 1}, '{"a": 1}'),
        ({"a": b"secret"}, '{"a": "bytes"}'),
        (1 << 63, str(1 << 63)),
        ("\ud800x", "?x"),
        ("y" * (MAX_STRING + 5), "y" * MAX_STRING),
        ([5] * 3000, [5] * 1024),
    ],
    ids=lambda value: type(value).__name__,
)
def test_conversion(value: object, want: object) -> None:
    """One row per kind of value that field reports name."""
    got = attribute_value(value)
    assert got == want
    assert type(got) is type(want)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(min_size=1), JSON_LIKE, max_size=5))
def test_the_sdk_takes_every_converted_value_without_a_warning(values: dict[str, object]) -> None:
    """Nothing converted is dropped, warned about, or refused by the protobuf encoder."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # a list is all the handler has to be
    logging.getLogger("opentelemetry").addHandler(handler)
    try:
        converted = clean(values)
        span = provider.get_tracer("t").start_span("s", attributes=converted)
        span.end()
        (finished,) = exporter.get_finished_spans()
        assert set(finished.attributes or {}) == set(converted)
        assert encode_spans([finished]).SerializeToString()
    finally:
        logging.getLogger("opentelemetry").removeHandler(handler)
    assert records == []


def test_the_table_has_no_name_twice_and_only_known_types() -> None:
    """The table is what the docs print."""
    names = [attribute.name for attribute in ATTRIBUTES]
    assert len(names) == len(set(names))
    assert {attribute.type for attribute in ATTRIBUTES} <= {
        "string",
        "int",
        "double",
        "boolean",
        "int[]",
        "string[]",
    }
    assert all(attribute.meaning.endswith(".") and attribute.spans for attribute in ATTRIBUTES)
