"""Live runs: the pool, the figures, and agents against a scripted server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest

from agentspec_runtime.bench.live import (
    LivePlan,
    LiveRow,
    _command,
    live,
    load_live,
    run_jobs,
    summarise_live,
)
from agentspec_runtime.bench.live_agents import Agents, TaskOutcome, load_tasks
from agentspec_runtime.bench.live_report import build_live_report, write_live_report
from agentspec_runtime.bench.summary import Cost
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.demo.server import RunningServer, ServerCommand
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.testing import MockVLLM, RecordedRequest, Reply

openai = pytest.importorskip("openai")


def outcome(solved: bool, seconds: float, **changes: object) -> TaskOutcome:
    values: dict[str, object] = {"calls": 2, "tokens": 50, "drafted": 40, "accepted": 30, **changes}
    return TaskOutcome(agent="a", task="t", solved=solved, attempts=1, seconds=seconds, **values)  # type: ignore[arg-type]


def test_the_cost_of_the_wall_time_is_shared_by_the_solved_tasks() -> None:
    outcomes = [outcome(True, 1.0), outcome(False, 3.0), outcome(True, 2.0), outcome(False, 4.0, failed="x")]
    row = summarise_live("m", 2, 0, "closed loop", outcomes, 36.0, 10.0)
    assert (row.tasks, row.solved, row.failed) == (4, 2, 1)
    assert row.cost_per_task == pytest.approx(0.025)
    assert row.cost_per_solved == pytest.approx(0.05)
    assert (row.tasks_per_hour, row.task_p50) == (400.0, 2.5)
    assert (row.drafted, row.accepted, row.rejected_share) == (160, 120, 0.25)
    nothing = summarise_live("m", 2, 0, "closed loop", [outcome(False, 1.0)], 36.0, 10.0)
    assert nothing.cost_per_solved is None


def test_no_more_jobs_run_at_a_time_than_asked_for_and_all_are_done() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def job(due_s: float) -> TaskOutcome:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return outcome(True, time.perf_counter() - due_s)

    outcomes, wall_s = run_jobs([job] * 12, 3)
    assert (len(outcomes), most[0]) == (12, 3)
    assert wall_s >= 4 * 0.02


def test_an_open_loop_counts_the_wait_for_a_slot() -> None:
    def job(due_s: float) -> TaskOutcome:
        time.sleep(0.05)
        return outcome(True, time.perf_counter() - due_s)

    outcomes, _ = run_jobs([job] * 6, 1, rate_per_s=1000.0)
    assert max(one.seconds for one in outcomes) > 0.2


def test_who_interrupts_does_not_wait_for_what_was_still_to_be_run() -> None:
    """Ctrl-C once ran every remaining agent first."""
    begun: list[float] = []

    def interrupted(due_s: float) -> TaskOutcome:
        raise KeyboardInterrupt

    def slow(due_s: float) -> TaskOutcome:
        begun.append(due_s)
        time.sleep(0.2)
        return outcome(True, 0.2)

    with pytest.raises(KeyboardInterrupt):
        run_jobs([interrupted, *[slow] * 50], 1)
    time.sleep(0.5)
    assert len(begun) <= 2


def test_reflexion_agents_on_a_server_are_judged_by_their_tests(tmp_path: Path) -> None:
    """The first answer is wrong, the second right: solved in two attempts, three calls, one session."""
    tasks = tmp_path / "tasks.jsonl"
    stub = 'def inc(n):\n    """Return n + 1."""\n'
    task = {"name": "inc", "stub": stub, "visible": [["inc(1)", "2"]], "hidden": [["inc(-1)", "0"]]}
    tasks.write_text(json.dumps(task) + "\n\n")

    def answer(request: RecordedRequest) -> Reply:
        told = json.dumps(request.body["messages"])
        if "review a Python function" in told:
            return Reply("add one")
        return Reply(f"```python\ndef inc(n):\n    return n{' + 1' if 'add one' in told else ''}\n```")

    agents = Agents(served="mock-model", tasks=load_tasks(tasks), coder=False, rounds=2)
    with MockVLLM(answer) as server, instrument(servers="always"):
        client = openai.OpenAI(base_url=server.url, api_key="unused")
        outcomes, _ = run_jobs(list(agents.jobs("cell", 0, server.url, client)), 2)
        hints = [request.hint for request in server.requests]
    assert [(one.solved, one.attempts, one.calls, one.failed) for one in outcomes] == [(True, 2, 3, "")] * 2
    assert all(one.tokens > 0 for one in outcomes)
    assert {hint.session for hint in hints if hint} == {"cell-inc-0", "cell-inc-1"}
    assert {request.body["cache_salt"] for request in server.requests} == {"cell"}


def test_a_whole_run_keeps_a_row_per_cell_and_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that answer at once stand in for real ones: ours tells of its drafts, a plain one does not."""
    salts: dict[str, set[str]] = {}
    seeds: dict[str, set[object]] = {}

    @contextmanager
    def server_of(command: ServerCommand, **_: object) -> Iterator[RunningServer]:
        kind: Literal["agentspec", "vllm"] = "vllm" if command.plain else "agentspec"
        reply = Reply("no idea", drafted=None if command.plain else [4], accepted=[3])
        with MockVLLM([reply], poses_as=kind) as server:
            yield RunningServer(base_url=server.url, pid=0, started_s=1.0)
            salts[kind] = {str(request.body["cache_salt"]) for request in server.requests}
            seeds.setdefault(kind, set()).update(request.body["seed"] for request in server.requests)

    monkeypatch.setattr("agentspec_runtime.bench.live.running_server", server_of)
    agents = Agents(served="mock-model", rounds=1, attempts=1, coder=False)
    plan = LivePlan(out=tmp_path, agents=agents, concurrency=(1, 4), repeat=2)
    rows = live(plan, price_per_hour=1.0)
    assert [(row.method, row.concurrency, row.repeat) for row in rows] == [
        *(("plain", 1, 0), ("plain", 4, 0), ("agentspec", 1, 0), ("agentspec", 4, 0)),
        *(("agentspec", 1, 1), ("agentspec", 4, 1), ("plain", 1, 1), ("plain", 4, 1)),
    ]
    assert load_live(tmp_path / "live.jsonl") == rows
    for row in rows:
        assert (row.tasks, row.solved, row.failed) == (len(agents.tasks), 0, 0)
        assert row.cost_per_solved is None
    assert (rows[0].drafted, rows[0].accepted, rows[0].rejected_share) == (None, None, None)
    assert rows[2].drafted
    assert rows[2].rejected_share == 0.25
    assert salts == {"vllm": {"plain-c1", "plain-c4"}, "agentspec": {"agentspec-c1", "agentspec-c4"}}
    provenance = json.loads((tmp_path / "live-provenance.json").read_text())
    assert "--plain" in provenance["engine"]["plain"]["command"]
    assert provenance["seeds"] == [0, 1]
    assert seeds == {"vllm": {0, 1}, "agentspec": {0, 1}}
    assert len(provenance["notes"]["tasks_sha256"]) == 64
    html, markdown = write_live_report(tmp_path, Cost(per_hour=1.0))
    assert "none solved" in html.read_text()
    assert "0 of" in markdown.read_text()
    with pytest.raises(ConfigurationError, match="is there already"):
        live(plan)


def row_of(method: str, repeat: int, *, wall_s: float, solved: int, failed: str = "") -> LiveRow:
    outcomes = [outcome(number < solved, 2.0, failed=failed) for number in range(20)]
    return summarise_live(method, 8, repeat, "closed loop", outcomes, wall_s, None)


def test_the_report_pairs_repeats_and_tells_chance_from_difference() -> None:
    """Plain slows down from 100 to 200 s, ours takes half of it each time: the factor is 2, not 1 to 4."""
    rows = [
        row_of("plain", 0, wall_s=100.0, solved=10),
        row_of("agentspec", 0, wall_s=50.0, solved=11),
        row_of("agentspec", 1, wall_s=100.0, solved=9),
        row_of("plain", 1, wall_s=200.0, solved=10),
    ]
    told = build_live_report(rows, "{}", Cost(per_hour=3600.0)).markdown
    assert "agentspec did 2.00x (2.00 to 2.00) the tasks per hour of plain" in told
    assert "took 0.50x the machine time; solved 20 of 40, plain 20 of 40." in told
    assert "7.5 s, $7.5000" in told
    # 1.96 * sqrt(0.5 * 0.5 * 2 / 40) = 0.219
    assert "solved +0% of the tasks against plain; differences within ±22% are chance" in told
    assert "raised" not in told
    assert "text per task" not in told
    wordy = [rows[0], replace(rows[1], out_tokens=900, tok_s=18.0)]
    told = build_live_report(wordy, "{}", None).markdown
    assert "agentspec wrote -10% text per task against plain. Per token agentspec had 1.80x" in told
    worse = [*rows[:2], row_of("agentspec", 1, wall_s=100.0, solved=0, failed="x"), rows[3]]
    told = build_live_report(worse, "{}", None).markdown
    assert "20 agents raised" in told
    assert "Agents raised (20 and 0), so this is no comparison." in told
    # 11 + 0 of 40 against 20 of 40: pooled 0.3875, bound 0.214, difference -0.225
    assert "solved -22% of the tasks against plain, and differences within ±21% are chance" in told
    assert "this is more" in told


def test_rows_of_another_version_are_refused_and_a_torn_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    whole = json.dumps(asdict(row_of("plain", 0, wall_s=1.0, solved=1)))
    path.write_text(whole + "\n" + whole[:50])
    assert len(load_live(path)) == 1
    path.write_text('{"method": "plain", "outcomes": []}\n')
    with pytest.raises(ConfigurationError, match="not a row of this version"):
        load_live(path)
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="no finished cell"):
        load_live(path)


def test_an_agent_that_fails_is_counted_and_the_others_go_on() -> None:
    agents = Agents(served="mock-model", coder=False, rounds=1)
    with MockVLLM([Reply(status=400, error="no such luck")]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0)
        outcomes, _ = run_jobs(list(agents.jobs("cell", 0, server.url, client)), 4)
    assert len(outcomes) == len(agents.tasks)
    assert all("BadRequestError" in one.failed and not one.solved for one in outcomes)


def test_a_method_becomes_the_flags_of_its_server(tmp_path: Path) -> None:
    plan = LivePlan(out=tmp_path, agents=Agents(served="m"), vllm_flags=("--enforce-eager",))
    ours, sync, ngram = (
        _command(plan, label).arguments()
        for label in ("agentspec", "plain-sync", "ngram:num_speculative_tokens=7")
    )
    assert "--plain" not in ours
    assert {"--plain", "--no-async-scheduling", "--enforce-eager"} <= set(sync)
    place = ngram.index("--speculative-config.num_speculative_tokens")
    assert ngram[place + 1] == "7"
    assert "--per-request-spec-decode-metrics" in ngram
    assert "--per-request-spec-decode-metrics" not in sync
    assisted = _command(plan, "agentspec-assist:assist=eagle3:some/head").arguments()
    assert assisted[assisted.index("--assist") + 1] == "eagle3:some/head"
    assert assisted.index("--assist") < assisted.index("--")
    assert "--plain" in _command(plan, "eagle3:model=some/head").arguments()
    assert not any("otlp" in word for word in ours + sync + ngram)
    with pytest.raises(ConfigurationError, match="no live form"):
        _command(plan, "agentspec-nohints")


def test_a_task_file_with_a_fault_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"name": "a", "stub": "s", "visible": [], "hidden": []}\n{"name": "b"}\n')
    with pytest.raises(ConfigurationError, match="line 2 is no task"):
        load_tasks(path)
