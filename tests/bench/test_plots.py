"""Pictures of a simulation: what stands in the file is what is drawn."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from agentspec_runtime.bench.plots import calibration_svg, frontier_svg, read_simulation, write_plots
from agentspec_runtime.bench.simulate import LaneResult, WorkloadResult
from agentspec_runtime.bench.tally import Tally, WireTally
from agentspec_runtime.errors import ConfigurationError


def lane(method: str, accepted: int, rejected: int, survived: float = 0.5) -> LaneResult:
    """Of 1,000 tokens; all its slots claimed a survival of one half."""
    tally = Tally()
    tally.out_tokens, tally.accepted, tally.drafted, tally.steps = 1000, accepted, accepted + rejected, 500
    tally.calibration[:, 10] = np.array([200.0, 100.0, 200.0 * survived])
    return LaneResult(method=method, setting="", figures=WireTally.of(tally))


def result(*lanes: LaneResult) -> WorkloadResult:
    return WorkloadResult(
        file="a.jsonl",
        workload="a",
        trajectories=1,
        requests=1,
        out_tokens=1000,
        skipped_requests=0,
        lanes=lanes,
    )


def circles(svg: str) -> list[tuple[float, float]]:
    return [
        (float(node.attrib["cx"]), float(node.attrib["cy"]))
        for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    ]


def test_a_setting_that_another_one_beats_is_not_drawn():
    svg = frontier_svg(result(lane("suffix", 500, 100), lane("suffix", 400, 300), lane("suffix", 600, 900)))
    points = circles(svg)
    assert len(points) == 2
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1], "more accepted is further up"
    assert re.findall(r">(suffix|agentspec|ngram)<", svg) == ["suffix"]


def test_calibration_lies_on_the_diagonal_only_if_it_is_right():
    diagonal = circles(calibration_svg([result(lane("agentspec", 500, 100))]))
    off = circles(calibration_svg([result(lane("agentspec", 500, 100, survived=0.9))]))
    begin, end, exact = diagonal
    assert exact == pytest.approx(((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2), abs=0.1)
    assert off[2][1] < exact[1] - 50
    assert "a 0.400" in calibration_svg([result(lane("agentspec", 500, 100, survived=0.9))])


def test_files_are_read_and_written(tmp_path: Path):
    document = {"workloads": [asdict(result(lane("agentspec", 500, 100), lane("suffix", 300, 100)))]}
    (tmp_path / "s.json").write_text(json.dumps(document))
    results = read_simulation(tmp_path / "s.json")
    assert results == [result(lane("agentspec", 500, 100), lane("suffix", 300, 100))]
    names = [path.name for path in write_plots(results, tmp_path / "out")]
    assert names == ["frontier-a.svg", "calibration.svg"]
    for name in names:
        ET.parse(tmp_path / "out" / name)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"workloads": [{"file": 1}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigurationError, match="bench simulate --out"):
        read_simulation(tmp_path / "s.json")
