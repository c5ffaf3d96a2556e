"""Reflexion on small Python functions: act, run the tests, reflect in words, remember, try again.

After Shinn et al., "Reflexion: Language Agents with Verbal Reinforcement Learning" (arXiv 2303.11366).
Deviations: the visible tests are part of the task (there the model writes them), and hidden tests, that
neither actor nor reflection ever sees, decide whether a task counts as solved.

Nothing here knows a server or a framework: the model is a function from messages to text.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TypedDict

from agentspec_runtime.demo.sandbox import Limits, run_python

__all__ = [
    "Actor",
    "Chat",
    "Check",
    "Evaluation",
    "FunctionTask",
    "Message",
    "Outcome",
    "Reflector",
    "Trial",
    "act",
    "evaluate",
    "extract_program",
    "reflect",
    "solve",
]


class Message(TypedDict):
    """One chat message, in the form of the OpenAI API."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(Protocol):
    """One model call: the conversation in, the answer's text out. `expect` names the block it should hold."""

    def __call__(
        self, messages: Sequence[Message], *, max_tokens: int, expect: Literal["code", "text"]
    ) -> str:
        """Answer of the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One test: `call` is a Python expression over the program, `expected` the `repr` of its value."""

    call: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTask:
    """A function to write. `stub` is its signature and docstring."""

    name: str
    stub: str
    visible: tuple[Check, ...]
    hidden: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How many tests passed, and what to tell the model about the others."""

    num_passed: int
    num_checks: int
    feedback: str

    @property
    def passed(self) -> bool:
        """True when every test passed."""
        return self.num_passed == self.num_checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt. `reflection` is what the model said about it, empty after a pass or the last trial."""

    program: str
    evaluation: Evaluation
    reflection: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All trials at one task, and the verdict of the hidden tests on the last program."""

    task: FunctionTask
    trials: tuple[Trial, ...]
    solved: bool


class Actor(Protocol):
    """Writes a program, with the earlier trials in view."""

    def __call__(self, task: FunctionTask, chat: Chat, memory: Sequence[Trial], /) -> str:
        """Source of the program."""
        ...


class Reflector(Protocol):
    """Says in words what was wrong with a program."""

    def __call__(self, task: FunctionTask, chat: Chat, program: str, evaluation: Evaluation, /) -> str:
        """The reflection, on one line."""
        ...


_ACT_SYSTEM: Final = (
    "You are a Python programmer. "
    "Answer with one code block that holds the complete function and nothing else."
)
_REFLECT_SYSTEM: Final = (
    "You review a Python function that failed its tests. "
    "Say in one or two sentences what is wrong and how to fix it."
)

# Bounds on an answer: a stub and a short body need about 100 tokens, two sentences about 60.
_PROGRAM_TOKENS: Final = 160
_REFLECTION_TOKENS: Final = 64
_MEMORY_TRIALS: Final = 2
"""Trials whose reflections the actor is reminded of; more confuse a small model."""


def act(task: FunctionTask, chat: Chat, memory: Sequence[Trial]) -> str:
    """Actor: write the program; after a failed trial with the tests and the latest reflections in view."""
    request = f"Complete this function:\n```python\n{task.stub}```"
    if memory:
        tests = [f"assert {check.call} == {check.expected}" for check in task.visible]
        lessons = [trial.reflection for trial in memory[-_MEMORY_TRIALS:]]
        request += "\n".join(["\nIt must pass these tests:", *tests, *lessons])
    messages: list[Message] = [
        {"role": "system", "content": _ACT_SYSTEM},
        {"role": "user", "content": request},
    ]
    return extract_program(chat(messages, max_tokens=_PROGRAM_TOKENS, expect="code"))


def reflect(task: FunctionTask, chat: Chat, program: str, evaluation: Evaluation) -> str:
    """Self-reflection: what the model thinks went wrong, in words, on one line."""
    text = chat(
        [
            {"role": "system", "content": _REFLECT_SYSTEM},
            {
                "role": "user",
                "content": f"Task:\n```python\n{task.stub}```\nProgram:\n```python\n{program}```\n"
                f"{evaluation.feedback}\nWhat is wrong, and how can it be fixed?",
            },
        ],
        max_tokens=_REFLECTION_TOKENS,
        expect="text",
    )
    return " ".join(text.split())


def solve(
    task: FunctionTask,
    chat: Chat,
    *,
    max_trials: int = 3,
    act: Actor = act,
    reflect: Reflector = reflect,
    on_trial: Callable[[int, Trial], None] | None = None,
) -> Outcome:
    """Try, test and reflect until the visible tests pass or `max_trials` are used up.

    Args:
        task: what to write.
        chat: the model.
        max_trials: programs to try.
        act, reflect: other prompts than those of this module.
        on_trial: called with the number of a trial, from 0, and the trial.
    """
    trials: list[Trial] = []
    for number in range(max_trials):
        program = act(task, chat, trials)
        evaluation = evaluate(program, task.visible)
        last = evaluation.passed or number == max_trials - 1
        reflection = "" if last else reflect(task, chat, program, evaluation)
        trials.append(Trial(program=program, evaluation=evaluation, reflection=reflection))
        if on_trial is not None:
            on_trial(number, trials[-1])
        if last:
            break
    solved = bool(trials) and evaluate(trials[-1].program, task.visible + task.hidden).passed
    return Outcome(task=task, trials=tuple(trials), solved=solved)


_FENCE: Final = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def extract_program(answer: str) -> str:
    """First code block of an answer, or the whole answer where there is none. Ends with a newline."""
    found = _FENCE.search(answer)
    return (found.group(1) if found else answer).strip("\n") + "\n"


# Runs beside the program. Results go to a file, because the program may print what it likes; a program
# that exits early leaves no file, and then nothing has passed.
_HARNESS: Final = """
import json, pathlib
checks = json.loads(pathlib.Path("checks.json").read_text())
scope = {"__name__": "solution"}
results = []
try:
    exec(compile(pathlib.Path("solution.py").read_text(), "solution.py", "exec"), scope)
    broken = ""
except Exception as error:
    broken = f"raised {type(error).__name__}: {error}"
for call, expected in checks:
    got = broken
    if not broken:
        try:
            value = eval(call, dict(scope))
            got = "" if value == eval(expected) else f"returned {value!r:.80}"
        except Exception as error:
            got = f"raised {type(error).__name__}: {error!s:.80}"
    results.append(got)
pathlib.Path("results.json").write_text(json.dumps(results))
"""


def evaluate(program: str, checks: Sequence[Check], *, limits: Limits | None = None) -> Evaluation:
    """Evaluator: run the checks in a child process and say what failed, in words the model can use."""
    with tempfile.TemporaryDirectory(prefix="agentspec-") as name:
        folder = Path(name)
        (folder / "solution.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "checks.json").write_text(json.dumps([[check.call, check.expected] for check in checks]))
        (folder / "harness.py").write_text(_HARNESS)
        run = run_python(folder / "harness.py", folder=folder, limits=limits)
        results = _read_results(folder / "results.json", len(checks))
    if results is None:
        reason = "did not end in time" if run.timed_out else f"ended with status {run.return_code}"
        return Evaluation(num_passed=0, num_checks=len(checks), feedback=f"The program {reason}.")
    failures = [
        f"{check.call} {got}, expected {check.expected}"
        for check, got in zip(checks, results, strict=True)
        if got
    ]
    num_passed = len(checks) - len(failures)
    lines = [f"{num_passed} of {len(checks)} tests passed.", *failures[:3]]
    return Evaluation(num_passed=num_passed, num_checks=len(checks), feedback="\n".join(lines))


def _read_results(path: Path, num_checks: int) -> list[str] | None:
    """One string per check, empty for a pass; None unless the file is exactly that."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, list) or len(values) != num_checks:
        return None
    return [str(value) for value in values]
