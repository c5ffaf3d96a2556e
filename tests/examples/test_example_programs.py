"""Every program in `examples/` runs as a user would run it: as a process, with a server in its environment.

Against a scripted server the logic is checked; against the real one, that it ends and drafts are reported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from agentspec_runtime.testing import MockVLLM, RecordedRequest, Reply, ToolCall

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCES = sorted(path for path in EXAMPLES.rglob("*.py") if "deploy" not in path.parts)
GAIN = re.compile(
    r"(\d+) model calls, (\d+) tokens, [\d.]+ s; (\d+) steps: (\d+) tokens drafted, (\d+) accepted"
)


def run(name: str, base_url: str, *arguments: str, **environment: str) -> str:
    """Standard output of an example; it has to end with status 0."""
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "AGENTSPEC_"))
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**variables, "OPENAI_BASE_URL": base_url, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def serve() -> Iterator[Callable[..., MockVLLM]]:
    servers: list[MockVLLM] = []

    def start(script: Any, **options: Any) -> MockVLLM:
        servers.append(MockVLLM(script, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def reply(text: str | None = None, **fields: Any) -> Reply:
    return Reply(text, drafted=[8, 4], accepted=[6, 1], completion_tokens=20, **fields)


def last_text(request: RecordedRequest) -> str:
    return str(request.body["messages"][-1]["content"])


# -- reflexion -----------------------------------------------------------------------------------------

GOOD = "```python\ndef is_even(n):\n    return n % 2 == 0\n```"
WRONG = "```python\ndef is_even(n):\n    return n\n```"


def test_reflexion_learns_from_a_failed_trial(serve: Callable[..., MockVLLM]) -> None:
    server = serve([reply(WRONG), reply("Compare the rest\nwith zero."), reply(GOOD)])
    output = run("reflexion/reflexion.py", server.url, "--tasks", "1")
    assert "is_even: solved, tests passed 0/2, 2/2" in output
    assert "solved 1 of 1 tasks" in output
    assert GAIN.search(output).groups() == ("3", "60", "39", "36", "21")  # type: ignore[union-attr]
    assert "Compare the rest with zero." in last_text(server.requests[2])
    hints = [request.hint for request in server.requests]
    assert [(hint.session, hint.agent, hint.expect) for hint in hints if hint] == [
        ("reflexion-is_even", "actor", ("code",)),
        ("reflexion-is_even", "critic", ("text",)),
        ("reflexion-is_even", "actor", ("code",)),
    ]


def test_reflexion_works_with_somebody_elses_strict_server(serve: Callable[..., MockVLLM]) -> None:
    server = serve([Reply(WRONG, drafted=None), Reply("no idea", drafted=None)] * 2, poses_as="foreign")
    output = run("reflexion/reflexion.py", server.url, "--tasks", "1", "--trials", "2", OPENAI_API_KEY="k")
    assert "not solved" in output
    assert "says nothing about drafting" in output
    assert len(server.requests) == 3
    assert server.requests[0].headers["authorization"] == "Bearer k"


REFERENCE = {
    "is_even": "def is_even(n): return n % 2 == 0",
    "largest": "def largest(numbers): return max(numbers)",
    "sum_even": "def sum_even(numbers): return sum(n for n in numbers if n % 2 == 0)",
    "is_prime": "def is_prime(n): return n > 1 and all(n % i for i in range(2, n))",
    "is_palindrome": "def is_palindrome(text): return text.lower() == text.lower()[::-1]",
    "fizzbuzz": "def fizzbuzz(n): return 'Fizz' * (n % 3 == 0) + 'Buzz' * (n % 5 == 0) or str(n)",
    "average": "def average(numbers): return sum(numbers) / len(numbers) if numbers else 0",
    "count_vowels": "def count_vowels(text): return sum(c in 'aeiou' for c in text.lower())",
    "unique": "def unique(items): return list(dict.fromkeys(items))",
    "clamp": "def clamp(value, low, high): return max(low, min(high, value))",
    "second_largest": "def second_largest(numbers): return sorted(set(numbers))[-2]",
    "roman": (
        "def roman(n):\n    text = ''\n"
        "    for value, letters in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),\n"
        "                              'M CM D CD C XC L XL X IX V IV I'.split()):\n"
        "        while n >= value: text += letters; n -= value\n    return text"
    ),
}


def test_every_reflexion_task_can_be_solved(serve: Callable[..., MockVLLM]) -> None:
    def solver(request: RecordedRequest) -> Reply:
        name = re.search(r"def (\w+)\(", last_text(request))
        assert name is not None
        return reply(f"```python\n{REFERENCE[name.group(1)]}\n```")

    output = run("reflexion/reflexion.py", serve(solver).url)
    assert "solved 12 of 12 tasks" in output
    assert "not solved" not in output


# -- the others ----------------------------------------------------------------------------------------


def test_text_to_sql_corrects_a_query_and_checks_rows(serve: Callable[..., MockVLLM]) -> None:
    answers = {
        "How many customers": "```sql\nSELECT COUNT(*) FROM customers;\n```",
        "names of the customers": "```sql\nDELETE FROM customers\n```",
        "sum of all order": "SELECT SUM(amount) FROM orders",
        "of the year 2024": "```sql\nSELECT SUM(amount) FROM orders WHERE yaer = 2024\n```",
        "each customer": "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x FROM t) SELECT COUNT(*) FROM t",
    }

    def model(request: RecordedRequest) -> Reply:
        if "no such column: yaer" in last_text(request):
            return reply("```sql\nSELECT SUM(amount) FROM orders WHERE year = 2024\n```")
        return reply(
            next(
                (text for key, text in answers.items() if key in last_text(request)), "```sql\nSELECT 1\n```"
            )
        )

    server = serve(model)
    output = run("text_to_sql.py", server.url)
    assert "right answers: 3 of 5" in output
    assert "-> error: attempt to write a readonly database" in output
    assert "-> error: interrupted" in output  # the endless query was stopped
    assert GAIN.search(output)
    assert {request.hint.agent for request in server.requests if request.hint} == {"sql"}


def coder(request: RecordedRequest) -> Reply:
    """Reads, writes and tests when it has to call a tool; says something else when it need not."""
    if request.body.get("tool_choice") == "none":
        return reply("area.py is complete.")
    done = [m for m in request.body["messages"] if m["role"] == "tool"]
    calls = [
        ToolCall("read_file", {"path": "area.py"}),
        ToolCall(
            "write_file", {"path": "area.py", "code": "def area(width, height):\n    return width * height\n"}
        ),
        ToolCall("run_tests", {}),
    ]
    return reply(tool_calls=[calls[len(done)]])


def test_the_langgraph_agent_edits_files_until_tests_pass(serve: Callable[..., MockVLLM]) -> None:
    server = serve(coder)
    output = run("langgraph_coding_agent.py", server.url)
    assert "the tests pass" in output
    assert [request.body["tool_choice"] for request in server.requests] == ["required"] * 3 + ["none"]
    assert {(r.hint.session, r.hint.agent) for r in server.requests if r.hint} == {("area", "coder")}
    assert GAIN.search(output).group(1) == "4"  # type: ignore[union-attr]


def test_the_langgraph_agent_gives_up_after_its_limit(serve: Callable[..., MockVLLM]) -> None:
    def lost(request: RecordedRequest) -> Reply:
        if request.body.get("tool_choice") == "none":
            return reply("I give up.")
        return reply(tool_calls=[ToolCall("read_file", {"path": "nowhere.py"})])

    output = run("langgraph_coding_agent.py", serve(lost).url)
    assert "the tests fail" in output
    assert "no file named 'nowhere.py'" in output


def test_a_free_agent_is_not_made_to_call(serve: Callable[..., MockVLLM]) -> None:
    server = serve([reply("I would rather talk.")])
    assert "the tests fail" in run("langgraph_coding_agent.py", server.url, "--free")
    assert "tool_choice" not in server.requests[0].body


def test_agents_hand_over_and_are_told_apart(serve: Callable[..., MockVLLM]) -> None:
    def team(request: RecordedRequest) -> Reply:
        system = str(request.body["messages"][0]["content"])
        if system.startswith("You write Python"):
            return reply("```python\ndef is_even(n):\n    return n % 2 == 0\n```")
        if system.startswith("You write tests"):
            assert "def is_even(n):" in last_text(request)  # it sees what the coder wrote
            return reply("```python\nassert is_even(2)\n```")
        handed = sum(message["role"] == "tool" for message in request.body["messages"])
        return reply(tool_calls=[ToolCall("hand_over", {"to": ["coder", "tester"][handed]})])

    server = serve(team)
    output = run("multi_agent_handoff.py", server.url)
    assert "handed over to coder" in output
    assert "assert is_even(2)" in output
    assert [request.hint.agent for request in server.requests if request.hint] == [
        "lead",
        "coder",
        "lead",
        "tester",
    ]
    assert [line.split(":")[0] for line in output.splitlines()[-4:]] == ["lead", "coder", "tester", "all"]


def test_endless_handing_over_ends(serve: Callable[..., MockVLLM]) -> None:
    def stuck(request: RecordedRequest) -> Reply:
        if request.body.get("tools"):
            return reply(tool_calls=[ToolCall("hand_over", {"to": "coder"})])
        return reply("code")

    server = serve(stuck)
    run("multi_agent_handoff.py", server.url)
    assert len(server.requests) == 8


def test_the_unmodified_client_sends_nothing_of_ours(serve: Callable[..., MockVLLM]) -> None:
    server = serve([reply("def order_total(items): ..."), reply("def order_total(items): round")])
    output = run("openai_client.py", server.url)
    assert output.count("--> 20 tokens, 12 drafted, 7 accepted") == 2
    assert all("vllm_xargs" not in request.body for request in server.requests)
    assert "agentspec_runtime" not in (EXAMPLES / "openai_client.py").read_text()


def test_the_unmodified_client_works_with_another_server(serve: Callable[..., MockVLLM]) -> None:
    output = run("openai_client.py", serve([Reply("text", drafted=None)], poses_as="foreign").url)
    assert output.count("says nothing about drafting") == 2


def test_the_agents_sdk_calls_the_tool_and_answers(serve: Callable[..., MockVLLM]) -> None:
    pytest.importorskip("agents")

    def shop(request: RecordedRequest) -> Reply:
        if request.body["messages"][-1]["role"] == "tool":
            return reply(f"It costs {last_text(request)}.")
        item = last_text(request).split()[-2]
        return reply(tool_calls=[ToolCall("price_of", {"item": item})])

    server = serve(shop)
    output = run("openai_agents.py", server.url)
    assert "It costs 12 euros." in output
    assert GAIN.search(output).group(1) == "6"  # type: ignore[union-attr]
    assert {(r.hint.session, r.hint.agent) for r in server.requests if r.hint} == {("shop", "shop")}
    assert server.requests[0].body["tool_choice"] == "required"


def test_the_pydantic_ai_agent_calls_the_tool_and_answers(serve: Callable[..., MockVLLM]) -> None:
    pytest.importorskip("pydantic_ai")

    def shop(request: RecordedRequest) -> Reply:
        if request.body["messages"][-1]["role"] == "tool":
            return reply(f"It costs {last_text(request)}.")
        return reply(tool_calls=[ToolCall("price_of", {"item": last_text(request).split()[3]})])

    server = serve(shop)
    output = run("pydantic_ai_agent.py", server.url)
    assert "It costs 12 euros." in output
    assert GAIN.search(output).group(1) == "6"  # type: ignore[union-attr]
    assert {(r.hint.session, r.hint.agent) for r in server.requests if r.hint} == {("shop", "shop")}


def test_the_dspy_program_reports_answers_and_their_absence(serve: Callable[..., MockVLLM]) -> None:
    pytest.importorskip("dspy")

    def hours(request: RecordedRequest) -> Reply:
        if "library" in last_text(request):
            return reply("At ten, I think.")
        return reply(
            "[[ ## reasoning ## ]]\nIt says so.\n\n[[ ## answer ## ]]\nat seven\n\n[[ ## completed ## ]]"
        )

    server = serve(hours)
    output = run("dspy_program.py", server.url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert output.count("    at seven\n") == 2
    assert "(no answer in the form" in output
    assert {(r.hint.session, r.hint.agent) for r in server.requests if r.hint} == {
        ("opening-hours", "ChainOfThought")
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_tells_how_it_is_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "__main__" in text:
        assert f"python examples/{path.relative_to(EXAMPLES)}" in text
        assert "OPENAI_BASE_URL" in text or "openai" not in text


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("openai_client.py", ()),
        ("text_to_sql.py", ()),
        ("reflexion/reflexion.py", ("--tasks", "2", "--trials", "2")),
        ("multi_agent_handoff.py", ()),
        ("langgraph_coding_agent.py", ()),
        ("openai_agents.py", ()),
    ],
)
def test_on_the_real_server(engine_server: Any, name: str, arguments: tuple[str, ...]) -> None:
    """It ends well, and something was drafted and accepted."""
    if name == "openai_agents.py":
        pytest.importorskip("agents")
    output = run(name, engine_server.base_url, *arguments)
    accepted = [int(match) for match in re.findall(r"(\d+) accepted", output)]
    assert sum(accepted) > 0, output


@pytest.mark.slow
def test_a_head_is_trained_and_has_the_form_that_vllm_loads(tmp_path: Path) -> None:
    """A few updates on our own recordings; vLLM itself loads the one that is kept (test_lossless)."""
    pytest.importorskip("torch", reason="training needs torch")
    safetensors = pytest.importorskip("safetensors.torch", reason="training needs safetensors")
    recording = files("agentspec_runtime.bench") / "data" / "demo_agents.jsonl"
    size = ("--minutes", "0.1", "--tokens-per-file", "2000", "--draft-vocab", "512")
    output = run("eagle_head/train_head.py", "", "--traces", str(recording), "--out", str(tmp_path), *size)
    assert "in the draft vocabulary" in output
    made = safetensors.load_file(tmp_path / "model.safetensors")
    kept = safetensors.load_file(EXAMPLES / "eagle_head" / "head" / "model.safetensors")
    assert {name: array.shape[1:] for name, array in made.items()} == {
        name: array.shape[1:] for name, array in kept.items()
    }
    assert made["lm_head.weight"].shape[0] == len(made["d2t"]) == 512
    report = json.loads((tmp_path / "report.json").read_text())
    first, last = report["loss_by_tokens_seen"][0][1], report["loss_by_tokens_seen"][-1][1]
    assert 0 < last <= first
