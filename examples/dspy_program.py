"""A DSPy program, with one line of ours.

    agentspec serve                   # in another terminal; or any OpenAI-compatible server
    pip install 'agentspec-runtime[dspy]'
    python examples/dspy_program.py   # OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are honoured

The one line is the callback: it tells the server which program a model call belongs to. `engine="litellm"`
makes DSPy go through the OpenAI SDK, where hints go out and reports come back.
"""

import os

import dspy
from agentspec_runtime.adapters.dspy import AgentSpecCallback
from dspy.utils.exceptions import AdapterParseError
from openai import OpenAI

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain

NOTES = (
    "The bakery opens at seven and closes at noon. On Sundays it stays closed.",
    "The library opens at ten and closes at six. On Sundays it stays closed.",
    "The market opens at eight and closes at one. On Sundays it opens at nine.",
)
QUESTION = "When does it open on Mondays?"


def connect() -> dspy.LM:
    """The model, on the server that the environment names."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key = os.environ.get("OPENAI_API_KEY", "unused")
    name = os.environ.get("OPENAI_MODEL") or OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return dspy.LM(
        f"openai/{name}", api_base=base_url, api_key=key, temperature=0.0, max_tokens=120, cache=False,
        engine="litellm",
    )  # fmt: skip


def main() -> None:
    """Ask the same question of three notes."""
    program = dspy.ChainOfThought("note, question -> answer")
    with (
        dspy.context(lm=connect(), callbacks=[AgentSpecCallback()]),
        agentspec_runtime.session("opening-hours"),
        agentspec_runtime.collect_calls() as calls,
    ):
        for note in NOTES:
            try:
                answer = program(note=note, question=QUESTION).answer
            except AdapterParseError:  # a tiny model does not always keep to the form that DSPy asks for
                answer = "(no answer in the form that was asked for)"
            print(f"{note}\n    {answer}")
    print(describe_gain(calls))


if __name__ == "__main__":
    main()
