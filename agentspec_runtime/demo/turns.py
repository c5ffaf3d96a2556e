"""The turns of a run: what each model call was for, what it answered, and what it cost.

The cost comes from the client (`CallReport`), so the same code measures any server. Turns are recorded in
the order in which they ended; the programs here make one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentspec_runtime.client.report import CallReport, on_call

__all__ = ["Block", "TaskResult", "Tokens", "Turn", "TurnLog", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was emitted and what drafting had to do with it. All in tokens but `steps` (engine steps)."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rejected(self) -> int:
        """Draft tokens that cost verification and gave nothing."""
        return self.drafted - self.accepted

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
        )


def total(parts: Sequence[Tokens]) -> Tokens:
    """Sum of the parts."""
    return sum(parts, Tokens())


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One structural block of an answer, as the engine saw it. `seconds` from its first to its last step."""

    kind: str
    count: Tokens
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call. `answer` is all that the model said: text, and names and arguments of tool calls."""

    task: str
    step: str
    answer: str
    report: CallReport
    blocks: tuple[Block, ...] = ()

    @property
    def count(self) -> Tokens:
        """Tokens of this turn. A server without drafting takes one step per token.

        Steps are the engine's where it reported blocks. The client can only subtract, and is one short when
        an answer ends inside an accepted draft: that step adds no token of its own.
        """
        report = self.report
        tokens = report.completion_tokens or 0
        steps = tokens if report.num_steps is None else report.num_steps
        return Tokens(
            tokens=tokens,
            steps=sum(block.count.steps for block in self.blocks) or steps,
            drafted=report.drafted or 0,
            accepted=report.accepted or 0,
        )

    @property
    def seconds(self) -> float:
        """Time of the call as its caller saw it."""
        return self.report.latency_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What became of a task. `solved` is the verdict of its tests, `attempts` how often it was tried."""

    agent: str
    task: str
    solved: bool
    attempts: int


@dataclass(slots=True)
class TurnLog:
    """Turns as they come. `on_turn` is called with each."""

    on_turn: Callable[[Turn], None] | None = None
    turns: list[Turn] = field(default_factory=list)
    _reports: list[CallReport] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take notice of the model calls of this process while the block is open."""
        with on_call(self._reports.append, everywhere=True):
            yield

    def add(self, *, task: str, step: str, answer: str) -> None:
        """The model call that has just ended was this step of this task.

        Raises:
            RuntimeError: no call was seen: `listening()` is not open, or `instrument()` was not called.
        """
        if not self._reports:
            raise RuntimeError("no model call was seen: call instrument() and open listening() first")
        report = self._reports.pop()
        self._reports.clear()
        turn = Turn(task=task, step=step, answer=answer, report=report)
        self.turns.append(turn)
        if self.on_turn is not None:
            self.on_turn(turn)
