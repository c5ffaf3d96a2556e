"""Files of a replay read back: raw records of cells, and the rows of results.jsonl.

What a crash cut off is skipped, never an error: everything before it was written whole.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentspec_runtime.bench.load import CellLoad, TurnRecord
from agentspec_runtime.bench.measure import (
    CellKey,
    DraftCounts,
    OwnSums,
    ResultRow,
    StepRecord,
    measure_cell,
)
from agentspec_runtime.bench.replay_engine import RawCell
from agentspec_runtime.errors import ConfigurationError

__all__ = ["finished_cells", "load_rows", "measure_raw", "read_raw"]


def load_rows(path: Path) -> list[ResultRow]:
    """Rows of a results file; a line that a crash cut off is skipped.

    Raises:
        ConfigurationError: there is no such file, or nothing in it.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file; agentspec bench replay writes it")
    rows: list[ResultRow] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        for name in ("by_block", "by_source"):
            data[name] = {key: DraftCounts(**counts) for key, counts in data[name].items()}
        data["turn_quantiles"] = tuple(data["turn_quantiles"])
        rows.append(ResultRow(**data))
    if not rows:
        raise ConfigurationError(f"{path}: holds no finished cell yet")
    return rows


def finished_cells(out: Path) -> set[tuple[str, int, int]]:
    """Cells that are in the results already. A line that was cut off by a crash does not count."""
    finished: set[tuple[str, int, int]] = set()
    results = out / "results.jsonl"
    if not results.is_file():
        return finished
    whole: list[str] = []
    for line in results.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            finished.add((row["method"], row["concurrency"], row["repeat"]))
        except (json.JSONDecodeError, KeyError):
            continue
        whole.append(line)
    results.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return finished


def read_raw(path: Path) -> tuple[CellLoad, list[StepRecord]]:
    """Raw record of a cell."""
    raw: RawCell = json.loads(path.read_text(encoding="utf-8"))
    turns = [TurnRecord(**turn) for turn in raw["turns"]]  # type: ignore[arg-type] # written by asdict
    load = CellLoad(begin_s=raw["begin_s"], end_s=raw["end_s"], turns=turns)
    return load, [_step(entry) for entry in raw["steps"]]


def measure_raw(key: CellKey, raw_file: Path, ours: OwnSums | None) -> ResultRow:
    """Result row of a raw record."""
    load, steps = read_raw(raw_file)
    return measure_cell(key, load, steps, ours=ours)


def _step(entry: list[object]) -> StepRecord:
    begin_s, sampled_s, draft_s, tokens, prompt_tokens, preempted, fillers, rows = entry
    assert isinstance(rows, list)  # noqa: S101 - for the type checker: the worker wrote it
    return StepRecord(
        begin_s=float(str(begin_s)),
        sampled_s=float(str(sampled_s)),
        draft_s=float(str(draft_s)),
        tokens=int(str(tokens)),
        prompt_tokens=int(str(prompt_tokens)),
        preempted=int(str(preempted)),
        fillers=int(str(fillers)),
        rows=tuple((row[0], row[1], row[2]) for row in rows),
    )
