"""vLLM's CPU worker, put right in three places. Use by `--worker-cls`; every server of ours on a CPU does.

- A request with a `seed` whose prompt is computed in several steps does not end the engine. After each but
  the last of them vLLM winds the request's random generator back (`_bookkeeping_sync`), which generators on a
  CPU cannot do. Here it is kept out of such a step: nothing is drawn from it that would have to be put back.
- Sampling of drafts follows the request's temperature (`cpu_sampling.py`), whoever made the drafts.
- A step that says so (`num_spec_tokens_to_schedule` below 0) runs nothing of a model drafter, by the means
  that vLLM has for requests near the drafter's context limit: here the limit is 0 tokens for that step.

Written for vLLM 0.32 (vllm/v1/worker/gpu_model_runner.py, `_bookkeeping_sync`, `_input_fits_in_drafter`).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1.worker.cpu_worker import CPUWorker

from agentspec_runtime.engine.cpu_sampling import repair_cpu_sampling

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RepairedCPUWorker", "kept_out"]

_T = TypeVar("_T")
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

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See `Worker.sample_tokens`."""
        batch = self.model_runner.input_batch
        discarded = self.model_runner.discard_request_mask.np[: batch.num_reqs]
        with kept_out(batch.generators, discarded):
            return super().sample_tokens(grammar_output)


@contextmanager
def kept_out(generators: MutableMapping[int, _T], discarded: npt.NDArray[np.bool_]) -> Iterator[None]:
    """Without the generators of those rows, bool[R], whose sampled token is thrown away; then with them."""
    rows = [row for row in map(int, np.flatnonzero(discarded)) if row in generators] if generators else []
    kept = {row: generators.pop(row) for row in rows}
    try:
        yield
    finally:
        generators.update(kept)
