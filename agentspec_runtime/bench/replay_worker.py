"""Trace-forced replay inside vLLM's worker: the recorded token wins in every row that is verified.

Loaded by vLLM's own means (`worker_extension_cls`) and switched on by `collective_rpc("replay_install")`.
The model runs in full; only the logits that come out of it are changed, by raising the recorded token's
above all others. vLLM's own sampler and rejection sampler then do what they always do: at temperature 0
they emit the recording, and accept exactly the drafts that equal it.

Which recorded token belongs to a row follows from the position of the row's input token on the device.
That is right in every mode (chunked prefill, preemption, asynchronous scheduling with drafts, where the
host does not know how many tokens were accepted), and costs no synchronisation.

The same hooks see every step of every method, so they are the common ruler: what was scheduled, drafted
and accepted, and when. Counts stay on the device until the cell is over.

Made for vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0), which is the one that all compared methods
share; `replay_install` refuses any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["REPLAY_KEY", "ReplayExtension"]

REPLAY_KEY: Final = "agentspec_replay"
"""Key in `SamplingParams.extra_args` under which a request carries its recorded output ids."""

_WINNING_LOGIT: Final = 1e9
"""Above any logit of any model, and far from the largest bfloat16."""


class _SamplingParams(Protocol):
    extra_args: dict[str, object] | None


class _RequestState(Protocol):
    sampling_params: _SamplingParams | None


class _InputBatch(Protocol):
    num_reqs: int
    req_ids: list[str]
    num_prompt_tokens: NDArray[np.int32]


class _HostDeviceBuffer(Protocol):
    np: NDArray[np.int32]
    gpu: torch.Tensor


class _Verification(Protocol):
    """vLLM's SpecDecodeMetadata."""

    num_draft_tokens: list[int]
    logits_indices: torch.Tensor


class _Sampled(Protocol):
    sampled_token_ids: torch.Tensor


class _Scheduled(Protocol):
    """vLLM's SchedulerOutput."""

    total_num_scheduled_tokens: int
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str] | None


class _Runner(Protocol):
    """What is used of vLLM's GPUModelRunner; the CPU runner is a subclass of it."""

    device: torch.device
    positions: torch.Tensor
    query_start_loc: _HostDeviceBuffer
    discard_request_mask: _HostDeviceBuffer
    input_batch: _InputBatch
    requests: dict[str, _RequestState]
    drafter: object
    num_spec_tokens: int
    _sample: Callable[[torch.Tensor | None, _Verification | None], _Sampled]
    execute_model: Callable[..., object]
    propose_draft_token_ids: Callable[..., object]


@dataclass(slots=True, kw_only=True)
class _Step:
    """One engine step as the worker saw it.

    `fillers` are draft tokens by request that no drafter made: near the context limit vLLM's runner gives
    every request zeros to verify. `counts` is int64[3, rows]: accepted, emitted, whether the row sampled.
    """

    begin_s: float
    sampled_s: float = 0.0
    draft_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    preempted: int = 0
    fillers: dict[str, int] = field(default_factory=dict)
    drafted: Sequence[int] = ()
    counts: torch.Tensor | None = None


class _RecordedTokens:
    """Recorded outputs on the device: one table row per running request."""

    def __init__(self, runner: _Runner) -> None:
        import torch

        self._runner = runner
        self._row_of: dict[str, int] = {}
        self._length_of: dict[str, int] = {}
        self._free: list[int] = []
        self.table = torch.zeros((0, 0), dtype=torch.int64, device=runner.device)

    def rows(self, req_ids: Sequence[str]) -> tuple[list[int], list[int]]:
        """(table row, recorded length) of every request; length 0 for one that is not replayed."""
        for req_id in req_ids:
            if req_id not in self._row_of:
                self._add(req_id)
        return [self._row_of[r] for r in req_ids], [self._length_of[r] for r in req_ids]

    def _add(self, req_id: str) -> None:
        import torch

        for gone in [known for known in self._row_of if known not in self._runner.requests]:
            self._free.append(self._row_of.pop(gone))
            del self._length_of[gone]
        params = self._runner.requests[req_id].sampling_params
        recorded = (params.extra_args or {}).get(REPLAY_KEY, []) if params is not None else []
        ids = np.asarray(recorded, dtype=np.int64)
        rows, width = self.table.shape
        if not self._free or len(ids) > width:
            bigger = torch.zeros(
                (rows if self._free else max(8, 2 * rows), max(width, 2 * len(ids), 1)),
                dtype=torch.int64,
                device=self.table.device,
            )
            bigger[:rows, :width] = self.table
            self._free += range(rows, bigger.shape[0])
            self.table = bigger
        row = self._free.pop()
        self._row_of[req_id], self._length_of[req_id] = row, len(ids)
        if len(ids):
            self.table[row, : len(ids)] = torch.from_numpy(ids).to(self.table.device)


class _Forcing:
    """The hooks of one worker and the steps that they saw."""

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self._recorded = _RecordedTokens(runner)
        self._sample = runner._sample  # noqa: SLF001 - the one place where vLLM samples, in all modes
        self._execute = runner.execute_model
        self._propose = runner.propose_draft_token_ids
        self.steps: list[_Step] = []
        self._step = _Step(begin_s=0.0)
        runner._sample = self.sample  # noqa: SLF001
        runner.execute_model = self.execute_model
        runner.propose_draft_token_ids = self.propose

    def execute_model(self, scheduled: _Scheduled, *args: object, **kwargs: object) -> object:
        """Note what the step holds, then run it."""
        self._step = _Step(
            begin_s=time.perf_counter(),
            tokens=scheduled.total_num_scheduled_tokens,
            preempted=len(scheduled.preempted_req_ids or ()),
        )
        decode = scheduled.scheduled_spec_decode_tokens
        self._step.fillers = {
            req_id: len(ids)
            for req_id, ids in decode.items()
            if len(ids) == self._runner.num_spec_tokens and not any(ids)
        }
        self._step.prompt_tokens = sum(
            count - 1 - len(decode.get(req_id, ()))
            for req_id, count in scheduled.num_scheduled_tokens.items()
        )
        return self._execute(scheduled, *args, **kwargs)

    def propose(self, *args: object, **kwargs: object) -> object:
        """Draft by vLLM's own proposer, timed on the host."""
        begin = time.perf_counter()
        try:
            return self._propose(*args, **kwargs)
        finally:
            self._step.draft_s += time.perf_counter() - begin

    def sample(self, logits: torch.Tensor | None, verification: _Verification | None) -> _Sampled:
        """Let the recorded tokens win, sample, and note what was accepted."""
        if logits is None:  # a pipeline stage that does not sample
            return self._sample(logits, verification)
        import torch

        batch = self._runner.input_batch
        rows_of, lengths = self._recorded.rows(batch.req_ids)
        num_reqs = len(rows_of)
        if verification is None:
            drafted = [0] * num_reqs
            last_inputs = self._runner.query_start_loc.gpu[1 : num_reqs + 1] - 1
        else:
            drafted = verification.num_draft_tokens
            last_inputs = verification.logits_indices
        repeats = np.asarray(drafted) + 1
        prompt_lengths = batch.num_prompt_tokens[:num_reqs]
        known = np.stack((rows_of, lengths, prompt_lengths)).astype(np.int64)
        per_row = torch.from_numpy(np.repeat(known, repeats, axis=1)).to(logits.device)
        # A row's input token stands at this position; its logits are for the next one.
        index = self._runner.positions[last_inputs].to(torch.int64) + 1 - per_row[2]
        _force(logits, self._recorded.table, per_row[0], index, per_row[1])
        sampled = self._sample(logits, verification)
        first_rows = torch.from_numpy(np.cumsum(repeats) - repeats).to(logits.device)
        discarded = torch.from_numpy(self._runner.discard_request_mask.np[:num_reqs].astype(bool))
        left = (per_row[1] - index)[first_rows]
        left = left.masked_fill(discarded.to(logits.device), 0)
        fillers = self._step.fillers
        made = [0 if r in fillers else n for r, n in zip(batch.req_ids, drafted, strict=True)]
        self._note(made, left, sampled.sampled_token_ids)
        return sampled

    def _note(self, drafted: Sequence[int], left: torch.Tensor, sampled: torch.Tensor) -> None:
        import torch

        # A placeholder of -1 stands for what was not accepted; tokens behind the end are no output.
        emitted = torch.minimum((sampled >= 0).sum(dim=1), left).clamp(min=0)
        accepted = torch.minimum((sampled >= 0).sum(dim=1) - 1, left).clamp(min=0)
        # Rows that sampled nothing (a prompt chunk that is not the last) have nothing left: drop them.
        self._step.drafted = drafted
        self._step.counts = torch.stack((accepted, emitted, (left > 0).to(torch.int64)))
        self._step.sampled_s = time.perf_counter()
        self.steps.append(self._step)

    def take(self) -> list[list[object]]:
        """Steps since the last call: [begin, sampled, draft, tokens, prompt, preempted, fillers, rows].

        Every row is [drafted, accepted, emitted] of one request that sampled. Times in seconds.
        """
        taken: list[list[object]] = []
        for step in self.steps:
            assert step.counts is not None  # noqa: S101 - set together with the step's entry in the list
            accepted, emitted, sampled = step.counts.tolist()
            rows = [
                [drafted, accepted[i], emitted[i]] for i, drafted in enumerate(step.drafted) if sampled[i]
            ]
            taken.append(
                [
                    step.begin_s,
                    step.sampled_s,
                    step.draft_s,
                    step.tokens,
                    step.prompt_tokens,
                    step.preempted,
                    sum(step.fillers.values()),
                    rows,
                ]
            )
        self.steps = []
        return taken


def _force(
    logits: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Raise table[rows, index] above all other logits, where a recorded token exists for the row."""
    valid = (index >= 0) & (index < lengths)
    tokens = table[rows, index.clamp(0, max(table.shape[1] - 1, 0))]
    tokens = tokens.where(valid, tokens.new_zeros(()))
    current = logits.gather(1, tokens[:, None])
    wanted = current.new_full((), _WINNING_LOGIT)
    logits.scatter_(1, tokens[:, None], wanted.where(valid[:, None], current))


class ReplayExtension:
    """Methods that vLLM adds to its worker class; called through `collective_rpc`."""

    model_runner: _Runner
    _replay: _Forcing

    def replay_install(self) -> None:
        """Switch forcing on. Raises RuntimeError on a runner that it was not made for."""
        if not hasattr(self.model_runner, "_sample"):
            raise RuntimeError(
                f"{type(self.model_runner).__name__} has no _sample hook: replay needs vLLM's first model "
                "runner, VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self._replay = _Forcing(self.model_runner)

    def replay_reset(self) -> None:
        """Forget what a proposer of the worker has learned from text, and all noted steps."""
        self._replay.steps = []
        drafter = getattr(self.model_runner, "drafter", None)
        cache = getattr(drafter, "suffix_cache", None)
        if cache is not None:
            for req_id in list(cache.active_requests):
                cache.stop_request(req_id)
            for req_id in list(cache.cached_requests):
                cache.evict_cached_response(req_id)

    def replay_take(self) -> str:
        """Steps since the last call, as JSON."""
        return json.dumps(self._replay.take())
