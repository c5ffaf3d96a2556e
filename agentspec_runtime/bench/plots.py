"""Pictures of simulations, for people who would rather look than read; SVG files.

Of `agentspec bench simulate`: the frontier of a workload (accepted against rejected draft tokens, every
setting of every method a point), and how well survival is calibrated (what was claimed against what came
true). Of `agentspec bench controller`: load, budget beside optimum, and goodput, step by step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from agentspec_runtime.bench.charts import PALETTE, Series, lines, stacked
from agentspec_runtime.bench.controller import Run
from agentspec_runtime.bench.controller_figures import WINDOW, Figures, columns, smoothed
from agentspec_runtime.bench.provenance import Provenance
from agentspec_runtime.bench.simulate import WorkloadResult
from agentspec_runtime.errors import ConfigurationError

__all__ = [
    "calibration_svg",
    "controller_svg",
    "frontier_svg",
    "read_simulation",
    "write_controller",
    "write_plots",
]

_COLORS: Final[Mapping[str, str]] = {"agentspec": PALETTE[0], "suffix": PALETTE[2], "ngram": PALETTE[3]}
_FEW_SLOTS: Final = 50
"""Bins with fewer slots are left out: their share is mostly chance."""
_LEAST_REJECTED: Final = 0.01
_POINTS: Final = 400
"""Points of a line over steps: more than that are not seen."""
_RESULTS: Final = TypeAdapter(list[WorkloadResult])


def read_simulation(path: Path) -> list[WorkloadResult]:
    """Workloads of a file that `agentspec bench simulate --out` wrote.

    Raises:
        ConfigurationError: it is not such a file.
    """
    try:
        return _RESULTS.validate_python(json.loads(path.read_text(encoding="utf-8"))["workloads"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigurationError(
            f"{path} is no result of a simulation ({type(error).__name__}): "
            "agentspec bench simulate --out FILE writes one"
        ) from error


def write_plots(results: Sequence[WorkloadResult], folder: Path) -> list[Path]:
    """One frontier per workload and one calibration for all; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {f"frontier-{result.workload}.svg": frontier_svg(result) for result in results}
    pictures["calibration.svg"] = calibration_svg(results)
    written = []
    for name, picture in pictures.items():
        (folder / name).write_text(picture + "\n", encoding="utf-8")
        written.append(folder / name)
    return written


def frontier_svg(result: WorkloadResult) -> str:
    """Accepted against rejected draft tokens per output token; only settings that no other one beats."""
    series = []
    for method, color in _COLORS.items():
        points = sorted(
            (max(lane.figures.rejected_per_token, _LEAST_REJECTED), lane.figures.accepted_per_token)
            for lane in result.lanes
            if lane.method == method and lane.figures.drafted
        )
        best = _undominated(points)
        if best:
            series.append(Series(name=method, x=[x for x, _ in best], y=[y for _, y in best], color=color))
    return lines(
        series,
        x_label=f"{result.workload}: rejected draft tokens per output token",
        y_label="accepted per output token",
        x_ticks=[0.01, 0.03, 0.1, 0.3, 1, 3],
        log_x=True,
    )


def _undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for rejected, accepted in points:
        if not best or accepted > best[-1][1]:
            best.append((rejected, accepted))
    return best


def calibration_svg(results: Sequence[WorkloadResult]) -> str:
    """Share of slots that survived against the survival that was claimed, of the widest drafts of ours."""
    series = [Series(name="exact", x=[0, 1], y=[0, 1], color=PALETTE[1], dashed=True)]
    for index, result in enumerate(results):
        ours = [lane for lane in result.lanes if lane.method == "agentspec" and lane.figures.drafted]
        if not ours:
            continue
        widest = max(ours, key=lambda lane: lane.figures.drafted).figures
        bins = [
            (claimed / slots, survived / slots)
            for slots, claimed, survived in zip(*widest.calibration, strict=True)
            if slots >= _FEW_SLOTS
        ]
        series.append(
            Series(
                name=f"{result.workload} {widest.calibration_error or 0.0:.3f}",
                x=[x for x, _ in bins],
                y=[y for _, y in bins],
                color=(PALETTE[0], *PALETTE[2:])[index % (len(PALETTE) - 1)],
            )
        )
    return lines(
        series,
        x_label="survival that was claimed (beside the name: mean error over all slots)",
        y_label="share that survived",
        x_ticks=[0, 0.25, 0.5, 0.75, 1],
    )


def write_controller(
    results: Sequence[tuple[Run, Figures]], provenance: Provenance, folder: Path
) -> list[Path]:
    """controller.json, with the figures and every step, and a picture of each programme; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    programmes = [{**asdict(found), "records": columns(run.steps)} for run, found in results]
    texts = {
        "controller.json": json.dumps({"provenance": asdict(provenance), "programmes": programmes}),
        **{f"{found.programme}.svg": controller_svg(run, found) for run, found in results},
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return [folder / name for name in texts]


def controller_svg(run: Run, found: Figures) -> str:
    """Requests in flight, draft tokens of the budget and of the optimum, and goodput over that of plain."""
    every = max(len(run.steps) // _POINTS, 1)

    def line(name: str, values: Sequence[float], color: str, *, dashed: bool = False) -> Series:
        shown = list(values)[::every]
        return Series(name=name, x=range(0, len(values), every), y=shown, color=color, dashed=dashed)

    load = line("in flight", [step.in_flight for step in run.steps], PALETTE[1])
    budget = line("budget", smoothed([step.drafted for step in run.steps]).tolist(), PALETTE[0])
    best = line("optimum", smoothed([step.optimum for step in run.steps]).tolist(), PALETTE[2], dashed=True)
    middles = [window.first_step + WINDOW / 2 for window in found.windows]
    goodput = [
        Series(name="budget", x=middles, y=[w.over_plain for w in found.windows], color=PALETTE[0]),
        Series(name="plain", x=middles, y=[1.0] * len(middles), color=PALETTE[1], dashed=True),
    ]
    return stacked(
        [
            lines([load], x_label="step", y_label="requests in flight"),
            lines([best, budget], x_label="step", y_label="draft tokens per step"),
            lines(goodput, x_label="step", y_label="goodput over plain"),
        ],
        title=f"{run.programme.name}: load, budget and goodput by step",
    )
