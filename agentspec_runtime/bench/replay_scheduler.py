"""Our scheduler with the observer of a replay, which writes down what only the scheduler knows.

Loaded by name in the engine process of our methods. The path of the sums stands in `additional_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentspec_runtime.bench.scheduler_records import SummingObserver
from agentspec_runtime.engine.scheduler import AgentSpecScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from agentspec_runtime.engine.config import EngineConfig
    from agentspec_runtime.observe import Observer

__all__ = ["RECORDS_KEY", "RecordingScheduler"]

RECORDS_KEY: Final = "agentspec_bench_records"


class RecordingScheduler(AgentSpecScheduler):
    """The same scheduler; `StepReport`s are added up in a file."""

    def make_observer(self, config: EngineConfig, vllm_config: VllmConfig) -> Observer | None:
        """The measured engine has telemetry off, so there is no other observer to keep."""
        del config
        return SummingObserver(Path(vllm_config.additional_config[RECORDS_KEY]))
