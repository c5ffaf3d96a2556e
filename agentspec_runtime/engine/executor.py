"""vLLM's multi-process executor, without one question per step to which the answer is always "none".

With a speculative method, vLLM's engine asks its worker after every step for the drafts of the worker's
proposer (`EngineCore.post_step`, vllm/v1/engine/core.py). Our drafts come from the scheduler and the proposer
is empty, but with workers in processes of their own the question costs a round trip per step in which nothing
else happens. Use by `--distributed-executor-backend`; `agentspec serve` does so on a CPU, where vLLM always
takes the multi-process executor. In one process (one GPU) the question is a function call, and free.

With a model drafter in the worker (`assist.py`) it is asked after those steps in which it was to draft. Where
that does not pay those are few, and the question cost 1 ms of each step of the embedded model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

__all__ = ["AssistMultiprocExecutor", "QuietMultiprocExecutor"]


class QuietMultiprocExecutor(MultiprocExecutor):
    """The same executor for a worker whose proposer has nothing to say."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Nothing, and nobody is asked."""
        return None


class AssistMultiprocExecutor(MultiprocExecutor):
    """The same executor for a worker that drafts in the steps that say so."""

    _drafts = False

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """See `Executor.execute_model`."""
        self._drafts = scheduler_output.num_spec_tokens_to_schedule > 0
        return super().execute_model(scheduler_output, non_block)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the worker drafted in the step before; nothing where it was not to."""
        return super().take_draft_token_ids() if self._drafts else None
