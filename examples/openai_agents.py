"""An agent of the OpenAI Agents SDK, with one line of ours.

    agentspec serve                    # in another terminal; or any OpenAI-compatible server
    pip install openai-agents
    python examples/openai_agents.py   # OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are honoured

The one line is `instrument()`: the SDK calls the OpenAI client, and that is where hints go out and reports
come back. `session()` names the run, so that later questions are drafted from earlier ones.
"""

import os

from agents import Agent, MaxTurnsExceeded, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from openai import AsyncOpenAI, OpenAI

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain

PRICES = {"apple": 3, "bread": 4, "cheese": 12}
MAX_TURNS = 4


@function_tool
@agentspec_runtime.tool
def price_of(item: str) -> str:
    """Price of one item of the shop, in euros."""
    price = PRICES.get(item.lower().strip())
    return f"error: no {item!r} here; there are {', '.join(PRICES)}" if price is None else f"{price} euros"


def build() -> Agent[None]:
    """The agent, on the server that the environment names."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key = os.environ.get("OPENAI_API_KEY", "unused")
    name = os.environ.get("OPENAI_MODEL") or OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return Agent(
        name="shop",
        instructions="Answer questions about prices. Look prices up with price_of.",
        tools=[price_of],
        model=OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=base_url, api_key=key)),
        # "required" holds until a tool was called; a model that knows tools does not need it.
        model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required"),
    )


def main() -> None:
    """Ask for three prices."""
    set_tracing_disabled(True)  # it would be sent to OpenAI
    agentspec_runtime.instrument()
    agent = build()
    with agentspec_runtime.session("shop", agent=agent.name), agentspec_runtime.collect_calls() as calls:
        for item in PRICES:
            question = f"What does the {item} cost?"
            try:
                answer = str(Runner.run_sync(agent, question, max_turns=MAX_TURNS).final_output)
            except MaxTurnsExceeded:
                answer = f"(no answer within {MAX_TURNS} turns)"
            print(f"{question}\n    {answer}")
    print(describe_gain(calls))


if __name__ == "__main__":
    main()
