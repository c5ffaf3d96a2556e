"""Step times: curves, rooflines, the fit of a calibration, and goodput worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agentspec_runtime.bench.calibrate import MeasuredStep, fit_coefficients, step_seconds
from agentspec_runtime.bench.costs import CostCurve, goodput_table, load_curve, save_curve
from agentspec_runtime.bench.measure import StepRecord
from agentspec_runtime.bench.presets import PRESET_NAMES, preset
from agentspec_runtime.bench.simulate import LaneResult
from agentspec_runtime.bench.tally import Tally, WireTally
from agentspec_runtime.errors import ConfigurationError

CURVE = CostCurve(model="m", machine="x", points=((1, 0.01), (10, 0.02), (20, 0.04)), context_tokens=100)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 0.01), (5.5, 0.015), (20, 0.04), (30, 0.06), (0.5, 0.01)]
)
def test_a_curve_is_linear_between_points_and_beyond(tokens: float, seconds: float) -> None:
    assert CURVE.step_s(tokens, 1) == pytest.approx(seconds)


def test_a_curve_survives_its_file_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    save_curve(path, CURVE)
    assert load_curve(path) == CURVE
    for text in ("{}", "[", '{"model": "m", "machine": "x", "points": [[1, 0]], "context_tokens": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="cost curve"):
            load_curve(path)


def lane(method: str, steps: int, out_tokens: int, drafted: int, accepted: int) -> LaneResult:
    tally = Tally(requests=0, out_tokens=out_tokens, steps=steps, drafted=drafted, accepted=accepted)
    return LaneResult(method=method, setting=f"{drafted}", figures=WireTally.of(tally))


def test_goodput_is_tokens_over_the_time_of_what_was_computed() -> None:
    """Two tokens per step for three drafted ones: 2 / T(4) at batch 1, 5 * 2 / T(20) at batch 5."""
    rows = goodput_table([lane("d", 100, 200, 300, 100)], CURVE, [1, 5])
    found = {(row.method, row.batch): row for row in rows}
    assert found["plain", 1].tokens_per_s == pytest.approx(100.0)
    assert found["d", 1].tokens_per_s == pytest.approx(2 / (0.01 + 3 / 9 * 0.01), abs=0.01)
    assert found["d", 5].tokens_per_s == pytest.approx(10 / 0.04)
    assert found["d", 5].speedup == pytest.approx((10 / 0.04) / (5 / (0.01 + 4 / 9 * 0.01)), abs=1e-3)


def test_each_method_takes_its_best_setting_at_each_batch_and_oracles_stay_apart() -> None:
    greedy, careful = lane("d", 100, 300, 2000, 200), lane("d", 100, 150, 60, 50)
    oracle = LaneResult(method="oracle", setting="O3", figures=lane("o", 100, 400, 300, 300).figures)
    rows = goodput_table([greedy, careful, oracle], CURVE, [1, 100])
    chosen = {(row.method, row.batch): row.setting for row in rows}
    assert chosen["d", 100] == "60"
    assert ("O3", 1) in chosen


def test_rooflines_never_fall_and_have_their_knee() -> None:
    for name in PRESET_NAMES:
        step = preset(name, 1024)
        times = [step.step_s(n, 1) for n in range(1, 600)]
        assert all(after >= before for before, after in pairwise(times)), name
    dense = preset("h100/dense-8b", 0)
    # 16.06 GB over 0.8 * 3.35 TB/s, plus 1.5 ms; flat until the arithmetic takes over.
    assert dense.step_s(1, 1) == pytest.approx(0.0015 + 16.06e9 / (0.8 * 3.35e12))
    assert dense.step_s(200, 1) == dense.step_s(1, 1)
    assert dense.step_s(1000, 1) == pytest.approx(0.0015 + 2 * 8.03e9 * 1000 / (0.6 * 989e12))
    with pytest.raises(ConfigurationError, match="known are a100-80g/dense-8b"):
        preset("h100/none")


def test_a_mixture_of_experts_reads_more_weights_as_more_tokens_choose() -> None:
    step = preset("a100-80g/moe-20b", 0)
    assert step.step_s(16, 1) > 1.5 * step.step_s(1, 1)
    assert step.step_s(200, 1) < 1.2 * step.step_s(64, 1)


def test_the_fit_of_a_calibration_finds_the_coefficients_that_made_it() -> None:
    truth = (0.02, 0.0005, 0.0003, 0.001)
    measured = [
        MeasuredStep(
            requests=r,
            tokens=r * k,
            context_tokens=c,
            seconds=truth[0] + truth[1] * r * k + truth[2] * r * k * c / 1e3 + truth[3] * r,
        )
        for r in (1, 2, 4, 8, 16)
        for k in (1, 16)
        for c in (128, 512)
    ]
    assert fit_coefficients(measured) == pytest.approx(truth, rel=1e-6)
    shrinking = [
        MeasuredStep(requests=r, tokens=r, context_tokens=c, seconds=0.05 - 1e-5 * c)
        for r in (1, 2, 4)
        for c in (128, 512)
    ]
    assert min(fit_coefficients(shrinking)) >= 0.0


def test_a_calibration_point_is_the_median_of_full_decode_steps() -> None:
    def step(begin_s: float, requests: int, prompt: int = 0) -> StepRecord:
        return StepRecord(
            begin_s=begin_s,
            sampled_s=begin_s,
            draft_s=0.0,
            tokens=requests,
            prompt_tokens=prompt,
            preempted=0,
            fillers=0,
            rows=((0, 0, 1),) * requests,
        )

    begins = np.cumsum([0, 9, 9, 9, 1, 1, 2, 1, 1]).tolist()
    steps = [step(begin, 2) for begin in begins]
    assert step_seconds(steps, 2) == 1.0
    assert step_seconds(steps, 3) is None
    assert step_seconds([step(0, 2, prompt=5), step(1, 2)], 2) is None
