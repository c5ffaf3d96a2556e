"""How many tokens to draft for whom: the lengths that maximise expected tokens per second.

With survivals S (probability that a slot and all before it are accepted), the step emits R + sum(S)
tokens. A slot is worth drafting when the time it saves later is more than the time it takes now:

    S * value > cost        value: seconds that one more emitted token saves
                            cost: seconds that one more token adds to this step

`value` is 1 / (tokens per second while decoding), the best over all draft lengths: a fixed point that
is found by admitting slots in the order of survival / cost. It is computed from the decode part of the
step alone. A step that carries a prompt chunk is slow for a reason that drafts cannot help, so its own
token rate would make every slot look cheap, and drafts would push other requests' prompts back.

Nobody tunes a threshold: while steps are memory-bound the cost is near zero and everything is drafted;
as the batch grows the cost rises and only near-certain copies are left; where nothing pays, nothing is
drafted. The first draft of a step also pays what verifying costs at all (`StepCost.verify_seconds`).

Whoever drafts nothing does not learn what drafting costs: after a burst from 1 to 64 requests on a CPU a
slot seemed twice as dear as it was, nothing was drafted, so nothing was learned, at 0.8 of what was possible
(`agentspec bench controller` shows such things). So more is tried than seems best where the steps seen leave
open whether it would pay (`StepCost.unsure_seconds`). That is next to nothing while drafts are made, and
grows while none are. It is all the exploration there is: no timer, no dice.

The classical form of this is TurboSpec's goodput (arXiv 2406.14066) with per-slot survival as
in TETRIS, here with a cost per slot instead of a given capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from agentspec_runtime.budget.cost import StepCost, StepShape

__all__ = [
    "LATENCY_WEIGHTS",
    "AssistPrices",
    "BudgetPolicy",
    "FixedBudget",
    "GoodputBudget",
    "Load",
    "Plan",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LATENCY_WEIGHTS: Final[Mapping[str, float]] = {"interactive": 1.5, "normal": 1.0, "batch": 0.75}
"""How much a saved token of each latency class of a hint is worth against a normal one."""

_OPTIMISM: Final = 0.7
"""Drafts are made down to 0.7 of the last price, so that the exact choice has something to choose from
when load falls within one step."""
_CHEAPEST: Final = 0.02
"""Slots below 2 % survival are never drafted: even free slots fill the batch of tokens."""
_DEAREST: Final = 0.98
_SMOOTH: Final = 0.1
_TRY_LEAST: Final = 8
_TRY_MOST: Final = 64
"""Drafts are tried up to as many again as there are tokens in the step, within these bounds. Few tell little:
with 8 more in every step of 64, sizes hardly differ, and the lock-in above lasted 150 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The step that is about to be scheduled.

    `contexts` int64[R]: tokens that each decoding request looks back on. `prefill_tokens` and
    `prefill_attended`: prompt tokens expected beside them. `weights` float64[R]: latency class, 1.0
    is normal. `num_waiting`: requests that may be started in it. `room`: most draft tokens that fit.
    `assist_depth`: tokens that a model drafter of the worker will probably make in it per request; -1: it
    will not run.
    """

    contexts: IntArray
    prefill_tokens: int
    prefill_attended: int
    weights: FloatArray
    num_waiting: int
    room: int
    assist_depth: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """`lengths` int64[R], draft tokens per request; `price` the least survival that was admitted."""

    lengths: IntArray
    price: float
    predicted_s: float


class AssistPrices(NamedTuple):
    """Seconds: what a token is worth, what a model drafter takes for 0 to D tokens of each request (float64
    [D + 1]), what it takes before that because it runs at all, and what a step takes longer because it
    verifies drafts at all.
    """

    token: float
    drafter: FloatArray
    standing: float
    verify: float


class BudgetPolicy(Protocol):
    """Chooses draft lengths. Pure: everything it knows comes in by these calls."""

    def prices(self, load: Load) -> FloatArray:
        """float64[R]: survival below which drafting would be wasted, known before drafting."""
        ...

    def choose(self, load: Load, survival: npt.NDArray[np.float32], offered: IntArray) -> Plan:
        """Lengths for drafts with `survival` float32[R, K] of which `offered[i]` slots exist."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """One step was measured."""
        ...

    def assist_prices(
        self, num_requests: int, num_attended: int, num_tokens: int, max_depth: int
    ) -> AssistPrices:
        """For a drafter of so many requests, which look back on `num_attended` tokens together, in a step of
        `num_tokens`.
        """
        ...


class FixedBudget:
    """Draft every slot with at least the given survival, whatever the load. The comparison case."""

    def __init__(self, min_survival: float) -> None:
        self._min_survival = min_survival
        self.cost = StepCost()

    def prices(self, load: Load) -> FloatArray:
        """The threshold."""
        return np.full(load.contexts.size, self._min_survival)

    def choose(
        self,
        load: Load,
        survival: npt.NDArray[np.float32],  # noqa: ARG002  (the protocol's signature)
        offered: IntArray,
    ) -> Plan:
        """Everything offered, in order of the batch, as far as there is room."""
        room = np.maximum(load.room - (np.cumsum(offered) - offered), 0)
        lengths = np.minimum(offered, room)
        shape = _shape(load, int(lengths.sum()), int((lengths * load.contexts).sum()))
        return Plan(lengths, self._min_survival, self.cost.predict(shape))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn the step time, for the report only."""
        self.cost.observe(shape, seconds)

    def assist_prices(
        self,
        num_requests: int,  # noqa: ARG002
        num_attended: int,  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        max_depth: int,
    ) -> AssistPrices:
        """Whatever helps, at any cost."""
        return AssistPrices(1.0, np.zeros(max_depth + 1), 0.0, 0.0)


class GoodputBudget:
    """The rule of the module docstring, with a step time that is learned online."""

    def __init__(self, cost: StepCost, *, draft_seconds: float = 0.0) -> None:
        self.cost = cost
        self._draft_seconds = draft_seconds
        self._price = 0.0

    def prices(self, load: Load) -> FloatArray:
        """From the cost of a slot and the value of a token as far as both are known now."""
        slot_cost, value = self._hopeful_slot_cost(load), self._value_without_drafts(load)
        exact = slot_cost / np.maximum(value * load.weights, 1e-9)
        prices: FloatArray = np.clip(exact * _OPTIMISM, _CHEAPEST, _DEAREST)
        return prices

    def choose(self, load: Load, survival: npt.NDArray[np.float32], offered: IntArray) -> Plan:
        """Admit slots by survival per cost until the next one would lower the token rate."""
        requests = load.contexts.size
        lengths = np.zeros(requests, np.int64)
        price = self._price
        if requests and offered.any():
            columns = np.arange(survival.shape[1])
            line, position = np.nonzero(columns[None, :] < offered[:, None])
            gain = survival[line, position].astype(np.float64)
            cost = self._slot_cost(load)[line]
            worth = gain * load.weights[line] / np.maximum(cost, 1e-12)
            # Survival does not grow along a draft, so this order takes each draft from its start.
            order = np.lexsort((position, line, -worth))
            taken = self._best_prefix(load, gain[order], load.contexts[line[order]].astype(np.float64))
            chosen = order[:taken]
            lengths = np.bincount(line[chosen], minlength=requests).astype(np.int64)
            if taken:
                price = float(gain[chosen].min())
        self._price += _SMOOTH * (price - self._price)
        shape = _shape(load, int(lengths.sum()), int((lengths * load.contexts).sum()))
        return Plan(lengths, price, self.cost.predict(shape))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn the step time."""
        self.cost.observe(shape, seconds)

    def assist_prices(
        self, num_requests: int, num_attended: int, num_tokens: int, max_depth: int
    ) -> AssistPrices:
        """By the learned step time, decoding alone as in `choose`."""
        requests = max(num_requests, 1)
        shape = StepShape(num_tokens=requests, num_attended=num_attended, num_requests=requests)
        return AssistPrices(
            self.cost.predict(shape) / requests,
            self.cost.assist_seconds(requests, max_depth),
            self.cost.assist_standing(num_tokens),
            self.cost.verify_seconds,
        )

    def _slot_cost(self, load: Load) -> FloatArray:
        per_token, per_attended = self.cost.slope(_shape(load, 0, 0))
        costs: FloatArray = per_token + per_attended * load.contexts.astype(np.float64)
        return costs

    def _hopeful_slot_cost(self, load: Load) -> FloatArray:
        context = int(load.contexts.sum()) / max(load.contexts.size, 1)
        unsure = self.cost.unsure_slope(_shape(load, 0, 0), context)
        costs: FloatArray = np.maximum(self._slot_cost(load) - unsure, 0.0)
        return costs

    def _decode_seconds(self, load: Load) -> float:
        shape = StepShape(
            num_tokens=load.contexts.size,
            num_attended=int(load.contexts.sum()),
            num_requests=load.contexts.size,
            assist_depth=load.assist_depth,
        )
        return self.cost.predict(shape) + self._draft_seconds

    def _value_without_drafts(self, load: Load) -> float:
        return self._decode_seconds(load) / max(load.contexts.size, 1)

    def _best_prefix(self, load: Load, gain: FloatArray, contexts: FloatArray) -> int:
        """How many slots, in this order, give the highest rate of (R + gains) per (time + costs)."""
        limit = min(load.room, gain.size)
        if limit <= 0:
            return 0
        shape = _shape(load, 0, 0)
        _, per_attended = self.cost.slope(shape)
        more = np.arange(limit + 1, dtype=np.float64)
        emitted = load.contexts.size + np.concatenate([[0.0], np.cumsum(gain[:limit])])
        attended = np.concatenate([[0.0], np.cumsum(contexts[:limit])])
        seconds = self._decode_seconds(load) + self.cost.added_seconds(shape, more) + per_attended * attended
        seconds[1:] += self.cost.verify_seconds
        likely = int(np.argmax(emitted / seconds))
        most = min(max(load.contexts.size + likely, _TRY_LEAST), _TRY_MOST)
        tried = slice(likely, likely + most + 1)
        unsure = self.cost.unsure_seconds(shape, more[tried], attended[tried])
        hopeful = np.maximum(seconds[tried] - unsure, seconds[0])
        return likely + int(np.argmax(emitted[tried] / hopeful))


def _shape(load: Load, draft_tokens: int, draft_attended: int) -> StepShape:
    requests = load.contexts.size
    return StepShape(
        num_tokens=requests + load.prefill_tokens + draft_tokens,
        num_attended=int(load.contexts.sum()) + load.prefill_attended + draft_attended,
        num_requests=requests,
        num_drafts=draft_tokens,
        assist_depth=load.assist_depth,
    )
