"""vLLM's CPU worker with two things more, for model drafters beside ours (`--assist`). Use by `--worker-cls`.

- Sampling of drafts put right (`cpu_sampling.py`); without `--assist` our proposer, which the worker loads,
  does it.
- A step that says so (`num_spec_tokens_to_schedule` below 0) runs nothing of the drafter, by the means that
  vLLM has for requests near the drafter's context limit: here the limit is 0 tokens for that step.

Written for vLLM 0.32 (vllm/v1/worker/gpu_model_runner.py, `_input_fits_in_drafter`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from agentspec_runtime.engine.cpu_sampling import repair_cpu_sampling

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RepairedCPUWorker"]

_LIMIT = "effective_drafter_max_model_len"


class RepairedCPUWorker(CPUWorker):
    """The same worker."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """See `Worker.load_model`."""
        repair_cpu_sampling()
        super().load_model(*args, **kwargs)
        self._drafter_limit: int | None = getattr(self.model_runner, _LIMIT, None)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """See `Worker.execute_model`. What it returns is sampled, and drafted from, by a call of its own."""
        leave_out = scheduler_output.num_spec_tokens_to_schedule < 0
        if leave_out:
            scheduler_output.num_spec_tokens_to_schedule = 0
        if self._drafter_limit is not None:
            setattr(self.model_runner, _LIMIT, 0 if leave_out else self._drafter_limit)
        return super().execute_model(scheduler_output)
