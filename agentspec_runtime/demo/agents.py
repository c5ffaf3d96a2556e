"""Run the demo's two agents against one server: the LangGraph coder, then the Reflexion loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import openai
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agentspec_runtime.client.session import session
from agentspec_runtime.demo.coding_agent import CodingTask, run_coding_task
from agentspec_runtime.demo.reflexion import FunctionTask, Message, solve
from agentspec_runtime.demo.turns import TaskResult, TurnLog
from agentspec_runtime.demo.workspace import Workspace

__all__ = ["Workload", "run_agents", "warm_up"]

_TIMEOUT_S: Final = 120.0
"""One call; the longest here is 200 tokens, which a busy laptop answers in 20 s."""
_KEY: Final = "unused"


class Workload:
    """What the agents are to do."""

    __slots__ = ("attempts", "coding", "functions")

    def __init__(
        self, *, coding: Sequence[CodingTask], functions: Sequence[FunctionTask], attempts: int
    ) -> None:
        self.coding = tuple(coding)
        self.functions = tuple(functions)
        self.attempts = attempts


def warm_up(base_url: str, model: str) -> None:
    """One answer that is not counted: it takes what only a first request has to load or compile."""
    with openai.OpenAI(base_url=base_url, api_key=_KEY, timeout=_TIMEOUT_S) as client:
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count to five."}],
            max_tokens=16,
            temperature=0,
        )


def run_agents(
    base_url: str,
    model: str,
    workload: Workload,
    log: TurnLog,
    on_task: Callable[[TaskResult], None],
) -> list[TaskResult]:
    """Run both agents on their tasks, one call at a time, temperature 0."""
    results: list[TaskResult] = []

    def done(result: TaskResult) -> None:
        results.append(result)
        on_task(result)

    chat_model = ChatOpenAI(
        model=model, base_url=base_url, api_key=SecretStr(_KEY), temperature=0, timeout=_TIMEOUT_S
    )
    for coding_task in workload.coding:
        with tempfile.TemporaryDirectory(prefix="agentspec-") as folder:
            workspace = Workspace(Path(folder), coding_task.files)
            done(run_coding_task(coding_task, workspace, chat_model, log, max_attempts=workload.attempts))
    with openai.OpenAI(base_url=base_url, api_key=_KEY, timeout=_TIMEOUT_S) as client:
        for task in workload.functions:
            done(_run_reflexion(task, client, model, log, max_trials=workload.attempts))
    return results


def _run_reflexion(
    task: FunctionTask, client: openai.OpenAI, model: str, log: TurnLog, *, max_trials: int
) -> TaskResult:
    def chat(messages: Sequence[Message], *, max_tokens: int, expect: Literal["code", "text"]) -> str:
        role = "actor" if expect == "code" else "critic"
        with session(agent=role, expect=[expect]):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": m["role"], "content": m["content"]} for m in messages],  # type: ignore[misc]  # a union of literals
                max_tokens=max_tokens,
                temperature=0,
            )
        text = answer.choices[0].message.content or ""
        log.add(task=task.name, step="code" if expect == "code" else "reflect", answer=text)
        return text

    with session(f"reflexion-{task.name}", agent="reflexion"):
        outcome = solve(task, chat, max_trials=max_trials)
    return TaskResult(agent="reflexion", task=task.name, solved=outcome.solved, attempts=len(outcome.trials))
