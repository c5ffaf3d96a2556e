"""The recording proxy between a real OpenAI client and a scripted server."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from agentspec_runtime.bench.record import recording_proxy
from agentspec_runtime.bench.recordings import read_recordings
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

openai = pytest.importorskip("openai")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_plain_and_streamed_calls_of_a_chat_become_one_recording(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl.gz"
    replies = [Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2})]), Reply("the sum is 3")]
    with MockVLLM(replies) as server:
        with recording_proxy(server.url, out) as proxy:
            client = openai.OpenAI(base_url=proxy.url, api_key="sk-very-secret-key-1234567890")
            messages = [
                {"role": "system", "content": "be exact"},
                {"role": "user", "content": "add 1 and 2"},
            ]
            first = client.chat.completions.create(model="mock-model", messages=messages, tools=TOOLS)
            call = first.choices[0].message
            messages += [
                call.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "3"},
            ]
            stream = client.chat.completions.create(
                model="mock-model", messages=messages, tools=TOOLS, stream=True
            )
            told = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert [model.id for model in client.models.list()] == ["mock-model"]
        assert server.requests[0].headers["authorization"] == "Bearer sk-very-secret-key-1234567890"
    assert told == "the sum is 3"
    [recording] = read_recordings(out)
    assert [message["role"] for message in recording.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [request.prompt for request in recording.requests] == [(0, 1), (0, 1, 2, 3)]
    [recorded] = recording.messages[2]["tool_calls"]
    assert recorded["function"]["name"] == "add"
    assert recording.messages[4]["content"] == "the sum is 3"
    assert recording.tools == tuple(TOOLS)
    assert b"very-secret" not in gzip.decompress(out.read_bytes())


def test_sessions_by_header_are_runs_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    with MockVLLM([Reply("hello")]) as server, recording_proxy(server.url, out) as proxy:
        client = openai.OpenAI(base_url=proxy.url, api_key="unused")
        for session in ("a", "b", "a"):
            client.chat.completions.create(
                model="mock-model",
                messages=[{"role": "user", "content": f"hi from {session}"}],
                extra_headers={"X-Session-ID": session},
            )
    assert sorted(recording.group for recording in read_recordings(out)) == ["a", "b"]


def test_errors_pass_through_and_are_not_recorded(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    with MockVLLM([Reply(status=400)]) as server, recording_proxy(server.url, out) as proxy:
        client = openai.OpenAI(base_url=proxy.url, api_key="unused", max_retries=0)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="mock-model", messages=[{"role": "user", "content": "x"}])
    assert out.read_bytes() == b""


def test_an_upstream_that_is_away_is_a_502_with_its_name(tmp_path: Path) -> None:
    with recording_proxy("http://127.0.0.1:9/v1", tmp_path / "runs.jsonl") as proxy:
        client = openai.OpenAI(base_url=proxy.url, api_key="unused", max_retries=0)
        with pytest.raises(openai.InternalServerError, match=r"127\.0\.0\.1:9 does not answer"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


def test_a_word_is_no_upstream(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="needed a URL"),
        recording_proxy("localhost", tmp_path / "runs.jsonl"),
    ):
        pass
