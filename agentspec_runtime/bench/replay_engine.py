"""The process that holds the engine of one (method, repeat): all its cells, then it ends.

Started by `replay.py` as `python -m agentspec_runtime.bench.replay_engine JOB.json`. Everything that vLLM
prints goes to standard error; standard output carries one JSON object per event. What a cell measured is
written to its own file before the event that tells of it, so that nothing is lost when the process dies.

Cells of one process start cold: every request of a cell carries the cell's own cache salt, which neither
the prefix cache nor our draft memory shares with another one, and the worker's proposer is reset.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypedDict, cast

import numpy as np

from agentspec_runtime.bench.load import Call, CellLoad, Chunk, LoadPlan, run_load
from agentspec_runtime.bench.replay_worker import REPLAY_KEY
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory, fit_context, load_tokens, shuffled
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.hints import XARGS_KEY, Hint, encode_hint

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = [
    "CellJob",
    "Job",
    "PeriodicLoad",
    "RawCell",
    "cells_in_time",
    "main",
    "salt_of",
    "select_trajectories",
    "sums_file",
    "with_copies",
    "write_cell",
]

EXTENSION: Final = "agentspec_runtime.bench.replay_worker.ReplayExtension"

CONTEXT_MARGIN: Final = 64
"""Tokens that requests end before the context limit. Where one of them is within a draft's length of it, vLLM
verifies zeros instead of the drafts of all (gpu_model_runner.py, `effective_drafter_max_model_len`), whatever
proposes them in the worker: one long recording would decide how fast those methods are."""
_PERIOD: Final = 37
"""Longer than the longest draft, so that the earliest occurrence is followed by enough tokens; prime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicLoad:
    """Made-up requests instead of recordings, to measure step time: random tokens that repeat.

    Every prompt of `context_tokens` tokens repeats `_PERIOD` random ones of its own, and the forced output
    goes on repeating them. An n-gram drafter therefore always drafts its full length, and all of it is
    accepted: the number of tokens in a step is known and constant.
    """

    context_tokens: int
    output_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellJob:
    """One cell to run: its load, which trajectories of which files, and where its raw record goes."""

    concurrency: int
    files: list[str]
    trajectories: int | None
    max_turns: int | None
    part: Literal["all", "tune", "test"]
    rate_per_s: float | None
    honour_waits: bool
    seed: int
    salt: str
    raw_file: str
    copies: bool = False
    shuffled: bool = False
    periodic: PeriodicLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that one engine process needs. `engine` holds keyword arguments of vLLM's AsyncEngineArgs.

    `until_s` is a time on the clock of `time.time`: no cell but the first begins later. None: no limit.
    """

    engine: dict[str, JsonValue]
    model: str
    chat_template: str | None
    max_model_len: int
    hints: bool
    reuse: bool
    records_file: str | None
    cells: list[CellJob]
    until_s: float | None = None

    @staticmethod
    def load(path: Path) -> Job:
        """Job of a file that the parent wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        cells = []
        for cell in data.pop("cells"):
            periodic = cell.pop("periodic")
            cells.append(CellJob(**cell, periodic=PeriodicLoad(**periodic) if periodic else None))
        return Job(**data, cells=cells)


def sums_file(raw_file: Path) -> Path:
    """Where the sums of our scheduler for a cell stand, beside its raw record."""
    return raw_file.with_suffix(".sums.json")


class RawCell(TypedDict):
    """A cell's raw record, enough to compute every metric again."""

    begin_s: float
    end_s: float
    turns: list[dict[str, object]]
    steps: list[list[object]]


class _Engine(Protocol):
    """What is used of vLLM's AsyncLLM."""

    async def collective_rpc(self, method: str) -> list[str]: ...


def select_trajectories(job: Job, cell: CellJob) -> list[TokenTrajectory]:
    """Trajectories of a cell in file order, taken in turn from its files, as many as it asks for.

    Fewer where the recordings hold no more, unless the cell takes copies.
    """
    from agentspec_runtime.bench.simulate import select_part

    template = Path(job.chat_template) if job.chat_template else None
    per_file: list[list[TokenTrajectory]] = []
    for file in cell.files:
        chosen = select_part(load_tokens(file, job.model, chat_template=template), cell.part)
        short = [_first_turns(trajectory, cell.max_turns) for trajectory in chosen]
        per_file.append(list(fit_context(short, job.max_model_len - CONTEXT_MARGIN).trajectories))
    mixed = [
        runs[index] for index in range(max(map(len, per_file))) for runs in per_file if index < len(runs)
    ]
    if cell.shuffled:
        mixed = [shuffled(t, np.random.default_rng(number)) for number, t in enumerate(mixed)]
    if cell.copies and cell.trajectories is not None:
        return with_copies(mixed, cell.trajectories)
    return mixed[: cell.trajectories]


def with_copies(trajectories: Sequence[TokenTrajectory], count: int) -> list[TokenTrajectory]:
    """So many trajectories: the given ones, then copies of all of them, and again.

    A copy has an id of its own, hence is another session, and its requests carry another cache salt than
    those of any other copy (`salt_of`). So it finds neither its prompts in the prefix cache nor its answers
    in draft memory: it costs what a stranger of the same length costs.
    """
    copies: list[TokenTrajectory] = []
    while trajectories and len(copies) < count:
        number = len(copies) // len(trajectories)
        copies += [replace(t, id=f"{t.id}~{number}", copy=number) if number else t for t in trajectories]
    return copies[:count]


def salt_of(cell: CellJob, copy: int) -> str:
    """Cache salt of the requests of a cell; copies of trajectories have their own."""
    return f"{cell.salt}~{copy}" if copy else cell.salt


def cells_in_time(job: Job, clock: Callable[[], float] = time.time) -> Iterator[tuple[int, CellJob]]:
    """Cells of a job with their numbers, until its time is up; the first in any case."""
    for number, cell in enumerate(job.cells):
        if number and job.until_s is not None and clock() >= job.until_s:
            return
        yield number, cell


def _cell_trajectories(job: Job, cell: CellJob) -> list[TokenTrajectory]:
    if cell.periodic is not None:
        return [_periodic_trajectory(cell.periodic, number) for number in range(cell.trajectories or 1)]
    return select_trajectories(job, cell)


def _periodic_trajectory(load: PeriodicLoad, number: int) -> TokenTrajectory:
    random = np.random.default_rng(number)
    pattern = random.integers(load.vocab_size // 8, load.vocab_size // 2, _PERIOD, dtype=np.int32)
    text = np.resize(pattern, load.context_tokens + load.output_tokens)
    request = TokenRequest(prompt_ids=text[: load.context_tokens], output_ids=text[load.context_tokens :])
    return TokenTrajectory(
        id=f"periodic-{number}", group="", workload="periodic", model="", fidelity="", requests=(request,)
    )


def _first_turns(trajectory: TokenTrajectory, count: int | None) -> TokenTrajectory:
    return replace(trajectory, requests=trajectory.requests[:count])


class _VllmReplay:
    """vLLM as the engine of one cell: recorded ids and hint ride on every request."""

    def __init__(self, engine: AsyncLLM, job: Job, cell: CellJob) -> None:
        self._engine = engine
        self._job = job
        self._cell = cell
        self._count = 0

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        """Stream the answer, up to the recorded end token."""
        from vllm.inputs import TokensPrompt

        self._count += 1
        salt = salt_of(self._cell, call.copy)
        prompt = TokensPrompt(prompt_token_ids=list(call.prompt_ids), cache_salt=salt)
        request_id = f"{self._cell.salt}-{self._count}"
        async for output in self._engine.generate(prompt, self._params(call), request_id):
            tokens: Sequence[int] = output.outputs[0].token_ids
            yield Chunk(token_ids=tokens, cached_tokens=output.num_cached_tokens or 0)

    def _params(self, call: Call) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, object] = {REPLAY_KEY: list(call.output_ids)}
        if self._job.hints:
            session = f"{self._cell.salt}/{call.session}"[-128:]
            scope: Literal["corpus", "request"] = "corpus" if self._job.reuse else "request"
            extra[XARGS_KEY] = encode_hint(Hint(session=session, turn=call.turn, scope=scope))
        limits = (
            {"max_tokens": len(call.output_ids), "ignore_eos": True}
            if self._cell.periodic is not None
            # The end comes as in production, by the end token: a `max_tokens` of exactly the recorded length
            # would tell a drafter where the answer ends.
            else {
                "max_tokens": self._job.max_model_len - len(call.prompt_ids),
                "stop_token_ids": [call.output_ids[-1]],
            }
        )
        return SamplingParams(
            temperature=0.0, output_kind=RequestOutputKind.DELTA, extra_args=extra, **limits
        )


async def _run(job: Job, tell: Callable[[dict[str, object]], None]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    started = time.perf_counter()
    arguments = AsyncEngineArgs(
        model=job.model, max_model_len=job.max_model_len, worker_extension_cls=EXTENSION, **job.engine
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        await engine.collective_rpc("replay_install")
        await _warm_up(engine, job)
        tell({"event": "ready", "seconds": round(time.perf_counter() - started, 1)})
        for number, cell in cells_in_time(job):
            await _run_cell(engine, job, cell, number, tell)
    finally:
        engine.shutdown()


async def _run_cell(
    engine: AsyncLLM, job: Job, cell: CellJob, number: int, tell: Callable[[dict[str, object]], None]
) -> None:
    trajectories = _cell_trajectories(job, cell)
    await engine.collective_rpc("replay_reset")
    records = Path(job.records_file) if job.records_file else None
    if records is not None:
        records.write_bytes(b"")  # the observer appends: what stands there afterwards is of this cell
    tell({"event": "begin", "cell": number, "turns": sum(len(t.requests) for t in trajectories)})
    plan = LoadPlan(
        concurrency=cell.concurrency,
        rate_per_s=cell.rate_per_s,
        honour_waits=cell.honour_waits,
        seed=cell.seed,
    )
    load = await run_load(
        trajectories,
        _VllmReplay(engine, job, cell),
        plan,
        on_turn=lambda turn: tell({"event": "turn", "cell": number, "tokens": turn.out_tokens}),
    )
    [steps, *_] = await cast("_Engine", engine).collective_rpc("replay_take")
    write_cell(Path(cell.raw_file), load, json.loads(steps))
    if records is not None:  # a copy: the next cell may have emptied the file before the parent reads it
        shutil.copyfile(records, sums_file(Path(cell.raw_file)))
    tell({"event": "cell", "cell": number})


async def _warm_up(engine: AsyncLLM, job: Job) -> None:
    """A few requests before anything is timed: kernels, numba and the HTTP-free path are compiled by then."""
    request = _cell_trajectories(job, job.cells[0])[0].requests[0]
    cell = replace(job.cells[0], salt="warm-up")
    replay = _VllmReplay(engine, job, cell)
    call = Call(
        session="warm-up",
        turn=0,
        prompt_ids=request.prompt_ids.tolist()[:512],
        output_ids=request.output_ids.tolist()[:32],
    )

    async def once() -> None:
        async for _ in replay.generate(call):
            pass

    await asyncio.gather(*(once() for _ in range(3)))


def write_cell(path: Path, load: CellLoad, steps: list[list[object]]) -> None:
    """Write the raw record of a cell, whole or not at all."""
    raw = RawCell(
        begin_s=load.begin_s, end_s=load.end_s, turns=[asdict(turn) for turn in load.turns], steps=steps
    )
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(raw), encoding="utf-8")
    partial.replace(path)


def main(path: Path) -> None:
    """Run the job of a file. Events go to what was standard output; all else to standard error."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: dict[str, object]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    # Told to end: let `finally` shut the engine core down, which would otherwise outlive this process.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    asyncio.run(_run(Job.load(path), tell))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
