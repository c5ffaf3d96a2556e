"""Load: recorded agent runs sent to an engine, closed loop or at random arrival times.

A trajectory is one agent: its turn N+1 is sent when turn N is over and the recorded wait has passed. The
next prompt is always the recorded one, never what came back, so that prompts are equal for every method.

Closed loop keeps `concurrency` agents running; a new one starts when one is done. Open loop starts agents
at the times of a seeded Poisson process, `concurrency` of them at most (0: no limit). An agent that had to
wait for that limit counts from when it was due, not from when it was sent.

The engine is a protocol and the clock a parameter: tests drive this with a scripted engine whose latencies
are known.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentspec_runtime.bench.tokens import TokenTrajectory

__all__ = ["Call", "CellLoad", "Chunk", "LoadPlan", "ReplayEngine", "TurnRecord", "run_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call. `session` names the agent run, `turn` counts its calls from 0."""

    session: str
    turn: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    copy: int = 0
    """Number of the copy that the agent run is (`TokenTrajectory`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived together. `cached_tokens` of the prompt came from the prefix cache."""

    token_ids: Sequence[int]
    cached_tokens: int = 0


class ReplayEngine(Protocol):
    """Whatever answers calls."""

    def generate(self, call: Call) -> AsyncIterator[Chunk]:
        """Stream the answer to a call."""
        ...


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One answered call. Times in seconds on the load's clock; `first_s` is None without any token.

    `due_s` is when the agent was ready for the call, `sent_s` when it was handed to the engine.
    `mismatched` is set when the tokens that came are not exactly the recorded ones.
    """

    trajectory: str
    turn: int
    due_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    out_tokens: int
    chunks: int
    mismatched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How the agents arrive. `rate_per_s` None is the closed loop."""

    concurrency: int
    rate_per_s: float | None = None
    honour_waits: bool = True
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class CellLoad:
    """All turns of one cell, and the clock when its first agent was due and its last one done."""

    begin_s: float = 0.0
    end_s: float = 0.0
    turns: list[TurnRecord] = field(default_factory=list)


async def run_load(
    trajectories: Sequence[TokenTrajectory],
    engine: ReplayEngine,
    plan: LoadPlan,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_turn: Callable[[TurnRecord], None] = lambda _turn: None,
) -> CellLoad:
    """Send every turn of every trajectory and record what came back."""
    cell = CellLoad(begin_s=clock())

    async def run_agent(trajectory: TokenTrajectory, due_s: float) -> None:
        for number, request in enumerate(trajectory.requests):
            if plan.honour_waits and request.wait_s > 0:
                await asyncio.sleep(request.wait_s)
                due_s += request.wait_s
            call = Call(
                session=trajectory.id,
                turn=number,
                prompt_ids=request.prompt_ids.tolist(),
                output_ids=request.output_ids.tolist(),
                copy=trajectory.copy,
            )
            record = await _run_turn(engine, call, due_s, clock)
            cell.turns.append(record)
            on_turn(record)
            due_s = record.end_s

    if plan.rate_per_s is None:
        await _closed_loop(trajectories, max(plan.concurrency, 1), run_agent, clock)
    else:
        await _open_loop(trajectories, plan, plan.rate_per_s, run_agent, clock, cell.begin_s)
    cell.end_s = clock()
    return cell


class _RunAgent(Protocol):
    async def __call__(self, trajectory: TokenTrajectory, due_s: float) -> None: ...


async def _closed_loop(
    trajectories: Sequence[TokenTrajectory],
    concurrency: int,
    run_agent: _RunAgent,
    clock: Callable[[], float],
) -> None:
    waiting = iter(trajectories)

    async def one_after_the_other() -> None:
        for trajectory in waiting:
            await run_agent(trajectory, clock())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(trajectories))):
            group.create_task(one_after_the_other())


async def _open_loop(
    trajectories: Sequence[TokenTrajectory],
    plan: LoadPlan,
    rate_per_s: float,
    run_agent: _RunAgent,
    clock: Callable[[], float],
    begin_s: float,
) -> None:
    arrivals = random.Random(plan.seed)  # noqa: S311 - arrival times, the same for every method
    slots = asyncio.Semaphore(plan.concurrency) if plan.concurrency > 0 else None

    async def when_due(trajectory: TokenTrajectory, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - clock()))
        if slots is None:
            await run_agent(trajectory, due_s)
            return
        async with slots:
            await run_agent(trajectory, due_s)

    due_s = begin_s
    async with asyncio.TaskGroup() as group:
        for trajectory in trajectories:
            due_s += arrivals.expovariate(rate_per_s)
            group.create_task(when_due(trajectory, due_s))


async def _run_turn(engine: ReplayEngine, call: Call, due_s: float, clock: Callable[[], float]) -> TurnRecord:
    sent_s = clock()
    first_s: float | None = None
    token_ids: list[int] = []
    chunks = cached = 0
    async for chunk in engine.generate(call):
        if chunk.token_ids:
            first_s = clock() if first_s is None else first_s
            chunks += 1
            token_ids.extend(chunk.token_ids)
        cached = max(cached, chunk.cached_tokens)
    return TurnRecord(
        trajectory=call.session,
        turn=call.turn,
        due_s=due_s,
        sent_s=sent_s,
        first_s=first_s,
        end_s=clock(),
        prompt_tokens=len(call.prompt_ids),
        cached_tokens=cached,
        out_tokens=len(token_ids),
        chunks=chunks,
        mismatched=token_ids != list(call.output_ids),
    )
