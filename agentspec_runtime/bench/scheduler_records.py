"""What only our scheduler knows of a cell: time spent drafting, and verdicts by block and source.

The scheduler hands records to an `Observer`. The one here adds them up and writes the sums to a file from
time to time, so that a process that dies leaves almost all of them. It lives in the engine process, which
the driver of the load reaches by nothing but files: an emptied file says that another cell begins.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

from agentspec_runtime.bench.measure import DraftCounts, OwnSums
from agentspec_runtime.observe import RequestReport, StepReport

__all__ = ["SummingObserver", "read_scheduler_records"]

_WRITE_EVERY_S: Final = 0.5
"""A write takes about 0.1 ms; twice a second is below 0.1 % of any engine's time."""


class SummingObserver:
    """Observer that keeps running sums in a file; it starts again when the file was emptied."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_write = 0.0
        self._written = False
        self._errors = 0
        self._clear()

    def _clear(self) -> None:
        self._draft_s = 0.0
        self._grammar_cut = 0
        self._errors_before = self._errors
        self._block: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._source: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def on_step(self, report: StepReport) -> None:
        """Add one engine step."""
        if self._another_cell():
            self._clear()
        self._draft_s += report.draft_s
        self._grammar_cut += report.grammar_cut
        self._errors = report.internal_errors  # since the engine started
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
            "draft_s": self._draft_s,
            "grammar_cut": self._grammar_cut,
            "internal_errors": self._errors - self._errors_before,
            "by_block": self._block,
            "by_source": self._source,
        }
        self._path.write_text(json.dumps(sums), encoding="utf-8")
        self._written = True


def read_scheduler_records(path: Path) -> OwnSums | None:
    """Sums of a file, or None when the scheduler wrote none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return OwnSums(
        draft_s=data["draft_s"],
        grammar_cut=data["grammar_cut"],
        internal_errors=data["internal_errors"],
        by_block={name: DraftCounts(drafted=d, accepted=a) for name, (d, a) in data["by_block"].items()},
        by_source={name: DraftCounts(drafted=d, accepted=a) for name, (d, a) in data["by_source"].items()},
    )
