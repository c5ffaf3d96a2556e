"""Prometheus: exact counts, bounded labels, and the way from the engine process to the API process."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from engine_records import make_request, make_step
from prometheus_client import CollectorRegistry, generate_latest

from agentspec_runtime.observe import DraftSource
from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer
from agentspec_runtime.telemetry.metrics import prepare_multiprocess


def observer_on(registry: CollectorRegistry) -> EngineObserver:
    observer = build_engine_observer(registry=registry, environ={})
    assert isinstance(observer, EngineObserver)
    return observer


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, f"{name} {labels} is not exposed"
    return found


def summed(registry: CollectorRegistry, name: str) -> float:
    return sum(
        sample.value for family in registry.collect() for sample in family.samples if sample.name == name
    )


def test_counters_equal_the_sums_of_the_reports() -> None:
    """drafted, accepted, rejected and discarded by block and source, exactly."""
    registry = CollectorRegistry()
    observer = observer_on(registry)
    made = make_request(num_blocks=6, steps_per_block=50, seed=11)
    for step in made.steps:
        observer.on_step(step)
    observer.on_request(made.request)
    observer.close()
    for block in ("text", "code", "tool_call"):
        for source in DraftSource:
            want = [r.verdicts.get(source) for r in made.request.blocks if r.kind == block]
            got = value(registry, "agentspec_draft_tokens_total", block=block, source=str(source))
            assert got == sum(verdict.drafted for verdict in want if verdict)
    drafted = summed(registry, "agentspec_draft_tokens_total")
    assert drafted == sum(made.request.per_step_drafted)
    assert summed(registry, "agentspec_accepted_tokens_total") == sum(made.request.per_step_accepted)
    assert drafted == summed(registry, "agentspec_accepted_tokens_total") + summed(
        registry, "agentspec_rejected_tokens_total"
    )
    assert value(registry, "agentspec_steps_total") == 300
    assert value(registry, "agentspec_silent_steps_total") == made.request.per_step_drafted.count(0)
    assert value(registry, "agentspec_step_seconds_count") == 300
    assert value(registry, "agentspec_requests_total", finish_reason="stop") == 1


def test_gauges_and_faults_are_visible() -> None:
    """Price, index memory, dropped hints and internal errors (reported as totals of each engine)."""
    registry = CollectorRegistry()
    observer, other = observer_on(registry), observer_on(registry)
    for total in (1, 1, 4):
        observer.on_step(make_step(dropped_hints=total, internal_errors=total // 4, grammar_cut=total))
    observer.flush()
    other.on_step(make_step(dropped_hints=2, internal_errors=2))
    observer.close()
    other.close()
    assert value(registry, "agentspec_slot_price") == pytest.approx(0.35)
    assert value(registry, "agentspec_index_bytes") == 1 << 20
    assert value(registry, "agentspec_dropped_hints_total") == 6
    assert value(registry, "agentspec_internal_errors_total") == 3
    assert value(registry, "agentspec_grammar_cut_tokens_total") == 6, "by step, not a total"
    assert value(registry, "agentspec_step_prediction_ratio_sum") == pytest.approx(4.4)


def test_what_clients_send_never_becomes_a_label() -> None:
    """Session, agent and unknown finish reasons stay out of the exposition."""
    registry = CollectorRegistry()
    observer = observer_on(registry)
    observer.on_request(make_request(finish_reason="CANARY-reason").request)
    observer.close()
    text = generate_latest(registry).decode()
    assert "CANARY" not in text
    assert "session-1" not in text
    assert "coder" not in text
    assert 'agentspec_requests_total{finish_reason="other"} 1.0' in text


def test_full_queues_drop_and_count() -> None:
    """An observer that is not drained in time loses records, tells how many, and never blocks."""
    registry = CollectorRegistry()
    made = observer_on(registry)
    observer = EngineObserver(metrics=made._metrics, spans=None, close_timeout_s=2.0, step_records=10)
    for _ in range(25):  # the reader wakes four times a second: these all meet a reader that is asleep
        observer.on_step(make_step())
    observer.close()
    assert observer.losses.steps == 15
    assert value(registry, "agentspec_telemetry_dropped_total", record="step") == 15
    assert value(registry, "agentspec_steps_total") == 10
    made.close()


@pytest.mark.parametrize("method", ["add_steps", "add_faults", "add_request", "set_losses"])
def test_metrics_that_raise_lose_records_and_nothing_else(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk under the shared files, say: counted, logged once, and what comes afterwards is counted."""
    registry = CollectorRegistry()
    observer = observer_on(registry)
    made = make_request()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level("ERROR", logger="agentspec.telemetry"), monkeypatch.context() as patch:
        patch.setattr(observer._metrics, method, full)
        for _ in range(2):
            observer.on_step(make_step())
            observer.on_request(made.request)
            assert observer.flush()
        observer.flush()
    assert observer._worker.failures > 0
    assert caplog.text.count("logged once") == 1
    observer.on_step(make_step())
    observer.on_request(made.request)
    observer.close()
    assert value(registry, "agentspec_steps_total") >= 1
    assert value(registry, "agentspec_requests_total", finish_reason="stop") >= 1


def test_two_observers_of_one_process_share_their_metrics() -> None:
    """An engine that is built twice (tests, notebooks) does not fail on duplicate names."""
    registry = CollectorRegistry()
    first, second = observer_on(registry), observer_on(registry)
    first.on_step(make_step())
    second.on_step(make_step())
    first.close()
    second.close()
    assert value(registry, "agentspec_steps_total") == 2


ENGINE_PROCESS = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from engine_records import make_request
    from agentspec_runtime.telemetry.engine import build_engine_observer
    observer = build_engine_observer(environ={})
    made = make_request(num_blocks=3, steps_per_block=20, seed=int(sys.argv[2]))
    for step in made.steps:
        observer.on_step(step)
    observer.close()
    print(sum(made.request.per_step_drafted))
"""

API_PROCESS = """
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def run(code: str, *arguments: str, directory: str) -> str:
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": directory}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_engine_processes_add_up_in_the_api_process(tmp_path: Path) -> None:
    """Two engine processes write, a third process (as vLLM's API process does) exposes the sums."""
    here = str(Path(__file__).parent)
    drafted = sum(int(run(ENGINE_PROCESS, here, seed, directory=str(tmp_path))) for seed in ("1", "2"))
    text = run(API_PROCESS, directory=str(tmp_path))
    found = re.findall(r"^agentspec_draft_tokens_total\{.*\} ([0-9.]+)$", text, flags=re.MULTILINE)
    assert sum(map(float, found)) == drafted > 0
    assert "agentspec_steps_total 120.0" in text
    assert "agentspec_slot_price 0.35" in text
    assert "pid=" not in text


def test_prepare_multiprocess_makes_a_fresh_directory_once() -> None:
    """An existing choice is kept; without one, a new empty directory is made."""
    environ: dict[str, str] = {}
    made = prepare_multiprocess(environ)
    assert environ["PROMETHEUS_MULTIPROC_DIR"] == made
    assert list(Path(made).iterdir()) == []
    assert prepare_multiprocess(environ) == made
    Path(made).rmdir()
