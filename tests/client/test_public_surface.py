"""Importing is cheap, the surface is what it says, and the test double is as strict as vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

import agentspec_runtime
from agentspec_runtime.testing import MockVLLM, Reply

pytest_plugins = ["agentspec_runtime.testing"]

HEAVY = (
    "openai",
    "vllm",
    "torch",
    "numba",
    "numpy",
    "opentelemetry.sdk",
    "langchain_core",
    "langgraph",
    "httpx2",
)


def loaded_after(code: str) -> list[str]:
    script = f"{code}\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import agentspec_runtime") == []


def test_marking_code_loads_nothing_heavy() -> None:
    code = (
        "import agentspec_runtime as a\n"
        "from agentspec_runtime.client import instrument, capability, recording\n"
        "f = a.tool(lambda: 'x')\n"
        "with a.session('s', agent='b'), a.collect_calls(): f()\n"
        "a.Hint, a.SegmentKind, a.__version__"
    )
    assert loaded_after(code) == []


@pytest.mark.parametrize("name", [name for name in agentspec_runtime.__all__ if name != "configure_tracing"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(agentspec_runtime, name) is not None
    assert name in dir(agentspec_runtime)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        agentspec_runtime.nothing  # noqa: B018


def test_without_the_sdk_the_message_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "import agentspec_runtime as a\n"
        "try: a.instrument()\n"
        "except a.errors.MissingDependencyError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "agentspec-runtime[openai]" in done.stdout


def test_without_langgraph_the_message_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['langgraph.pregel'] = None\n"
        "from agentspec_runtime.errors import MissingDependencyError\n"
        "try: import agentspec_runtime.adapters.langgraph\n"
        "except MissingDependencyError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "agentspec-runtime[langgraph]" in done.stdout


# The test double -------------------------------------------------------------------------------------------


def post(server: MockVLLM, body: dict[str, Any], path: str = "/chat/completions") -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
@pytest.mark.parametrize(
    ("xargs", "status"),
    [
        ({"a": "x", "b": 1, "c": 2.5, "d": ["x", 1]}, 200),
        ({"a": True}, 200),
        ({"a": None}, 400),
        ({"a": {"nested": 1}}, 400),
        ({"a": [["nested"]]}, 400),
        (["a"], 400),
        ({"agentspec": '{"v":1,"session":"s"}'}, 200),
        ({"agentspec": '{"v":1,"turn":"many"}'}, 400),
    ],
)
def test_vllm_xargs_are_checked_as_vllm_does(
    path: str, xargs: object, status: int, mock_vllm: MockVLLM
) -> None:
    assert post(mock_vllm, {"model": "m", "messages": [], "vllm_xargs": xargs}, path)[0] == status


def test_a_foreign_server_names_the_field_it_does_not_know() -> None:
    with MockVLLM(poses_as="foreign") as server:
        status, body = post(server, {"model": "m", "messages": [], "vllm_xargs": {}})
    assert (status, "vllm_xargs" in body["error"]["message"]) == (400, True)


def test_metrics_are_consistent_with_usage() -> None:
    with MockVLLM([Reply("a b", drafted=(4, 3, 0), accepted=(4, 1, 0))]) as server:
        _, body = post(server, {"model": "m", "messages": []})
    spec = body["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == sum(spec["per_step_accepted"]) == 5
    assert body["usage"]["completion_tokens"] >= spec["num_accepted_draft_tokens"] + spec["num_spec_steps"]


def test_the_fixture_collects_calls_of_all_threads(
    mock_vllm: MockVLLM, agentspec_calls: list[agentspec_runtime.CallReport]
) -> None:
    import threading

    import openai

    client = openai.OpenAI(base_url=mock_vllm.url, api_key="x")
    arguments: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    thread = threading.Thread(target=lambda: client.chat.completions.create(**arguments))
    thread.start()
    thread.join()
    assert [call.outcome for call in agentspec_calls] == ["ok"]
