"""The demo's tasks, written for it: small enough that a model of 135M parameters solves some of them.

The visible checks are what an agent gets to see; the hidden ones decide whether a task counts as solved.
"""

from __future__ import annotations

from typing import Final

from agentspec_runtime.demo.coding_agent import CodingTask
from agentspec_runtime.demo.reflexion import Check, FunctionTask

__all__ = ["CODING_TASKS", "FUNCTION_TASKS"]


def _coding(name: str, parameter: str, purpose: str, visible: str, hidden: str) -> CodingTask:
    head = f"from {name} import {name}\n\n\ndef"
    return CodingTask(
        name=name,
        stub=f"def {name}({parameter}):\n    # {purpose}\n",
        tests=f"{head} test_{name}():\n    {visible}\n",
        hidden=f"{head} test_hidden_{name}():\n    {hidden}\n",
    )


def _function(
    name: str, signature: str, purpose: str, visible: dict[str, str], hidden: dict[str, str]
) -> FunctionTask:
    return FunctionTask(
        name=name,
        stub=f'def {name}({signature}):\n    """{purpose}"""\n',
        visible=tuple(Check(call=call, expected=expected) for call, expected in visible.items()),
        hidden=tuple(Check(call=call, expected=expected) for call, expected in hidden.items()),
    )


CODING_TASKS: Final = (
    _coding(
        "is_prime",
        "n",
        "Return True if n is a prime number.",
        "assert is_prime(7)\n    assert not is_prime(9)",
        "assert is_prime(2)\n    assert not is_prime(1)\n    assert not is_prime(0)\n    assert is_prime(97)",
    ),
    _coding(
        "area",
        "width, height",
        "Return the area of a rectangle.",
        "assert area(2, 3) == 6",
        "assert area(0, 3) == 0\n    assert area(1.5, 2) == 3",
    ),
    _coding(
        "factorial",
        "n",
        "Return the factorial of n.",
        "assert factorial(5) == 120",
        "assert factorial(0) == 1\n    assert factorial(1) == 1",
    ),
)

FUNCTION_TASKS: Final = (
    _function(
        "sum_even",
        "numbers",
        "Return the sum of the even numbers in the list.",
        {"sum_even([1, 2, 3, 4])": "6", "sum_even([])": "0"},
        {"sum_even([-2, 5])": "-2", "sum_even([7])": "0"},
    ),
    _function(
        "average",
        "numbers",
        "Return the mean of the numbers, or 0 for an empty list.",
        {"average([1, 2, 3])": "2", "average([])": "0"},
        {"average([4])": "4", "average([1, 2])": "1.5"},
    ),
    _function(
        "is_palindrome",
        "text",
        "Return True if the text reads the same backwards, ignoring case.",
        {"is_palindrome('Anna')": "True", "is_palindrome('abc')": "False"},
        {"is_palindrome('')": "True", "is_palindrome('Abc')": "False"},
    ),
)
