"""A LangGraph agent that completes a Python file: look, read, think, write, test, and again if that failed.

A graph of our own (`StateGraph` with a `ToolNode`), not `create_agent`: a model of 135M parameters left to
itself answers in prose, so `next_step` decides which tool comes next and the server makes the model call
that one (`tool_choice`). What is in the call stays the model's affair: which file, which code. A larger
model needs none of this, see `examples/langgraph_coding_agent.py`.

One worked example stands in the prompt. It is what makes the embedded model write code into a tool call.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypedDict

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field, create_model

from agentspec_runtime.adapters.langgraph import wrap
from agentspec_runtime.demo.turns import TaskResult, TurnLog
from agentspec_runtime.demo.workspace import ERROR_PREFIX, TESTS_PASSED, Workspace

__all__ = ["CodingTask", "Step", "StepName", "next_step", "run_coding_task"]

StepName = Literal["list_files", "read_file", "code", "write_file", "run_tests", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """A Python file to complete. `stub` and `tests` are files of the workspace, `hidden` tests are not."""

    name: str
    stub: str
    tests: str
    hidden: str

    @property
    def files(self) -> dict[str, str]:
        """Files that the agent finds."""
        return {f"{self.name}.py": self.stub, f"test_{self.name}.py": self.tests}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model call to come: a tool call or words, what is said to the model first, a bound."""

    name: StepName
    max_tokens: int
    nudge: str = ""

    @property
    def tool(self) -> str | None:
        """Tool that the model has to call."""
        return None if self.name in ("code", "report") else self.name


# Bounds in tokens: a call without arguments takes 26, one with a path 37, a small function as code about
# 60 and as a JSON string about 110. A model that runs on is cut off and told so.
_LIST: Final = Step(name="list_files", max_tokens=48)
_READ: Final = Step(name="read_file", max_tokens=64)
_CODE: Final = Step(name="code", max_tokens=160, nudge="Write the complete file.")
_WRITE: Final = Step(name="write_file", max_tokens=200, nudge="Save it.")
_TEST: Final = Step(name="run_tests", max_tokens=48)
_REPORT: Final = Step(name="report", max_tokens=40)
_AFTER: Final[dict[StepName, Step]] = {
    "list_files": _READ,
    "read_file": _CODE,
    "code": _WRITE,
    "write_file": _TEST,
}


def next_step(done: Sequence[StepName], last_result: str, *, max_attempts: int) -> Step | None:
    """What comes after the steps that are done, given what the last of them said; None at the end."""
    if not done:
        return _LIST
    if done[-1] == "report":
        return None
    if done[-1] != "run_tests":
        return _AFTER[done[-1]]
    if last_result.endswith(TESTS_PASSED) or done.count("run_tests") >= max_attempts:
        return _REPORT
    return Step(name="read_file", max_tokens=_READ.max_tokens, nudge="The tests fail. Correct the file.")


class AgentState(TypedDict):
    """State of the graph: the conversation, and the steps that are done."""

    messages: Annotated[list[AnyMessage], add_messages]
    done: Annotated[list[StepName], operator.add]


_SYSTEM: Final = (
    "You are a coding agent. You work on small Python files: "
    "read the file, write the complete file, run the tests."
)


def _call(name: str, **arguments: str) -> AIMessage:
    return AIMessage(content="", tool_calls=[{"name": name, "args": arguments, "id": "example"}])


def _result(text: str) -> ToolMessage:
    return ToolMessage(text, tool_call_id="example")


_DOUBLE: Final = "def double(n):\n    # Return n times two.\n"
_EXAMPLE: Final[tuple[AnyMessage, ...]] = (
    HumanMessage("Complete double.py."),
    _call("list_files"),
    _result("double.py\ntest_double.py"),
    _call("read_file", path="double.py"),
    _result(_DOUBLE),
    HumanMessage(_CODE.nudge),
    AIMessage(f"```python\n{_DOUBLE}    return n * 2\n```"),
    HumanMessage(_WRITE.nudge),
    _call("write_file", path="double.py", code=f"{_DOUBLE}    return n * 2\n"),
    _result("wrote double.py"),
    _call("run_tests"),
    _result(f"PASS test_double\n{TESTS_PASSED}"),
    AIMessage(f"double.py is complete: {TESTS_PASSED}."),
)


def run_coding_task(
    task: CodingTask, workspace: Workspace, model: ChatOpenAI, log: TurnLog, *, max_attempts: int
) -> TaskResult:
    """Run the agent on one task; the verdict is that of the visible and the hidden tests."""
    graph = _build(task, workspace, model, log, max_attempts=max_attempts)
    state = graph.invoke(
        {
            "messages": [SystemMessage(_SYSTEM), *_EXAMPLE, HumanMessage(f"Complete {task.name}.py.")],
            "done": [],
        },
        # The thread id becomes the session of the hints: turns of one task draft from each other.
        {"configurable": {"thread_id": f"coder-{task.name}"}, "recursion_limit": 20 * max_attempts},
    )
    return TaskResult(
        agent="coder",
        task=task.name,
        solved=workspace.tests_pass(task.hidden),
        attempts=list(state["done"]).count("run_tests"),
    )


def _build(
    task: CodingTask, workspace: Workspace, model: ChatOpenAI, log: TurnLog, *, max_attempts: int
) -> CompiledStateGraph[AgentState, None, AgentState, AgentState]:
    tools = _tools(workspace, task)

    def agent(state: AgentState) -> dict[str, Any]:
        step = next_step(state["done"], _text(state["messages"][-1]), max_attempts=max_attempts)
        if step is None:  # the graph ends after the report
            raise RuntimeError("the agent was asked for a step after its last one")
        said: list[AnyMessage] = [HumanMessage(step.nudge)] if step.nudge else []
        # `strict` lets the server hold the arguments to their schema.
        bound = model.bind_tools(tools, tool_choice=step.tool or "none", strict=True)
        answer = bound.bind(max_tokens=step.max_tokens).invoke([*state["messages"], *said])
        if not isinstance(answer, AIMessage):
            raise TypeError(f"a chat model answered with {type(answer).__name__}")
        log.add(task=task.name, step=step.name, answer=_answer_text(answer))
        said.append(answer)
        if step.tool and not answer.tool_calls:
            said.append(HumanMessage(f"{ERROR_PREFIX}that was no complete call of {step.tool}."))
        return {"messages": said, "done": [step.name]}

    def route(state: AgentState) -> str:
        last = state["messages"][-1]
        if isinstance(last, AIMessage) and last.tool_calls:
            return "tools"
        return END if state["done"][-1] == "report" else "agent"

    builder = StateGraph(AgentState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", route, ["agent", "tools", END])
    builder.add_edge("tools", "agent")
    graph: CompiledStateGraph[AgentState, None, AgentState, AgentState] = builder.compile(name="coder")
    return wrap(graph)


class _NoArguments(BaseModel):
    """Arguments of a tool that takes none."""


def _tools(workspace: Workspace, task: CodingTask) -> list[StructuredTool]:
    """The workspace's tools, with schemas that name this project's files and so hold a path to them."""
    readable: Any = Literal[tuple(sorted(task.files))]
    writable: Any = Literal[f"{task.name}.py"]
    schemas: list[tuple[Any, type[BaseModel]]] = [
        (workspace.list_files, _NoArguments),
        (workspace.read_file, create_model("ReadFile", path=(readable, Field()))),
        (workspace.write_file, create_model("WriteFile", path=(writable, Field()), code=(str, Field()))),
        (workspace.run_tests, _NoArguments),
    ]
    return [StructuredTool.from_function(function, args_schema=schema) for function, schema in schemas]


def _text(message: BaseMessage) -> str:
    return message.content if isinstance(message.content, str) else json.dumps(message.content)


def _answer_text(answer: AIMessage) -> str:
    """All that the model said. Ids of calls are left out: the server makes them up."""
    calls = [f"{call['name']} {json.dumps(call['args'], sort_keys=True)}" for call in answer.tool_calls]
    return "\n".join([text for text in [_text(answer)] if text] + calls)
