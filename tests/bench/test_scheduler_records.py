"""Sums of what only our scheduler knows, cell by cell; the driver of the load empties the file between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentspec_runtime.bench.measure import DraftCounts
from agentspec_runtime.bench.scheduler_records import SummingObserver, read_scheduler_records
from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.observe import DraftSource, StepReport, Verdict

STEP = StepReport(
    num_sampling=4, num_prefill_tokens=0, num_draft_tokens=9, num_waiting=0, price=0.35, predicted_s=0.010,
    measured_s=0.011, draft_s=0.5, index_s=0.0001, index_bytes=1 << 20, dropped_hints=0, internal_errors=0,
    verdicts={}, grammar_cut=3,
)  # fmt: skip


def test_each_cell_has_its_own_sums(tmp_path: Path) -> None:
    """Errors are told as a total since the engine started: those before a cell are not of it."""
    file = tmp_path / "sums"
    observer = SummingObserver(file)
    verdicts = {
        (SegmentKind.CODE, DraftSource.SESSION): Verdict(drafted=5, accepted=3),
        (SegmentKind.TEXT, DraftSource.CORPUS): Verdict(drafted=4),
    }
    for errors in (1, 1, 2):
        observer.on_step(replace(STEP, internal_errors=errors, verdicts=verdicts))
    observer.close()
    found = read_scheduler_records(file)
    assert found is not None
    assert (found.draft_s, found.grammar_cut, found.internal_errors) == (1.5, 9, 2)
    assert found.by_block == {
        "code": DraftCounts(drafted=15, accepted=9),
        "text": DraftCounts(drafted=12, accepted=0),
    }
    assert found.by_source == {
        "session": DraftCounts(drafted=15, accepted=9),
        "corpus": DraftCounts(drafted=12, accepted=0),
    }
    file.write_text("")  # another cell begins
    observer.on_step(replace(STEP, internal_errors=2, grammar_cut=1, draft_s=0.25))
    observer.close()
    found = read_scheduler_records(file)
    assert found is not None
    assert (found.draft_s, found.grammar_cut, found.internal_errors) == (0.25, 1, 0)
    assert found.by_block == {}


@pytest.mark.parametrize("text", [None, "", '{"draft_s": 1'])
def test_nothing_written_is_nothing_known(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "sums"
    if text is not None:
        file.write_text(text)
    assert read_scheduler_records(file) is None
