"""vLLM's CPU worker with its sampling of drafts put right, for drafters that are not ours.

Otherwise our proposer, which the worker loads, does it (`proposer.py`). Use by `--worker-cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from agentspec_runtime.engine.cpu_sampling import repair_cpu_sampling

__all__ = ["RepairedCPUWorker"]


class RepairedCPUWorker(CPUWorker):
    """The same worker."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """See `Worker.load_model`."""
        repair_cpu_sampling()
        super().load_model(*args, **kwargs)
