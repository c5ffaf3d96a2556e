"""Three agents in one graph: a lead hands work over to a coder and to a tester, by a tool call.

    agentspec serve                          # in another terminal; or any OpenAI-compatible server
    python examples/multi_agent_handoff.py   # OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL are honoured

The handoff is LangGraph's: a tool that returns `Command(goto=...)`. Agents are the nodes of one run, so the
tester's answer, which repeats the coder's function, is drafted from what the coder wrote.
"""

import os
from typing import Annotated, Any, Literal

from agentspec_runtime.adapters.langgraph import wrap
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from openai import OpenAI

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain

MAX_HANDOFFS = 4
ROLES = {
    "coder": "You write Python. Answer with one code block that holds the function that was asked for.",
    "tester": "You write tests. Answer with one code block: the given function, then asserts for it.",
}


@tool
@agentspec_runtime.tool
def hand_over(
    to: Literal["coder", "tester"], tool_call_id: Annotated[str, InjectedToolCallId]
) -> Command[str]:
    """Let another agent work on it: the coder writes the function, the tester writes tests."""
    note = ToolMessage(f"handed over to {to}", tool_call_id=tool_call_id)
    return Command(goto=to, update={"messages": [note]})


def build(model: ChatOpenAI) -> Any:
    """The graph: lead -> handoff -> coder or tester -> lead."""

    def lead(state: MessagesState) -> dict[str, list[AnyMessage]]:
        system = SystemMessage(
            "You lead a coder and a tester. Call hand_over, first for code, then for tests."
        )
        answer = model.bind_tools([hand_over], tool_choice="required", strict=True).invoke(
            [system, *state["messages"]]
        )
        return {"messages": [answer]}

    def worker(role: str) -> Any:
        def work(state: MessagesState) -> dict[str, list[AnyMessage]]:
            said = [
                message
                for message in state["messages"]
                if message.content and message.type in ("human", "ai")
            ]
            request = HumanMessage("\n\n".join(str(message.content) for message in said))
            answer = model.invoke([SystemMessage(ROLES[role]), request])
            return {"messages": [AIMessage(answer.content, name=role)]}

        return work

    def more_to_do(state: MessagesState) -> str:
        workers = [message.name for message in state["messages"] if message.name in ROLES]
        return END if set(workers) == set(ROLES) or len(workers) >= MAX_HANDOFFS else "lead"

    def called(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "handoff" if isinstance(last, AIMessage) and last.tool_calls else END

    builder = StateGraph(MessagesState)
    builder.add_node("lead", lead)
    builder.add_node("handoff", ToolNode([hand_over]))
    for role in ROLES:
        builder.add_node(role, worker(role))
        builder.add_conditional_edges(role, more_to_do, ["lead", END])
    builder.add_edge(START, "lead")
    builder.add_conditional_edges("lead", called, ["handoff", END])
    return wrap(builder.compile(name="team"))


def connect() -> ChatOpenAI:
    """The model that the environment names."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key = os.environ.get("OPENAI_API_KEY", "unused")
    name = os.environ.get("OPENAI_MODEL") or OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return ChatOpenAI(model=name, base_url=base_url, api_key=key, temperature=0, max_completion_tokens=160)


def main() -> None:
    """Give the team one job."""
    team = build(connect())
    with agentspec_runtime.collect_calls(everywhere=True) as calls:
        state = team.invoke(
            {"messages": [HumanMessage("We need a Python function is_even(n).")]},
            {"configurable": {"thread_id": "is-even"}, "recursion_limit": 30},
        )
    for message in state["messages"]:
        message.pretty_print()
    print()
    for agent in dict.fromkeys(call.agent or "?" for call in calls):
        print(f"{agent}: {describe_gain([call for call in calls if call.agent == agent])}")
    print(f"all: {describe_gain(calls)}")


if __name__ == "__main__":
    main()
