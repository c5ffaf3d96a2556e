"""A PydanticAI agent, with one line of ours.

    agentspec serve                        # in another terminal; or any OpenAI-compatible server
    pip install 'agentspec-runtime[pydantic-ai]'
    python examples/pydantic_ai_agent.py   # OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are honoured

The one line is the capability: it tells the server which run, agent and tool call a model call belongs to.
One `conversation_id` for all questions makes them one session.
"""

import os

from agentspec_runtime.adapters.pydantic_ai import AgentSpecCapability
from openai import AsyncOpenAI, OpenAI
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain

PRICES = {"apple": 3, "bread": 4, "cheese": 12}
MAX_CALLS = 4


def build() -> Agent[None, str]:
    """The agent, on the server that the environment names."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key = os.environ.get("OPENAI_API_KEY", "unused")
    name = os.environ.get("OPENAI_MODEL") or OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=base_url, api_key=key))
    return Agent(
        OpenAIChatModel(name, provider=provider),
        name="shop",
        instructions="Answer questions about prices. Look prices up with price_of.",
        model_settings={"temperature": 0, "max_tokens": 60},
        capabilities=[AgentSpecCapability()],
    )


def main() -> None:
    """Ask for three prices."""
    agent = build()

    @agent.tool_plain
    @agentspec_runtime.tool
    def price_of(item: str) -> str:
        """Price of one item of the shop, in euros."""
        price = PRICES.get(item.lower().strip())
        return f"error: no {item!r}; there are {', '.join(PRICES)}" if price is None else f"{price} euros"

    with agentspec_runtime.collect_calls() as calls:
        for item in PRICES:
            question = f"What does the {item} cost?"
            try:
                limits = UsageLimits(request_limit=MAX_CALLS)
                answer = agent.run_sync(question, conversation_id="shop", usage_limits=limits).output
            except (UnexpectedModelBehavior, UsageLimitExceeded) as error:  # a tiny model gets lost at times
                answer = f"(no answer: {error})"
            print(f"{question}\n    {answer}")
    print(describe_gain(calls))


if __name__ == "__main__":
    main()
