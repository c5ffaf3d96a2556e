"""Observers see every call once, may add headers, and can break nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import openai
import pytest

import agentspec_runtime
from agentspec_runtime.client.observer import (
    BoundaryStart,
    CallStart,
    register_boundary_observer,
    register_call_observer,
)
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.testing import MockVLLM, Reply

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
current_span: ContextVar[str | None] = ContextVar("current_span", default=None)


class Spans:
    """Does what a tracer does: makes its span current while the request is sent, and injects a header."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def start(self, call: CallStart) -> object:
        self.log.append(("start", call.operation, call.session, call.agent, call.turn, call.server_address))
        call.headers["traceparent"] = "00-aa-bb-01"
        return "span"

    @contextmanager
    def active(self, token: object) -> Iterator[None]:
        reset = current_span.set(str(token))
        try:
            yield
        finally:
            current_span.reset(reset)  # raises where it is left in another context

    def finish(self, token: object, report: CallReport, error: BaseException | None) -> None:
        self.log.append(("finish", token, report.outcome, type(error).__name__ if error else None))


@pytest.fixture
def spans() -> Iterator[Spans]:
    watcher = Spans()
    remove = register_call_observer(watcher)
    register_call_observer(watcher)
    with agentspec_runtime.instrument():
        yield watcher
    remove()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_seen_once_and_a_header_goes_out(spans: Spans, stream: bool) -> None:
    with MockVLLM() as server, agentspec_runtime.session("s", agent="a") as run:
        answer: Any = openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(
            **CHAT, stream=stream
        )
        assert current_span.get() is None
        if stream:
            list(answer)
        assert server.requests[0].headers["traceparent"] == "00-aa-bb-01"
        assert spans.log == [
            ("start", "chat", "s", "a", run.turns - 1, "127.0.0.1"),
            ("finish", "span", "ok", None),
        ]


def test_a_header_of_the_caller_wins(spans: Spans) -> None:
    with MockVLLM() as server:
        client = openai.OpenAI(base_url=server.url, api_key="x")
        client.chat.completions.create(**CHAT, extra_headers={"Traceparent": "theirs"})
        assert server.requests[0].headers["traceparent"] == "theirs"


def test_traces_go_to_any_server_and_hints_do_not(spans: Spans) -> None:
    with MockVLLM(poses_as="foreign") as server, agentspec_runtime.session("s"):
        openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(**CHAT)
        request = server.requests[0]
        assert (request.headers["traceparent"], request.session_header) == ("00-aa-bb-01", None)


def test_an_error_is_seen_as_the_caller_gets_it(spans: Spans) -> None:
    with MockVLLM([Reply(status=400)]) as server, pytest.raises(openai.BadRequestError):
        openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(**CHAT)
    assert spans.log[-1] == ("finish", "span", "error", "BadRequestError")


class Bored(Spans):
    """Is not interested in any call."""

    def start(self, call: CallStart) -> object:
        return None


def test_an_observer_that_starts_nothing_is_not_told_again() -> None:
    bored = Bored()
    remove = register_call_observer(bored)
    with MockVLLM() as server, agentspec_runtime.instrument():
        openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(**CHAT)
    remove()
    assert bored.log == []


class Broken:
    """Raises wherever it is asked."""

    def __init__(self, where: str) -> None:
        self.where = where

    def start(self, call: CallStart | BoundaryStart) -> object:
        if self.where == "start":
            raise RuntimeError("broken start")
        return self

    @contextmanager
    def active(self, token: object) -> Iterator[None]:
        if self.where == "enter":
            raise RuntimeError("broken enter")
        yield
        if self.where == "exit":
            raise RuntimeError("broken exit")

    def finish(self, token: object, *_: object) -> None:
        if self.where == "finish":
            raise RuntimeError("broken finish")


@pytest.mark.parametrize("where", ["start", "enter", "exit", "finish"])
def test_a_broken_observer_is_logged_once_and_changes_nothing(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Broken(where), Spans()
    removers = [
        register_call_observer(broken), register_call_observer(healthy), register_boundary_observer(broken)
    ]  # fmt: skip

    @agentspec_runtime.tool
    def fails() -> None:
        raise KeyError("of the tool")

    try:
        with MockVLLM() as server, agentspec_runtime.instrument():
            client = openai.OpenAI(base_url=server.url, api_key="x")
            for _ in range(3):
                assert client.chat.completions.create(**CHAT).choices[0].message.content == "ok"
            with agentspec_runtime.session(agent="a"), pytest.raises(KeyError, match="of the tool"):
                fails()
    finally:
        for remove in removers:
            remove()
    assert len(healthy.log) == 6
    assert sum(f"broken {where}" in str(record.exc_info) for record in caplog.records) == 1


def test_a_broken_listener_is_logged_once_and_the_others_hear_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: CallReport) -> None:
        raise RuntimeError("broken listener")

    with MockVLLM() as server, agentspec_runtime.instrument():
        client = openai.OpenAI(base_url=server.url, api_key="x")
        with agentspec_runtime.on_call(broken), agentspec_runtime.collect_calls() as calls:
            client.chat.completions.create(**CHAT)
            client.chat.completions.create(**CHAT)
    assert len(calls) == 2
    assert sum("broken listener" in str(record.exc_info) for record in caplog.records) == 1


def test_listeners_hear_their_own_context_or_everything() -> None:
    import threading

    with MockVLLM() as server, agentspec_runtime.instrument():
        client = openai.OpenAI(base_url=server.url, api_key="x")
        with (
            agentspec_runtime.collect_calls() as here,
            agentspec_runtime.collect_calls(everywhere=True) as everywhere,
        ):
            thread = threading.Thread(target=lambda: client.chat.completions.create(**CHAT))
            thread.start()
            thread.join()
            client.chat.completions.create(**CHAT)
        client.chat.completions.create(**CHAT)
    assert (len(here), len(everywhere)) == (1, 2)


def test_the_protocols_are_met_by_a_context_manager_of_any_kind() -> None:
    manager: AbstractContextManager[object] = Spans().active("x")
    with manager:
        assert current_span.get() == "x"
