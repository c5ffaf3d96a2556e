"""docs/tracing.md and the code say the same: attributes, metrics, variables."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from engine_records import make_request
from prometheus_client import CollectorRegistry

from agentspec_runtime import configure_tracing, instrument, session, tool
from agentspec_runtime.telemetry.attributes import ATTRIBUTES, markdown_table
from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer
from agentspec_runtime.telemetry.metrics import EngineMetrics
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.receiver import OtlpReceiver
from agentspec_runtime.testing import MockVLLM

DOCS = Path(__file__).parents[2] / "docs" / "tracing.md"
TYPES = {"string": str, "int": int, "double": float, "boolean": bool, "int[]": list}


@pytest.fixture
def spans(receiver: OtlpReceiver) -> list[SpanRecord]:
    """Spans of both sides, as they arrive."""
    engine = build_engine_observer(endpoint=receiver.endpoint, registry=CollectorRegistry(), environ={})
    assert isinstance(engine, EngineObserver)
    engine.on_request(make_request().request)

    @tool
    def add() -> None:
        """Nothing."""

    with MockVLLM() as server, instrument(), configure_tracing(receiver.endpoint, environ={}) as tracing:
        with session("s", agent="outer"), session(agent="inner"):
            openai.OpenAI(base_url=server.url, api_key="unused").chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
            add()
        assert tracing.flush()
    assert engine.flush(30)
    engine.close()
    return receiver.spans()


def test_every_attribute_of_ours_is_in_the_table(spans: list[SpanRecord]) -> None:
    """Name, type and span of each exported agentspec attribute, and none in the table is never seen."""
    table = {attribute.name: attribute for attribute in ATTRIBUTES}
    seen: set[tuple[str, str]] = set()
    for span in spans:
        where = span.name.split()[0].removeprefix("agentspec.")
        for name, value in span.attributes.items():
            if not name.startswith("agentspec."):
                continue
            assert where in table[name].spans, f"{name} on {where}"
            assert type(value) is TYPES[table[name].type], name
            seen.add((name, where))
    rows = {
        (name, where) for name, attribute in table.items() for where in attribute.spans if where != "link"
    }
    # Sources that this request did not draft from, and the stock mock's missing queue time.
    absent = {name for name, _ in rows - seen if name.startswith("agentspec.")}
    assert all(
        re.fullmatch(r"agentspec\.(spec\.\w+\.\w+_tokens|queue_s|cached_tokens)", name) for name in absent
    ), absent


def test_the_docs_show_the_table() -> None:
    """To renew it, print `agentspec_runtime.telemetry.attributes.markdown_table()`."""
    assert markdown_table() in DOCS.read_text()


def test_the_docs_list_every_metric() -> None:
    """Families of Prometheus, by name, and no name that does not exist."""
    registry = CollectorRegistry()
    EngineMetrics(registry)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    section = DOCS.read_text().split("## Prometheus")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(agentspec_\w+)`", section, flags=re.MULTILINE)) == names
