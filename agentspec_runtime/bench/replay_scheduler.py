"""Our scheduler with one more observer, so that a replay learns what only the scheduler knows.

Loaded by name in the engine process of our methods. The path of the sums stands in `additional_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm.config import VllmConfig

from agentspec_runtime.bench.scheduler_records import SummingObserver
from agentspec_runtime.engine.scheduler import AgentSpecScheduler

__all__ = ["RECORDS_KEY", "RecordingScheduler"]

RECORDS_KEY: Final = "agentspec_bench_records"


class RecordingScheduler(AgentSpecScheduler):
    """The same scheduler; `StepReport`s are added up in a file."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        path = vllm_config.additional_config.get(RECORDS_KEY)
        if path:
            # The measured engine has telemetry off, so there is no other observer to keep.
            self._speculation._observer = SummingObserver(Path(path))  # noqa: SLF001 - no public place for it
