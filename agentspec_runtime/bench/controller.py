"""`agentspec bench controller`: does the budget find its optimum, and again when the load changes? No engine.

The real drafter and the real budget run in virtual time over recordings, cold: the step time comes from a
cost curve that the budget does not know. It is told the time of each step, with noise and rare stalls, and
learns. Beside every choice stands the optimum: what the same rule would choose from the same survivals if it
knew the curve.

Programmes, one entry per step:
    sweep   1 request in flight, one more every few steps up to the most, and back in the same way
    burst   1, the most at once, 1 at once
    wake    always the same number; text that does not repeat (outputs shuffled), text as recorded, shuffled

Where the recordings end they begin again, as other sessions. Drafts come from request and session only,
since the text of one round would be found in the corpus of the round before. Prompts take no time, as in
`lockstep.py`. Noise is in what the budget is told, not in what it is judged by: scores use true times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.costs import StepTime
from agentspec_runtime.bench.lockstep import CAP, ROOM, Agent, accepted_tokens, step_shape
from agentspec_runtime.bench.tokens import TokenTrajectory
from agentspec_runtime.bench.tokens import shuffled as in_random_order
from agentspec_runtime.budget import (
    LATENCY_WEIGHTS,
    BudgetPolicy,
    CostCurve,
    GoodputBudget,
    Load,
    Plan,
    StepCost,
    StepShape,
)
from agentspec_runtime.drafting import BatchDraft, Drafter, DraftingConfig, TokenTable
from agentspec_runtime.errors import ConfigurationError

__all__ = [
    "ClassCounts",
    "KnownCost",
    "KnownTime",
    "Noise",
    "Programme",
    "Run",
    "Step",
    "burst",
    "programme",
    "run_programme",
    "sweep",
    "wake",
]

_CLASSES: Final = ("normal", "interactive", "normal", "batch")
"""Latency classes of the agents, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """Requests in flight of every step, and whether they write shuffled text. `jumps`: steps at which that
    changes at once.
    """

    name: str
    loads: tuple[int, ...]
    shuffled: tuple[bool, ...]
    jumps: tuple[int, ...] = ()


def sweep(most: int = 64, hold: int = 25) -> Programme:
    """Up to `most` in flight and down again, `hold` steps at each number."""
    there = [load for load in range(1, most + 1) for _ in range(hold)]
    loads = (*there, *reversed(there))
    return Programme(name="sweep", loads=loads, shuffled=(False,) * len(loads))


def burst(most: int = 64, steps: int = 300) -> Programme:
    """One, `most`, one, so many steps each."""
    loads = (1,) * steps + (most,) * steps + (1,) * steps
    jumps = (steps, 2 * steps)
    return Programme(name="burst", loads=loads, shuffled=(False,) * len(loads), jumps=jumps)


def wake(in_flight: int = 16, steps: int = 300) -> Programme:
    """Shuffled text, recorded text, shuffled text, so many steps each."""
    return Programme(
        name="wake",
        loads=(in_flight,) * (3 * steps),
        shuffled=(True,) * steps + (False,) * steps + (True,) * steps,
        jumps=(steps, 2 * steps),
    )


def programme(name: str, *, most: int, hold: int, steps: int) -> Programme:
    """A programme by its name; `steps` per part of burst and wake, which runs at a quarter of `most`.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if name == "sweep":
        return sweep(most, hold)
    if name == "burst":
        return burst(most, steps)
    if name == "wake":
        return wake(max(most // 4, 1), steps)
    raise ConfigurationError(f"unknown programme {name!r}: known are sweep, burst, wake")


class KnownCost(StepCost):
    """A curve that is the truth: it predicts without error and has nothing to learn."""

    def __init__(self, curve: CostCurve | None = None, name: str = "") -> None:
        super().__init__(curve)
        self.name = name

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Known already."""


class KnownTime(KnownCost):
    """The same for a `StepTime`, whatever its form. Attention is a part of it, not a term of its own."""

    def __init__(self, time: StepTime) -> None:
        super().__init__(name=time.name)
        self._time = time
        self._tables: dict[int, NDArray[np.float64]] = {}

    def predict(self, shape: StepShape) -> float:
        """Expected seconds of a step."""
        return float(self._table(shape)[shape.num_tokens])

    def slope(self, shape: StepShape) -> tuple[float, float]:
        """Seconds that one more token costs, and nothing for what it looks back on."""
        table, n = self._table(shape), shape.num_tokens
        return float(table[n + 1] - table[n]), 0.0

    def added_seconds(self, shape: StepShape, more_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds that `more_tokens` float64[D] add."""
        table, n = self._table(shape), shape.num_tokens
        seconds: NDArray[np.float64] = table[n + more_tokens.astype(np.int64)] - table[n]
        return seconds

    def _table(self, shape: StepShape) -> NDArray[np.float64]:
        """Step times by number of tokens, as far as a full draft of every request reaches."""
        requests = shape.num_requests
        if requests not in self._tables:
            sizes = range((CAP + 1) * requests + 2)
            self._tables[requests] = np.array([self._time.step_s(n, requests) for n in sizes])
        return self._tables[requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What the budget is told instead of the true time. `sigma`: relative spread; one step in `stall_every`
    (0: none) takes `stall` times as long.
    """

    sigma: float = 0.05
    stall_every: int = 200
    stall: float = 5.0
    seed: int = 0

    def factors(self) -> Iterator[float]:
        """For step after step, the same for the same seed."""
        random = np.random.default_rng(self.seed)
        while True:
            factor = float(np.exp(random.normal(0.0, self.sigma)))
            stalled = self.stall_every > 0 and random.random() < 1.0 / self.stall_every
            yield factor * (self.stall if stalled else 1.0)


class Step(NamedTuple):
    """One step of the whole batch. `optimum`: draft tokens that the true curve would have had chosen.

    Seconds: what was predicted, the true time, what the budget was told, and the true time without drafts.
    `expected`: tokens that the survivals promised; `best_rate`: tokens per second that they promised for the
    optimum. `price`: least survival that was admitted.
    """

    in_flight: int
    drafted: int
    optimum: int
    accepted: int
    emitted: int
    predicted_s: float
    true_s: float
    told_s: float
    plain_s: float
    expected: float
    best_rate: float
    price: float


@dataclass(slots=True)
class ClassCounts:
    """Of one latency class: (request, step) pairs, draft tokens, emitted tokens."""

    steps: int = 0
    drafted: int = 0
    emitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A programme under one budget. `longest_wait`: most steps in a row in which a request had a draft as
    likely to survive as one that was admitted, and got none (its class is lower, its context longer). It
    emits a token in each of them all the same.
    """

    programme: Programme
    steps: tuple[Step, ...]
    longest_wait: int
    by_class: Mapping[str, ClassCounts]


def run_programme(
    programme: Programme,
    trajectories: Sequence[TokenTrajectory],
    vocabulary: TokenTable,
    truth: KnownCost,
    *,
    budget: BudgetPolicy | None = None,
    noise: Noise | None = None,
) -> Run:
    """Run a programme; `budget` None is the one of the engine, which has nothing learned yet."""
    floor = _Floor(
        trajectories=trajectories,
        drafter=Drafter(
            DraftingConfig(num_speculative_tokens=CAP, max_requests=max(programme.loads)), vocabulary
        ),
        budget=budget or GoodputBudget(StepCost()),
        optimal=GoodputBudget(truth),
        truth=truth,
    )
    factors = (noise or Noise()).factors()
    steps = []
    for wanted, shuffled in zip(programme.loads, programme.shuffled, strict=True):
        floor.set_load(wanted, shuffled=shuffled)
        steps.append(floor.step(next(factors)))
    return Run(
        programme=programme, steps=tuple(steps), longest_wait=floor.longest_wait, by_class=floor.by_class
    )


@dataclass(slots=True)
class _Seat:
    """A request in flight, its latency class, and for how many steps it has been passed over."""

    agent: Agent
    latency: str
    waits: int = 0


@dataclass(slots=True, kw_only=True)
class _Floor:
    """Everything that is in flight, and what was counted."""

    trajectories: Sequence[TokenTrajectory]
    drafter: Drafter
    budget: BudgetPolicy
    optimal: GoodputBudget
    truth: KnownCost
    longest_wait: int = 0
    by_class: dict[str, ClassCounts] = field(
        default_factory=lambda: {name: ClassCounts() for name in LATENCY_WEIGHTS}
    )
    _seats: list[_Seat] = field(default_factory=list)
    _classes: Iterator[str] = field(default_factory=lambda: itertools.cycle(_CLASSES))
    _shuffled: bool = False
    _texts: Iterator[TokenTrajectory] = field(default_factory=lambda: iter(()))

    def set_load(self, wanted: int, *, shuffled: bool) -> None:
        """As many requests as wanted: the next turn where one is over, aborts where there are too many."""
        if shuffled != self._shuffled or not self._seats:
            self._leave(0)
            self._shuffled = shuffled
            self._texts = _endless(self.trajectories, shuffled=shuffled)
        self._leave(wanted)
        for seat in self._seats:
            while seat.agent.done:
                seat.agent = self._agent()
        while len(self._seats) < wanted:
            self._seats.append(_Seat(self._agent(), next(self._classes)))

    def step(self, factor: float) -> Step:
        """One decode step, of which the budget is told its time times `factor`."""
        agents = [seat.agent for seat in self._seats]
        contexts = np.array([agent.context for agent in agents], np.int64)
        load = Load(
            contexts=contexts,
            prefill_tokens=0,
            prefill_attended=0,
            weights=np.array([LATENCY_WEIGHTS[seat.latency] for seat in self._seats]),
            num_waiting=0,
            room=ROOM,
        )
        ideal = self._offers(load, self.optimal)  # drafting changes nothing: only the last call counts
        best = self.optimal.choose(load, ideal.survival, ideal.lengths).lengths
        offered = self._offers(load, self.budget)
        plan = self.budget.choose(load, offered.survival, offered.lengths)
        self._note_waits(offered, plan)
        shape = step_shape(contexts, plan.lengths)
        true_s = self.truth.predict(shape)
        self.budget.observe(shape, true_s * factor)
        accepted, emitted = self._verify(offered, plan.lengths)
        return Step(
            in_flight=len(agents),
            drafted=int(plan.lengths.sum()),
            optimum=int(best.sum()),
            accepted=accepted,
            emitted=emitted,
            predicted_s=plan.predicted_s,
            true_s=true_s,
            told_s=true_s * factor,
            plain_s=self.truth.predict(step_shape(contexts, np.zeros_like(contexts))),
            expected=_promised(offered, plan.lengths),
            best_rate=_promised(ideal, best) / self.truth.predict(step_shape(contexts, best)),
            price=plan.price,
        )

    def _offers(self, load: Load, budget: BudgetPolicy) -> BatchDraft:
        req_ids = [seat.agent.req_id for seat in self._seats]
        return self.drafter.draft_batch(req_ids, [CAP] * len(req_ids), budget.prices(load))

    def _note_waits(self, offered: BatchDraft, plan: Plan) -> None:
        as_good = (offered.lengths > 0) & (offered.survival[:, 0] >= plan.price) & plan.lengths.any()
        for seat, waits in zip(self._seats, as_good & (plan.lengths == 0), strict=True):
            seat.waits = seat.waits + 1 if waits else 0
            self.longest_wait = max(self.longest_wait, seat.waits)

    def _verify(self, offered: BatchDraft, lengths: NDArray[np.int64]) -> tuple[int, int]:
        """What the recording makes of the drafts: (accepted, emitted)."""
        agents = [seat.agent for seat in self._seats]
        rests = [agent.rest for agent in agents]
        right = [
            accepted_tokens(offered.token_ids[row, : lengths[row]], rest) for row, rest in enumerate(rests)
        ]
        new_ids = [rest[: num + 1].tolist() for num, rest in zip(right, rests, strict=True)]
        self.drafter.observe_batch([agent.req_id for agent in agents], new_ids)
        for seat, num, tokens in zip(self._seats, lengths.tolist(), new_ids, strict=True):
            counts = self.by_class[seat.latency]
            counts.steps += 1
            counts.drafted += num
            counts.emitted += len(tokens)
            seat.agent.advance(len(tokens))
        self.drafter.work()
        return sum(right), sum(map(len, new_ids))

    def _agent(self) -> Agent:
        return Agent(next(self._texts), self.drafter, "session")

    def _leave(self, wanted: int) -> None:
        """The last ones go, in the middle of their answers."""
        while len(self._seats) > wanted:
            self._seats.pop().agent.leave()


def _promised(offered: BatchDraft, lengths: NDArray[np.int64]) -> float:
    """Tokens that a step with drafts of these lengths emits by expectation."""
    chosen = np.arange(offered.survival.shape[1]) < lengths[:, None]
    return lengths.size + float(offered.survival[chosen].sum())


def _endless(trajectories: Sequence[TokenTrajectory], *, shuffled: bool) -> Iterator[TokenTrajectory]:
    """The trajectories again and again, each time as another session; shuffled anew each time."""
    random = np.random.default_rng(0)
    for number in itertools.count():
        for one in trajectories:
            text = in_random_order(one, random) if shuffled else one
            yield replace(text, id=f"{one.id}~{number}{'s' * shuffled}")
