"""`agentspec bench simulate`: recordings through the drafters, without an engine.

Requests run one after the other in the order of the recording, so whoever keeps a corpus has exactly the
outputs of the requests before. Acceptance here is that of a target model that writes the recorded text at
temperature 0. Time is only drafting time: what steps cost comes in with a cost curve (`goodput.py`).

Work is cut into (workload, rival) units for a pool of processes; results are tallies, which are small.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.oracles import CopyLengths, copy_lengths, oracle_steps
from agentspec_runtime.bench.rivals import NgramRival, Rival, SuffixRival
from agentspec_runtime.bench.tally import Tally, WireTally
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory, fit_context, load_tokens
from agentspec_runtime.errors import ConfigurationError

_SOURCE_NAMES: Final = ("request", "session", "corpus", "assist")
"""Codes of `drafting.SOURCES`; spelled out, because the drafter is loaded only where it is compared."""

__all__ = [
    "METHODS",
    "LaneResult",
    "Part",
    "Plan",
    "WorkloadResult",
    "replay_request",
    "run_oracles",
    "select_part",
    "selected_trajectories",
    "simulate",
]

Part = Literal["all", "tune", "test"]

ORACLE_LIMIT: Final = 32
"""Draft length of O2 and O3: the cap that the compared drafters have."""

OUR_THRESHOLDS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85)
"""Least survival of a drafted slot; 0.0 drafts everything, and cut at the truth it is the oracle O1."""

METHODS: Final = (
    "ngram", "suffix", "agentspec", "agentspec-nohints", "agentspec-session", "agentspec-request", "oracle",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to simulate. `trajectories` limits each workload; `part` is the side of the set-aside split."""

    files: tuple[Path, ...]
    model: str
    chat_template: Path | None = None
    methods: tuple[str, ...] = METHODS
    trajectories: int | None = None
    part: Part = "all"
    max_model_len: int | None = None
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneResult:
    """One setting of one method on one workload."""

    method: str
    setting: str
    figures: WireTally


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """All lanes of one recording file."""

    file: str
    workload: str
    trajectories: int
    requests: int
    out_tokens: int
    skipped_requests: int
    lanes: tuple[LaneResult, ...]


def select_part(trajectories: Sequence[TokenTrajectory], part: Part) -> list[TokenTrajectory]:
    """One side of the split by task: a hash of `group` sends a quarter of the tasks to "test".

    Whatever is tuned is tuned on "tune", and only "test" decides; all runs of a task are on one side.
    """
    if part == "all":
        return list(trajectories)
    return [t for t in trajectories if (sha256(t.group.encode()).digest()[0] % 4 == 0) == (part == "test")]


def simulate(
    plan: Plan, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> list[WorkloadResult]:
    """Run a plan; `progress(done, all)` is called whenever a unit is over.

    Raises:
        ConfigurationError: a method that is unknown, or a selection without any trajectory.
        RecordingError: a file that cannot be read.
    """
    unknown = [method for method in plan.methods if method not in METHODS]
    if unknown:
        raise ConfigurationError(f"unknown method {unknown[0]!r}: known are {', '.join(METHODS)}")
    if plan.part not in get_args(Part):
        raise ConfigurationError(f"part {plan.part!r} is none of {', '.join(get_args(Part))}")
    chosen = [
        selected_trajectories(plan, file) for file in plan.files
    ]  # also fills the token cache, before the pool
    units = [(index, unit) for index, _ in enumerate(plan.files) for unit in _units(plan.methods)]
    lanes: dict[tuple[int, str], list[LaneResult]] = {}
    for done, (key, result) in enumerate(_run_units(plan, units), start=1):
        lanes[key] = result
        progress(done, len(units))
    results = []
    for index, (trajectories, skipped) in enumerate(chosen):
        results.append(
            WorkloadResult(
                file=plan.files[index].name,
                workload=trajectories[0].workload,
                trajectories=len(trajectories),
                requests=sum(len(t.requests) for t in trajectories),
                out_tokens=sum(t.num_output_tokens for t in trajectories),
                skipped_requests=skipped,
                lanes=_in_order(lane for unit in _units(plan.methods) for lane in lanes[index, unit]),
            )
        )
    return results


def _in_order(lanes: Iterable[LaneResult]) -> tuple[LaneResult, ...]:
    """Oracles last: O1 comes out of the run of our drafter."""
    return tuple(sorted(lanes, key=lambda lane: lane.method == "oracle"))


def replay_request(
    rival: Rival, req_id: str, session: str, request: TokenRequest, tallies: Sequence[Tally]
) -> None:
    """One request through all settings of a rival, each at its own pace over the same tokens."""
    output = request.output_ids
    size = len(output)
    clock = time.perf_counter
    started = clock()
    rival.start(req_id, session, request.prompt_ids)
    index_s = clock() - started
    for tally in tallies:
        tally.add_request(size)
    next_step = [1] * len(tallies)  # position 0 is sampled by the last step of the prompt
    given = 0
    while (position := min(next_step)) < size:
        started = clock()
        rival.extend(output[given:position])
        index_s += clock() - started
        given = position
        for setting, tally in enumerate(tallies):
            if next_step[setting] == position:
                next_step[setting] = position + _step(rival, setting, tally, output[position:])
    started = clock()
    rival.extend(output[given:])
    rival.finish()
    index_s += clock() - started
    for tally in tallies:
        tally.index_s += index_s


def _step(rival: Rival, setting: int, tally: Tally, rest: NDArray[np.int32]) -> int:
    """One decode step of one setting; how many tokens it emitted."""
    started = time.perf_counter()
    candidate = rival.draft(setting)
    tally.draft_s += time.perf_counter() - started
    drafted = len(candidate.token_ids)
    common = min(drafted, len(rest))
    wrong = np.flatnonzero(candidate.token_ids[:common] != rest[:common])
    accepted = int(wrong[0]) if len(wrong) else common
    emitted = min(accepted + 1, len(rest))
    tally.add_step(drafted, accepted, emitted)
    if candidate.survival is not None:
        tally.add_survival(candidate.survival, accepted)
    if candidate.sources is not None:
        for source in np.unique(candidate.sources):
            counts = tally.by_source.setdefault(_SOURCE_NAMES[int(source)], [0, 0])
            counts[0] += int((candidate.sources == source).sum())
            counts[1] += int((candidate.sources[:accepted] == source).sum())
    return emitted


def selected_trajectories(plan: Plan, file: Path) -> tuple[tuple[TokenTrajectory, ...], int]:
    """Trajectories that the plan takes from a file, and how many requests did not fit the context."""
    loaded = load_tokens(file, plan.model, chat_template=plan.chat_template)
    fitting = fit_context(select_part(loaded, plan.part)[: plan.trajectories], plan.max_model_len)
    if not fitting.trajectories:
        raise ConfigurationError(
            f"{file}: no trajectory is left after --part {plan.part} and the context limit "
            f"({fitting.skipped_requests} requests were too long)"
        )
    return fitting.trajectories, fitting.skipped_requests


def _units(methods: Sequence[str]) -> Iterator[str]:
    """Names of the pieces of work of one file: a method, or a method at one threshold."""
    for method in methods:
        if method.startswith("agentspec"):
            yield from (f"{method}@{threshold:g}" for threshold in OUR_THRESHOLDS)
        else:
            yield method


def _run_units(
    plan: Plan, units: Sequence[tuple[int, str]]
) -> Iterator[tuple[tuple[int, str], list[LaneResult]]]:
    if plan.processes <= 1:
        for index, unit in units:
            yield (index, unit), _run_unit(plan, index, unit)
        return
    # "spawn": a forked numba thread pool can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=plan.processes, mp_context=context) as pool:
        pending: dict[Future[list[LaneResult]], tuple[int, str]] = {
            pool.submit(_run_unit, plan, index, unit): (index, unit) for index, unit in units
        }
        while pending:
            finished, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                yield pending.pop(future), future.result()


def _run_unit(plan: Plan, index: int, unit: str) -> list[LaneResult]:
    trajectories, _ = selected_trajectories(plan, plan.files[index])
    if unit == "oracle":
        return run_oracles(trajectories)
    # Compiled code is loaded by a throwaway rival, so that drafting time is drafting time.
    rehearsal = _rival(unit, plan)
    replay_request(rehearsal, "-", "-", trajectories[0].requests[0], [Tally() for _ in rehearsal.settings])
    rival = _rival(unit, plan)
    tallies = [Tally() for _ in rival.settings]
    for trajectory in trajectories:
        for number, request in enumerate(trajectory.requests):
            replay_request(rival, f"{trajectory.id}#{number}", trajectory.id, request, tallies)
    tallies[0].by_block = rival.by_block
    lanes = [
        LaneResult(method=rival.method, setting=setting, figures=WireTally.of(tally))
        for setting, tally in zip(rival.settings, tallies, strict=True)
    ]
    if unit == "agentspec@0":
        lanes.append(
            LaneResult(method="oracle", setting="O1", figures=WireTally.of(_cut_at_truth(tallies[0])))
        )
    return lanes


def _rival(unit: str, plan: Plan) -> Rival:
    if unit == "ngram":
        return NgramRival()
    if unit == "suffix":
        return SuffixRival()
    from agentspec_runtime.bench.chat_tokens import load_vocabulary
    from agentspec_runtime.bench.ours import OurRival

    method, _, threshold = unit.partition("@")
    return OurRival(method, float(threshold), load_vocabulary(plan.model))


def _cut_at_truth(tally: Tally) -> Tally:
    """The same steps, each draft cut where it went wrong: the length oracle O1."""
    return Tally(
        requests=tally.requests,
        out_tokens=tally.out_tokens,
        steps=tally.steps,
        drafted=tally.accepted,
        accepted=tally.accepted,
        step_tokens=tally.step_tokens,
    )


def run_oracles(trajectories: Sequence[TokenTrajectory]) -> list[LaneResult]:
    """O2, O3 and the LZ bound on trajectories that run one after the other."""
    bounds: tuple[tuple[str, Callable[[CopyLengths], NDArray[np.int64]], int | None], ...] = (
        ("O2", lambda copies: copies.addressed, ORACLE_LIMIT),
        ("O2/1", lambda copies: copies.loosely, ORACLE_LIMIT),
        ("O3", lambda copies: copies.anywhere, ORACLE_LIMIT),
        ("LZ", lambda copies: copies.anywhere, None),
    )
    tallies = {name: Tally() for name, _, _ in bounds}
    for lengths in copy_lengths(trajectories):
        for copies in lengths:
            for name, chosen, limit in bounds:
                steps, accepted = oracle_steps(chosen(copies), limit)
                tally = tallies[name]
                tally.requests += 1
                tally.out_tokens += len(copies.anywhere)
                tally.steps += steps
                tally.drafted += accepted
                tally.accepted += accepted
    return [
        LaneResult(method="oracle", setting=name, figures=WireTally.of(tally))
        for name, tally in tallies.items()
    ]
