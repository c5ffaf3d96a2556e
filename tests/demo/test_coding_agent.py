"""The LangGraph coder, against a scripted server: real graph, real tools, real tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_openai import ChatOpenAI

from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.demo.coding_agent import CodingTask, StepName, next_step, run_coding_task
from agentspec_runtime.demo.turns import TaskResult, TurnLog
from agentspec_runtime.demo.workspace import TESTS_PASSED, Workspace
from agentspec_runtime.testing import MockVLLM, RecordedRequest, Reply, ToolCall

TASK = CodingTask(
    name="triple",
    stub="def triple(n):\n    # Return n times three.\n",
    tests="from triple import triple\n\n\ndef test_triple():\n    assert triple(2) == 6\n",
    hidden="from triple import triple\n\n\ndef test_hidden():\n    assert triple(-1) == -3\n",
)
GOOD, WRONG = TASK.stub + "    return n * 3\n", TASK.stub + "    return n\n"


def steps(results: list[str], max_attempts: int) -> list[StepName]:
    """Steps of a run whose test runs say `results`."""
    done: list[StepName] = []
    last = ""
    while (step := next_step(done, last, max_attempts=max_attempts)) is not None:
        done.append(step.name)
        last = results.pop(0) if step.name == "run_tests" else "something"
        assert len(done) < 50
    return done


ROUND: list[StepName] = ["read_file", "code", "write_file", "run_tests"]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([TESTS_PASSED], ["list_files", *ROUND, "report"]),
        (["1 failed", TESTS_PASSED], ["list_files", *ROUND, *ROUND, "report"]),
        (["1 failed", "1 failed"], ["list_files", *ROUND, *ROUND, "report"]),
    ],
)
def test_order_of_steps(results: list[str], expected: list[StepName]) -> None:
    assert steps(results, max_attempts=2) == expected


class Model:
    """Answers as a model that obeys `tool_choice`; `codes` are the files it writes, one per attempt."""

    def __init__(self, codes: list[str | None]) -> None:
        self.codes = codes

    def __call__(self, request: RecordedRequest) -> Reply:
        choice = request.body.get("tool_choice")
        name = choice["function"]["name"] if isinstance(choice, dict) else None
        match name:
            case "read_file":
                return Reply(tool_calls=[ToolCall("read_file", {"path": "triple.py"})])
            case "write_file":
                code = self.codes.pop(0)
                if code is None:  # a call that was cut off comes back as text
                    return Reply('<tool_call>\n{"name": "write_file", "arguments": {"path": "tri')
                return Reply(tool_calls=[ToolCall("write_file", {"path": "triple.py", "code": code})])
            case str():
                return Reply(tool_calls=[ToolCall(name, {})])
            case None:
                return Reply("words")


Run = Callable[[list[str | None]], tuple[TaskResult, TurnLog, MockVLLM, str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    servers: list[MockVLLM] = []

    def start(codes: list[str | None]) -> tuple[TaskResult, TurnLog, MockVLLM, str]:
        server = MockVLLM(Model(codes)).start()
        servers.append(server)
        model = ChatOpenAI(model="mock-model", base_url=server.url, api_key="unused", temperature=0)
        log = TurnLog()
        with instrument(), log.listening():
            result = run_coding_task(TASK, Workspace(tmp_path, TASK.files), model, log, max_attempts=2)
        return result, log, server, (tmp_path / "triple.py").read_text()

    yield start
    for server in servers:
        server.close()


def test_the_agent_writes_a_file_that_passes(run: Run) -> None:
    result, log, server, text = run([GOOD])
    assert result == TaskResult(agent="coder", task="triple", solved=True, attempts=1)
    assert text == GOOD
    assert [turn.step for turn in log.turns] == ["list_files", *ROUND, "report"]
    sessions = {request.hint.session for request in server.requests if request.hint}
    assert sessions == {"coder-triple"}
    assert [request.hint.agent for request in server.requests if request.hint] == ["coder"] * 6


def test_a_failure_is_seen_and_tried_again(run: Run) -> None:
    result, log, server, text = run([WRONG, GOOD])
    assert (result.solved, result.attempts, text) == (True, 2, GOOD)
    assert [turn.step for turn in log.turns].count("write_file") == 2
    contents = [str(message["content"]) for message in server.requests[-1].body["messages"]]
    assert any("1 failed" in content for content in contents)
    assert any(content.startswith("The tests fail.") for content in contents)


def test_two_failures_end_it(run: Run) -> None:
    result, _, _, text = run([WRONG, WRONG])
    assert (result.solved, result.attempts, text) == (False, 2, WRONG)


def test_a_call_that_was_cut_off_is_reported_to_the_model(run: Run) -> None:
    result, log, server, _ = run([None, GOOD])
    assert result.solved
    after = server.requests[4].body["messages"]
    assert after[-1]["content"] == "error: that was no complete call of write_file."
    assert "<tool_call>" in log.turns[3].answer


def test_a_wrong_path_is_answered_and_does_not_end_the_run(run: Run, tmp_path: Path) -> None:
    class Lost(Model):
        def __call__(self, request: RecordedRequest) -> Reply:
            reply = super().__call__(request)
            if reply.tool_calls and reply.tool_calls[0].name == "read_file":
                return Reply(tool_calls=[ToolCall("read_file", {"path": "elsewhere.py"})])
            return reply

    with MockVLLM(Lost([GOOD])) as server:
        model = ChatOpenAI(model="mock-model", base_url=server.url, api_key="unused")
        log = TurnLog()
        with instrument(), log.listening():
            result = run_coding_task(TASK, Workspace(tmp_path, TASK.files), model, log, max_attempts=1)
        answer = server.requests[2].body["messages"]
    assert result.solved
    assert "triple.py" in json.dumps(answer[-2:])  # the error names what there is


def test_every_request_offers_the_same_tools_and_holds_arguments_to_their_schema(run: Run) -> None:
    _, _, server, _ = run([GOOD])
    offered = [request.body["tools"] for request in server.requests]
    assert all(tools == offered[0] for tools in offered)
    read = next(tool["function"] for tool in offered[0] if tool["function"]["name"] == "read_file")
    assert read["strict"] is True
    assert read["parameters"]["properties"]["path"]["enum"] == ["test_triple.py", "triple.py"]


def test_two_runs_send_the_same_prompts(run: Run) -> None:
    """Ids, times and folders must not get into prompts: the two servers are compared turn by turn."""
    prompts = []
    for _ in range(2):
        _, _, server, _ = run([WRONG, GOOD])
        sent = json.dumps([request.body["messages"] for request in server.requests])
        for request in server.requests:
            for message in request.body["messages"]:
                for call in message.get("tool_calls", []):
                    sent = sent.replace(call["id"], "ID")
        prompts.append(sent)
    assert prompts[0] == prompts[1]
