"""A replay without vLLM: engines whose speed is known, through the same code as the real ones.

What stands in is the engine process alone. Jobs, cells, loads, raw records and rows are the real ones; time
is a clock that the engines push forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from virtual_time import VirtualLoop, run_virtual

from agentspec_runtime.bench.load import Call, Chunk, LoadPlan, TurnRecord, run_load
from agentspec_runtime.bench.replay_engine import (
    CellJob,
    Job,
    cells_in_time,
    salt_of,
    select_trajectories,
    write_cell,
)
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.errors import ServerError


@dataclass
class _Engine:
    """One chunk for an answer, after `token_s` for each of its tokens."""

    token_s: float
    wrong: bool

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        await asyncio.sleep(self.token_s * len(call.output_ids))
        tokens = list(call.output_ids)
        yield Chunk(token_ids=tokens[:-1] if self.wrong else tokens)


@dataclass
class ScriptedEngines:
    """`token_s`: seconds per token by method and concurrency. `dies`, `wrong`: methods that do that."""

    token_s: Mapping[str, Mapping[int, float]]
    start_s: float = 60.0
    dies: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    now: float = 1_000.0
    ran: list[tuple[str, int]] = field(default_factory=list)
    sessions: dict[int, set[str]] = field(default_factory=dict)
    salts: dict[int, dict[str, str]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def __call__(
        self, job_file: Path, log_file: Path, environment: Mapping[str, str]
    ) -> Iterator[Mapping[str, JsonValue]]:
        method = log_file.stem.rpartition("-r")[0]
        job = Job.load(job_file)
        self.now += self.start_s
        yield {"event": "ready", "seconds": self.start_s}
        for number, cell in cells_in_time(job, self.clock):
            if method in self.dies:
                raise ServerError(f"the engine process of {method} ended with code 1")
            yield {"event": "begin", "cell": number, "turns": 1}
            self._run(method, job, cell)
            yield {"event": "cell", "cell": number}

    def _run(self, method: str, job: Job, cell: CellJob) -> None:
        trajectories = select_trajectories(job, cell)
        self.ran.append((method, cell.concurrency))
        self.sessions[cell.concurrency] = {trajectory.id for trajectory in trajectories}
        self.salts[cell.concurrency] = {t.id: salt_of(cell, t.copy) for t in trajectories}
        engine = _Engine(self.token_s[method][cell.concurrency], method in self.wrong)
        loop = VirtualLoop()
        plan = LoadPlan(concurrency=cell.concurrency, honour_waits=cell.honour_waits)
        turns: list[TurnRecord] = []
        load = run_virtual(run_load(trajectories, engine, plan, clock=loop.time, on_turn=turns.append), loop)
        self.now += load.end_s - load.begin_s
        write_cell(Path(cell.raw_file), load, [_step(turn, method) for turn in turns])


def _step(turn: TurnRecord, method: str) -> list[object]:
    """All steps of a turn in one record: plain samples its tokens one by one, the others two at a time."""
    tokens = turn.out_tokens
    if method == "plain":
        rows = [[0, 0, 1]] * tokens
    else:
        rows = [[2, 1, 2]] * (tokens // 2) + [[2, 0, 1]] * (tokens % 2)
    return [turn.sent_s, turn.end_s, 0.0, tokens, 0, 0, 0, rows]
