"""The proposer that proposes nothing.

vLLM's worker verifies drafts only if a speculative method is configured. Ours is `custom_class` with
this class (vllm/v1/spec_decode/custom_class_proposer.py); the drafts come from the scheduler, which
knows request ids, hints, grammar state, load and step times, none of which reaches a proposer.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NullProposer"]


class NullProposer:
    """No drafts from the worker."""

    def __init__(self, vllm_config: object) -> None:  # noqa: ARG002  (vLLM passes it)
        """This runs in the worker, before any step."""
        from agentspec_runtime.engine.cpu_sampling import repair_cpu_sampling

        repair_cpu_sampling()

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], *_: object, **__: object
    ) -> list[list[int]]:
        """One empty draft per row of the batch."""
        return [[] for _ in sampled_token_ids]

    def load_model(self, *_: object, **__: object) -> None:
        """There is no model."""

    def dummy_run(self, *_: object, **__: object) -> None:
        """There is nothing to warm up."""
