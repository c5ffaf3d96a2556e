"""vLLM's scheduler with drafts: the only place where our code runs inside an engine step.

Rules of this file:

- No policy here. What to draft is decided in `drafting/`, how much in `budget/`, the glue is
  `speculation.py`; this class only says when.
- vLLM decides everything it decided before. We set `request.spec_token_ids` before it schedules, say how
  many tokens a model drafter of the worker shall make (`assist`; without one none), and read what came out.
- Nothing of ours may raise inside a step. Every call goes through a `Guard`: an exception is counted,
  logged once per place, costs the requests of the step their drafts, and nothing else.

Lossless: drafts are verified by vLLM's own rejection sampler. Reading order: `speculation.py` next.
Written for vLLM 0.32 (vllm/v1/core/sched/scheduler.py, vllm/v1/engine/core.py `EngineCore.step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.scheduler import Scheduler

from agentspec_runtime.budget import FixedBudget, GoodputBudget, StepCost
from agentspec_runtime.drafting import Drafter, DraftingConfig, TokenTable
from agentspec_runtime.engine.args import ASSIST_METHODS, CPU_WORKER
from agentspec_runtime.engine.config import ADDITIONAL_CONFIG_KEY, EngineConfig
from agentspec_runtime.engine.curves import AUTO, CurveFile, curve_of, read_curve
from agentspec_runtime.engine.guard import Guard
from agentspec_runtime.engine.speculation import Speculation
from agentspec_runtime.engine.token_table import build_token_table
from agentspec_runtime.engine.warm_up import warm_up
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from agentspec_runtime.observe import Observer

__all__ = ["AgentSpecScheduler"]

_MAX_ERRORS: Final = 1_000
"""After that many internal errors the scheduler gives up on drafts and is plain vLLM."""


class AgentSpecScheduler(Scheduler):
    """vLLM's scheduler, with drafts made from the requests' own text. Use by `--scheduler-cls`."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        _check_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        self._guard = Guard("requests go on without drafts")
        config = EngineConfig.model_validate(vllm_config.additional_config.get(ADDITIONAL_CONFIG_KEY) or {})
        self._curve = curve_of(vllm_config) if config.cost_curve == AUTO else None
        self._budget = _build_budget(config, self._curve)
        self._speculation: Speculation = _build_speculation(
            config, vllm_config, self, self._budget, self.make_observer(config, vllm_config)
        )

    def make_observer(self, config: EngineConfig, vllm_config: VllmConfig) -> Observer | None:  # noqa: ARG002
        """Who is told of every step and request; for subclasses that measure. None: nobody."""
        return _build_observer(config)

    # Requests

    def add_request(self, request: Request) -> None:
        """See `Scheduler.add_request`."""
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._guard("start", lambda: self._speculation.start(request))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """See `Scheduler.finish_requests`: aborts and errors from outside a step."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            reason = str(request.get_finished_reason())
            self._guard("finish", partial(self._speculation.finish, request, reason))
        return finished

    # The step, in the order in which `EngineCore.step` calls it

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See `Scheduler.schedule`."""
        self._guard("draft", self._place_drafts)
        output = super().schedule(throttle_prefills)
        waiting = len(self.waiting)
        output.num_spec_tokens_to_schedule = 0  # unless our part says otherwise: no drafts by the worker

        def scheduled() -> None:
            depth = self._speculation.scheduled(output, self.requests, waiting)
            output.num_spec_tokens_to_schedule = depth if self._guard.errors < _MAX_ERRORS else 0

        self._guard("scheduled", scheduled)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """See `Scheduler.get_grammar_bitmask`. Called while the worker is computing: time for our index."""
        bitmask = super().get_grammar_bitmask(scheduler_output)
        self._guard("index", self._speculation.work)
        return bitmask

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See `Scheduler.update_from_output`."""
        sampled: dict[str, int] = {}
        self._guard("sampled", lambda: sampled.update(_num_sampled(scheduler_output, model_runner_output)))
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        taken_in = self._guard(
            "verdicts", lambda: self._speculation.verdicts(sampled, outputs, self.requests)
        )
        if not taken_in:
            self._guard("abandon", lambda: self._speculation.abandon(outputs, self.requests))
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts of the worker's own method (`assist`); all drafts are placed in `schedule`."""
        self._guard(
            "assist",
            lambda: self._speculation.take_assist(draft_token_ids.req_ids, draft_token_ids.draft_token_ids),
        )

    def shutdown(self) -> None:
        """See `Scheduler.shutdown`."""
        self._guard("close", self._speculation.close)
        if (curve := self._curve) is not None:
            self._guard("curve", lambda: curve.keep(self._budget.cost))
        super().shutdown()

    # Ours

    def _place_drafts(self) -> None:
        if self._guard.errors < _MAX_ERRORS:
            # Prompts of requests for which there is no place among the running ones cannot be in the step.
            free = max(self.max_num_running_reqs - len(self.running), 0)
            waiting = islice(chain(self.waiting, self.kv_holding_waiting), free)
            self._speculation.place_drafts(self.running, waiting, self.max_num_scheduled_tokens)


def _num_sampled(scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, int]:
    """Tokens per request with drafts, before stop handling shortens the lists."""
    tokens, index = result.sampled_token_ids, result.req_id_to_index
    if not tokens:
        return {}
    return {
        req_id: len(tokens[index[req_id]])
        for req_id in scheduler_output.scheduled_spec_decode_tokens
        if req_id in index
    }


def _check_config(vllm_config: VllmConfig) -> None:
    """Refuse what would not work, before a model is served."""
    if vllm_config.speculative_config is None:
        raise ConfigurationError(
            "AgentSpecScheduler needs a speculative_config, since vLLM verifies drafts only with one: "
            "take the arguments that `agentspec engine-args` prints"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigurationError(
            "AgentSpecScheduler drafts from the tokens of the step before, which asynchronous scheduling "
            "does not have yet: pass --no-async-scheduling (agentspec engine-args does)"
        )
    if vllm_config.model_config.has_inner_state:
        raise ConfigurationError(
            f"{vllm_config.model_config.model!r} has recurrent layers, from whose state a rejected draft "
            "cannot be taken back (vLLM issue 39273: garbled text): use `agentspec serve --plain` for it"
        )
    _check_assist(vllm_config)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigurationError(
            "AgentSpecScheduler does not work with pipeline parallelism (several steps are in flight): "
            "use tensor or data parallelism"
        )


def _check_assist(vllm_config: VllmConfig) -> None:
    """Our drafts stand in the place of the drafter's: right only if those are not samples."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if not _is_assisted(vllm_config):
        return
    if speculative.method not in ASSIST_METHODS:
        raise ConfigurationError(
            f"speculative method {speculative.method!r} does not work beside our drafts: use one of "
            f"{', '.join(ASSIST_METHODS)} (--assist METHOD:MODEL), or none"
        )
    if speculative.draft_sample_method != "greedy":
        raise ConfigurationError(
            f"draft_sample_method {speculative.draft_sample_method!r}: vLLM would verify our drafts with the "
            "probabilities of the drafter's own; leave it at 'greedy'"
        )
    if speculative.parallel_drafting:
        raise ConfigurationError(
            "parallel_drafting makes a fixed number of tokens per request, and ours changes with the load: "
            "use a head without it, or --plain"
        )
    if parallel.data_parallel_size > 1:
        raise ConfigurationError(
            "--assist with data parallelism: ranks that wait for each other would have to draft equally "
            "deep. Start one server per rank (docs/scale-out.md), or leave --assist out"
        )


def _is_assisted(vllm_config: VllmConfig) -> bool:
    """Whether the worker has a model drafter of its own."""
    return bool(vllm_config.speculative_config.method != "custom_class")


def _may_leave_out(vllm_config: VllmConfig) -> bool:
    """Whether the worker is ours, which can do without its model drafter (`worker.py`)."""
    return bool(vllm_config.parallel_config.worker_cls == CPU_WORKER)


def _build_budget(config: EngineConfig, kept: CurveFile | None) -> FixedBudget | GoodputBudget:
    if config.budget == "fixed":
        return FixedBudget(config.min_survival)
    if kept is not None:
        return GoodputBudget(StepCost(kept.load()))
    return GoodputBudget(StepCost(read_curve(Path(config.cost_curve)) if config.cost_curve else None))


def _build_speculation(
    config: EngineConfig,
    vllm_config: VllmConfig,
    scheduler: AgentSpecScheduler,
    budget: FixedBudget | GoodputBudget,
    observer: Observer | None,
) -> Speculation:
    model_config = vllm_config.model_config
    tokenizer = None if model_config.skip_tokenizer_init else cached_tokenizer_from_config(model_config)
    vocabulary = build_token_table(tokenizer, model_config.get_vocab_size())
    drafter = Drafter(
        DraftingConfig(
            num_speculative_tokens=scheduler.num_spec_tokens,
            memory_mb=config.memory_mb,
            max_requests=scheduler.max_num_running_reqs,
        ),
        vocabulary,
    )
    warm_up(drafter)
    hashing = vllm_config.cache_config.enable_prefix_caching
    return Speculation(
        config,
        drafter,
        budget,
        guard=scheduler._guard,  # noqa: SLF001 - one guard counts the errors of both
        max_model_len=scheduler.max_model_len,
        model=model_config.served_model_name or model_config.model,
        structured_output=scheduler.structured_output_manager,
        observer=observer,
        assisted=_is_assisted(vllm_config),
        may_leave_out=_may_leave_out(vllm_config),
        token_text=_token_text(vocabulary),
        block_tokens=getattr(scheduler, "hash_block_size", 0) or scheduler.block_size if hashing else 0,
    )


def _token_text(vocabulary: TokenTable) -> Callable[[int], bytes]:
    """Bytes of a token; control tokens (class 0) have none, as in an answer's text."""
    text, offsets, classes = vocabulary.text, vocabulary.offsets, vocabulary.classes

    def of(token_id: int, /) -> bytes:
        if not 0 <= token_id < vocabulary.vocab_size or classes[token_id] == 0:
            return b""
        return text[offsets[token_id] : offsets[token_id + 1]].tobytes()

    return of


def _build_observer(config: EngineConfig) -> Observer | None:
    if not config.telemetry:
        return None
    from agentspec_runtime.telemetry.engine import build_engine_observer

    return build_engine_observer()
