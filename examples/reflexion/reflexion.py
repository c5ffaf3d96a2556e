"""Reflexion: the model writes a function, tests run, the model says what went wrong, and tries again.

    agentspec serve                              # in another terminal; or any OpenAI-compatible server
    python examples/reflexion/reflexion.py       # OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL are honoured

`act` and `reflect` below are the two prompts, and what you will want to change. The loop and the evaluator
(it runs the program in a child process with limits) are `agentspec_runtime.demo.reflexion.solve` and
`.evaluate`. A second trial repeats most of the first: that is what the server drafts from.
"""

import argparse
import os
from collections.abc import Sequence

from openai import OpenAI
from tasks import TASKS

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain
from agentspec_runtime.demo.reflexion import (
    Chat,
    Evaluation,
    FunctionTask,
    Message,
    Trial,
    extract_program,
    solve,
)


def act(task: FunctionTask, chat: Chat, memory: Sequence[Trial]) -> str:
    """Actor: write the program. `memory` holds the earlier trials, the latest last."""
    request = f"Complete this function:\n```python\n{task.stub}```"
    messages: list[Message] = [
        {"role": "system", "content": "You write Python. Answer with one code block and nothing else."},
        {"role": "user", "content": request},
    ]
    for trial in memory[-2:]:
        messages.append({"role": "assistant", "content": f"```python\n{trial.program}```"})
        remark = f"{trial.evaluation.feedback}\n{trial.reflection}\nWrite the corrected function."
        messages.append({"role": "user", "content": remark})
    return extract_program(chat(messages, max_tokens=200, expect="code"))


def reflect(task: FunctionTask, chat: Chat, program: str, evaluation: Evaluation) -> str:
    """Self-reflection: one or two sentences on what is wrong."""
    question = (
        f"This function should do: {task.stub}\n```python\n{program}```\n{evaluation.feedback}\n"
        "In one or two sentences: what is wrong, and how is it fixed?"
    )
    return " ".join(chat([{"role": "user", "content": question}], max_tokens=80, expect="text").split())


def connect() -> Chat:
    """The model as a function, on the server that the environment names."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    model = os.environ.get("OPENAI_MODEL") or client.models.list().data[0].id

    def chat(messages: Sequence[Message], *, max_tokens: int, expect: str) -> str:
        with agentspec_runtime.session(agent="actor" if expect == "code" else "critic", expect=[expect]):
            answer = client.chat.completions.create(
                model=model, messages=list(messages), max_tokens=max_tokens, temperature=0
            )
        return answer.choices[0].message.content or ""

    return chat


def main() -> None:
    """Solve the tasks one after the other and say what came of it."""
    parser = argparse.ArgumentParser(description="Reflexion on small Python functions.")
    parser.add_argument("--tasks", type=int, default=len(TASKS), help="how many (default: all)")
    parser.add_argument("--trials", type=int, default=3, help="programs per task (default: 3)")
    options = parser.parse_args()
    agentspec_runtime.instrument()
    chat = connect()
    solved = 0
    for task in TASKS[: options.tasks]:
        with agentspec_runtime.session(f"reflexion-{task.name}"), agentspec_runtime.collect_calls() as calls:
            outcome = solve(task, chat, max_trials=options.trials, act=act, reflect=reflect)
        solved += outcome.solved
        passed = [f"{trial.evaluation.num_passed}/{trial.evaluation.num_checks}" for trial in outcome.trials]
        print(
            f"{task.name}: {'solved' if outcome.solved else 'not solved'}, tests passed {', '.join(passed)}"
        )
        print(f"    {describe_gain(calls)}")
    print(f"solved {solved} of {min(options.tasks, len(TASKS))} tasks (hidden tests included)")


if __name__ == "__main__":
    main()
