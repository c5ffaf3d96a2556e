"""`agentspec bench live`: real agents, `concurrency` of them at a time, judged by executed tests.

Where a replay forces the text, here the model writes it: answers, and so the number of turns, differ between
methods and runs. What can be compared is success, time per task, and cost per solved task.

Agents are the Reflexion loop and, where LangGraph is installed, the coding agent of `agentspec demo`. Their
tasks can be replaced by a file. A task that is run in several rounds gets another seed and session in each;
at a temperature above 0 its answers differ, yet they resemble each other more than those of different tasks
do, and a drafter with a corpus profits from that. Many tasks and few rounds are the honest load.

Every cell has a cache salt of its own, so that neither the prefix cache nor our draft memory knows the tasks
from the cell before. vLLM's suffix decoding has one memory for all salts, and does know them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from agentspec_runtime.bench.measure import percentiles
from agentspec_runtime.bench.methods import parse_method
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.client.report import CallReport, on_call
from agentspec_runtime.client.session import session
from agentspec_runtime.demo.reflexion import Check, FunctionTask, Message, solve
from agentspec_runtime.demo.server import ServerCommand, free_port, running_server
from agentspec_runtime.demo.tasks import FUNCTION_TASKS
from agentspec_runtime.engine.args import JsonValue, dotted
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    import openai

    from agentspec_runtime.demo.coding_agent import CodingTask

__all__ = ["LivePlan", "LiveRow", "TaskOutcome", "live", "load_tasks", "run_jobs", "summarise_live"]

_METHODS: Final = ("plain", "plain-sync", "ngram", "suffix", "eagle3", "agentspec", "agentspec-assist")
_TIMEOUT_S: Final = 600.0
"""One call; a full batch on a small machine answers slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """What to run. `model` None is the embedded one; `served` is the name that the server knows it by."""

    out: Path
    served: str
    model: str | None = None
    methods: tuple[str, ...] = ("plain", "agentspec")
    concurrency: tuple[int, ...] = (1, 8)
    rounds: int = 2
    attempts: int = 2
    temperature: float = 0.7
    rate_per_s: float | None = None
    seed: int = 0
    tasks: tuple[FunctionTask, ...] = FUNCTION_TASKS
    coder: bool = True
    vllm_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """One agent run. `seconds` from when it was due; counts are sums over its calls. None: no call told
    it, as where nothing drafts.
    """

    agent: str
    task: str
    solved: bool
    attempts: int
    seconds: float
    calls: int
    tokens: int
    drafted: int | None
    accepted: int | None
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """One line of live.jsonl: a method at one concurrency. Seconds, tokens."""

    method: str
    concurrency: int
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


Job = Callable[[float], TaskOutcome]
"""One agent run; it is given the time when it was due, on `time.perf_counter`."""


def live(
    plan: LivePlan, *, price_per_hour: float | None = None, say: Callable[[str], None] = lambda _text: None
) -> list[LiveRow]:
    """Run a plan, method after method, each on a fresh server; rows are appended to DIR/live.jsonl.

    Raises:
        ConfigurationError: a method that has no server form.
        MissingDependencyError: the OpenAI SDK is not installed.
        ServerError: a server did not start.
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingDependencyError("openai", "openai")
    commands = {method: _command(plan, method) for method in plan.methods}
    plan.out.mkdir(parents=True, exist_ok=True)
    provenance = collect_provenance(
        files=(),
        seeds=[plan.seed],
        engine={method: {"command": command.arguments()[1:]} for method, command in commands.items()},
        notes=_notes(plan),
    )
    (plan.out / "live-provenance.json").write_text(json.dumps(asdict(provenance), indent=1), encoding="utf-8")
    rows: list[LiveRow] = []
    for method, command in commands.items():
        say(f"{method}: starting the server")
        with running_server(command, log=plan.out / f"live-{method}.log", on_wait=lambda _s: None) as server:
            say(f"{method}: ready after {server.started_s:.0f} s")
            for concurrency in plan.concurrency:
                row = _cell(plan, method, concurrency, server.base_url, price_per_hour)
                with (plan.out / "live.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                rows.append(row)
                say(
                    f"{method}, {concurrency} at a time: {row.solved} of {row.tasks} solved in "
                    f"{row.wall_s:.0f} s, {row.tok_s:.0f} tok/s"
                )
    return rows


def load_tasks(path: Path) -> tuple[FunctionTask, ...]:
    """Tasks of a JSON Lines file: `name`, `stub`, and lists `visible` and `hidden` of [call, expected repr].

    Raises:
        ConfigurationError: not such a file.
    """
    tasks: list[FunctionTask] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.strip():
                continue
            data = json.loads(line)
            visible, hidden = (
                tuple(Check(call=str(call), expected=str(expected)) for call, expected in data[kind])
                for kind in ("visible", "hidden")
            )
            tasks.append(
                FunctionTask(name=str(data["name"]), stub=str(data["stub"]), visible=visible, hidden=hidden)
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: line {len(tasks) + 1} is no task (name, stub, visible, hidden): {error}"
        ) from error
    return tuple(tasks)


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

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        due_s = begin
        pending = []
        for job in jobs:
            if rate_per_s is not None:
                due_s += arrivals.expovariate(rate_per_s)
                time.sleep(max(0.0, due_s - time.perf_counter()))
            pending.append(pool.submit(run, job, due_s if rate_per_s is not None else None))
        for future in pending:
            future.result()
    return outcomes, time.perf_counter() - begin


def summarise_live(
    method: str,
    concurrency: int,
    mode: str,
    outcomes: Sequence[TaskOutcome],
    wall_s: float,
    price_per_hour: float | None,
) -> LiveRow:
    """Figures of one cell. Cost is that of the machine for the wall time, shared by its tasks."""
    solved = sum(outcome.solved for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    drafted = _known_sum(outcome.drafted for outcome in outcomes)
    accepted = _known_sum(outcome.accepted for outcome in outcomes)
    p50, p95, p99 = percentiles(outcome.seconds for outcome in outcomes)
    cost = None if price_per_hour is None else price_per_hour * wall_s / 3600
    return LiveRow(
        method=method,
        concurrency=concurrency,
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


def _known_sum(values: Iterable[int | None]) -> int | None:
    """Sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _notes(plan: LivePlan) -> dict[str, str | int | float | bool | None]:
    return {
        "model": plan.model or plan.served,
        "temperature": plan.temperature,
        "rounds": plan.rounds,
        "attempts": plan.attempts,
        "tasks": len(plan.tasks),
        "tasks_sha256": hashlib.sha256(repr(plan.tasks).encode()).hexdigest(),
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
    plan: LivePlan, method: str, concurrency: int, base_url: str, price_per_hour: float | None
) -> LiveRow:
    import openai

    from agentspec_runtime.client.instrument import instrument

    with instrument(), openai.OpenAI(base_url=base_url, api_key="unused", timeout=_TIMEOUT_S) as client:
        jobs = list(_jobs(plan, f"{method}-c{concurrency}", base_url, client))
        outcomes, wall_s = run_jobs(jobs, concurrency, rate_per_s=plan.rate_per_s, seed=plan.seed)
    mode = "closed loop" if plan.rate_per_s is None else f"open loop, {plan.rate_per_s:g}/s"
    return summarise_live(method, concurrency, mode, outcomes, wall_s, price_per_hour)


def _jobs(plan: LivePlan, cell: str, base_url: str, client: openai.OpenAI) -> Iterator[Job]:
    """Every task once per round; the same order for every method."""
    for number in range(plan.rounds):
        for task in plan.tasks:
            yield _reflexion_job(plan, cell, f"{task.name}-{number}", task, plan.seed + number, client)
        if plan.coder and importlib.util.find_spec("langgraph") is not None:
            from agentspec_runtime.demo.tasks import CODING_TASKS

            for coding in CODING_TASKS:
                yield _coder_job(plan, cell, coding, plan.seed + number, base_url)


def _reflexion_job(
    plan: LivePlan, salt: str, name: str, task: FunctionTask, seed: int, client: openai.OpenAI
) -> Job:
    def chat(messages: Sequence[Message], *, max_tokens: int, expect: Literal["code", "text"]) -> str:
        with session(agent="actor" if expect == "code" else "critic", expect=[expect]):
            answer = client.chat.completions.create(
                model=plan.served,
                messages=[{"role": m["role"], "content": m["content"]} for m in messages],  # type: ignore[misc]  # a union of literals
                max_tokens=max_tokens,
                temperature=plan.temperature,
                seed=seed,
                extra_body={"cache_salt": salt},
            )
        return answer.choices[0].message.content or ""

    def run() -> tuple[bool, int]:
        with session(f"{salt}-{name}", agent="reflexion"):
            outcome = solve(task, chat, max_trials=plan.attempts)
        return outcome.solved, len(outcome.trials)

    return lambda due_s: _outcome("reflexion", task.name, run, due_s)


def _coder_job(plan: LivePlan, salt: str, task: CodingTask, seed: int, base_url: str) -> Job:
    def run() -> tuple[bool, int]:
        from langchain_openai import ChatOpenAI
        from pydantic import SecretStr

        from agentspec_runtime.demo.coding_agent import run_coding_task
        from agentspec_runtime.demo.turns import TurnLog
        from agentspec_runtime.demo.workspace import Workspace

        class _OwnLog(TurnLog):
            """Hears the calls of this thread only."""

            @contextmanager
            def listening(self) -> Iterator[None]:
                with on_call(self._reports.append):
                    yield

        model = ChatOpenAI(
            model=plan.served,
            base_url=base_url,
            api_key=SecretStr("unused"),
            temperature=plan.temperature,
            seed=seed,
            timeout=_TIMEOUT_S,
            extra_body={"cache_salt": salt},
        )
        log = _OwnLog()
        with tempfile.TemporaryDirectory(prefix="agentspec-") as folder, log.listening():
            workspace = Workspace(Path(folder), task.files)
            result = run_coding_task(task, workspace, model, log, max_attempts=plan.attempts)
        return result.solved, result.attempts

    return lambda due_s: _outcome("coder", task.name, run, due_s)


def _outcome(agent: str, task: str, run: Callable[[], tuple[bool, int]], due_s: float) -> TaskOutcome:
    """Run an agent; what it raises is its failure, counted and told, never the end of the others."""
    reports: list[CallReport] = []
    solved, attempts, failed = False, 0, ""
    with on_call(reports.append):
        try:
            solved, attempts = run()
        except Exception as error:  # noqa: BLE001 - agents of many libraries; the reason is kept in the row
            failed = f"{type(error).__name__}: {error}"[:300]
    return TaskOutcome(
        agent=agent,
        task=task,
        solved=solved,
        attempts=attempts,
        seconds=round(time.perf_counter() - due_s, 4),
        calls=len(reports),
        tokens=sum(report.completion_tokens or 0 for report in reports),
        drafted=_known_sum(report.drafted for report in reports),
        accepted=_known_sum(report.accepted for report in reports),
        failed=failed,
    )
