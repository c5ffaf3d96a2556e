"""Step-time curves on disk: a measured one to start from, and the one that was learned last time.

A curve belongs to a model (and a model drafter), a dtype, an engine mode and a machine; the name of its file
says which. With `cost_curve="auto"` the budget starts from what the last run learned there, so that the first
steps after a restart are priced right, and keeps what it learns when the engine shuts down. A kept file that
is damaged or cannot be written is a line in the log: the curve is then learned from the first steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentspec_runtime.budget import CostCurve, StepCost
from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["AUTO", "CurveFile", "curve_of", "read_curve"]

_log = logging.getLogger("agentspec.engine")

AUTO: Final = "auto"
_WORTH_KEEPING: Final = 500
"""Steps after which a curve has seen more than its start: the half-life of its past is 350."""


def read_curve(path: Path) -> CostCurve:
    """A curve of `agentspec bench calibrate`, or one that was kept.

    Raises:
        ConfigurationError: there is none in the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        base, per_token, per_attended, per_request = (float(value) for value in data["coefficients"])
        bends = tuple(float(value) for value in data.get("bends", ()))
        verify, slot = float(data.get("verify", 0.0)), float(data.get("slot", 0.0))
        assist = tuple(float(value) for value in data.get("assist", ()))
        values = (base, per_token, per_attended, per_request, *bends, verify, slot, *assist)
        if not 0.0 < base + per_token < math.inf or min(values) < 0.0 or not all(map(math.isfinite, values)):
            raise ValueError("step times must be positive")
        coefficients = (base, per_token, per_attended, per_request)
        return CostCurve(coefficients=coefficients, bends=bends, verify=verify, slot=slot, assist=assist)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"cost_curve {str(path)!r} cannot be used ({error}): write one with `agentspec bench calibrate`"
        ) from error


class CurveFile:
    """Where the curve of one model on one machine is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> CostCurve | None:
        """What was kept, or None."""
        if not self.path.exists():
            return None
        try:
            return read_curve(self.path)
        except ConfigurationError as error:
            _log.warning("kept step times are not used: %s", error)
            return None

    def keep(self, cost: StepCost) -> bool:
        """Write what was learned, if it is worth it. Whole or not at all; False when it was not written."""
        if cost.num_steps < _WORTH_KEEPING:
            return False
        try:
            self._write(json.dumps(asdict(cost.curve())) + "\n")
        except OSError as error:
            _log.warning("step times are not kept: %s", error)
            return False
        return True

    def _write(self, text: str) -> None:
        """Beside its place and then there; a full disk leaves neither half a curve nor half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        part = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            part.replace(self.path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def curve_of(vllm_config: VllmConfig) -> CurveFile:
    """The file of this model, dtype, engine mode and machine, in the cache folder."""
    from agentspec_runtime.embedded.cache import cache_root

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    what = "|".join(
        (
            model.model,
            str(model.dtype),
            str(model.enforce_eager),
            str(parallel.world_size_across_dp),
            str(vllm_config.scheduler_config.max_num_batched_tokens),
            str(vllm_config.cache_config.cache_dtype),
            _device(),
            os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
            *_assist(vllm_config),
        )
    )
    name = "".join(c if c.isalnum() else "-" for c in Path(model.model).name)[:60]
    return CurveFile(
        cache_root() / "curves" / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}.json"
    )


def _assist(vllm_config: VllmConfig) -> tuple[str, ...]:
    """A model drafter of the worker takes a part of every step."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method == "custom_class":
        return ()
    return (speculative.method, str(speculative.model))


def _device() -> str:
    from vllm.platforms import current_platform

    return f"{current_platform.get_device_name()}|{platform.machine()}|{os.cpu_count()}"
