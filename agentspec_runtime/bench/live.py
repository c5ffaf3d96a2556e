"""`agentspec bench live`: real agents, `concurrency` of them at a time, judged by executed tests.

Where a replay forces the text, here the model writes it: answers, and so the number of turns, differ between
methods and runs. What can be compared is success, time per task, and cost per solved task.

Every (method, repeat) gets a fresh server that runs all concurrencies; over repeats the order of the methods
alternates and the seeds are others, so that the spread is that of machine and sampling together.

A task that is run in several rounds gets another seed and session in each; at a temperature above 0 its
answers differ, yet they resemble each other more than those of different tasks do, and a drafter with a
corpus profits from that. Many tasks and few rounds are the honest load.

Every cell has a cache salt of its own, so that neither the prefix cache nor our draft memory knows the tasks
from the cell before. vLLM's suffix decoding has one memory for all salts, and does know them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from agentspec_runtime.bench.live_agents import CALL_TIMEOUT_S, Agents, Job, TaskOutcome, known_sum
from agentspec_runtime.bench.measure import percentiles
from agentspec_runtime.bench.methods import parse_method
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.demo.server import ServerCommand, free_port, running_server
from agentspec_runtime.engine.args import JsonValue, dotted
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError

__all__ = [
    "LIVE_FILE",
    "PROVENANCE_FILE",
    "LivePlan",
    "LiveRow",
    "live",
    "load_live",
    "run_jobs",
    "summarise_live",
]

LIVE_FILE: Final = "live.jsonl"
PROVENANCE_FILE: Final = "live-provenance.json"
_METHODS: Final = ("plain", "plain-sync", "ngram", "suffix", "eagle3", "agentspec", "agentspec-assist")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """What to run. `model` None is the embedded one."""

    out: Path
    agents: Agents
    model: str | None = None
    methods: tuple[str, ...] = ("plain", "agentspec")
    concurrency: tuple[int, ...] = (1, 8)
    repeat: int = 1
    rate_per_s: float | None = None
    seed: int = 0
    vllm_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """One line of live.jsonl: a method at one concurrency. Seconds, tokens."""

    method: str
    concurrency: int
    repeat: int
    mode: str
    tasks: int
    solved: int
    failed: int
    wall_s: float
    tasks_per_hour: float
    tok_s: float
    task_p50: float | None
    task_p95: float | None
    task_p99: float | None
    calls: int
    out_tokens: int
    drafted: int | None
    accepted: int | None
    rejected_share: float | None
    cost_per_task: float | None
    cost_per_solved: float | None
    outcomes: tuple[TaskOutcome, ...] = field(repr=False)


def live(
    plan: LivePlan, *, price_per_hour: float | None = None, say: Callable[[str], None] = lambda _text: None
) -> list[LiveRow]:
    """Run a plan, each method of each repeat on a fresh server; rows go to DIR/live.jsonl as they come.

    Raises:
        ConfigurationError: a method that has no server form, or results of an earlier run in the folder.
        MissingDependencyError: the OpenAI SDK is not installed.
        ServerError: a server did not start.
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingDependencyError("openai", "openai")
    commands = {method: _command(plan, method) for method in plan.methods}
    if (plan.out / LIVE_FILE).exists():
        raise ConfigurationError(f"{plan.out / LIVE_FILE} is there already: choose another --out, or move it")
    plan.out.mkdir(parents=True, exist_ok=True)
    provenance = collect_provenance(
        files=(),
        seeds=[_seed(plan, repeat) for repeat in range(plan.repeat)],
        engine={method: {"command": command.arguments()[1:]} for method, command in commands.items()},
        notes=_notes(plan),
    )
    (plan.out / PROVENANCE_FILE).write_text(json.dumps(asdict(provenance), indent=1), encoding="utf-8")
    rows: list[LiveRow] = []
    for repeat in range(plan.repeat):
        for method in plan.methods if repeat % 2 == 0 else reversed(plan.methods):
            for row in _cells(plan, method, commands[method], repeat, price_per_hour, say):
                with (plan.out / LIVE_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                rows.append(row)
    return rows


def load_live(path: Path) -> list[LiveRow]:
    """Rows of a live.jsonl; a line that a crash cut off is skipped.

    Raises:
        ConfigurationError: nothing in it, or rows of another version.
    """
    rows: list[LiveRow] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        try:
            data["outcomes"] = tuple(TaskOutcome(**outcome) for outcome in data["outcomes"])
            rows.append(LiveRow(**data))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}: not a row of this version of agentspec: {error}") from error
    if not rows:
        raise ConfigurationError(f"{path}: holds no finished cell yet")
    return rows


def _seed(plan: LivePlan, repeat: int) -> int:
    """First seed of a repeat; its rounds count on from there."""
    return plan.seed + repeat * plan.agents.rounds


def _cells(
    plan: LivePlan,
    method: str,
    command: ServerCommand,
    repeat: int,
    price_per_hour: float | None,
    say: Callable[[str], None],
) -> Iterator[LiveRow]:
    """All concurrencies of a method on one fresh server."""
    log = plan.out / f"live-{re.sub(r'[^A-Za-z0-9._-]+', '_', method)}-r{repeat}.log"
    say(f"{method}, repeat {repeat}: starting the server")
    with running_server(command, log=log, on_wait=lambda _s: None) as server:
        say(f"{method}, repeat {repeat}: ready after {server.started_s:.0f} s")
        for concurrency in plan.concurrency:
            row = _cell(plan, method, concurrency, repeat, server.base_url, price_per_hour)
            say(
                f"{method}, {concurrency} at a time: {row.solved} of {row.tasks} solved in "
                f"{row.wall_s:.0f} s, {row.tok_s:.0f} tok/s"
            )
            yield row


def run_jobs(
    jobs: Sequence[Job], concurrency: int, *, rate_per_s: float | None = None, seed: int = 0
) -> tuple[list[TaskOutcome], float]:
    """Run jobs, at most so many at a time; outcomes in the order in which they ended, and the wall time.

    With a rate they become due at the times of a Poisson process, and one that finds no slot waits.
    """
    arrivals = random.Random(seed)  # noqa: S311 - arrival times, the same for every method
    outcomes: list[TaskOutcome] = []
    lock = threading.Lock()
    begin = time.perf_counter()

    def run(job: Job, due_s: float | None) -> None:
        outcome = job(time.perf_counter() if due_s is None else due_s)
        with lock:
            outcomes.append(outcome)

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        due_s = begin
        pending = []
        for job in jobs:
            if rate_per_s is not None:
                due_s += arrivals.expovariate(rate_per_s)
                time.sleep(max(0.0, due_s - time.perf_counter()))
            pending.append(pool.submit(run, job, due_s if rate_per_s is not None else None))
        for future in pending:
            future.result()
    finally:  # who is interrupted must not wait for all that was still to be run
        pool.shutdown(wait=False, cancel_futures=True)
    return outcomes, time.perf_counter() - begin


def summarise_live(
    method: str,
    concurrency: int,
    repeat: int,
    mode: str,
    outcomes: Sequence[TaskOutcome],
    wall_s: float,
    price_per_hour: float | None,
) -> LiveRow:
    """Figures of one cell. Cost is that of the machine for the wall time, shared by its tasks."""
    solved = sum(outcome.solved for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    drafted = known_sum(outcome.drafted for outcome in outcomes)
    accepted = known_sum(outcome.accepted for outcome in outcomes)
    p50, p95, p99 = percentiles(outcome.seconds for outcome in outcomes)
    cost = None if price_per_hour is None else price_per_hour * wall_s / 3600
    return LiveRow(
        method=method,
        concurrency=concurrency,
        repeat=repeat,
        mode=mode,
        tasks=len(outcomes),
        solved=solved,
        failed=sum(bool(outcome.failed) for outcome in outcomes),
        wall_s=round(wall_s, 3),
        tasks_per_hour=round(3600 * len(outcomes) / wall_s, 2),
        tok_s=round(tokens / wall_s, 2),
        task_p50=p50,
        task_p95=p95,
        task_p99=p99,
        calls=sum(outcome.calls for outcome in outcomes),
        out_tokens=tokens,
        drafted=drafted,
        accepted=accepted,
        rejected_share=round(1 - (accepted or 0) / drafted, 4) if drafted else None,
        cost_per_task=None if cost is None or not outcomes else round(cost / len(outcomes), 6),
        cost_per_solved=None if cost is None or not solved else round(cost / solved, 6),
        outcomes=tuple(outcomes),
    )


def _notes(plan: LivePlan) -> dict[str, str | int | float | bool | None]:
    return {
        "model": plan.model or plan.agents.served,
        "temperature": plan.agents.temperature,
        "rounds": plan.agents.rounds,
        "attempts": plan.agents.attempts,
        "tasks": len(plan.agents.tasks),
        "tasks_sha256": hashlib.sha256(repr(plan.agents.tasks).encode()).hexdigest(),
    }


def _command(plan: LivePlan, label: str) -> ServerCommand:
    """Server of a method: plain with vLLM's flags for it, or ours."""
    name = label.partition(":")[0]
    bare = {"agentspec": label != name, "agentspec-assist": "," in label}
    if name not in _METHODS or bare.get(name, False):
        raise ConfigurationError(f"method {label!r} has no live form: use {', '.join(_METHODS)}")
    method = parse_method(label)
    flags: list[str] = []
    if not method.ours:
        for key, value in method.engine.items():
            flags += _flag(key, value)
        if "speculative_config" in method.engine:  # as our server asks for itself, or nothing is told
            flags += ["--per-request-spec-decode-metrics", "detailed"]
    return _UntracedServer(
        plain=not method.ours,
        port=free_port(),
        otlp_endpoint="",
        model=plan.model,
        options=("--assist", label.partition("assist=")[2]) if name == "agentspec-assist" else (),
        vllm_flags=(*flags, *plan.vllm_flags),
    )


class _UntracedServer(ServerCommand):
    """The demo's server without a receiver of spans: nothing but the answers is wanted here."""

    __slots__ = ()

    def arguments(self) -> list[str]:
        """Command line of the server."""
        return [word for word in super().arguments() if not word.startswith("--otlp-endpoint")]


def _flag(key: str, value: JsonValue) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, Mapping):
        return dotted(flag, value)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    return [flag, str(value)]


def _cell(
    plan: LivePlan,
    method: str,
    concurrency: int,
    repeat: int,
    base_url: str,
    price_per_hour: float | None,
) -> LiveRow:
    import openai

    from agentspec_runtime.client.instrument import instrument

    seed = _seed(plan, repeat)
    with instrument(), openai.OpenAI(base_url=base_url, api_key="unused", timeout=CALL_TIMEOUT_S) as client:
        jobs = list(plan.agents.jobs(f"{method}-c{concurrency}", seed, base_url, client))
        outcomes, wall_s = run_jobs(jobs, concurrency, rate_per_s=plan.rate_per_s, seed=seed)
    mode = "closed loop" if plan.rate_per_s is None else f"open loop, {plan.rate_per_s:g}/s"
    return summarise_live(method, concurrency, repeat, mode, outcomes, wall_s, price_per_hour)
