"""Our drafter under its real budget at batch b, with step times from a cost curve instead of an engine.

b agents run in lockstep: every step drafts for all of them, the budget chooses lengths from the curve that it
learns from the same steps, the recording decides what is accepted, and the curve says how long the step took.
Prompts cost nothing here. Only steps with all b agents count: the tail, where agents have run out, does not.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.chat_tokens import Tokens, load_vocabulary
from agentspec_runtime.bench.costs import GoodputRow, StepTime
from agentspec_runtime.bench.simulate import Plan, selected_trajectories
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory
from agentspec_runtime.budget import BudgetPolicy, GoodputBudget, Load, StepCost, StepShape
from agentspec_runtime.drafting import Drafter, DraftingConfig, DraftScope, TokenTable

__all__ = [
    "CAP",
    "ROOM",
    "Agent",
    "LockstepResult",
    "accepted_tokens",
    "budget_rows",
    "simulate_budget",
    "step_shape",
]

CAP: Final = 32
"""Draft length, as for the compared drafters."""

ROOM: Final = 8192
"""Tokens that fit into a step beside the requests; vLLM's default on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepResult:
    """What came out. `steps` counts (request, step) pairs; `speedup` is over plain at the same batch."""

    batch: int
    steps: int
    emitted: int
    drafted: int
    accepted: int
    seconds: float
    speedup: float


class Agent:
    """One agent on its way through its requests. `reach`: the widest text that its drafts come from."""

    def __init__(
        self, trajectory: TokenTrajectory, drafter: Drafter, reach: Literal["corpus", "session"] = "corpus"
    ) -> None:
        self._session = trajectory.id
        self._reach = reach
        self._requests: Iterator[tuple[int, TokenRequest]] = iter(enumerate(trajectory.requests))
        self._drafter = drafter
        self._request: TokenRequest | None = None
        self.req_id = ""
        self.position = 0
        self.advance(0)

    @property
    def done(self) -> bool:
        """No request is left."""
        return self._request is None

    @property
    def context(self) -> int:
        """Tokens so far."""
        return 0 if self._request is None else len(self._request.prompt_ids) + self.position

    @property
    def rest(self) -> Tokens:
        """Recorded tokens to come."""
        assert self._request is not None  # noqa: S101 - asked of running agents only
        return self._request.output_ids[self.position :]

    def advance(self, emitted: int) -> None:
        """Tokens were emitted; the next request starts when this one is over."""
        self.position += emitted
        while self._request is None or self.position >= len(self._request.output_ids):
            if self._request is not None:
                self._drafter.finish(self.req_id)
            number, self._request = next(self._requests, (0, None))
            if self._request is None:
                return
            self.req_id = f"{self._session}#{number}"
            scope = DraftScope(namespace="bench", session=self._session, reach=self._reach)
            self._drafter.start(self.req_id, self._request.prompt_ids, scope=scope)
            while self._drafter.work():
                pass
            # The last step of the prompt yields the first token.
            self._drafter.observe_batch([self.req_id], [self._request.output_ids[:1].tolist()])
            self.position = 1

    def leave(self) -> None:
        """The client goes away in the middle of an answer."""
        if self._request is not None:
            self._drafter.finish(self.req_id)
            self._request = None


def accepted_tokens(draft: Tokens, rest: Tokens) -> int:
    """How many tokens of a draft the recording goes on with."""
    common = min(len(draft), len(rest))
    wrong = np.flatnonzero(draft[:common] != rest[:common])
    return int(wrong[0]) if len(wrong) else common


def step_shape(contexts: NDArray[np.int64], lengths: NDArray[np.int64]) -> StepShape:
    """A step of requests with these contexts, int64[R], and drafts of these lengths, int64[R]."""
    return StepShape(
        num_tokens=contexts.size + int(lengths.sum()),
        num_attended=int((contexts * (1 + lengths)).sum()),
        num_requests=contexts.size,
        num_drafts=int(lengths.sum()),
    )


def simulate_budget(
    trajectories: Sequence[TokenTrajectory],
    vocabulary: TokenTable,
    cost: StepTime,
    batch: int,
    budget: BudgetPolicy | None = None,
) -> LockstepResult | None:
    """Run a batch of agents; None where there are fewer than `batch` trajectories."""
    if len(trajectories) < batch:
        return None
    drafter = Drafter(DraftingConfig(num_speculative_tokens=CAP, max_requests=batch), vocabulary)
    chosen = budget or GoodputBudget(StepCost())
    waiting = iter(trajectories)
    running = [Agent(next(waiting), drafter) for _ in range(batch)]
    steps = emitted = drafted = accepted = 0
    seconds = 0.0
    while len(running := _refilled(running, waiting, drafter)) == batch:
        num_drafted, num_accepted, num_emitted, took_s = _step(running, drafter, chosen, cost)
        steps += batch
        drafted += num_drafted
        accepted += num_accepted
        emitted += num_emitted
        seconds += took_s
    plain = batch / cost.step_s(batch, batch)
    return LockstepResult(
        batch=batch,
        steps=steps,
        emitted=emitted,
        drafted=drafted,
        accepted=accepted,
        seconds=round(seconds, 6),
        speedup=round(emitted / seconds / plain, 4) if seconds else 1.0,
    )


def budget_rows(
    plan: Plan, costs: Sequence[StepTime], batches: Sequence[int], progress: Callable[[int, int], None]
) -> dict[tuple[int, str], list[GoodputRow]]:
    """Rows for goodput tables, keyed by file index and cost name; batches that cannot be filled have none."""
    units = [
        (index, cost, batch) for index, _ in enumerate(plan.files) for cost in costs for batch in batches
    ]
    found: dict[tuple[int, str], list[GoodputRow]] = {}
    context = multiprocessing.get_context("spawn")  # a forked numba thread pool can hang
    with ProcessPoolExecutor(max_workers=plan.processes, mp_context=context) as pool:
        results = pool.map(_unit, [plan] * len(units), *zip(*units, strict=True))
        for done, ((index, cost, batch), result) in enumerate(zip(units, results, strict=True), start=1):
            progress(done, len(units))
            if result is not None:
                row = GoodputRow(
                    method="agentspec, budget",
                    setting=f"rejected {1 - result.accepted / max(result.drafted, 1):.2f}",
                    batch=batch,
                    tokens_per_s=round(result.emitted / result.seconds, 2) if result.seconds else 0.0,
                    speedup=result.speedup,
                )
                found.setdefault((index, cost.name), []).append(row)
    return found


def _unit(plan: Plan, index: int, cost: StepTime, batch: int) -> LockstepResult | None:
    trajectories, _ = selected_trajectories(plan, plan.files[index])
    return simulate_budget(trajectories, load_vocabulary(plan.model), cost, batch)


def _refilled(running: Sequence[Agent], waiting: Iterator[TokenTrajectory], drafter: Drafter) -> list[Agent]:
    """The agents that go on, and new ones in the place of those that are done."""
    kept: list[Agent] = []
    for agent in running:
        current: Agent | None = agent
        while current is not None and current.done:
            following = next(waiting, None)
            current = None if following is None else Agent(following, drafter)
        if current is not None:
            kept.append(current)
    return kept


def _step(
    running: Sequence[Agent], drafter: Drafter, budget: BudgetPolicy, cost: StepTime
) -> tuple[int, int, int, float]:
    """(drafted, accepted, emitted, seconds) of one step."""
    batch = len(running)
    contexts = np.array([agent.context for agent in running], dtype=np.int64)
    load = Load(
        contexts=contexts,
        prefill_tokens=0,
        prefill_attended=0,
        weights=np.ones(batch),
        num_waiting=0,
        room=ROOM,
    )
    req_ids = [agent.req_id for agent in running]
    offered = drafter.draft_batch(req_ids, [CAP] * batch, budget.prices(load).tolist())
    lengths = budget.choose(load, offered.survival, offered.lengths).lengths
    drafted = int(lengths.sum())
    seconds = cost.step_s(batch + drafted, batch)
    budget.observe(step_shape(contexts, lengths), seconds)
    accepted = emitted = 0
    new_ids: list[list[int]] = []
    for row, agent in enumerate(running):
        rest = agent.rest
        right = accepted_tokens(offered.token_ids[row, : lengths[row]], rest)
        accepted += right
        new_ids.append(rest[: right + 1].tolist())
    drafter.observe_batch(req_ids, new_ids)
    for agent, tokens in zip(running, new_ids, strict=True):
        emitted += len(tokens)
        agent.advance(len(tokens))
    return drafted, accepted, emitted, seconds
