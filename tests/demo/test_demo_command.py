"""`agentspec demo` from its arguments to its last line, with scripted servers, and with the real ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec_runtime.bench.recordings import read_recordings
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.demo import command, main
from agentspec_runtime.demo.agents import Workload, run_agents
from agentspec_runtime.demo.blocks import REQUEST_SPAN, with_blocks
from agentspec_runtime.demo.reflexion import evaluate
from agentspec_runtime.demo.server import RunningServer, ServerCommand
from agentspec_runtime.demo.summary import DemoSummary, identical_turns
from agentspec_runtime.demo.tasks import CODING_TASKS, FUNCTION_TASKS
from agentspec_runtime.demo.turns import TaskResult, TurnLog, total
from agentspec_runtime.demo.workspace import Workspace
from agentspec_runtime.errors import ServerError
from agentspec_runtime.telemetry.otlp import read_jsonl, span_records
from agentspec_runtime.telemetry.receiver import OtlpReceiver
from agentspec_runtime.testing import MockVLLM, RecordedRequest, Reply, ToolCall

PRIME = "def is_prime(n):\n    return n > 1 and all(n % i for i in range(2, n))\n"
SUM_EVEN = "def sum_even(numbers):\n    return sum(n for n in numbers if n % 2 == 0)\n"


def model(request: RecordedRequest) -> Reply:
    """A model that solves the first task of each agent."""
    choice = request.body.get("tool_choice")
    match choice["function"]["name"] if isinstance(choice, dict) else None:
        case "read_file":
            return Reply(tool_calls=[ToolCall("read_file", {"path": "is_prime.py"})])
        case "write_file":
            return Reply(tool_calls=[ToolCall("write_file", {"path": "is_prime.py", "code": PRIME})])
        case None if "sum_even" in str(request.body["messages"][-1]["content"]):
            return Reply(f"```python\n{SUM_EVEN}```")
        case None:
            return Reply("done")
        case name:
            return Reply(tool_calls=[ToolCall(name, {})])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerCommand]]:
    """Scripted servers in place of real ones; collects what was to be started."""
    started: list[ServerCommand] = []

    @contextmanager
    def fake(wanted: ServerCommand, *, log: Path, on_wait: Any) -> Iterator[RunningServer]:
        started.append(wanted)
        log.write_text("server log")
        on_wait(0.1)
        with MockVLLM(model, models=["m"]) as server:
            yield RunningServer(base_url=server.url, pid=0, started_s=0.1)

    monkeypatch.setattr(command, "running_server", fake)
    monkeypatch.setattr(command, "_SPAN_TIMEOUT_S", 0.1)  # a scripted server sends no spans
    return started


def test_the_whole_command(
    commands: list[ServerCommand], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    handler = signal.getsignal(signal.SIGTERM)
    code = main(["--quick", "--model", "m", "--out", str(out), "--", "--max-num-seqs", "4"])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.err == ""
    lines = captured.out.splitlines()
    summary = DemoSummary.model_validate_json(lines[-1])
    assert summary.identical
    assert summary.turns == 7
    assert (summary.plain.solved, summary.plain.tasks) == (2, 2)
    assert [started.plain for started in commands] == [True, False]
    assert all(started.vllm_flags == ("--max-num-seqs", "4") for started in commands)
    assert sum("is_prime · list_files" in line for line in lines) == 2  # progress of both runs
    requests = read_jsonl(Path(summary.trace_file))
    spans = [span.name.split()[0] for request in requests for span in span_records(request)]
    assert spans.count("chat") == 2 * (7 + 1)  # the warm-up call is in the trace, not in the totals
    assert spans.count("execute_tool") == 2 * 4
    assert [Path(path).read_text() for path in summary.log_files] == ["server log"] * 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_server_that_fails_gives_the_reason_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def broken(*_: Any, **__: Any) -> Iterator[RunningServer]:
        raise ServerError("the server ended with status 1; the end of its log (x.log):\nno memory")
        yield  # a generator

    monkeypatch.setattr(command, "running_server", broken)
    assert main(["--model", "m", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "no memory" in captured.err
    assert "{" not in captured.out


def test_a_model_call_that_fails_shows_the_end_of_the_servers_log(
    commands: list[ServerCommand],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: Any) -> None:
        raise openai.OpenAIError("connection lost")

    monkeypatch.setattr(command, "warm_up", refused)
    assert main(["--model", "m", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "connection lost" in error
    assert "server log" in error


def test_the_second_run_can_be_recorded(commands: list[ServerCommand], tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert main(["--quick", "--model", "m", "--out", str(tmp_path), "--record", str(path)]) == 0
    recordings = list(read_recordings(path))
    assert [len(list(recording.calls())) for recording in recordings] == [6, 1]
    assert recordings[0].tools


def test_ctrl_c_says_so_and_ends_with_130(
    commands: list[ServerCommand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "warm_up", interrupted)
    assert main(["--model", "m", "--out", str(tmp_path)]) == 130
    assert "no server is left running" in capsys.readouterr().out


def test_a_wrong_number_of_attempts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--attempts", "0"]) == 2
    assert "--attempts 0" in capsys.readouterr().err


def test_the_embedded_model_is_served_eagerly_in_float32(
    commands: list[ServerCommand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "prepare_embedded_model", lambda say: say("ready"))
    assert main(["--quick", "--out", str(tmp_path), "--", "--dtype=bfloat16"]) == 0
    assert commands[0].model is None
    assert commands[0].vllm_flags == (
        "--enforce-eager", "--dtype=float32", "--max-model-len=4096", "--dtype=bfloat16"
    )  # fmt: skip


REFERENCE = {
    "is_prime": PRIME,
    "area": "def area(width, height):\n    return width * height\n",
    "factorial": "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)\n",
    "sum_even": SUM_EVEN,
    "average": "def average(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n",
    "is_palindrome": "def is_palindrome(text):\n    return text.lower() == text.lower()[::-1]\n",
}


@pytest.mark.parametrize("task", CODING_TASKS, ids=lambda task: task.name)
def test_coding_tasks_can_be_solved_and_are_not_solved_yet(task: Any, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, task.files)
    assert not workspace.tests_pass()
    workspace.write_file(path=f"{task.name}.py", code=REFERENCE[task.name])
    assert workspace.tests_pass()
    assert workspace.tests_pass(task.hidden)


@pytest.mark.parametrize("task", FUNCTION_TASKS, ids=lambda task: task.name)
def test_function_tasks_can_be_solved_and_stubs_do_not(task: Any) -> None:
    checks = task.visible + task.hidden
    assert evaluate(REFERENCE[task.name], checks).passed
    assert evaluate(task.stub + "    pass\n", checks).num_passed < len(checks)


@pytest.mark.engine
def test_real_servers_agree_and_drafts_are_accepted(
    engine_server: Any, plain_server: Any, engine_spans: OtlpReceiver
) -> None:
    """The demo's own agents on the suite's servers: same answers, drafts in code and in tool calls."""
    workload = Workload(coding=CODING_TASKS[:1], functions=FUNCTION_TASKS[1:2], attempts=2)
    logs: list[TurnLog] = []
    results: list[list[TaskResult]] = []
    for server in (plain_server, engine_server):
        log = TurnLog()
        with instrument(), log.listening():
            results.append(run_agents(server.base_url, server.model, workload, log, lambda _: None))
        logs.append(log)
    plain, drafting = (log.turns for log in logs)
    assert identical_turns(plain, drafting) == len(plain) == len(drafting)
    assert results[0] == results[1]
    ids = {turn.report.response_id for turn in drafting}

    def arrived(spans: Any) -> bool:
        ours = [span for span in spans if span.name == REQUEST_SPAN]
        found = [str(span.attributes["agentspec.request_id"]) for span in ours]
        return all(any(name.startswith(str(wanted)) for name in found) for wanted in ids)

    turns = with_blocks(drafting, engine_spans.wait_for(arrived, timeout_s=20))
    for turn in turns:
        assert total([block.count for block in turn.blocks]) == turn.count
        steps = turn.report.num_steps
        assert steps is not None
        assert turn.count.steps - steps in (0, 1)  # the client cannot see a last step without a new token
    for kind in ("code", "tool_call"):
        assert sum(b.count.accepted for turn in turns for b in turn.blocks if b.kind == kind) > 0
    assert json.dumps([turn.answer for turn in turns]) == json.dumps([turn.answer for turn in plain])
