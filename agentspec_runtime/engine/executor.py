"""vLLM's multi-process executor, without one question per step to which the answer is always "none".

With a speculative method, vLLM's engine asks its worker after every step for the drafts of the worker's
proposer (`EngineCore.post_step`, vllm/v1/engine/core.py). Our drafts come from the scheduler and the proposer
is empty, but with workers in processes of their own the question costs a round trip per step in which nothing
else happens. Use by `--distributed-executor-backend`; `agentspec serve` does so on a CPU, where vLLM always
takes the multi-process executor. In one process (one GPU) the question is a function call, and free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds

__all__ = ["QuietMultiprocExecutor"]


class QuietMultiprocExecutor(MultiprocExecutor):
    """The same executor for a worker whose proposer has nothing to say."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Nothing, and nobody is asked."""
        return None
