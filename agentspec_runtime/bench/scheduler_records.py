"""What only our scheduler knows of a cell: time spent drafting, and verdicts by block and source.

The scheduler hands records to an `Observer`. The one here adds them up and writes the sums to a file from
time to time, so that a process that dies leaves almost all of them. It lives in the engine process, which
the driver of the load reaches by nothing but files: an emptied file says that another cell begins.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentspec_runtime.bench.measure import DraftCounts
from agentspec_runtime.observe import RequestReport, StepReport

__all__ = ["SchedulerSums", "SummingObserver", "read_scheduler_records"]

_WRITE_EVERY_S: Final = 0.5
"""A write takes about 0.1 ms; twice a second is below 0.1 % of any engine's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSums:
    """Sums over a cell."""

    steps: int = 0
    draft_s: float = 0.0
    index_s: float = 0.0
    internal_errors: int = 0
    by_block: Mapping[str, DraftCounts] = field(default_factory=dict)
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)


class SummingObserver:
    """Observer that keeps running sums in a file; it starts again when the file was emptied."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_write = 0.0
        self._written = False
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._draft_s = self._index_s = 0.0
        self._internal_errors = 0
        self._block: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._source: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def on_step(self, report: StepReport) -> None:
        """Add one engine step."""
        if self._another_cell():
            self._clear()
        self._steps += 1
        self._draft_s += report.draft_s
        self._index_s += report.index_s
        self._internal_errors += report.internal_errors
        for (block, source), verdict in report.verdicts.items():
            for sums, name in ((self._block, block), (self._source, source)):
                sums[str(name)][0] += verdict.drafted
                sums[str(name)][1] += verdict.accepted
        now = time.monotonic()
        if now >= self._next_write:
            self._next_write = now + _WRITE_EVERY_S
            self._write()

    def on_request(self, report: RequestReport) -> None:
        """Its steps have been told: written at once, there may be no further step."""
        del report
        self._write()

    def close(self) -> None:
        """Write what is left."""
        self._write()

    def _another_cell(self) -> bool:
        """Whether the file was emptied since the last write. Costs two microseconds."""
        if not self._written or self._path.stat().st_size:
            return False
        self._written = False
        return True

    def _write(self) -> None:
        sums = {
            "steps": self._steps,
            "draft_s": self._draft_s,
            "index_s": self._index_s,
            "internal_errors": self._internal_errors,
            "by_block": self._block,
            "by_source": self._source,
        }
        self._path.write_text(json.dumps(sums), encoding="utf-8")
        self._written = True


def read_scheduler_records(path: Path) -> SchedulerSums | None:
    """Sums of a file, or None when the scheduler wrote none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return SchedulerSums(
        steps=data["steps"],
        draft_s=data["draft_s"],
        index_s=data["index_s"],
        internal_errors=data["internal_errors"],
        by_block={name: DraftCounts(drafted=d, accepted=a) for name, (d, a) in data["by_block"].items()},
        by_source={name: DraftCounts(drafted=d, accepted=a) for name, (d, a) in data["by_source"].items()},
    )
