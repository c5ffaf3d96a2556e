"""The agents of a live run and their tasks: Reflexion loops, and the coding agent if LangGraph is there.

Each run is a `Job`: it is judged by executed tests, and what it raises is its own failure, never the end of
the others.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from agentspec_runtime.client.report import CallReport, on_call
from agentspec_runtime.client.session import session
from agentspec_runtime.demo.reflexion import Check, FunctionTask, Message, solve
from agentspec_runtime.demo.tasks import FUNCTION_TASKS
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import openai

    from agentspec_runtime.demo.coding_agent import CodingTask

__all__ = ["CALL_TIMEOUT_S", "Agents", "Job", "TaskOutcome", "known_sum", "load_tasks"]

CALL_TIMEOUT_S: Final = 600.0
"""One call; a full batch on a small machine answers slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Which agents run, and how. `served` is the name that the server knows the model by.

    A task is run `rounds` times, each with another seed and session; an agent has so many `attempts` at it.
    """

    served: str
    rounds: int = 2
    attempts: int = 2
    temperature: float = 0.7
    tasks: tuple[FunctionTask, ...] = FUNCTION_TASKS
    coder: bool = True

    def jobs(self, salt: str, seed: int, base_url: str, client: openai.OpenAI) -> Iterator[Job]:
        """Every task once per round, in the same order for every method."""
        for number in range(self.rounds):
            for task in self.tasks:
                yield _reflexion_job(self, salt, f"{task.name}-{number}", task, seed + number, client)
            if self.coder and importlib.util.find_spec("langgraph") is not None:
                from agentspec_runtime.demo.tasks import CODING_TASKS

                for coding in CODING_TASKS:
                    yield _coder_job(self, salt, coding, seed + number, base_url)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """One agent run. `seconds` from when it was due; counts are sums over its calls. None: no call told
    it, as where nothing drafts.
    """

    agent: str
    task: str
    solved: bool
    attempts: int
    seconds: float
    calls: int
    tokens: int
    drafted: int | None
    accepted: int | None
    failed: str = ""


Job = Callable[[float], TaskOutcome]
"""One agent run; it is given the time when it was due, on `time.perf_counter`."""


def load_tasks(path: Path) -> tuple[FunctionTask, ...]:
    """Tasks of a JSON Lines file: `name`, `stub`, and lists `visible` and `hidden` of [call, expected repr].

    Raises:
        ConfigurationError: not such a file.
    """
    tasks: list[FunctionTask] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.strip():
                continue
            data = json.loads(line)
            visible, hidden = (
                tuple(Check(call=str(call), expected=str(expected)) for call, expected in data[kind])
                for kind in ("visible", "hidden")
            )
            tasks.append(
                FunctionTask(name=str(data["name"]), stub=str(data["stub"]), visible=visible, hidden=hidden)
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: line {len(tasks) + 1} is no task (name, stub, visible, hidden): {error}"
        ) from error
    return tuple(tasks)


def known_sum(values: Iterable[int | None]) -> int | None:
    """Sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _reflexion_job(
    agents: Agents, salt: str, name: str, task: FunctionTask, seed: int, client: openai.OpenAI
) -> Job:
    def chat(messages: Sequence[Message], *, max_tokens: int, expect: Literal["code", "text"]) -> str:
        with session(agent="actor" if expect == "code" else "critic", expect=[expect]):
            answer = client.chat.completions.create(
                model=agents.served,
                messages=[{"role": m["role"], "content": m["content"]} for m in messages],  # type: ignore[misc]  # a union of literals
                max_tokens=max_tokens,
                temperature=agents.temperature,
                seed=seed,
                extra_body={"cache_salt": salt},
            )
        return answer.choices[0].message.content or ""

    def run() -> tuple[bool, int]:
        with session(f"{salt}-{name}", agent="reflexion"):
            outcome = solve(task, chat, max_trials=agents.attempts)
        return outcome.solved, len(outcome.trials)

    return lambda due_s: _outcome("reflexion", task.name, run, due_s)


def _coder_job(agents: Agents, salt: str, task: CodingTask, seed: int, base_url: str) -> Job:
    def run() -> tuple[bool, int]:
        from langchain_openai import ChatOpenAI
        from pydantic import SecretStr

        from agentspec_runtime.demo.coding_agent import run_coding_task
        from agentspec_runtime.demo.turns import TurnLog
        from agentspec_runtime.demo.workspace import Workspace

        class _OwnLog(TurnLog):
            """Hears the calls of this thread only."""

            @contextmanager
            def listening(self) -> Iterator[None]:
                with on_call(self._reports.append):
                    yield

        model = ChatOpenAI(
            model=agents.served,
            base_url=base_url,
            api_key=SecretStr("unused"),
            temperature=agents.temperature,
            seed=seed,
            timeout=CALL_TIMEOUT_S,
            extra_body={"cache_salt": salt},
        )
        log = _OwnLog()
        with tempfile.TemporaryDirectory(prefix="agentspec-") as folder, log.listening():
            workspace = Workspace(Path(folder), task.files)
            result = run_coding_task(task, workspace, model, log, max_attempts=agents.attempts)
        return result.solved, result.attempts

    return lambda due_s: _outcome("coder", task.name, run, due_s)


def _outcome(agent: str, task: str, run: Callable[[], tuple[bool, int]], due_s: float) -> TaskOutcome:
    """Run an agent; what it raises is its failure, counted and told, never the end of the others."""
    reports: list[CallReport] = []
    solved, attempts, failed = False, 0, ""
    with on_call(reports.append):
        try:
            solved, attempts = run()
        except Exception as error:  # noqa: BLE001 - agents of many libraries; the reason is kept in the row
            failed = f"{type(error).__name__}: {error}"[:300]
    return TaskOutcome(
        agent=agent,
        task=task,
        solved=solved,
        attempts=attempts,
        seconds=round(time.perf_counter() - due_s, 4),
        calls=len(reports),
        tokens=sum(report.completion_tokens or 0 for report in reports),
        drafted=known_sum(report.drafted for report in reports),
        accepted=known_sum(report.accepted for report in reports),
        failed=failed,
    )
