"""{invoke, ainvoke, stream, astream} x {create_agent, StateGraph, raw SDK} x what may happen.

A wrapped agent gives the same values, types and exceptions as the unwrapped one, puts its hint on every
request exactly once, and leaves nothing behind.
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
from agent_builds import BY_NAME, THREAD, build, cases, run, serve
from agentspec_runtime.adapters.langgraph import wrap
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import agentspec_runtime
from agentspec_runtime.client.call import Call
from agentspec_runtime.client.observer import (
    BoundaryStart,
    CallStart,
    register_boundary_observer,
    register_call_observer,
)
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.client.scope import current
from agentspec_runtime.telemetry.client import install_span_observers
from agentspec_runtime.testing import MockVLLM


class Watcher:
    """Counts what begins and ends, calls and boundaries alike."""

    def __init__(self) -> None:
        self.open: list[object] = []
        self.boundaries: list[BoundaryStart] = []
        self.errors: list[tuple[str, str]] = []

    def start(self, what: CallStart | BoundaryStart) -> object:
        token = object()
        self.open.append(token)
        if isinstance(what, BoundaryStart):
            self.boundaries.append(what)
        return token

    def active(self, token: object) -> AbstractContextManager[None]:
        assert token in self.open
        return nullcontext()

    def finish(self, token: object, *rest: Any) -> None:
        self.open.remove(token)
        if rest[-1] is not None:
            self.errors.append((type(rest[-1]).__name__, str(rest[-1])))


def plain_run(style: str, mode: str, scenario: str) -> list[Any]:
    with serve(scenario) as server:
        return run(build(style, scenario, server.url), style, mode, scenario, server)


def wrapped_run(
    style: str, mode: str, scenario: str, server: MockVLLM, exporter: InMemorySpanExporter | None = None
) -> tuple[list[Any], list[CallReport], Watcher]:
    watcher = Watcher()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter or InMemorySpanExporter()))
    undo = (
        register_call_observer(watcher),
        register_boundary_observer(watcher),
        install_span_observers(provider),
    )
    try:
        with agentspec_runtime.instrument(), agentspec_runtime.collect_calls() as calls:
            agent = build(style, scenario, server.url)
            if style == "raw":
                with agentspec_runtime.session(THREAD, agent="coder"):
                    pictures = run(agent, style, mode, scenario, server)
            else:
                pictures = run(wrap(agent), style, mode, scenario, server)
            if scenario == "early_break":
                gc.collect()  # a stream that was dropped and not closed ends here
    finally:
        for remove in undo:
            remove()
        agentspec_runtime.uninstrument()
    return pictures, calls, watcher


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Call]:
    """Every call that is made and not collected."""
    calls: WeakSet[Call] = WeakSet()

    def make(*args: Any, **kwargs: Any) -> Call:
        call = Call(*args, **kwargs)
        calls.add(call)
        return call

    monkeypatch.setattr("agentspec_runtime.client.instrument.Call", make)
    return calls


@pytest.mark.parametrize(("style", "mode", "scenario"), list(cases()))
def test_wrapped_equals_plain(style: str, mode: str, scenario: str, alive: WeakSet[Call]) -> None:
    expected = plain_run(style, mode, scenario)
    with serve(scenario) as server:
        exporter = InMemorySpanExporter()
        pictures, calls, watcher = wrapped_run(style, mode, scenario, server, exporter)

        assert pictures == expected
        assert server.requests, "the agent called no model"
        for request in server.requests:
            assert list(request.body["vllm_xargs"]) == ["agentspec"]
            assert request.hint is not None
            assert (request.hint.session, request.hint.agent) == (THREAD, "coder")
            assert request.session_header == THREAD
        turns = [request.hint.turn or 0 for request in server.requests if request.hint]
        turns = [turn - turns[0] for turn in turns]  # the session goes on from test to test
        retried = scenario == "retry"
        assert turns == ([0, 0] if retried else list(range(len(turns))))
        assert len(calls) == len(set(turns))
        deadline = time.monotonic() + 5
        while server.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.num_open == 0
    assert watcher.open == []
    assert current().session is None
    check_boundaries(style, scenario, watcher)
    check_traces(style, scenario, list(exporter.get_finished_spans()), len(calls))
    if alive:
        gc.collect()
    assert not list(alive), "a call is still referenced"


def check_boundaries(style: str, scenario: str, watcher: Watcher) -> None:
    """Tools are announced with their call ids and the right agent; control flow is no error."""
    tools = [boundary for boundary in watcher.boundaries if boundary.kind == "tool"]
    assert {tool.name for tool in tools} <= set(BY_NAME)
    assert {(tool.session, tool.agent) for tool in tools} <= {
        (THREAD, "coder"),
        (THREAD, None),
        (THREAD, "tools"),
    }
    if scenario == "parallel":
        assert len(tools) == 2
        if style != "raw":  # a hand-written loop calls the function, and only that
            assert sorted(tool.call_id or "" for tool in tools) == ["c1", "c2"]
    names = [name for name, _ in watcher.errors]
    match scenario:
        case "tool_raises":
            assert ("ValueError", "no 1 today") in watcher.errors
        case "timeout":
            assert names
            assert set(names) <= {"APITimeoutError", "OpenAITimeoutError"}  # the SDK's, and LangChain's own
        case "cancel" | "early_break":
            assert set(names) <= {"CancelledError"}
        case _:
            assert names == []


def check_traces(style: str, scenario: str, spans: list[ReadableSpan], num_calls: int) -> None:
    """One tree per run: the agent on top, calls and tools under it, no error where nothing failed."""
    runs = 2 if scenario == "interrupt" and style != "raw" else 1
    roots = [span for span in spans if span.parent is None]
    assert [span.name.split()[0] for span in roots] == ["invoke_agent"] * runs
    assert len({span.context.trace_id for span in spans}) == runs
    by_id = {span.context.span_id: span for span in spans}
    below = [span for span in spans if span.parent is not None]
    assert {by_id[span.parent.span_id].name.split()[0] for span in below if span.parent} <= {"invoke_agent"}
    assert sum(span.name.startswith("chat") for span in spans) == num_calls
    failed = {span.name.split()[0] for span in spans if span.status.status_code is StatusCode.ERROR}
    top = set() if style == "raw" else {"invoke_agent"}  # a raw agent's error is caught inside its session
    match scenario:
        case "tool_raises":
            assert failed == {"execute_tool"} | top
        case "timeout":
            assert failed == {"chat"} | top
        case "cancel":
            assert failed <= {"invoke_agent"}
        case _:
            assert failed == set()


@pytest.mark.parametrize("mode", ["invoke", "ainvoke", "stream", "astream"])
def test_reports_tell_acceptance_where_langchain_drops_it(mode: str) -> None:
    with serve("parallel") as server:
        _, calls, _ = wrapped_run("create_agent", mode, "parallel", server)
    assert [(call.drafted, call.accepted, call.per_step_accepted) for call in calls] == [(5, 2, (2, 0))] * 2
    assert [call.outcome for call in calls] == ["ok", "ok"]
    assert all(call.num_steps == (call.completion_tokens or 0) - 2 for call in calls)


@pytest.mark.parametrize("mode", ["stream", "astream"])
def test_an_early_break_is_reported_as_incomplete_with_usage_unknown(mode: str) -> None:
    with serve("early_break") as server:
        _, calls, _ = wrapped_run("raw", mode, "early_break", server)
    assert [call.outcome for call in calls] == ["incomplete"]
    assert calls[0].completion_tokens is None
    assert calls[0].accepted is None
