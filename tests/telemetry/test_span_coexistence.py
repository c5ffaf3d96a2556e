"""Beside other instrumentations: every call, tool and agent is drawn once, and tokens are counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agentspec_runtime.adapters.langgraph import AgentSpecMiddleware, wrap

from agentspec_runtime import configure_tracing, instrument, session, tool
from agentspec_runtime.telemetry.client import Tracing
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.receiver import OtlpReceiver
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

QUESTION: Any = [{"role": "user", "content": "add 1 and 2"}]
TURN = [
    Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4})]),
    Reply("3 and 7"),
]


@pytest.fixture
def tracing(receiver: OtlpReceiver) -> Iterator[Tracing]:
    with instrument(), configure_tracing(receiver.endpoint, service_name="agent", environ={}) as running:
        yield running


@pytest.fixture
def server() -> Iterator[MockVLLM]:
    with MockVLLM(TURN) as running:
        yield running


@pytest.fixture
def official_langchain(tracing: Tracing) -> Iterator[None]:
    module = pytest.importorskip("opentelemetry.instrumentation.genai.langchain")
    instrumentor = module.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=tracing.provider)
    yield
    instrumentor.uninstrument()


@pytest.fixture
def official_openai(tracing: Tracing) -> Iterator[None]:
    module = pytest.importorskip("opentelemetry.instrumentation.genai.openai")
    instrumentor = module.OpenAIInstrumentor()
    instrumentor.instrument(tracer_provider=tracing.provider)
    yield
    instrumentor.uninstrument()


@pytest.fixture
def openinference(tracing: Tracing) -> Iterator[None]:
    module = pytest.importorskip("openinference.instrumentation.langchain")
    instrumentor = module.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=tracing.provider)
    yield
    instrumentor.uninstrument()


def run_agent(
    server: MockVLLM, *, stream: bool = False, middleware: bool = False, wrapped: bool = False
) -> None:
    """A LangGraph agent with two parallel tool calls, its tool marked by our decorator."""
    agents = pytest.importorskip("langchain.agents")
    langchain_openai = pytest.importorskip("langchain_openai")
    langchain_tools = pytest.importorskip("langchain_core.tools")

    @langchain_tools.tool
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = langchain_openai.ChatOpenAI(model="m", base_url=server.url, api_key="unused")
    hooks = [AgentSpecMiddleware()] if middleware else []
    agent = agents.create_agent(model, tools=[add], name="coder", middleware=hooks)
    if wrapped:
        agent = wrap(agent)
    question = {"messages": QUESTION}
    if stream:
        for _ in agent.stream(question, stream_mode="messages"):
            pass
    else:
        agent.invoke(question)


def collect(tracing: Tracing, receiver: OtlpReceiver) -> list[SpanRecord]:
    assert tracing.flush()
    return receiver.spans()


def sums(spans: list[SpanRecord], *names: str) -> int:
    return sum(
        int(value) for span in spans for name in names if isinstance(value := span.attributes.get(name), int)
    )


@pytest.mark.parametrize("hooks", ["none", "middleware", "wrapped"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("official_langchain")
def test_official_langchain_and_ours_are_one_tree(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver, stream: bool, hooks: str
) -> None:
    """Five spans as the official package alone makes, with our attributes on the chats and no doubles."""
    run_agent(server, stream=stream, middleware=hooks == "middleware", wrapped=hooks == "wrapped")
    spans = collect(tracing, receiver)
    names = Counter(span.name for span in spans)
    assert names == {"invoke_agent coder": 1, "chat m": 2, "execute_tool add": 2}
    chats = [span for span in spans if span.name == "chat m"]
    assert [chat.attributes["agentspec.spec.draft_tokens"] for chat in chats] == [5, 5]
    assert [chat.attributes["agentspec.spec.accepted_tokens"] for chat in chats] == [2, 2]
    assert len({span.trace_id for span in spans}) == 1
    agent = receiver.spans("invoke_agent coder")[0]
    assert {span.parent_id for span in spans if span is not agent and span.name != agent.name} == {
        agent.span_id
    }
    headers = [request.headers["traceparent"] for request in server.requests]
    assert [header.split("-")[2] for header in headers] == [chat.span_id for chat in chats]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("official_openai")
def test_official_openai_and_ours_are_one_span(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver, stream: bool
) -> None:
    """One chat span with both packages' attributes; the request names it as parent."""
    server.script([Reply("hello there", completion_tokens=6)])
    client = openai.OpenAI(base_url=server.url, api_key="unused")
    with session("s"):
        answer = client.chat.completions.create(model="m", messages=QUESTION, stream=stream)
        if stream:
            assert list(answer)
    (chat,) = collect(tracing, receiver)
    assert chat.name == "chat m"
    assert chat.attributes["gen_ai.usage.output_tokens"] == 6
    assert chat.attributes["agentspec.spec.draft_tokens"] == 5
    assert server.requests[0].headers["traceparent"].split("-")[2] == chat.span_id


@pytest.mark.usefixtures("openinference")
def test_tokens_are_counted_once_beside_a_third_party(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """OpenInference reports tokens on its own LLM spans: ours carry none that a backend would add up."""
    run_agent(server)
    spans = collect(tracing, receiver)
    theirs = [span for span in spans if span.scope.startswith("openinference")]
    assert sums(theirs, "llm.token_count.prompt") == 22
    assert sums(spans, "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens") == 0
    ours = [span for span in spans if span.name == "chat m"]
    assert sums(ours, "agentspec.spec.draft_tokens") == 10
    assert sums(ours, "agentspec.prompt_tokens") == 22


def test_alone_ours_draws_tools_and_calls(tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver) -> None:
    """Without any other instrumentation the decorator and the SDK wrapper give chats and tools."""
    run_agent(server)
    names = Counter(span.name for span in collect(tracing, receiver))
    assert names == {"chat m": 2, "execute_tool add": 2}


def test_the_middleware_knows_the_calls_of_its_tools(
    tracing: Tracing, server: MockVLLM, receiver: OtlpReceiver
) -> None:
    """With our middleware tools carry their call ids, are drawn once, and the next call links to them."""
    with session("s", agent="coder"):
        run_agent(server, middleware=True)
    spans = collect(tracing, receiver)
    tools = [span for span in spans if span.name == "execute_tool add"]
    assert sorted(str(span.attributes["gen_ai.tool.call.id"]) for span in tools) == [
        "call_0_add",
        "call_1_add",
    ]
    first, second = [span for span in spans if span.name == "chat m"]
    assert first.links == ()
    assert set(second.links) == {(span.trace_id, span.span_id) for span in (*tools, first)}
    assert len({span.trace_id for span in spans}) == 1


def test_enrich_makes_no_span_of_its_own(server: MockVLLM, receiver: OtlpReceiver) -> None:
    """AGENTSPEC_SPANS=enrich without another instrumentation: nothing is drawn, nothing breaks."""
    with instrument(), configure_tracing(receiver.endpoint, environ={"AGENTSPEC_SPANS": "enrich"}) as tracing:
        run_agent(server)
        assert collect(tracing, receiver) == []
        module = pytest.importorskip("opentelemetry.instrumentation.genai.openai")
        instrumentor = module.OpenAIInstrumentor()
        instrumentor.instrument(tracer_provider=tracing.provider)
        try:
            server.script([Reply("hi")])
            openai.OpenAI(base_url=server.url, api_key="unused").chat.completions.create(
                model="m", messages=QUESTION
            )
        finally:
            instrumentor.uninstrument()
        (chat,) = collect(tracing, receiver)
    assert chat.scope == "opentelemetry.instrumentation.genai.openai"
    assert chat.attributes["agentspec.spec.draft_tokens"] == 5
