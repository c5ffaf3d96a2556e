"""openai, openai-agents, PydanticAI, DSPy and smolagents: hints on every call, agents, tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import openai
import pytest

import agentspec_runtime
from agentspec_runtime.client.instrument import _state
from agentspec_runtime.client.observer import BoundaryStart, register_boundary_observer
from agentspec_runtime.client.scope import current
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ADD = [Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2}, "c1")]), Reply("three")]


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    agentspec_runtime.uninstrument()
    assert current().session is None


class Boundaries:
    """What began."""

    def __init__(self) -> None:
        self.seen: list[BoundaryStart] = []
        self.errors: list[BaseException | None] = []
        """How agents ended."""
        self.open = 0

    def start(self, boundary: BoundaryStart) -> object:
        self.seen.append(boundary)
        self.open += 1
        return boundary

    def active(self, token: object) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, token: object, error: BaseException | None) -> None:
        self.open -= 1
        if isinstance(token, BoundaryStart) and token.kind == "agent":
            self.errors.append(error)

    def of(self, kind: str) -> list[tuple[str, str | None]]:
        return [(start.name, start.call_id) for start in self.seen if start.kind == kind]


@pytest.fixture
def boundaries() -> Iterator[Boundaries]:
    watcher = Boundaries()
    remove = register_boundary_observer(watcher)
    yield watcher
    remove()
    assert watcher.open == 0


def hints(server: MockVLLM) -> list[agentspec_runtime.Hint]:
    return [request.hint for request in server.requests if request.hint is not None]


def agents(server: MockVLLM) -> list[tuple[str | None, str | None]]:
    assert len(hints(server)) == len(server.requests)
    return [(hint.agent, hint.parent) for hint in hints(server)]


# openai ---------------------------------------------------------------------------------------------------


def test_one_wrapped_client_is_covered_and_the_others_are_not() -> None:
    from agentspec_runtime.adapters.openai import wrap

    with MockVLLM() as server, agentspec_runtime.session("s"), agentspec_runtime.collect_calls() as calls:
        client = openai.OpenAI(base_url=server.url, api_key="x")
        assert wrap(client) is client
        assert wrap(client) is client
        client.chat.completions.create(**CHAT)
        list(client.with_options(timeout=3).chat.completions.create(**CHAT, stream=True))
        openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(**CHAT)
        assert [request.hint is not None for request in server.requests] == [True, True, False]
    assert len(calls) == 2
    assert _state.active is None


def test_a_wrapped_client_beside_instrument_is_watched_once() -> None:
    from agentspec_runtime.adapters.openai import wrap

    with MockVLLM() as server, agentspec_runtime.session() as run, agentspec_runtime.collect_calls() as calls:
        client = wrap(openai.OpenAI(base_url=server.url, api_key="x"))
        agentspec_runtime.instrument()
        client.chat.completions.create(**CHAT)
        assert (len(calls), run.turns) == (1, 1)


async def test_an_async_client_can_be_wrapped() -> None:
    from agentspec_runtime.adapters.openai import wrap

    with MockVLLM() as server, agentspec_runtime.session("s"):
        async with wrap(openai.AsyncOpenAI(base_url=server.url, api_key="x")) as client:
            await client.chat.completions.create(**CHAT)
        assert hints(server)[0].session == "s"


def test_something_else_is_refused() -> None:
    from agentspec_runtime.adapters.openai import wrap

    with pytest.raises(ConfigurationError, match="needs an openai client, got str"):
        wrap("client")  # type: ignore[type-var]  # what the test is about


# openai-agents --------------------------------------------------------------------------------------------


@pytest.fixture
def agents_sdk() -> Iterator[Any]:
    sdk = pytest.importorskip("agents")
    from agentspec_runtime.adapters import openai_agents

    sdk.set_tracing_disabled(True)
    undo = openai_agents.instrument()
    openai_agents.instrument()
    yield sdk
    undo()


def agents_model(sdk: Any, server: MockVLLM, **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="x", **options)
    return sdk.OpenAIChatCompletionsModel(model="m", openai_client=client)


@agentspec_runtime.tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents_turns_and_tools(streamed: bool, agents_sdk: Any, boundaries: Boundaries) -> None:
    with MockVLLM(ADD) as server, agentspec_runtime.collect_calls() as calls:
        tool = agents_sdk.function_tool(add)
        agent = agents_sdk.Agent(name="adder", model=agents_model(agents_sdk, server), tools=[tool])
        if streamed:
            result = agents_sdk.Runner.run_streamed(agent, "hi")
            assert [event async for event in result.stream_events()]
        else:
            result = await agents_sdk.Runner.run(agent, "hi")
        assert result.final_output == "three"
        assert agents(server) == [("adder", None)] * 2
        assert [hint.turn for hint in hints(server)] == [0, 1]
        assert len({hint.session for hint in hints(server)}) == 1
    assert [call.accepted for call in calls] == [2, 2]
    assert boundaries.of("tool") == [("add", None)]
    assert boundaries.of("agent") == [("adder", None)]


async def test_openai_agents_a_streamed_run_ends_with_its_task(
    agents_sdk: Any, boundaries: Boundaries
) -> None:
    """An error in the run, a cancelled run, one that nobody reads: the agent ends, once, and says how."""
    script = [Reply(status=500), *ADD, *ADD]
    with MockVLLM(script) as server:
        tool = agents_sdk.function_tool(add)
        agent = agents_sdk.Agent(
            name="adder", model=agents_model(agents_sdk, server, max_retries=0), tools=[tool]
        )
        failing = agents_sdk.Runner.run_streamed(agent, "hi")
        assert current().session is None, "the caller's context is as before"
        with pytest.raises(openai.InternalServerError):
            [event async for event in failing.stream_events()]
        cancelled = agents_sdk.Runner.run_streamed(agent, "hi")
        async for _ in cancelled.stream_events():
            cancelled.cancel()
        unread = agents_sdk.Runner.run_streamed(agent, "hi")
        await unread.run_loop_task
    assert [type(error) for error in boundaries.errors] == [
        openai.InternalServerError,
        type(None),
        type(None),
    ]


async def test_openai_agents_a_run_that_cannot_start_leaves_nothing(
    agents_sdk: Any, boundaries: Boundaries
) -> None:
    agent = agents_sdk.Agent(name="adder")
    with pytest.raises(TypeError):
        agents_sdk.Runner.run_streamed(agent, "hi", hooks=agents_sdk.RunHooks(), run_config=object())
    assert current().session is None


async def test_openai_agents_hand_over(agents_sdk: Any) -> None:
    seen: list[str] = []

    class Hooks(agents_sdk.RunHooks):  # type: ignore[misc]  # loaded at run time
        async def on_agent_start(self, context: Any, agent: Any) -> None:
            seen.append(agent.name)

    with MockVLLM([Reply(tool_calls=[ToolCall("transfer_to_bob", {}, "h")]), Reply("bob here")]) as server:
        model = agents_model(agents_sdk, server)
        bob = agents_sdk.Agent(name="bob", model=model)
        alice = agents_sdk.Agent(name="alice", model=model, handoffs=[bob])
        result = await agents_sdk.Runner.run(alice, "hi", hooks=Hooks())
        assert result.final_output == "bob here"
        assert agents(server) == [("alice", None), ("bob", "alice")]
    assert seen == ["alice", "bob"]


async def test_openai_agents_agent_as_tool_and_session(agents_sdk: Any) -> None:
    script = [Reply(tool_calls=[ToolCall("ask", {"input": "x"}, "t")]), Reply("inner"), Reply("outer")]
    with MockVLLM(script) as server:
        model = agents_model(agents_sdk, server)
        inner = agents_sdk.Agent(name="inner", model=model)
        tool = inner.as_tool(tool_name="ask", tool_description="d")
        outer = agents_sdk.Agent(name="outer", model=model, tools=[tool])
        config = agents_sdk.RunConfig(group_id="thread-9")
        await agents_sdk.Runner.run(outer, "hi", run_config=config)
        assert agents(server) == [("outer", None), ("inner", "outer"), ("outer", None)]
        assert {hint.session for hint in hints(server)} == {"thread-9"}


async def test_openai_agents_runs_side_by_side_never_mix(agents_sdk: Any) -> None:
    with MockVLLM() as server:
        model = agents_model(agents_sdk, server)

        async def run(number: int) -> None:
            agent = agents_sdk.Agent(name=f"agent-{number}", model=model)
            await agents_sdk.Runner.run(agent, f"agent-{number}")

        await asyncio.gather(*(run(number) for number in range(10)))
        for request in server.requests:
            assert request.hint is not None
            assert request.hint.agent == request.body["messages"][0]["content"]
        assert len({hint.session for hint in hints(server)}) == 10


# PydanticAI -----------------------------------------------------------------------------------------------


def pydantic_agent(server: MockVLLM, name: str, **options: Any) -> Any:
    module = pytest.importorskip("pydantic_ai")
    from agentspec_runtime.adapters.pydantic_ai import AgentSpecCapability
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=server.url, api_key="x"))
    model = OpenAIChatModel("m", provider=provider)
    return module.Agent(model, name=name, capabilities=[AgentSpecCapability()], **options)


@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai_turns_and_tools(streamed: bool, boundaries: Boundaries) -> None:
    with MockVLLM(ADD) as server, agentspec_runtime.collect_calls() as calls:
        agent = pydantic_agent(server, "adder")
        agent.tool_plain(add)
        if streamed:
            async with agent.run_stream("hi") as result:
                assert await result.get_output() == "three"
        else:
            assert (await agent.run("hi")).output == "three"
        assert agents(server) == [("adder", None)] * 2
        assert [hint.turn for hint in hints(server)] == [0, 1]
        assert len({hint.session for hint in hints(server)}) == 1
    assert [call.accepted for call in calls] == [2, 2]
    assert boundaries.of("tool") == [("add", "c1")]


async def test_pydantic_ai_an_agent_inside_a_tool_has_a_parent() -> None:
    script = [Reply(tool_calls=[ToolCall("ask", {}, "t")]), Reply("inner"), Reply("outer")]
    with MockVLLM(script) as server:
        inner, outer = pydantic_agent(server, "inner"), pydantic_agent(server, "outer")

        @outer.tool_plain  # type: ignore[untyped-decorator]  # loaded at run time
        async def ask() -> str:
            return str((await inner.run("x")).output)

        await outer.run("hi", conversation_id="talk-1")
        assert agents(server) == [("outer", None), ("inner", "outer"), ("outer", None)]
        assert {hint.session for hint in hints(server)} == {"talk-1"}


# DSPy -----------------------------------------------------------------------------------------------------


def test_dspy_modules_and_tools(boundaries: Boundaries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download one
    dspy = pytest.importorskip("dspy")
    from agentspec_runtime.adapters.dspy import AgentSpecCallback

    def answer(**fields: str) -> Reply:
        return Reply(
            "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items())
            + "\n\n[[ ## completed ## ]]"
        )

    script = [
        answer(next_thought="add", next_tool_name="add", next_tool_args='{"a": 1, "b": 2}'),
        answer(next_thought="done", next_tool_name="finish", next_tool_args="{}"),
        answer(reasoning="sum", answer="three"),
    ]
    with MockVLLM(script) as server, agentspec_runtime.collect_calls() as calls:
        model = dspy.LM(
            "openai/m", api_base=server.url, api_key="x", cache=False, num_retries=0, engine="litellm"
        )
        with dspy.context(lm=model, callbacks=[AgentSpecCallback()]):
            assert dspy.ReAct("question -> answer", tools=[add])(question="1+2?").answer == "three"
        assert {hint.agent for hint in hints(server)} == {"ReAct", "ChainOfThought"}
        assert agents(server)[0] == ("ReAct", None)
        assert len({hint.session for hint in hints(server)}) == 1
    assert len(calls) == 3
    assert ("add", None) in boundaries.of("tool")
    assert len([name for name, _ in boundaries.of("tool") if name == "add"]) == 1


# smolagents: no adapter, a session block is enough --------------------------------------------------------


def test_smolagents_inside_a_session(boundaries: Boundaries) -> None:
    """With `session` and `@tool`: session, agent, turns and tools are marked; call ids are not known."""
    smolagents = pytest.importorskip("smolagents")

    class Add(smolagents.Tool):  # type: ignore[misc]  # loaded at run time
        name = "add"
        description = "Add."
        inputs = {"a": {"type": "integer", "description": "a"}, "b": {"type": "integer", "description": "b"}}  # noqa: RUF012 - smolagents wants it
        output_type = "string"

        @agentspec_runtime.tool(name="add")
        def forward(self, a: int, b: int) -> str:
            return str(a + b)

    script = [
        Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2}, "c1")]),
        Reply(tool_calls=[ToolCall("final_answer", {"answer": "three"}, "c2")]),
    ]
    agentspec_runtime.instrument()
    with MockVLLM(script) as server, agentspec_runtime.collect_calls() as calls:
        model = smolagents.OpenAIModel(model_id="m", api_base=server.url, api_key="x")
        agent = smolagents.ToolCallingAgent(tools=[Add()], model=model, verbosity_level=0)
        with agentspec_runtime.session("small", agent="adder"):
            assert agent.run("1+2?") == "three"
        assert agents(server) == [("adder", None)] * 2
        assert [(hint.session, hint.turn) for hint in hints(server)] == [("small", 0), ("small", 1)]
        assert [mark.kind for mark in hints(server)[1].marks] == ["tool_result"], "written as user text"
    assert [call.accepted for call in calls] == [2, 2]
    assert boundaries.of("agent") == [("adder", None)]
    assert boundaries.of("tool") == [("add", None)]


def test_smolagents_managed_agents_are_not_told_apart() -> None:
    """A session block around the run marks one agent: its managed agents' calls go under its name."""
    smolagents = pytest.importorskip("smolagents")
    script = [
        Reply(tool_calls=[ToolCall("helper", {"task": "x"}, "c1")]),
        Reply(tool_calls=[ToolCall("final_answer", {"answer": "inner"}, "c2")]),
        Reply(tool_calls=[ToolCall("final_answer", {"answer": "outer"}, "c3")]),
    ]
    agentspec_runtime.instrument()
    with MockVLLM(script) as server:
        model = smolagents.OpenAIModel(model_id="m", api_base=server.url, api_key="x")
        helper = smolagents.ToolCallingAgent(
            tools=[], model=model, name="helper", description="helps", verbosity_level=0
        )
        lead = smolagents.ToolCallingAgent(tools=[], model=model, managed_agents=[helper], verbosity_level=0)
        with agentspec_runtime.session("small", agent="lead"):
            assert lead.run("go") == "outer"
        assert agents(server) == [("lead", None)] * 3
