"""What one model call did, as the agent process saw it, and who is told.

A `CallReport` is made once per logical call: the SDK's own retries happen inside it. `None` always means
"unknown" and never stands for zero: a stream that was left early has no usage, a server without
per-request metrics has no acceptance, `n > 1` has neither.

Listeners belong to the context they were added in: calls made in the same task or thread, and in tasks
and threads that inherit its context, are delivered; other runs in the process are not. A plain thread
pool does not inherit context, so pass `everywhere=True` where the calls come from one.

Rule: a listener can slow a call down, it cannot break it. What it raises is logged once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from agentspec_runtime.client.shield import shielded

__all__ = ["CallReport", "Operation", "Outcome", "collect_calls", "deliver", "listeners_here", "on_call"]

Operation = Literal["chat", "text_completion", "responses"]
Outcome = Literal["ok", "incomplete", "error"]
"""`incomplete`: the caller stopped reading, or the task was cancelled, before the answer was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """One model call. Counts in tokens, durations in milliseconds, `None` for unknown.

    Attributes:
        operation: which endpoint was called.
        model: model that answered, else the one asked for.
        base_url: base URL of the client.
        response_id: id of the response; with vLLM it is also the id of the request in the engine.
        session, agent, parent, turn: what the hint said, or would have said.
        hinted: a hint was sent (the server understands them, and hints are not off).
        stream: the answer was asked for as a stream.
        outcome: see `Outcome`; `error_type` is the class name of the exception of an `error`.
        attempts: HTTP requests that this call took.
        num_steps: engine steps that emitted the answer: completion tokens minus accepted tokens. Exact with
            our scheduler; where another drafter drafts ends of answers, one or some too few.
        num_spec_steps: steps that verified a draft.
        per_step_drafted, per_step_accepted: one entry per step that verified a draft, in order.
        ttft_ms: scheduling to first token, measured by the server.
        first_token_ms: start of the call to the first token of any kind at the client (streams only).
        latency_ms: start of the call to the end of the answer, at the client.
    """

    operation: Operation
    model: str | None
    base_url: str
    session: str | None
    agent: str | None
    parent: str | None
    turn: int | None
    hinted: bool
    stream: bool
    outcome: Outcome
    latency_ms: float
    error_type: str | None = None
    response_id: str | None = None
    finish_reasons: tuple[str, ...] = ()
    attempts: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    num_steps: int | None = None
    num_spec_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_step_drafted: tuple[int, ...] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    ttft_ms: float | None = None
    queue_ms: float | None = None
    generation_ms: float | None = None
    first_token_ms: float | None = None

    @property
    def rejected(self) -> int | None:
        """Draft tokens that cost verification and gave nothing."""
        if self.drafted is None or self.accepted is None:
            return None
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens, 0..1; unknown where nothing was drafted."""
        if not self.drafted or self.accepted is None:
            return None
        return self.accepted / self.drafted


Callback = Callable[[CallReport], None]


class _Listener:
    """One callback while its block is open."""

    __slots__ = ("_callback", "active")

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self.active = True

    def __call__(self, report: CallReport) -> None:
        if self.active:
            with shielded("a call listener", id(self)):
                self._callback(report)


_here: ContextVar[tuple[_Listener, ...]] = ContextVar("agentspec_listeners", default=())
_everywhere: list[_Listener] = []
_everywhere_lock = Lock()


@contextmanager
def on_call(callback: Callback, *, everywhere: bool = False) -> Iterator[None]:
    """Call `callback` with the `CallReport` of every model call that ends while the block is open.

    With `everywhere`, calls of the whole process are delivered and not only those of this context. The
    callback runs in the thread that ends the call.
    """
    listener = _Listener(callback)
    if everywhere:
        with _everywhere_lock:
            _everywhere.append(listener)
    else:
        _here.set((*_here.get(), listener))
    try:
        yield
    finally:
        listener.active = False
        if everywhere:
            with _everywhere_lock:
                _everywhere.remove(listener)
        else:
            # By identity and not by token: the block may be left in another context than it was entered.
            _here.set(tuple(other for other in _here.get() if other is not listener))


@contextmanager
def collect_calls(*, everywhere: bool = False) -> Iterator[list[CallReport]]:
    """Collect the reports of the model calls of a block, in the order in which they ended.

    ::

        with collect_calls() as calls:
            agent.invoke(...)
        print(sum(call.accepted or 0 for call in calls))
    """
    calls: list[CallReport] = []
    with on_call(calls.append, everywhere=everywhere):
        yield calls


def listeners_here() -> tuple[Callback, ...]:
    """Listeners of a call that starts now, in this context."""
    local = _here.get()
    return (*local, *_everywhere) if _everywhere else local


def deliver(report: CallReport, listeners: tuple[Callback, ...]) -> None:
    """Hand a report to the listeners that were there when the call started."""
    for listener in listeners:
        listener(report)
