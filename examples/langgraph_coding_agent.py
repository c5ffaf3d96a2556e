"""A LangGraph coding agent (`create_agent`) that edits files and runs tests, with one line of ours.

    agentspec serve                             # in another terminal; or any OpenAI-compatible server
    python examples/langgraph_coding_agent.py   # OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL are honoured

The one line is `wrap(...)`: it tells the server which run, agent and tool a call belongs to. The middleware
`make_it_call_tools` is for very small models only, which answer in prose unless a tool is demanded; with
a model that knows tools, run with `--free`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentspec_runtime.adapters.langgraph import wrap
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AnyMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain
from agentspec_runtime.demo.workspace import TESTS_PASSED, Workspace

FILES = {
    "area.py": "def area(width, height):\n    # Return the area of a rectangle.\n",
    "test_area.py": "from area import area\n\n\ndef test_area():\n    assert area(2, 3) == 6\n",
}
SYSTEM = (
    "You are a coding agent. Complete the file area.py: read it with read_file, write the complete file with "
    "write_file, then call run_tests."
)
MAX_CALLS = 8


def tools_of(folder: Path) -> list[Callable[..., str]]:
    """The agent's tools: four methods of `Workspace`, marked with `@agentspec_runtime.tool` there."""
    return Workspace(folder, FILES).tools()


@wrap_model_call
def make_it_call_tools(
    request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
) -> ModelResponse:
    """Demand a tool call until the tests pass or enough was tried, and words after that."""
    over = passed(request.messages) or sum(isinstance(m, ToolMessage) for m in request.messages) >= MAX_CALLS
    return handler(request.override(tool_choice="none" if over else "required"))


def passed(messages: list[AnyMessage]) -> bool:
    """Whether the last tool result is a passed test run."""
    results = [str(message.content) for message in messages if isinstance(message, ToolMessage)]
    return bool(results) and results[-1].endswith(TESTS_PASSED)


def connect() -> ChatOpenAI:
    """The model that the environment names."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key = os.environ.get("OPENAI_API_KEY", "unused")
    name = os.environ.get("OPENAI_MODEL") or OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return ChatOpenAI(model=name, base_url=base_url, api_key=key, temperature=0, max_completion_tokens=160)


def main() -> None:
    """Run the agent once and judge its file by its tests."""
    parser = argparse.ArgumentParser(description="A LangGraph coding agent.")
    parser.add_argument("--free", action="store_true", help="let the model decide when to call tools")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        middleware: list[Any] = [] if options.free else [make_it_call_tools]
        agent = wrap(
            create_agent(
                connect(), tools_of(folder), system_prompt=SYSTEM, middleware=middleware, name="coder"
            )
        )
        with agentspec_runtime.collect_calls(everywhere=True) as calls:
            state = agent.invoke(
                {"messages": [("user", "Complete area.py and run its tests.")]},
                {"configurable": {"thread_id": "area"}, "recursion_limit": 40},
            )
        for message in state["messages"][1:]:
            message.pretty_print()
        verdict = "pass" if Workspace(folder, {}).tests_pass() else "fail"
    print(f"\nthe tests {verdict}")
    print(describe_gain(calls))


if __name__ == "__main__":
    main()
