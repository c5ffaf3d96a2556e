"""Accounts of requests and steps, and the reports made of them for the observer.

What a step did is entered, and what ended in it is reported, while the worker computes the next one: nobody
waits for it then. Only when no request is left, there is no next one. Whatever fails here costs the record,
never a draft and never a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from agentspec_runtime.budget import Plan, StepShape
from agentspec_runtime.drafting import BatchObserved
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.engine.guard import Guard
from agentspec_runtime.engine.ledger import RequestLedger, StepVerdicts
from agentspec_runtime.engine.stop_strings import StopStrings, TokenText
from agentspec_runtime.observe import Observer, StepReport

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Accounts", "StepWork"]

_RECENT_STEPS: Final = 64
"""How far the engine may run ahead of the API that finds a stop string."""

_EMPTY: Final = StepShape(num_tokens=0, num_attended=0, num_requests=0)


@dataclass(slots=True)
class StepWork:
    """The step that is being executed, in the terms of `StepReport`; `sources` of draft tokens by request."""

    started: float
    shape: StepShape = _EMPTY
    plan: Plan | None = None
    sources: dict[str, bytes] = field(default_factory=dict)
    draft_s: float = 0.0
    num_prefill: int = 0
    num_sampling: int = 0
    num_waiting: int = 0
    grammar_cut: int = 0
    assist_gain: float | None = None
    index_s: float = 0.0
    index_bytes: int = 0
    dropped_hints: int = 0
    internal_errors: int = 0


class Accounts:
    """See the module docstring. `observer` None: nothing is kept. `wall`: seconds of the epoch."""

    def __init__(
        self,
        observer: Observer | None,
        answers: Answers,
        *,
        model: str,
        token_text: TokenText,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.guard = Guard("the record is lost, nothing else")
        self._observer = observer
        self._answers = answers
        self._model = model
        self._token_text = token_text
        self._wall = wall
        self._waiting: Callable[[], None] | None = None
        self._ended: dict[str, Callable[[], None]] = {}

    def start(self, req_id: str, kind: int) -> None:
        """A request arrives; its answer begins in a block of this kind."""
        if self._observer is not None:
            if req_id in self._ended:
                self.keep()
            self.guard("blocks", lambda: self._answers.start(req_id, kind))

    def finish(
        self,
        request: Request,
        ledger: RequestLedger,
        session: str | None,
        stops: StopStrings | None,
        reason: str,
        *,
        last: bool,
    ) -> None:
        """A request is over: report it with `keep`, or at once when it was the last one, and forget it."""
        observer = self._observer
        if observer is None:
            return
        end_s = self._wall()

        def report() -> None:
            num_cut = None if stops is None else self._num_behind_stop(request, stops)
            observer.on_request(
                ledger.report(
                    self._answers.read(request.request_id, num_cut=num_cut or 0),
                    req_id=request.request_id,
                    trace_headers=request.trace_headers,
                    session=session,
                    end_s=end_s,
                    num_preemptions=request.num_preemptions,
                    finish_reason=reason if num_cut is None else "stop",
                    model=self._model,
                )
            )

        self._ended[request.request_id] = report
        if last:
            self.keep()

    def enter(
        self,
        step: StepWork,
        duration: float,
        req_ids: Sequence[str],
        observed: BatchObserved,
        sampled: Mapping[str, int],
    ) -> None:
        """A step is over: remember what it did until `keep`. `sampled` as for `Speculation.verdicts`."""
        if self._observer is not None:
            self.keep()
            context = StepContext(
                end_s=self._wall(),
                duration_s=duration,
                batch=step.num_sampling,
                budget=sum(map(len, step.sources.values())),
            )
            self._waiting = partial(self._enter, self._observer, step, context, req_ids, observed, sampled)

    def keep(self) -> None:
        """Enter and report the step before, if that has waited, and report what has ended since."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.guard("accounts", waiting)
        ended, self._ended = self._ended, {}
        for req_id, report in ended.items():
            self.guard("on_request", report)
            self._answers.finish(req_id)

    def close(self) -> None:
        """The engine shuts down."""
        self.keep()
        if self._observer is not None:
            self._observer.close()

    def _enter(
        self,
        observer: Observer,
        step: StepWork,
        context: StepContext,
        req_ids: Sequence[str],
        observed: BatchObserved,
        sampled: Mapping[str, int],
    ) -> None:
        totals = self._answers.add_step(
            req_ids, observed.tokens, observed.offsets, context, step.sources, sampled
        )
        plan = step.plan
        report = StepReport(
            num_sampling=step.num_sampling,
            num_prefill_tokens=step.num_prefill,
            num_draft_tokens=context.budget,
            num_waiting=step.num_waiting,
            price=plan.price if plan else 0.0,
            predicted_s=plan.predicted_s if plan else 0.0,
            measured_s=context.duration_s,
            draft_s=step.draft_s,
            index_s=step.index_s,
            index_bytes=step.index_bytes,
            grammar_cut=step.grammar_cut,
            dropped_hints=step.dropped_hints,
            internal_errors=step.internal_errors + self.guard.errors,
            assist_depth=None if step.assist_gain is None else step.shape.assist_depth,
            assist_gain=step.assist_gain,
            verdicts=StepVerdicts(totals) if context.budget else {},
        )
        self.guard("on_step", lambda: observer.on_step(report))

    def _num_behind_stop(self, request: Request, stops: StopStrings) -> int | None:
        """Tokens that the API cut off behind a stop string; None where none ended the answer."""
        token_ids = request.output_token_ids
        recent = self._answers.num_recent(request.request_id, _RECENT_STEPS)
        kept = stops.num_kept(token_ids, self._token_text, num_recent=recent)
        return None if kept is None else len(token_ids) - kept
