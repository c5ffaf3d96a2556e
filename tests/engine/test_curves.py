"""Step times that outlive the engine: kept at shutdown, read at the next start, never in the way."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_engine import Fault, ScriptedEngine, write_model_config
from vllm.v1.core.sched.scheduler import Scheduler

from agentspec_runtime.budget import StepCost, StepShape
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.engine.curves import CurveFile

pytestmark = pytest.mark.engine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(tmp_path: Path, **engine: object) -> ScriptedEngine:
    config = EngineConfig(telemetry=False, memory_mb=8, cost_curve="auto")
    return ScriptedEngine(write_model_config(tmp_path / "model"), config=config, **engine)  # type: ignore[arg-type]


def learned(engine: ScriptedEngine) -> StepCost:
    cost: StepCost = engine.scheduler._budget.cost
    return cost


def teach(cost: StepCost, steps: int) -> None:
    for number in range(steps):
        num_tokens = 1 + number % 40
        shape = StepShape(num_tokens=num_tokens, num_attended=100 * num_tokens, num_requests=1)
        cost.observe(shape, 0.03 + 0.002 * num_tokens + 0.01 * max(num_tokens - 16, 0))


@contextmanager
def no_byte_to_write() -> Iterator[None]:
    """As on a full disk: files of this process may not grow (EFBIG instead of ENOSPC)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path, cache: Path) -> None:
    first = start(tmp_path)
    teach(learned(first), 600)
    shape = StepShape(num_tokens=36, num_attended=3600, num_requests=4)
    expected = learned(first).predict(shape)
    first.scheduler.shutdown()
    second = start(tmp_path)
    assert learned(second).num_steps == 0
    assert learned(second).predict(shape) == pytest.approx(expected)
    assert [path.suffix for path in (cache / "curves").iterdir()] == [".json"]


def test_another_engine_has_a_curve_of_its_own(tmp_path: Path, cache: Path) -> None:
    first = start(tmp_path)
    teach(learned(first), 600)
    first.scheduler.shutdown()
    other = start(tmp_path, max_num_batched_tokens=1024)
    fresh = StepCost().predict(StepShape(num_tokens=36, num_attended=0, num_requests=4))
    assert learned(other).predict(StepShape(num_tokens=36, num_attended=0, num_requests=4)) == fresh


def test_a_few_steps_are_not_worth_keeping(tmp_path: Path, cache: Path) -> None:
    engine = start(tmp_path)
    teach(learned(engine), 100)
    engine.scheduler.shutdown()
    assert not cache.exists()


def test_a_curve_that_cannot_be_kept_does_not_hold_up_the_end(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised there, not only by a disk: vLLM's own shutdown comes after it."""
    engine = start(tmp_path)
    teach(learned(engine), 600)
    curve = engine.scheduler._curve
    assert curve is not None
    monkeypatch.setattr(curve, "keep", Fault(curve.keep, first=1, last=1))
    ended = []
    monkeypatch.setattr(Scheduler, "shutdown", lambda _: ended.append(True))
    engine.scheduler.shutdown()
    assert ended == [True]
    assert caplog.text.count("error in 'curve'") == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"coefficients": [1, 2]}', '{"coefficients": [1, 1, 1, 1], "bends": [-1]}']
)
def test_a_damaged_file_is_a_line_in_the_log(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = CurveFile(tmp_path / "curve.json")
    file.path.write_text(text)
    assert file.load() is None
    assert "kept step times are not used" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_curve_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    cost = StepCost()
    teach(cost, 600)
    assert not CurveFile(tmp_path / "taken" / "curve.json").keep(cost)
    assert "step times are not kept" in caplog.text


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once with the place taken by a folder (the move fails), once on a disk that takes no byte more."""
    cost = StepCost()
    teach(cost, 600)
    file = CurveFile(tmp_path / "curve.json")
    file.path.mkdir()
    assert not file.keep(cost)
    assert list(tmp_path.iterdir()) == [file.path]
    file.path.rmdir()
    with no_byte_to_write():
        assert not file.keep(cost)
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("step times are not kept") == 2
    assert file.keep(cost)


def test_a_kept_file_is_one_that_the_cost_curve_option_takes(tmp_path: Path) -> None:
    cost = StepCost()
    teach(cost, 600)
    file = CurveFile(tmp_path / "curve.json")
    assert file.keep(cost)
    assert json.loads(file.path.read_text())["coefficients"] == list(cost.curve().coefficients)
    config = EngineConfig(telemetry=False, memory_mb=8, cost_curve=str(file.path))
    engine = ScriptedEngine(write_model_config(tmp_path / "model"), config=config)
    shape = StepShape(num_tokens=20, num_attended=0, num_requests=1)
    assert learned(engine).predict(shape) == pytest.approx(cost.predict(shape))
