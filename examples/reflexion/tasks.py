"""Twelve small Python functions to write. The model sees stub and visible checks; the hidden ones decide.

Written for this example, from easy to less easy. Add your own: a call and the `repr` of what it returns.
"""

from agentspec_runtime.demo.reflexion import Check, FunctionTask


def task(signature: str, purpose: str, visible: dict[str, object], hidden: dict[str, object]) -> FunctionTask:
    """A task out of a signature, a docstring and two tables of calls and results."""
    return FunctionTask(
        name=signature.partition("(")[0],
        stub=f'def {signature}:\n    """{purpose}"""\n',
        visible=tuple(Check(call=call, expected=repr(value)) for call, value in visible.items()),
        hidden=tuple(Check(call=call, expected=repr(value)) for call, value in hidden.items()),
    )


TASKS = (
    task(
        "is_even(n)",
        "Return True if n is even.",
        {"is_even(2)": True, "is_even(3)": False},
        {"is_even(0)": True},
    ),
    task(
        "largest(numbers)",
        "Return the largest number in the list.",
        {"largest([1, 5, 3])": 5},
        {"largest([-2, -7])": -2, "largest([4])": 4},
    ),
    task(
        "sum_even(numbers)",
        "Return the sum of the even numbers in the list.",
        {"sum_even([1, 2, 3, 4])": 6, "sum_even([])": 0},
        {"sum_even([-2, 5])": -2},
    ),
    task(
        "is_prime(n)",
        "Return True if n is a prime number.",
        {"is_prime(7)": True, "is_prime(9)": False},
        {"is_prime(1)": False, "is_prime(2)": True, "is_prime(97)": True},
    ),
    task(
        "is_palindrome(text)",
        "Return True if the text reads the same backwards, ignoring case.",
        {"is_palindrome('Anna')": True, "is_palindrome('abc')": False},
        {"is_palindrome('')": True},
    ),
    task(
        "fizzbuzz(n)",
        "Return 'Fizz' if n is divisible by 3, 'Buzz' if by 5, 'FizzBuzz' if by both, else str(n).",
        {"fizzbuzz(3)": "Fizz", "fizzbuzz(15)": "FizzBuzz", "fizzbuzz(7)": "7"},
        {"fizzbuzz(10)": "Buzz"},
    ),
    task(
        "average(numbers)",
        "Return the mean of the numbers, or 0 for an empty list.",
        {"average([1, 2, 3])": 2.0, "average([])": 0},
        {"average([4])": 4.0},
    ),
    task(
        "count_vowels(text)",
        "Return how many vowels (a, e, i, o, u) the text has, ignoring case.",
        {"count_vowels('hello')": 2, "count_vowels('xyz')": 0},
        {"count_vowels('AEIOU')": 5},
    ),
    task(
        "unique(items)",
        "Return the items without duplicates, in their first order.",
        {"unique([1, 2, 1, 3])": [1, 2, 3], "unique([])": []},
        {"unique('abca')": ["a", "b", "c"]},
    ),
    task(
        "clamp(value, low, high)",
        "Return value, limited to the range from low to high.",
        {"clamp(5, 0, 3)": 3, "clamp(-1, 0, 3)": 0},
        {"clamp(2, 0, 3)": 2},
    ),
    task(
        "second_largest(numbers)",
        "Return the second largest different number in the list.",
        {"second_largest([1, 5, 3])": 3, "second_largest([5, 5, 1])": 1},
        {"second_largest([-1, -2])": -2},
    ),
    task(
        "roman(n)",
        "Return the Roman numeral of n, from 1 to 3999.",
        {"roman(4)": "IV", "roman(9)": "IX", "roman(14)": "XIV"},
        {"roman(1994)": "MCMXCIV", "roman(3)": "III"},
    ),
)
