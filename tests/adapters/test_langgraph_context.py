"""What the LangGraph adapter derives, and what it leaves alone, in graphs that people build."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytest
from agentspec_runtime.adapters.langgraph import AgentSpecMiddleware, wrap
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import InjectedToolCallId, StructuredTool
from langchain_core.tools import tool as lc_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.pregel import Pregel
from langgraph.types import Command, RetryPolicy, interrupt
from pydantic import BaseModel
from typing_extensions import Annotated  # noqa: UP035 - LangGraph reads it from here

import agentspec_runtime
from agentspec_runtime.client.observer import (
    BoundaryStart,
    ReportedToolError,
    register_boundary_observer,
)
from agentspec_runtime.client.scope import current
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.testing import MockVLLM, RecordedRequest, Reply, ToolCall

HI: dict[str, Any] = {"messages": [HumanMessage("hi")]}


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    agentspec_runtime.uninstrument()


class Boundaries:
    """Everything that began, and how it ended."""

    def __init__(self) -> None:
        self.seen: list[tuple[BoundaryStart, list[BaseException | None]]] = []

    def start(self, boundary: BoundaryStart) -> object:
        ends: list[BaseException | None] = []
        self.seen.append((boundary, ends))
        return ends

    def active(self, token: object) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, token: object, error: BaseException | None) -> None:
        assert isinstance(token, list)
        token.append(error)

    def of(self, kind: str) -> list[tuple[str, str | None, str | None]]:
        return [(start.name, start.parent, start.call_id) for start, _ in self.seen if start.kind == kind]


@pytest.fixture
def boundaries() -> Iterator[Boundaries]:
    watcher = Boundaries()
    remove = register_boundary_observer(watcher)
    yield watcher
    remove()
    assert all(len(ends) == 1 for _, ends in watcher.seen), "every boundary ends exactly once"


def model_of(server: MockVLLM, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key="x", max_retries=0, **options)  # type: ignore[arg-type]


def agents(server: MockVLLM) -> list[tuple[str | None, str | None]]:
    return [(hint.agent, hint.parent) for hint in hints(server)]


def hints(server: MockVLLM) -> list[agentspec_runtime.Hint]:
    found = [request.hint for request in server.requests]
    assert None not in found
    return [hint for hint in found if hint is not None]


def chat_graph(
    model: ChatOpenAI, name: str | None = None, node: str = "model", **compile_options: Any
) -> Any:
    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(node, call)
    graph.add_edge(START, node)
    return graph.compile(name=name, **compile_options)


# Where a call is ------------------------------------------------------------------------------------------


def test_nested_graphs_give_agents_with_their_parents(boundaries: Boundaries) -> None:
    with MockVLLM() as server:
        model = model_of(server)
        team = StateGraph(MessagesState)
        team.add_node("plan", lambda state: {"messages": [model.invoke(state["messages"])]})
        team.add_node("work", chat_graph(model, "coder"))
        team.add_node("nameless", chat_graph(model))
        inner = create_agent(model, [], name="critic")
        team.add_node("review", lambda state: {"messages": inner.invoke(state)["messages"][-1:]})
        for before, after in [
            (START, "plan"),
            ("plan", "work"),
            ("work", "nameless"),
            ("nameless", "review"),
        ]:
            team.add_edge(before, after)
        wrap(team.compile(name="team")).invoke(HI)
        assert agents(server) == [
            ("plan", "team"),
            ("coder", "team"),
            ("nameless", "team"),
            ("critic", "team"),
        ]
        assert len({hint.session for hint in hints(server)}) == 1
        assert [hint.turn for hint in hints(server)] == [0, 1, 2, 3]
    assert boundaries.of("agent") == [("team", None, None), ("coder", "team", None)]


def test_the_session_is_the_open_one_then_the_thread_then_a_new_one() -> None:
    with MockVLLM() as server:
        graph = wrap(chat_graph(model_of(server), checkpointer=InMemorySaver()))
        config: Any = {"configurable": {"thread_id": 42}}
        graph.invoke(HI, config)
        with agentspec_runtime.session("mine", agent="boss"):
            graph.invoke(HI, config)
        wrap(chat_graph(model_of(server))).invoke(HI)
        wrap(chat_graph(model_of(server)).with_config(configurable={"thread_id": "bound"})).invoke(HI)
        first, second, third, fourth = hints(server)
    assert (first.session, second.session, second.agent, fourth.session) == ("42", "mine", "boss", "bound")
    assert third.session not in (None, "42", "mine")


def test_an_agent_named_inside_a_node_wins() -> None:
    with MockVLLM() as server:
        model = model_of(server)

        def call(state: MessagesState) -> dict[str, Any]:
            with agentspec_runtime.session(agent="specialist", expect=["code"]):
                return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("writer", call)
        graph.add_edge(START, "writer")
        wrap(graph.compile(name="team")).invoke(HI)
        hint = hints(server)[0]
    assert (hint.agent, hint.parent, hint.expect) == ("specialist", "writer", ("code",))


def test_a_handoff_changes_the_agent_and_keeps_the_session(boundaries: Boundaries) -> None:
    @lc_tool
    def to_bob(call_id: Annotated[str, InjectedToolCallId]) -> Command[Literal["bob"]]:
        """Hand over to bob."""
        message = ToolMessage("handed over", tool_call_id=call_id)
        return Command(goto="bob", graph=Command.PARENT, update={"messages": [message]})

    with MockVLLM([Reply(tool_calls=[ToolCall("to_bob", {}, "h1")]), Reply("bob here")]) as server:
        model = model_of(server)
        team = StateGraph(MessagesState)
        team.add_node("alice", create_agent(model, [to_bob], name="alice"))
        team.add_node("bob", create_agent(model, [], name="bob"))
        team.add_edge(START, "alice")
        result = wrap(team.compile(name="team")).invoke(HI)
        assert result["messages"][-1].content == "bob here"
        assert agents(server) == [("alice", "team"), ("bob", "team")]
        assert len({hint.session for hint in hints(server)}) == 1
    assert boundaries.of("tool") == [("to_bob", "team", "h1")]
    assert [ends for _, ends in boundaries.seen] == [[None]] * 4  # a hand-over is no error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_deprecated_react_agent_is_covered_too() -> None:
    with MockVLLM() as server:
        wrap(create_react_agent(model_of(server), [], name="old")).invoke(HI)
        assert agents(server) == [("old", None)]


def test_an_entrypoint_and_its_tasks_are_covered() -> None:
    with MockVLLM() as server:
        model = model_of(server)

        @task
        def ask(text: str) -> str:
            return str(model.invoke(text).content)

        @entrypoint()
        def flow(text: str) -> list[str]:
            return [future.result() for future in [ask(text), ask(text)]]

        assert isinstance(flow, Pregel)
        assert wrap(flow).invoke("hi") == ["ok", "ok"]
        assert len({hint.session for hint in hints(server)}) == 1
        assert sorted(hint.turn or 0 for hint in hints(server)) == [0, 1]


def test_a_tool_that_calls_a_model_is_the_same_session() -> None:
    with MockVLLM(
        [Reply(tool_calls=[ToolCall("expert", {"q": "x"}, "c1")]), Reply("deep"), Reply("end")]
    ) as server:
        model = model_of(server)

        @lc_tool
        def expert(q: str) -> str:
            """Ask an expert."""
            run = current().tool
            assert run is not None
            assert (run.name, run.call_id) == ("expert", "c1")
            return str(model.invoke(q).content)

        wrap(create_agent(model, [expert], name="coder")).invoke(HI)
        assert len({hint.session for hint in hints(server)}) == 1
        assert {hint.agent for hint in hints(server)} == {"coder"}


# Runs beside each other -----------------------------------------------------------------------------------


def marker_of(request: RecordedRequest) -> str:
    return str(request.body["messages"][0]["content"])


async def test_twenty_tasks_and_twenty_threads_on_one_graph_never_mix() -> None:
    with MockVLLM() as server:
        model = model_of(server)

        async def call(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        def call_sync(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        builder = StateGraph(MessagesState)
        builder.add_node("model", RunnableLambda(call_sync, call))
        builder.add_edge(START, "model")
        graph = wrap(builder.compile(checkpointer=InMemorySaver()))

        def work(name: str) -> Any:
            return {"messages": [HumanMessage(name)]}, {"configurable": {"thread_id": name}}

        with ThreadPoolExecutor(20) as pool:
            threads = [pool.submit(graph.invoke, *work(f"thread-{number}")) for number in range(20)]
            await asyncio.gather(*(graph.ainvoke(*work(f"task-{number}")) for number in range(20)))
            for future in threads:
                future.result()
        assert len(server.requests) == 40
        for request in server.requests:
            assert request.hint is not None
            assert request.hint.session == marker_of(request) == request.session_header
    assert current().session is None


@pytest.mark.parametrize("form", ["batch", "abatch"])
def test_batches_keep_their_runs_apart(form: str) -> None:
    with MockVLLM() as server:
        graph = wrap(chat_graph(model_of(server)))
        inputs = [{"messages": [HumanMessage(f"m{number}")]} for number in range(5)]
        results = graph.batch(inputs) if form == "batch" else asyncio.run(graph.abatch(inputs))
        assert [result["messages"][-1].content for result in results] == ["ok"] * 5
        assert len({hint.session for hint in hints(server)}) == 5


def test_two_streams_read_in_turns_never_mix() -> None:
    with MockVLLM() as server:
        graph = wrap(chat_graph(model_of(server), checkpointer=InMemorySaver()))
        streams = [
            graph.stream({"messages": [HumanMessage(name)]}, {"configurable": {"thread_id": name}})
            for name in "ab"
        ]
        for _ in range(2):
            for stream in streams:
                next(stream, None)
                assert current().session is None
        for request in server.requests:
            assert request.hint is not None
            assert request.hint.session == marker_of(request)


def test_a_graph_that_is_dropped_is_collected() -> None:
    with MockVLLM() as server:
        graph = wrap(chat_graph(model_of(server)))
        graph.invoke(HI)
        gone = weakref.ref(graph)
        del graph
        gc.collect()
        assert gone() is None


# Interrupts, retries, errors ------------------------------------------------------------------------------


def test_a_node_that_is_run_again_on_resume_makes_real_calls_with_new_turns(boundaries: Boundaries) -> None:
    with MockVLLM() as server:
        model = model_of(server)

        def call(state: MessagesState) -> dict[str, Any]:
            answer = model.invoke(state["messages"])
            return {"messages": [AIMessage(f"{answer.content} {interrupt('one')} {interrupt('two')}")]}

        builder = StateGraph(MessagesState)
        builder.add_node("model", call)
        builder.add_edge(START, "model")
        saver = InMemorySaver()
        graph = wrap(builder.compile(name="asks", checkpointer=saver))
        config: Any = {"configurable": {"thread_id": "resumed"}}
        first = graph.invoke(HI, config)
        assert [item.value for item in first["__interrupt__"]] == ["one"]
        graph.invoke(Command(resume="a"), config)
        again = wrap(builder.compile(name="asks", checkpointer=saver))  # as after a restart
        assert again.invoke(Command(resume="b"), config)["messages"][-1].content == "ok a b"
        turns = [hint.turn or 0 for hint in hints(server)]
        assert [turn - turns[0] for turn in turns] == [0, 1, 2]
        assert {hint.session for hint in hints(server)} == {"resumed"}
    assert [ends for _, ends in boundaries.seen] == [[None], [None], [None]]


def test_a_retry_policy_makes_new_calls_of_the_same_session() -> None:
    with MockVLLM([Reply(status=500), Reply(status=500), Reply("third")]) as server:
        builder = StateGraph(MessagesState)
        model = model_of(server)
        policy = RetryPolicy(initial_interval=0.01, max_attempts=3, retry_on=Exception)
        builder.add_node(
            "model", lambda state: {"messages": [model.invoke(state["messages"])]}, retry_policy=policy
        )
        builder.add_edge(START, "model")
        graph = wrap(builder.compile())
        with agentspec_runtime.collect_calls() as calls:
            assert graph.invoke(HI)["messages"][-1].content == "third"
        assert [call.outcome for call in calls] == ["error", "error", "ok"]
        assert len({call.session for call in calls}) == 1


def boom() -> str:
    """Fail."""
    raise ValueError("no")


@pytest.mark.parametrize("handle", [True, False, (ValueError,), (TypeError,), "a fixed text"])
def test_a_tool_node_handles_errors_as_without_us(handle: Any, boundaries: Boundaries) -> None:
    def run(graph: Any) -> Any:
        try:
            return [
                (type(m).__name__, m.content, getattr(m, "status", None))
                for m in graph.invoke(state)["messages"]
            ]
        except Exception as error:  # noqa: BLE001 - compared
            return type(error), str(error)

    calls: Any = [{"name": "boom", "args": {}, "id": "c1", "type": "tool_call"}]
    state = {"messages": [AIMessage("", tool_calls=calls)]}
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([lc_tool(boom)], handle_tool_errors=handle))
    builder.add_edge(START, "tools")
    plain = builder.compile()
    assert run(wrap(plain)) == run(plain)
    ((_, ends),) = [item for item in boundaries.seen if item[0].kind == "tool"]
    handled = handle in (True, "a fixed text") or handle == (ValueError,)
    assert isinstance(ends[0], ReportedToolError if handled else ValueError)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_nodes_own_wrappers_still_run_inside_ours(asynchronous: bool, boundaries: Boundaries) -> None:
    seen = []

    def around(request: Any, execute: Any) -> Any:
        run = current().tool
        seen.append(run.call_id if run else None)
        return execute(request)

    def add(a: int) -> str:
        """Add."""
        return str(a)

    calls: Any = [
        {"name": "add", "args": {"a": number}, "id": f"c{number}", "type": "tool_call"} for number in (1, 2)
    ]
    state: Any = {"messages": [AIMessage("", tool_calls=calls)]}
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([lc_tool(add)], wrap_tool_call=around))
    builder.add_edge(START, "tools")
    graph = wrap(builder.compile())
    result = asyncio.run(graph.ainvoke(state)) if asynchronous else graph.invoke(state)
    assert [message.content for message in result["messages"][1:]] == ["1", "2"]
    assert sorted(seen) == ["c1", "c2"]
    assert sorted(call_id or "" for _, _, call_id in boundaries.of("tool")) == ["c1", "c2"]


# What stays as it was -------------------------------------------------------------------------------------


def test_the_original_is_untouched_and_wrapping_twice_is_wrapping_once() -> None:
    with MockVLLM() as server:
        plain = create_agent(model_of(server), [StructuredTool.from_function(boom)], name="coder")
        nodes = dict(plain.nodes)
        wrapped = wrap(plain)
        assert plain.nodes == nodes
        assert wrap(wrapped) is wrapped
        assert isinstance(wrapped, type(plain))
        assert (type(wrapped).__name__, wrapped.name) == (type(plain).__name__, "coder")
        plain.invoke(HI)
        assert server.requests[0].hint is None


def test_copies_with_other_config_stay_wrapped() -> None:
    with MockVLLM() as server:
        graph = wrap(chat_graph(model_of(server))).with_config(tags=["t"])
        graph.invoke(HI, {"configurable": {"thread_id": "x"}})
        assert hints(server)[0].session == "x"


def test_graph_introspection_is_the_same() -> None:
    with MockVLLM() as server:
        plain = create_agent(model_of(server), [StructuredTool.from_function(boom)], name="coder")
        wrapped = wrap(plain)
        assert wrapped.get_graph().to_json() == plain.get_graph().to_json()
        assert wrapped.get_input_jsonschema() == plain.get_input_jsonschema()
        assert [name for name, _ in wrapped.get_subgraphs()] == [name for name, _ in plain.get_subgraphs()]


def test_something_that_is_no_compiled_graph_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"StateGraph.*compile"):
        wrap(StateGraph(MessagesState))


# Chains of model bindings: nothing of ours is in the model, so nothing can be lost -----------------------


class Verdict(BaseModel):
    verdict: str


CHAINS: dict[str, Any] = {
    "bind_tools": lambda m: m.bind_tools([lc_tool(boom)]),
    "structured": lambda m: m.with_structured_output(Verdict),
    "structured function": lambda m: m.with_structured_output(Verdict, method="function_calling"),
    "bind then structured": lambda m: m.bind(extra_body={"top_k": 3}).with_structured_output(Verdict),
    "with_config": lambda m: m.with_config(tags=["x"]),
    "with_retry": lambda m: m.with_retry(),
    "with_fallbacks": lambda m: m.with_fallbacks([m]),
    "bind extra_body": lambda m: m.bind(extra_body={"vllm_xargs": {"mine": 1}}),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_hint_survives_every_chain_of_bindings(chain: str, streaming: bool) -> None:
    call = ToolCall("Verdict", {"verdict": "v"}, "c1")
    reply = Reply(tool_calls=[call]) if chain == "structured function" else Reply('{"verdict": "v"}')
    agentspec_runtime.instrument()
    with MockVLLM([reply]) as server:
        model = CHAINS[chain](model_of(server, extra_body={"top_p": 0.5, "vllm_xargs": {"own": "x"}}))
        with agentspec_runtime.session("s"), agentspec_runtime.collect_calls() as calls:
            assert list(model.stream("hi")) if streaming else model.invoke("hi")
        (request,) = server.requests
        assert request.hint is not None
        kept = {"mine": 1} if chain == "bind extra_body" else {"own": "x"}
        dropped_by_langchain = chain == "bind then structured"
        if not dropped_by_langchain:
            assert kept.items() <= request.body["vllm_xargs"].items()
    assert [call.accepted for call in calls] == [2]


# The middleware -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_middleware_marks_the_same_and_adds_no_node(asynchronous: bool, boundaries: Boundaries) -> None:
    def add(a: int) -> str:
        """Add."""
        return str(a)

    script = [
        Reply(tool_calls=[ToolCall("add", {"a": 1}, "c1"), ToolCall("add", {"a": 2}, "c2")]),
        Reply("end"),
    ]
    with MockVLLM(script) as server:
        model = model_of(server)
        plain = create_agent(model, [lc_tool(add)], name="coder")
        agent = create_agent(model, [lc_tool(add)], name="coder", middleware=[AgentSpecMiddleware()])
        assert list(agent.nodes) == list(plain.nodes)
        result = asyncio.run(agent.ainvoke(HI)) if asynchronous else agent.invoke(HI)
        assert [message.content for message in result["messages"]] == ["hi", "", "1", "2", "end"]
        assert agents(server) == [("coder", None)] * 2
        assert len({hint.session for hint in hints(server)}) == 1
        assert "vllm_xargs" not in str(result)
    assert sorted(call_id or "" for _, _, call_id in boundaries.of("tool")) == ["c1", "c2"]
    assert {start.session for start, _ in boundaries.seen} == {hints(server)[0].session}


def test_the_middleware_and_wrap_together_mark_once(boundaries: Boundaries) -> None:
    def add(a: int) -> str:
        """Add."""
        return str(a)

    with MockVLLM([Reply(tool_calls=[ToolCall("add", {"a": 1}, "c1")]), Reply("end")]) as server:
        marked = agentspec_runtime.tool(add)
        middleware = [AgentSpecMiddleware(agent="renamed")]
        agent = create_agent(model_of(server), [lc_tool(marked)], name="coder", middleware=middleware)
        wrap(agent).invoke(HI, {"configurable": {"thread_id": "both"}})
        assert {hint.session for hint in hints(server)} == {"both"}
        assert {hint.agent for hint in hints(server)} == {"renamed"}
    assert boundaries.of("tool") == [("add", None, "c1")]


def test_an_early_end_of_a_graph_stream_ends_every_boundary(boundaries: Boundaries) -> None:
    with MockVLLM([Reply("one two three four five six", chunk_delay_s=0.005)]) as server:
        graph = wrap(create_agent(model_of(server), [], name="coder"))
        stream = graph.stream(HI, stream_mode="messages")
        next(stream)
        stream.close()
        del stream
        gc.collect()
    assert boundaries.of("agent") == [("coder", None, None)]
