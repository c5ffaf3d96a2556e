"""What happens between vLLM's scheduler and the pure core: requests in, drafts out, verdicts back.

One object per engine. It reads vLLM's `Request` and outputs, owns the drafter, the budget and the
ledgers, and sets `request.spec_token_ids`; it decides nothing about scheduling. `scheduler.py` calls
it at seven points and survives whatever it raises; what observers raise does not get that far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from agentspec_runtime.budget import LATENCY_WEIGHTS, BudgetPolicy, Load, Plan, StepShape
from agentspec_runtime.drafting import BatchDraft, Drafter, DraftScope
from agentspec_runtime.drafting.answers import Answers
from agentspec_runtime.drafting.blocks import kind_code
from agentspec_runtime.engine.accounts import Accounts, StepWork
from agentspec_runtime.engine.assist import LEFT_OUT, Assist
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.engine.guard import Guard
from agentspec_runtime.engine.ledger import RequestLedger
from agentspec_runtime.engine.prompts import PromptForecast
from agentspec_runtime.engine.request_facts import (
    end_tokens,
    may_draft,
    namespace,
    room,
    stop_strings,
    temperature_bucket,
)
from agentspec_runtime.engine.stop_strings import StopStrings, TokenText
from agentspec_runtime.errors import HintError
from agentspec_runtime.hints import HINT_VERSION, XARGS_KEY, Hint, decode_hint
from agentspec_runtime.observe import Observer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

__all__ = ["Speculation"]

_log = logging.getLogger("agentspec.engine")

_Reach: TypeAlias = Literal["corpus", "session", "request"]
_REACH: Final[tuple[_Reach, ...]] = ("request", "session", "corpus")


@dataclass(slots=True)
class _Live:
    request: Request
    hint: Hint | None
    session: str | None
    ledger: RequestLedger
    cap: int
    ends: tuple[int, ...]
    weight: float = 1.0
    stops: StopStrings | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """Drafts set for the step that is about to be scheduled."""

    sources: Mapping[str, bytes]
    plan: Plan | None = None
    draft_s: float = 0.0


_NOTHING: Final = _Placed(sources={})


class Speculation:
    """See the module docstring. `guard`: counts errors of the scheduler's calls, for the report. `assisted`:
    the worker has a model drafter, `may_leave_out`: and can do without its first pass. `clock`: seconds that
    never run backwards; `wall`: of the epoch.
    """

    def __init__(
        self,
        config: EngineConfig,
        drafter: Drafter,
        budget: BudgetPolicy,
        *,
        guard: Guard,
        max_model_len: int,
        model: str,
        structured_output: StructuredOutputManager,
        observer: Observer | None = None,
        assisted: bool = False,
        may_leave_out: bool = False,
        block_tokens: int = 0,
        token_text: TokenText = lambda _: b"",
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._budget = budget
        self._guard = guard
        self._max_model_len = max_model_len
        self._structured_output = structured_output
        answers = Answers(drafter.vocabulary, drafter.config.num_speculative_tokens)
        # With a guard of their own: telemetry that fails must not cost drafts.
        self._accounts = Accounts(observer, answers, model=model, token_text=token_text, wall=wall)
        most = drafter.config.num_speculative_tokens
        self._assist = (
            Assist(
                drafter.vocabulary.vocab_size,
                budget,
                min(config.assist_depth, most),
                may_leave_out=may_leave_out,
            )
            if assisted
            else None
        )
        self._block_tokens = block_tokens
        self._prompts = PromptForecast()
        self._clock = clock
        self._wall = wall
        self._live: dict[str, _Live] = {}
        self._step: StepWork | None = None
        self._pending = _NOTHING
        self._index_s = 0.0
        self._dropped_hints = 0
        self._grammar_cut = 0

    # Requests

    def start(self, request: Request) -> None:
        """A request has arrived."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        if prompt is None or params is None:
            return
        hint = self._read_hint(params.extra_args)
        session = (hint.session if hint else None) or request.session_id
        stops = stop_strings(params)
        ledger = RequestLedger(hint=hint, num_prompt_tokens=len(prompt), arrival_s=self._wall())
        cap = self._drafter.config.num_speculative_tokens
        live = _Live(request, hint, session, ledger, cap, end_tokens(params), stops=stops)
        self._live[request.request_id] = live
        begins_in = kind_code(hint.expect[0]) if hint and hint.expect else 0
        self._accounts.start(request.request_id, begins_in)
        if hint is not None:
            live.weight = LATENCY_WEIGHTS[hint.latency]
            if hint.speculate != "auto":
                live.cap = 0 if hint.speculate == "off" else min(live.cap, hint.speculate)
        if not may_draft(params):
            live.cap = 0
        if live.cap == 0 or self._config.speculate == "off":
            return
        reach = _REACH[min(_REACH.index(self._config.scope), _REACH.index(hint.scope if hint else "corpus"))]
        space = namespace(request)
        if self._assist is not None:
            self._assist.start(request.request_id, space, begins_in)
        self._drafter.start(
            request.request_id,
            prompt,
            scope=DraftScope(namespace=space, session=session, reach=reach),
            block_kind=begins_in,
            sampled=temperature_bucket(params.temperature),
            keys=request.block_hashes,
            block_tokens=self._block_tokens,
        )

    def finish(self, request: Request, reason: str) -> None:
        """A request is over, in whatever way."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return
        if self._assist is not None:
            self._assist.finish(request.request_id)
        try:
            self._drafter.finish(request.request_id, keys=request.block_hashes)
        finally:
            last = not self._live
            self._accounts.finish(request, live.ledger, live.session, live.stops, reason, last=last)

    def _read_hint(self, extra_args: Mapping[str, object] | None) -> Hint | None:
        if not self._config.hints or not extra_args or XARGS_KEY not in extra_args:
            return None
        try:
            hint = decode_hint(extra_args[XARGS_KEY])
        except HintError as error:
            # The API refuses these; one can still come in by another entry point. Speed only.
            self._dropped_hints += 1
            if self._dropped_hints == 1:
                _log.warning("a hint was dropped (further ones are only counted): %s", error)
            return None
        if hint.v > HINT_VERSION:
            self._dropped_hints += 1
            return None
        return hint

    # The step

    def place_drafts(self, running: Iterable[Request], waiting: Iterable[Request], max_tokens: int) -> None:
        """Set drafts on the requests that will decode in the step that is about to be scheduled."""
        self._pending = _NOTHING
        if self._config.speculate == "off":
            return
        begin = self._clock()
        decoding: list[_Live] = []
        caps: list[int] = []
        contexts: list[int] = []
        in_prompt: list[Request] = []
        for request in running:
            if request.spec_token_ids:
                request.spec_token_ids = []  # made for a step that had no room for the request
            left = request.num_tokens - request.num_computed_tokens
            if left == 1:
                live = self._live.get(request.request_id)
                if live is not None:
                    decoding.append(live)
                    caps.append(self._room_of(live))
                    contexts.append(request.num_tokens)
            elif left > 1:
                in_prompt.append(request)
        if not decoding:
            return
        prompts = self._prompts.expect(in_prompt, waiting, max_tokens - len(decoding))
        load = Load(
            contexts=np.array(contexts, np.int64),
            prefill_tokens=prompts.tokens,
            prefill_attended=prompts.attended,
            weights=np.array([live.weight for live in decoding]),
            num_waiting=prompts.num_waiting,
            room=max_tokens - len(decoding),
            assist_depth=self._assist.asked if self._assist is not None else LEFT_OUT,
        )
        batch = self._draft(decoding, caps, load)
        plan = self._budget.choose(load, batch.survival, batch.lengths)
        if (assist := self._assist) is not None:
            self._guard("assist", lambda: assist.settle(plan.lengths))
        sources = self._set_drafts(decoding, batch, plan)
        self._pending = _Placed(sources, plan, self._clock() - begin)

    def _draft(self, decoding: Sequence[_Live], caps: Sequence[int], load: Load) -> BatchDraft:
        req_ids = [live.request.request_id for live in decoding]
        prices = self._budget.prices(load)
        batch = self._drafter.draft_batch(req_ids, caps, prices)
        if self._assist is not None:
            batch = self._with_assist(self._assist, req_ids, batch, caps, prices)
        batch.cut_before([live.ends for live in decoding])
        return batch

    def _with_assist(
        self,
        assist: Assist,
        req_ids: Sequence[str],
        ours: BatchDraft,
        caps: Sequence[int],
        prices: npt.NDArray[np.float64],
    ) -> BatchDraft:
        """Drafts of both; ours alone if that fails."""
        merged = [ours]
        self._guard("assist", lambda: merged.append(assist.merge(req_ids, ours, caps, prices)))
        return merged[-1]

    def _set_drafts(self, decoding: Sequence[_Live], batch: BatchDraft, plan: Plan) -> dict[str, bytes]:
        """Place the drafts of a plan; returns the sources of their tokens by request."""
        placed: list[tuple[Request, list[int], bytes]] = []
        for i in np.flatnonzero(plan.lengths):
            request = decoding[i].request
            ids: list[int] = batch.token_ids[i, : plan.lengths[i]].tolist()
            if request.use_structured_output:
                allowed = self._allowed(decoding[i], ids)
                self._grammar_cut += len(ids) - len(allowed)
                ids = allowed
            if ids:
                placed.append((request, ids, batch.sources[i, : len(ids)].tobytes()))
        # Nothing can fail from here on: no draft is placed that the accounts do not know of.
        for request, ids, _ in placed:
            request.spec_token_ids = ids
        return {request.request_id: sources for request, _, sources in placed}

    def _allowed(self, live: _Live, ids: list[int]) -> list[int]:
        """The longest prefix that the request's grammar allows. One that fails gets no more drafts."""
        allowed: list[int] = []
        validate = self._structured_output.validate_tokens
        if not self._guard("grammar", lambda: allowed.extend(validate(live.request, ids))):
            live.cap = 0
        return allowed

    def _room_of(self, live: _Live) -> int:
        """Most draft tokens that can still be emitted, one more token coming from the step itself."""
        params = live.request.sampling_params
        return max(min(live.cap, room(live.request, params, self._max_model_len)), 0) if params else 0

    def scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request], num_waiting: int) -> int:
        """vLLM has decided what the step holds; it starts now. Returns how many tokens per request the
        worker's own drafter shall make in it; -1: it shall not run.
        """
        placed, self._pending = self._pending, _NOTHING
        self._prompts.observe(output)
        attended = num_prefill = num_sampling = 0
        now = 0.0
        drafted = output.scheduled_spec_decode_tokens
        for req_id, num in output.num_scheduled_tokens.items():
            request = requests[req_id]
            attended += num * (request.num_computed_tokens - num // 2)
            if request.is_prefill_chunk:
                num_prefill += num
            else:
                num_sampling += 1
                num_prefill += num - 1 - len(drafted.get(req_id, ()))
            live = self._live.get(req_id)
            if live is not None and live.ledger.scheduled_s == 0.0:
                now = now or self._wall()
                live.ledger.scheduled_s = now
                if request.prefill_stats is not None:  # vLLM takes it away with the first token
                    live.ledger.num_cached_tokens = int(request.prefill_stats.num_cached_tokens)
        assist = self._assist
        depth = self._assist_depth(assist, output, requests) if assist is not None else LEFT_OUT
        shape = StepShape(
            num_tokens=output.total_num_scheduled_tokens,
            num_attended=attended,
            num_requests=num_sampling,
            num_drafts=sum(map(len, drafted.values())),
            assist_depth=depth,
        )
        self._step = StepWork(
            started=self._clock(),
            shape=shape,
            plan=placed.plan,
            # Drafts that vLLM cut for want of room keep the sources of what is left.
            sources={r: s[: len(drafted[r])] for r, s in placed.sources.items() if r in drafted},
            draft_s=placed.draft_s,
            num_prefill=num_prefill,
            num_sampling=num_sampling,
            num_waiting=num_waiting,
            assist_gain=assist.gain if assist is not None else None,
        )
        return depth if assist is not None else 0

    def _assist_depth(self, assist: Assist, output: SchedulerOutput, requests: Mapping[str, Request]) -> int:
        most = self._drafter.config.num_speculative_tokens
        asking: list[str] = []
        attended = 0
        fits = self._config.speculate == "auto"
        for req_id in output.num_scheduled_tokens:
            request = requests[req_id]
            fits = fits and request.num_computed_tokens + most <= self._max_model_len
            live = self._live.get(req_id)
            if live is not None and live.cap and not request.is_prefill_chunk and req_id in assist.arbiter:
                asking.append(req_id)
                attended += request.num_computed_tokens
        return assist.depth(output.num_scheduled_tokens, asking, attended, fits=fits)

    def take_assist(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The worker's own drafts for the next step."""
        if self._assist is not None:
            self._assist.offer(req_ids, drafts)

    def work(self) -> None:
        """While the worker computes: accounts of the last step; take in prompts, index finished text, a
        bounded slice.
        """
        self._accounts.keep()
        begin = self._clock()
        self._drafter.work()
        self._index_s = self._clock() - begin

    def verdicts(
        self,
        sampled: Mapping[str, int],
        outputs: Mapping[int, EngineCoreOutputs],
        requests: Mapping[str, Request],
    ) -> None:
        """The step is over. `sampled`: tokens that the worker returned for requests with drafts, before
        stop handling. `requests`: those that vLLM still knows.
        """
        # Without a step (`scheduled` failed) there is still text to take in, and requests that ended.
        step, self._step = self._step or StepWork(self._clock()), None
        duration = self._clock() - step.started
        req_ids: list[str] = []
        new_ids: list[Sequence[int]] = []
        ended: list[tuple[str, str]] = []
        for group in outputs.values():
            for output in group.outputs:
                if output.new_token_ids and output.request_id in self._live:
                    req_ids.append(output.request_id)
                    new_ids.append(output.new_token_ids)
                if output.finish_reason is not None and output.request_id not in requests:
                    ended.append((output.request_id, str(output.finish_reason)))
        observed = self._drafter.observe_batch(req_ids, new_ids)
        if self._assist is not None:
            assist = self._assist
            self._guard("assist", lambda: assist.observe(req_ids, observed))
        self._close_step(step)
        self._accounts.enter(step, duration, req_ids, observed, sampled)
        for req_id, reason in ended:
            live = self._live.get(req_id)
            if live is not None:
                self._guard("finish", partial(self.finish, live.request, reason))
        if step.shape.num_tokens:
            self._budget.observe(step.shape, duration)

    def _close_step(self, step: StepWork) -> None:
        """Note what is only known when a step is over."""
        step.grammar_cut, self._grammar_cut = self._grammar_cut, 0
        step.index_s = self._index_s
        step.index_bytes = self._drafter.memory_bytes
        step.dropped_hints = self._dropped_hints
        step.internal_errors = self._guard.errors

    def abandon(self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]) -> None:
        """Verdicts of a step could not be taken in: its requests, of whose text something may be missing
        now, go on without drafts, and those that ended are over.
        """
        self._step = None
        for group in outputs.values():
            for output in group.outputs:
                live = self._live.get(output.request_id)
                if live is None:
                    continue
                self._guard("finish", partial(self._drop, output.request_id))
                if output.finish_reason is not None and output.request_id not in requests:
                    self._guard("finish", partial(self.finish, live.request, str(output.finish_reason)))

    def _drop(self, req_id: str) -> None:
        """No more drafts for a request, of whose text something may be missing."""
        if self._assist is not None:
            self._assist.finish(req_id)
        self._drafter.finish(req_id, keep=False)

    def close(self) -> None:
        """The engine shuts down."""
        self._accounts.close()
