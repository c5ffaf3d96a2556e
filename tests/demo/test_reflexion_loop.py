"""Reflexion: the evaluator judges by running, the loop remembers, hidden tests decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from agentspec_runtime.demo.reflexion import (
    Check,
    FunctionTask,
    Message,
    evaluate,
    extract_program,
    solve,
)
from agentspec_runtime.demo.sandbox import Limits

TASK = FunctionTask(
    name="double",
    stub='def double(n):\n    """Return n times two."""\n',
    visible=(Check(call="double(2)", expected="4"),),
    hidden=(Check(call="double(3)", expected="6"),),
)
GOOD, WRONG, CHEAT = (
    "def double(n):\n    return n * 2\n",
    "def double(n):\n    return n\n",
    "def double(n):\n    return 4\n",
)


class Scripted:
    """A model that answers from two lists and remembers what it was asked."""

    def __init__(self, programs: Sequence[str], reflections: Sequence[str] = ()) -> None:
        self.answers = {"code": list(programs), "text": list(reflections)}
        self.asked: list[tuple[str, list[Message]]] = []

    def __call__(
        self, messages: Sequence[Message], *, max_tokens: int, expect: Literal["code", "text"]
    ) -> str:
        assert max_tokens > 0
        self.asked.append((expect, list(messages)))
        return self.answers[expect].pop(0)


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}```\nDone."


def test_a_first_pass_needs_one_call() -> None:
    model = Scripted([fenced(GOOD)])
    outcome = solve(TASK, model)
    assert outcome.solved
    assert len(model.asked) == len(outcome.trials) == 1
    assert outcome.trials[0].reflection == ""


def test_feedback_and_reflection_reach_the_next_trial() -> None:
    model = Scripted([fenced(WRONG), fenced(GOOD)], ["Multiply  by\ntwo."])
    outcome = solve(TASK, model)
    assert outcome.solved
    assert [kind for kind, _ in model.asked] == ["code", "text", "code"]
    critic, actor = model.asked[1][1][-1]["content"], model.asked[2][1][-1]["content"]
    assert "double(2) returned 2, expected 4" in critic
    assert WRONG in critic
    assert "assert double(2) == 4\nMultiply by two." in actor
    assert "assert" not in model.asked[0][1][-1]["content"]


def test_the_loop_stops_at_its_limit_and_does_not_reflect_on_the_last_trial() -> None:
    model = Scripted([fenced(WRONG)] * 3, ["no idea"] * 2)
    outcome = solve(TASK, model, max_trials=3)
    assert not outcome.solved
    assert len(outcome.trials) == 3
    assert model.answers == {"code": [], "text": []}


def test_memory_holds_the_latest_reflections_only() -> None:
    model = Scripted([fenced(WRONG)] * 4, ["lesson one", "lesson two", "lesson three"])
    solve(TASK, model, max_trials=4)
    last = model.asked[-1][1][-1]["content"]
    assert "lesson two\nlesson three" in last
    assert "lesson one" not in last


def test_hidden_tests_decide_but_are_never_shown() -> None:
    model = Scripted([fenced(CHEAT)])
    outcome = solve(TASK, model)
    assert outcome.trials[0].evaluation.passed
    assert not outcome.solved
    assert "double(3)" not in str(model.asked)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("text\n```\na = 1\n```\nmore\n```\nb = 2\n```", "a = 1\n"),
        ("```py\na = 1", "a = 1\n"),  # cut off
        ("a = 1", "a = 1\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("", "\n"),
    ],
)
def test_extract_program(answer: str, program: str) -> None:
    assert extract_program(answer) == program


@pytest.mark.parametrize(
    ("program", "feedback"),
    [
        ("def double(n:\n", "raised SyntaxError"),
        ("import nowhere\n", "raised ModuleNotFoundError"),
        ("x = 1\n", "raised NameError"),
        ("def double(n):\n    raise KeyError('k')\n", "raised KeyError: 'k'"),
        ("def double(n):\n    return 'x' * 10**6\n", "expected 4"),
        ("import os\nos._exit(0)\n", "ended with status 0"),
        ("import sys\nsys.exit(0)\n", "ended with status 0"),
        ("while True: pass\n", "did not end in time"),
    ],
)
def test_the_evaluator_says_what_went_wrong(program: str, feedback: str) -> None:
    evaluation = evaluate(program, TASK.visible, limits=Limits(wall_s=1))
    assert not evaluation.passed
    assert feedback in evaluation.feedback
    assert len(evaluation.feedback) < 400


def test_printing_does_not_disturb_the_verdict() -> None:
    noisy = "print('[\"\"]')\n" + GOOD
    assert evaluate(noisy, TASK.visible).passed


def test_an_unequal_type_or_a_strange_comparison_is_no_pass() -> None:
    assert not evaluate("def double(n):\n    return str(n * 2)\n", TASK.visible).passed
    raises = (
        "class Odd:\n    def __eq__(self, other): raise ValueError('no')\ndef double(n):\n    return Odd()\n"
    )
    assert "raised ValueError" in evaluate(raises, TASK.visible).feedback
