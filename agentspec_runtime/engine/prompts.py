"""How many tokens of prompts the step that is about to be scheduled will hold, beside those that decode.

vLLM decides that afterwards, and only then looks up how much of a waiting prompt is in the prefix cache. An
agent sends its whole history again with every turn, so nearly all of it is: told in full, a step of 300
tokens looks like one of 1,500, and drafts in it as dear as there. So the share of waiting prompts that had to
be computed is learned from the steps before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["ExpectedPrompts", "PromptForecast"]

_RATE: Final = 0.1
"""Of the last ten steps in which requests started, about."""


class ExpectedPrompts(NamedTuple):
    """`attended`: what the `tokens` look back on together. `num_waiting`: requests that have not started."""

    tokens: int
    attended: int
    num_waiting: int


class PromptForecast:
    """See the module docstring."""

    def __init__(self) -> None:
        self._computed = 1.0
        self._started_of = 0

    def expect(self, in_prompt: Iterable[Request], waiting: Iterable[Request], room: int) -> ExpectedPrompts:
        """`in_prompt`: running requests with tokens of their prompts left; `room`: most tokens that fit."""
        tokens = attended = 0
        for request in in_prompt:
            left = request.num_tokens - request.num_computed_tokens
            tokens += left
            attended += left * (request.num_computed_tokens + left // 2)
        room_left = max(room - tokens, 0)
        num_waiting = told = 0
        for request in waiting:
            num_waiting += 1
            if told < room_left:
                told += request.num_tokens
                computed = int(request.num_tokens * self._computed)
                tokens += computed
                attended += computed * (request.num_tokens - computed // 2)
        self._started_of = min(told, room_left)
        fits = max(min(tokens, room), 0)
        return ExpectedPrompts(fits, attended * fits // max(tokens, 1), num_waiting)

    def observe(self, output: SchedulerOutput) -> None:
        """What vLLM has decided."""
        told, self._started_of = self._started_of, 0
        if told and output.scheduled_new_reqs:
            computed = sum(output.num_scheduled_tokens[new.req_id] for new in output.scheduled_new_reqs)
            self._computed += _RATE * (min(computed / told, 1.0) - self._computed)
