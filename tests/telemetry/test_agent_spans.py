"""Spans of the agent process, from a real OpenAI client through real OTLP: tree, attributes, privacy."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import trace

from agentspec_runtime import configure_tracing, instrument, session, tool
from agentspec_runtime.client.observer import BoundaryStart, BoundaryWatch
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.telemetry.client import Tracing, install_span_observers
from agentspec_runtime.telemetry.otlp import SpanRecord, read_jsonl, span_records
from agentspec_runtime.telemetry.receiver import OtlpReceiver
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

QUESTION: Any = [{"role": "user", "content": "add 1 and 2"}]


@pytest.fixture
def tracing(receiver: OtlpReceiver) -> Iterator[Tracing]:
    """Spans go to the receiver; the OpenAI SDK is instrumented."""
    with instrument(), configure_tracing(receiver.endpoint, service_name="agent", environ={}) as running:
        yield running


@pytest.fixture
def server() -> Iterator[MockVLLM]:
    with MockVLLM([Reply("three", completion_tokens=9, drafted=(4, 4), accepted=(3, 2))]) as running:
        yield running


def client_of(server: MockVLLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="unused", max_retries=2)


def ask(client: openai.OpenAI, **more: Any) -> object:
    return client.chat.completions.create(model="m", messages=QUESTION, **more)


def collect(tracing: Tracing, receiver: OtlpReceiver) -> list[SpanRecord]:
    assert tracing.flush()
    return receiver.spans()


def parents(spans: list[SpanRecord]) -> dict[str, str | None]:
    """Name of each span's parent, by its own name."""
    by_id = {span.span_id: span.name for span in spans}
    return {span.name: by_id.get(span.parent_id) for span in spans}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_a_turn_is_one_tree(tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver) -> None:
    """invoke_agent -> {chat, execute_tool}; the request carries the chat span's traceparent."""
    with session("s-1", agent="coder"):
        ask(client_of(server))
        assert add(1, 2) == 3
    spans = collect(tracing, receiver)
    assert parents(spans) == {
        "invoke_agent coder": None,
        "chat m": "invoke_agent coder",
        "execute_tool add": "invoke_agent coder",
    }
    kinds = {span.name: span.kind for span in spans}
    assert kinds == {"invoke_agent coder": "INTERNAL", "chat m": "CLIENT", "execute_tool add": "INTERNAL"}
    (chat,) = [span for span in spans if span.name == "chat m"]
    sent = server.requests[0].headers["traceparent"]
    assert sent.startswith(f"00-{chat.trace_id}-{chat.span_id}-")


def test_the_chat_span_has_names_and_types_of_the_convention(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """Exact names and types, of OpenTelemetry's attributes and ours."""
    with session("s-2", agent="coder"):
        ask(client_of(server), temperature=0, max_tokens=64, seed=7, top_p=0.5)
    (chat,) = [span for span in collect(tracing, receiver) if span.name == "chat m"]
    got = dict(chat.attributes)
    want: dict[str, object] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.conversation.id": "s-2",
        "server.address": "127.0.0.1",
        "agentspec.session": "s-2",
        "agentspec.agent": "coder",
        "agentspec.turn": 0,
        "agentspec.hinted": True,
        "agentspec.outcome": "ok",
        "agentspec.attempts": 1,
        "agentspec.prompt_tokens": 11,
        "agentspec.output_tokens": 9,
        "agentspec.spec.draft_tokens": 8,
        "agentspec.spec.accepted_tokens": 5,
        "agentspec.spec.rejected_tokens": 3,
        "agentspec.spec.acceptance_rate": 0.625,
        "agentspec.spec.steps": 4,
        "agentspec.spec.steps_saved": 5,
        "agentspec.spec.tokens_per_step": 2.25,
        "agentspec.spec.per_step_drafted": [4, 4],
        "agentspec.spec.per_step_accepted": [3, 2],
        "agentspec.spec.per_step_stride": 1,
        "agentspec.spec.accepted_histogram": [0, 0, 1, 1],
    }
    assert {name: got.get(name) for name in want} == want
    assert {name: type(got[name]) for name in want} == {name: type(value) for name, value in want.items()}
    assert chat.dropped == 0


def test_retries_are_one_span(tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver) -> None:
    """Two failures and a success of the SDK's own retry loop: one chat span that says three attempts."""
    retry = {"retry-after-ms": "1"}
    server.script([Reply(status=500, headers=retry), Reply(status=500, headers=retry), Reply("ok")])
    ask(client_of(server))
    (chat,) = collect(tracing, receiver)
    assert len(server.requests) == 3
    assert chat.attributes["agentspec.attempts"] == 3
    assert chat.status == "UNSET"


def test_an_error_gives_its_type_and_no_text(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """The exception reaches the caller untouched; the span says its type; its message stays here."""
    server.script([Reply(status=400, error="CANARY in the message")])
    with pytest.raises(openai.BadRequestError, match="CANARY"):
        ask(client_of(server))
    (chat,) = collect(tracing, receiver)
    assert (chat.status, chat.status_message) == ("ERROR", "")
    assert chat.attributes["error.type"] == "BadRequestError"
    assert b"CANARY" not in receiver.raw()


@pytest.mark.parametrize("ending", ["full", "break", "close", "dropped", "never"])
def test_every_way_to_leave_a_stream_gives_one_span(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One ended span each, marked incomplete unless read to the end, and no error in any log."""
    caplog.set_level(logging.WARNING)
    server.script([Reply("one two three four five", chunk_delay_s=0.005)])
    stream = client_of(server).chat.completions.create(model="m", messages=QUESTION, stream=True)
    if ending == "full":
        assert len(list(stream)) > 3
    elif ending == "break":
        for chunk in stream:  # the first chunk only names the role
            if chunk.choices[0].delta.content:
                break
        stream.close()
    elif ending == "close":
        next(stream), next(stream)
        stream.close()
    elif ending == "never":
        stream.close()
    if ending == "dropped":
        next(stream), next(stream)
    del stream
    gc.collect()
    assert tracing.flush()
    (chat,) = receiver.wait_for(lambda spans: len(spans) == 1)
    assert chat.attributes["agentspec.outcome"] == ("ok" if ending == "full" else "incomplete")
    assert chat.status == "UNSET"
    assert chat.attributes["gen_ai.request.stream"] is True
    assert ("gen_ai.response.time_to_first_chunk" in chat.attributes) == (ending != "never")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_async_calls_in_parallel_keep_their_parents(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """Two agents in one event loop: each chat under its own agent."""
    client = openai.AsyncOpenAI(base_url=server.url, api_key="unused")

    async def run(name: str) -> None:
        with session(name, agent=name):
            stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
            async for _ in stream:
                await asyncio.sleep(0)

    await asyncio.gather(run("left"), run("right"))
    await client.close()
    spans = collect(tracing, receiver)
    by_id = {span.span_id: span for span in spans}
    chats = [span for span in spans if span.name == "chat m"]
    assert len(chats) == 2
    for chat in chats:
        assert by_id[chat.parent_id].name == f"invoke_agent {chat.attributes['agentspec.session']}"
    assert len({span.trace_id for span in spans}) == 2


async def test_a_cancelled_task_ends_its_span(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancellation is incomplete, not an error, and logs nothing about contexts."""
    server.script([Reply("slow", delay_s=5.0)])
    client = openai.AsyncOpenAI(base_url=server.url, api_key="unused")
    task = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    (chat,) = collect(tracing, receiver)
    assert chat.attributes["agentspec.outcome"] == "incomplete"
    assert chat.status == "UNSET"
    assert "detach" not in caplog.text


def test_a_chat_links_to_the_tools_and_the_turn_that_fed_it(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """The second call links to the two tool runs whose results it carries, and to the first call."""
    calls = [ToolCall("add", {"a": 1, "b": 2}, id="call-a"), ToolCall("add", {"a": 3, "b": 4}, id="call-b")]
    server.script([Reply(tool_calls=calls), Reply("done")])
    client = client_of(server)
    with session("s-3", agent="coder"):
        ask(client)
        for call in calls:
            watch = BoundaryWatch(
                BoundaryStart(
                    kind="tool", name="add", call_id=call.id, session="s-3", agent="coder", parent=None
                )
            )
            with watch.active():
                add(1, 2)
            watch.finish(None)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        old = {"role": "tool", "tool_call_id": "call-a", "content": "older turn"}
        asked = {"role": "assistant", "content": None, "tool_calls": [call.wire(0) for call in calls]}
        client.chat.completions.create(model="m", messages=[*QUESTION, old, asked, *results])
    spans = collect(tracing, receiver)
    first, second = [span for span in spans if span.name == "chat m"]
    tools = [span for span in spans if span.name == "execute_tool add"]
    assert [span.attributes["gen_ai.tool.call.id"] for span in tools] == ["call-a", "call-b"]
    assert first.links == ()
    wanted = [*((span.trace_id, span.span_id) for span in tools), (first.trace_id, first.span_id)]
    assert list(second.links) == wanted


def test_a_decorated_tool_inside_a_framework_hook_is_one_span(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """The hook knows the call id, the decorator is inside it: one span, and a nested other tool its own."""
    hook = BoundaryWatch(
        BoundaryStart(kind="tool", name="add", call_id="c1", session=None, agent=None, parent=None)
    )
    with hook.active():
        add(1, 2)
    hook.finish(None)
    assert [span.name for span in collect(tracing, receiver)] == ["execute_tool add"]


def test_a_tool_error_that_became_a_message_marks_the_span(tracing: Tracing, receiver: OtlpReceiver) -> None:
    """`finish` gets the error even where the framework returned normally; its text is not exported."""
    hook = BoundaryWatch(
        BoundaryStart(kind="tool", name="read", call_id="c1", session=None, agent=None, parent=None)
    )
    hook.finish(ValueError("CANARY path"))
    (span,) = collect(tracing, receiver)
    assert (span.status, span.attributes["error.type"]) == ("ERROR", "ValueError")
    assert b"CANARY" not in receiver.raw()


def test_no_text_of_anything_is_exported(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canary in prompt, system, tools, arguments, results, stop, exceptions and answers: in no byte."""
    canary = "CANARY-7f3a"

    @tool
    def leak(text: str) -> str:
        """Return, or fail with, its text."""
        if text.startswith("fail"):
            raise RuntimeError(text)
        return text * 20_000

    server.script([Reply(canary, reasoning=canary, tool_calls=[ToolCall("leak", {"text": canary})])])
    with session("s-4", agent="coder"):
        client_of(server).chat.completions.create(
            model="m",
            messages=[{"role": "system", "content": canary}, {"role": "user", "content": canary}],
            tools=[{"type": "function", "function": {"name": "leak", "description": canary}}],
            stop=[canary],
            user=canary,
        )
        leak(canary)
        with pytest.raises(RuntimeError):
            leak(f"fail {canary}")
        with pytest.raises(KeyError):
            raise_inside(canary)
    spans = collect(tracing, receiver)
    assert len(spans) == 5
    assert canary.encode() not in receiver.raw()
    assert [span.dropped for span in spans] == [0] * 5


@tool
def raise_inside(text: str) -> None:
    """Fail with its argument."""
    raise KeyError(text)


def test_200_tools_and_a_long_history_stay_within_limits(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """200 tools, 300 messages, a 1 MB tool result: few attributes, nothing dropped, a small export."""
    tools: Any = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "x" * 500}} for n in range(200)
    ]
    history: list[Any] = list(QUESTION)
    for turn in range(50):
        calls = [ToolCall("tool_1", {}, id=f"{turn}-{n}").wire(n) for n in range(5)]
        history.append({"role": "assistant", "content": None, "tool_calls": calls})
        size = 1_000_000 if turn == 49 else 100
        history += [{"role": "tool", "tool_call_id": f"{turn}-{n}", "content": "y" * size} for n in range(5)]
    client_of(server).chat.completions.create(model="m", messages=history, tools=tools)
    (chat,) = collect(tracing, receiver)
    assert len(chat.attributes) < 60
    assert chat.dropped == 0
    assert len(receiver.raw()) < 10_000


def test_a_5000_step_answer_keeps_exact_sums(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """Per-step arrays of 5,000 entries arrive folded with the same sums."""
    server.script([Reply("x", drafted=[3] * 5000, accepted=[step % 4 for step in range(5000)])])
    ask(client_of(server))
    (chat,) = collect(tracing, receiver)
    accepted = chat.attributes["agentspec.spec.per_step_accepted"]
    assert isinstance(accepted, list)
    assert len(accepted) <= 1024
    assert sum(accepted) == chat.attributes["agentspec.spec.accepted_tokens"] == 7500
    assert chat.dropped == 0


def test_unknown_is_absent_and_not_zero(tracing: Tracing, receiver: OtlpReceiver) -> None:
    """A server without metrics and usage: no acceptance, no tokens, no steps on the span."""
    with MockVLLM([Reply("hi", drafted=None, usage=False)], poses_as="vllm") as plain:
        ask(client_of(plain))
    (chat,) = collect(tracing, receiver)
    assert not [name for name in chat.attributes if name.startswith("agentspec.spec")]
    assert not [name for name in chat.attributes if "tokens" in name]
    assert chat.attributes["agentspec.hinted"] is False


def test_the_file_is_otlp_json_lines(tmp_path: Path, server: MockVLLM) -> None:
    """configure_tracing(file=...) writes hex ids, one document per line, and needs no collector."""
    path = tmp_path / "turn.jsonl"
    with instrument(), configure_tracing(file=path, environ={}) as tracing:
        with session("s-5", agent="coder"):
            ask(client_of(server))
        assert tracing.flush()
    lines = path.read_text().splitlines()
    span = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert len(span["traceId"]) == 32
    assert int(span["traceId"], 16)
    assert len(span["spanId"]) == 16
    spans = [span for request in read_jsonl(path) for span in span_records(request)]
    assert parents(spans) == {"chat m": "invoke_agent coder", "invoke_agent coder": None}


def test_the_global_provider_is_never_touched(tracing: Tracing) -> None:
    """configure_tracing uses a provider of its own."""
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@pytest.mark.parametrize("environ", [{"AGENTSPEC_SPANS": "off"}, {"OTEL_SDK_DISABLED": "true"}])
def test_switched_off_nothing_is_made(
    environ: dict[str, str], server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """No span, no header."""
    with instrument(), configure_tracing(receiver.endpoint, environ=environ) as tracing:
        ask(client_of(server))
        assert tracing.flush()
    assert receiver.spans() == []
    assert "traceparent" not in server.requests[0].headers


def test_without_a_provider_nothing_is_made(server: MockVLLM) -> None:
    """Observers that find no provider add no header and cost no span."""
    remove = install_span_observers(environ={})
    with instrument():
        ask(client_of(server))
    remove()
    assert "traceparent" not in server.requests[0].headers


def test_wrong_settings_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    """The message names the variable and its values, or the path."""
    with pytest.raises(ConfigurationError, match="own, enrich or off"):
        configure_tracing(file=tmp_path / "x.jsonl", environ={"AGENTSPEC_SPANS": "both"})
    with pytest.raises(ConfigurationError, match="missing"):
        configure_tracing(file=tmp_path / "missing" / "x.jsonl", environ={})
