"""The agents of the matrix: one task in three styles, four ways to run it, nine things that may happen.

Everything is real (openai, langchain-openai, langgraph) except the server. `run()` returns a picture of what
a caller sees: values, types, exceptions; ids that are random by nature are left out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Annotated, Any, TypedDict

import openai
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool as lc_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt
from pydantic import BaseModel

import agentspec_runtime
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

THREAD = "thread-1"
FAST_RETRY = {"retry-after-ms": "1"}
PATIENCE_S = 0.25


class Verdict(BaseModel):
    """Structured answer."""

    verdict: str
    score: int


@agentspec_runtime.tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@agentspec_runtime.tool
def explode(a: int) -> str:
    """Fail."""
    raise ValueError(f"no {a} today")


@agentspec_runtime.tool
def confirm(question: str) -> str:
    """Ask a person."""
    return f"person said {interrupt(question)}"


TOOLS = [lc_tool(add), lc_tool(explode), lc_tool(confirm)]
BY_NAME: dict[str, Callable[..., str]] = {"add": add, "explode": explode, "confirm": confirm}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in BY_NAME
]

PAIR = Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("add", {"a": 3, "b": 4}, "c2")])
SCRIPTS: dict[str, list[Reply]] = {
    "plain": [Reply("a plain answer")],
    "parallel": [PAIR, Reply("three and seven")],
    "structured": [Reply('{"verdict": "good", "score": 7}')],
    "tool_raises": [Reply(tool_calls=[ToolCall("explode", {"a": 1}, "c1")]), Reply("never")],
    "interrupt": [Reply(tool_calls=[ToolCall("confirm", {"question": "sure?"}, "c1")]), Reply("done then")],
    "early_break": [Reply("one two three four five six", chunk_delay_s=0.005), Reply("never")],
    "retry": [Reply(status=500, headers=FAST_RETRY), Reply("second try")],
    "timeout": [Reply("late", delay_s=PATIENCE_S * 3)],
    "cancel": [Reply("one two three four", delay_s=PATIENCE_S * 3)],
}
ASYNC_ONLY = {"cancel"}
STREAM_ONLY = {"early_break"}
STYLES = ("create_agent", "state_graph", "raw")
MODES = ("invoke", "ainvoke", "stream", "astream")


def cases() -> Iterator[tuple[str, str, str]]:
    """(style, mode, scenario) of every cell that has a meaning."""
    for style in STYLES:
        for mode in MODES:
            for scenario in SCRIPTS:
                if scenario in ASYNC_ONLY and not mode.startswith("a"):
                    continue
                if scenario in STREAM_ONLY and "stream" not in mode:
                    continue
                yield style, mode, scenario


# Agents ---------------------------------------------------------------------------------------------------


def build(style: str, scenario: str, url: str) -> Any:
    """The agent of one cell, unwrapped."""
    timeout = PATIENCE_S if scenario == "timeout" else 20
    retries = 2 if scenario == "retry" else 0
    if style == "raw":
        return RawAgent(url, timeout, retries)
    model = ChatOpenAI(model="m", base_url=url, api_key="x", timeout=timeout, max_retries=retries)
    saver = InMemorySaver()
    if style == "create_agent":
        strategy = ProviderStrategy(Verdict) if scenario == "structured" else None
        return create_agent(model, TOOLS, name="coder", checkpointer=saver, response_format=strategy)
    if scenario == "structured":
        return _structured_graph(model, saver)
    bound = model.bind_tools(TOOLS)

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    async def acall(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("coder", RunnableLambda(call, acall))
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "coder")
    graph.add_conditional_edges("coder", tools_condition)
    graph.add_edge("tools", "coder")
    return graph.compile(checkpointer=saver)


class _Judged(TypedDict):
    messages: Annotated[list[BaseMessage], add_messages]
    verdict: Verdict


def _structured_graph(model: ChatOpenAI, saver: InMemorySaver) -> Any:
    judge = model.with_structured_output(Verdict)

    def call(state: _Judged) -> dict[str, Any]:
        return {"verdict": judge.invoke(state["messages"])}

    async def acall(state: _Judged) -> dict[str, Any]:
        return {"verdict": await judge.ainvoke(state["messages"])}

    graph = StateGraph(_Judged)
    graph.add_node("coder", RunnableLambda(call, acall))
    graph.add_edge(START, "coder")
    return graph.compile(checkpointer=saver)


class RawAgent:
    """A hand-written tool loop on the SDK; "interrupt" stops after the call and goes on in a second run."""

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        options: dict[str, Any] = {
            "base_url": url,
            "api_key": "x",
            "timeout": timeout,
            "max_retries": retries,
        }
        self.client = openai.OpenAI(**options)
        self.aclient = openai.AsyncOpenAI(**options)
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        self.raised: ValueError | None = None

    def _arguments(self, *, tools: bool = True) -> dict[str, Any]:
        return {"model": "m", "messages": self.history, **({"tools": SCHEMAS} if tools else {})}

    def answer(self, message: dict[str, Any]) -> bool:
        """Run the tools that a message asks for; whether the loop goes on."""
        self.history.append({"role": "assistant", **message})
        calls = message.get("tool_calls") or []
        for call in calls:
            if call["function"]["name"] == "confirm":
                result = "person said yes"
            else:
                result = BY_NAME[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return bool(calls)

    def invoke(self, scenario: str) -> Any:
        if scenario == "structured":
            return self.client.chat.completions.parse(**self._arguments(tools=False), response_format=Verdict)
        answer = self.client.chat.completions.create(**self._arguments())
        while self.answer(answer.choices[0].message.model_dump(exclude_none=True, exclude={"role"})):
            answer = self.client.chat.completions.create(**self._arguments())
        return answer

    async def ainvoke(self, scenario: str) -> Any:
        if scenario == "structured":
            return await self.aclient.chat.completions.parse(
                **self._arguments(tools=False), response_format=Verdict
            )
        answer = await self.aclient.chat.completions.create(**self._arguments())
        while self.answer(answer.choices[0].message.model_dump(exclude_none=True, exclude={"role"})):
            answer = await self.aclient.chat.completions.create(**self._arguments())
        return answer

    def stream(self, scenario: str) -> Iterator[Any]:
        if scenario == "structured":
            with self.client.chat.completions.stream(
                **self._arguments(tools=False), response_format=Verdict
            ) as events:
                yield from events
                yield events.get_final_completion()
            return
        while True:
            pieces: list[Any] = []
            for chunk in self.client.chat.completions.create(**self._arguments(), stream=True):
                pieces.append(chunk)
                yield chunk
            if not self.answer(_joined(pieces)):
                return

    async def astream(self, scenario: str) -> AsyncIterator[Any]:
        if scenario == "structured":
            manager = self.aclient.chat.completions.stream(
                **self._arguments(tools=False), response_format=Verdict
            )
            async with manager as events:
                async for event in events:
                    yield event
                yield await events.get_final_completion()
            return
        while True:
            pieces: list[Any] = []
            async for chunk in await self.aclient.chat.completions.create(**self._arguments(), stream=True):
                pieces.append(chunk)
                yield chunk
            if not self.answer(_joined(pieces)):
                return

    async def close(self) -> None:
        self.client.close()
        await self.aclient.close()


def _joined(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream, as an agent would put it together."""
    content, calls = "", {}
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                whole = calls.setdefault(call.index, {"id": call.id, "type": "function", "function": {}})
                function = whole["function"]
                function["name"] = function.get("name") or call.function.name
                function["arguments"] = function.get("arguments", "") + (call.function.arguments or "")
    return {"content": content, **({"tool_calls": list(calls.values())} if calls else {})}


# Running --------------------------------------------------------------------------------------------------


def run(agent: Any, style: str, mode: str, scenario: str, server: MockVLLM) -> list[Any]:
    """Run one cell and picture what came out, first run and resumed run."""
    pictures = _run(agent, style, mode, scenario, server)
    if scenario == "parallel" and "stream" in mode:
        pictures[0] = sorted(map(repr, pictures[0]))  # whichever of the two tools is ready first
    return pictures


def _run(agent: Any, style: str, mode: str, scenario: str, server: MockVLLM) -> list[Any]:
    if mode.startswith("a"):
        return asyncio.run(_arun(agent, style, mode, scenario, server))
    pictures = [_outcome(lambda: _once(agent, style, mode, scenario, {"messages": [("user", "hi")]}))]
    if scenario == "interrupt" and style != "raw":
        pictures.append(_outcome(lambda: _once(agent, style, mode, scenario, Command(resume="yes"))))
    return pictures


def _config() -> dict[str, Any]:
    return {"configurable": {"thread_id": THREAD}}


def _graph_stream(agent: Any, mode: str, given: Any) -> Any:
    return getattr(agent, mode)(given, _config(), stream_mode=["updates", "messages"])


def _once(agent: Any, style: str, mode: str, scenario: str, given: Any) -> Any:
    if mode == "invoke":
        return agent.invoke(scenario) if style == "raw" else agent.invoke(given, _config())
    items = agent.stream(scenario) if style == "raw" else _graph_stream(agent, mode, given)
    seen = []
    for item in items:
        seen.append(item)
        if scenario == "early_break" and len(seen) == 3:
            break
    items.close()
    return seen


async def _aonce(agent: Any, style: str, mode: str, scenario: str, given: Any) -> Any:
    if mode == "ainvoke":
        return await (agent.ainvoke(scenario) if style == "raw" else agent.ainvoke(given, _config()))
    seen = []
    items = agent.astream(scenario) if style == "raw" else _graph_stream(agent, mode, given)
    async with aclosing(items):
        async for item in items:
            seen.append(item)
            if scenario == "early_break" and len(seen) == 3:
                break
    return seen


async def _arun(agent: Any, style: str, mode: str, scenario: str, server: MockVLLM) -> list[Any]:
    first = {"messages": [("user", "hi")]}
    if scenario == "cancel":
        task = asyncio.create_task(_aonce(agent, style, mode, scenario, first))
        while not server.num_open:  # until the server is at work on it
            await asyncio.sleep(0.005)
        task.cancel()
        results = [await _aoutcome(task)]
    else:
        results = [await _aoutcome(_aonce(agent, style, mode, scenario, first))]
    if scenario == "interrupt" and style != "raw":
        results.append(await _aoutcome(_aonce(agent, style, mode, scenario, Command(resume="yes"))))
    deadline = time.monotonic() + 5  # what the loop has to finish, it finishes, on a busy machine too
    while len(asyncio.all_tasks()) > 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    results.append(("tasks left", len(asyncio.all_tasks()) - 1))
    if style == "raw":
        await agent.close()
    return results


def _outcome(body: Callable[[], Any]) -> Any:
    try:
        return picture(body())
    except Exception as error:  # noqa: BLE001 - pictured
        return picture(error)


async def _aoutcome(body: Any) -> Any:
    try:
        return picture(await body)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - pictured
        return picture(error)


# Pictures -------------------------------------------------------------------------------------------------

_RANDOM = {
    "id",
    "run_id",
    "headers",
    "langgraph_checkpoint_ns",
    "checkpoint_ns",
    "ls_run_id",
    "checkpoint_id",
}


def picture(value: Any) -> Any:
    """Types and values without ids that are random by nature."""
    if isinstance(value, BaseException):
        text = re.sub(r"127\.0\.0\.1:\d+|during task with .*", "", str(value))
        return (type(value).__name__, text)
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields if name not in _RANDOM}
        extra = {name: item for name, item in (value.model_extra or {}).items() if name not in _RANDOM}
        return (type(value).__name__, picture({**fields, **extra}))
    if isinstance(value, dict):
        return {key: picture(item) for key, item in value.items() if key not in _RANDOM}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(picture(item) for item in value)]
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__ if name not in _RANDOM}
        return (type(value).__name__, picture(fields))
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def serve(scenario: str) -> MockVLLM:
    """The scripted server of a scenario."""
    return MockVLLM(SCRIPTS[scenario])
