"""Hints go to servers that understand them, and pointing an agent at any other server never breaks it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import agentspec_runtime
from agentspec_runtime.client import capability
from agentspec_runtime.client.capability import Capability, read_servers
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.testing import MockVLLM, Reply

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    agentspec_runtime.uninstrument()


def ask(url: str, stream: bool = False) -> Any:
    """One call with a new client; a stream is read to its end."""
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client, agentspec_runtime.session("s"):
        answer: Any = client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
        return list(answer) if stream else answer


def hinted(server: MockVLLM) -> list[bool]:
    return ["vllm_xargs" in request.body or request.session_header is not None for request in server.requests]


def test_our_server_is_asked_once_and_gets_hints() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server:
        for _ in range(3):
            ask(server.url)
        assert hinted(server) == [True] * 3
        assert server.num_probes == 1


@pytest.mark.parametrize("poses_as", ["vllm", "foreign"])
@pytest.mark.parametrize("stream", [False, True])
def test_another_server_is_asked_once_and_gets_nothing(poses_as: Any, stream: bool) -> None:
    agentspec_runtime.instrument()
    with MockVLLM(poses_as=poses_as) as server:
        for _ in range(3):
            ask(server.url, stream)
        assert hinted(server) == [False] * 3
        assert all("stream_options" not in request.body for request in server.requests)
        assert server.num_probes == 1


def test_many_threads_at_once_send_one_probe() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: ask(server.url), range(16)))
        assert hinted(server) == [True] * 16
        assert server.num_probes == 1


async def test_many_tasks_at_once_send_one_probe() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x") as client:
            with agentspec_runtime.session("s"):
                await asyncio.gather(
                    *(client.chat.completions.create(model="m", messages=MESSAGES) for _ in range(16))
                )
        assert hinted(server) == [True] * 16
        assert server.num_probes == 1


async def test_a_cancelled_probe_leaves_nobody_waiting() -> None:
    asked = Capability()
    waiting = asyncio.Event()

    class Slow:
        base_url = "http://slow/v1"

        async def get(self, *_: object, **__: object) -> None:
            waiting.set()
            await asyncio.sleep(30)

    task = asyncio.create_task(asked.ask_async(Slow()))
    await waiting.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await asyncio.wait_for(asked.ask_async(Slow()), 1) is False


class Scripted:
    """A client whose probe gives one of several results."""

    base_url = "http://scripted/v1/"

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.asked = 0

    def get(self, *_: object, **__: object) -> object:
        self.asked += 1
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class Headers:
    def __init__(self, *names: str, status: int = 200) -> None:
        self.headers = dict.fromkeys(names, "1")
        self.status_code = status


def failure(*names: str, status: int) -> Exception:
    error = RuntimeError("status")
    error.response = Headers(*names, status=status)  # type: ignore[attr-defined]  # as the SDK's errors
    return error


def test_a_server_that_does_not_answer_is_asked_again_after_a_growing_pause() -> None:
    now = [0.0]
    asked = Capability(clock=lambda: now[0])
    client = Scripted(ConnectionError(), failure(status=503), Headers("x-agentspec"))
    assert asked.ask(client) is False
    assert asked.ask(client) is False
    assert client.asked == 1
    now[0] = capability._FIRST_PAUSE_S + 0.1
    assert asked.ask(client) is False
    assert client.asked == 2
    now[0] += capability._FIRST_PAUSE_S + 0.1
    asked.ask(client)
    assert client.asked == 2
    now[0] += capability._FIRST_PAUSE_S
    assert asked.ask(client) is True
    assert asked.ask(client) is True
    assert client.asked == 3


@pytest.mark.parametrize(
    ("result", "answer", "final"),
    [
        (failure(status=404), False, True),
        (failure("x-agentspec", status=401), True, True),
        (failure(status=401), False, False),
        (failure(status=429), False, False),
        (Headers(), False, True),
    ],
)
def test_what_counts_as_a_clear_answer(result: object, answer: bool, final: bool) -> None:
    now = [0.0]
    asked = Capability(clock=lambda: now[0])
    client = Scripted(result, Headers("x-agentspec"))
    assert asked.ask(client) is answer
    now[0] = 1e6
    assert asked.ask(client) is (answer if final else True)
    assert client.asked == (1 if final else 2)


@pytest.mark.parametrize("servers", ["auto", "always"])
def test_azure_and_openai_are_never_asked_and_never_hinted(servers: Any) -> None:
    asked = Capability(servers)
    azure = openai.AzureOpenAI(api_version="1", azure_endpoint="http://127.0.0.1:1", api_key="x")
    assert asked.ask(azure) is False
    for url in ("https://api.openai.com/v1", "https://mine.openai.azure.com/openai/v1"):
        client = Scripted()
        client.base_url = url
        assert asked.ask(client) is False
        assert client.asked == 0


@pytest.mark.parametrize("suffix", ["/v1", "", "/V1/"])
def test_a_list_of_base_urls_is_believed_without_asking(suffix: str) -> None:
    with MockVLLM(poses_as="vllm") as named, MockVLLM() as other:
        agentspec_runtime.instrument(servers=[named.url.removesuffix("/v1") + suffix])
        ask(named.url)
        ask(other.url)
        assert (hinted(named), hinted(other)) == ([True], [False])
        assert (named.num_probes, other.num_probes) == (0, 0)


def test_a_server_that_refuses_the_field_gets_the_plain_request_once_and_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agentspec_runtime.instrument(servers="always")
    with (
        MockVLLM([Reply("fine")], poses_as="foreign") as server,
        caplog.at_level(logging.WARNING, "agentspec"),
    ):
        with agentspec_runtime.collect_calls() as calls:
            assert ask(server.url).choices[0].message.content == "fine"
            assert ask(server.url).choices[0].message.content == "fine"
        assert hinted(server) == [True, False, False]
        assert [call.hinted for call in calls] == [False, False]
    assert len([record for record in caplog.records if "refused" in record.message]) == 1


async def test_the_same_for_an_async_client() -> None:
    agentspec_runtime.instrument(servers="always")
    with MockVLLM([Reply("fine")], poses_as="foreign") as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            for _ in range(2):
                with agentspec_runtime.session("s"):
                    await client.chat.completions.create(model="m", messages=MESSAGES)
        assert hinted(server) == [True, False, False]


def test_any_other_400_reaches_the_caller_and_is_sent_once() -> None:
    agentspec_runtime.instrument()
    with MockVLLM([Reply(status=400, error="tool_calls[0].arguments is not JSON")]) as server:
        with pytest.raises(openai.BadRequestError, match="is not JSON"):
            ask(server.url)
        assert len(server.requests) == 1


@pytest.mark.parametrize("value", ["auto", "always", "off"])
def test_the_environment_decides_where_the_argument_is_silent(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_HINTS", value)
    assert read_servers(None) == value
    assert read_servers("off") == "off"


def test_an_unknown_word_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_HINTS", "sometimes")
    with pytest.raises(ConfigurationError, match=r"AGENTSPEC_HINTS='sometimes'.*always"):
        agentspec_runtime.instrument()
    with pytest.raises(ConfigurationError, match="servers='perhaps'"):
        agentspec_runtime.instrument(servers="perhaps")


def test_off_sends_nothing_and_still_reports() -> None:
    agentspec_runtime.instrument(servers="off")
    with MockVLLM() as server, agentspec_runtime.collect_calls() as calls:
        ask(server.url)
        assert hinted(server) == [False]
        assert server.num_probes == 0
    assert (calls[0].accepted, calls[0].hinted, calls[0].session) == (2, False, "s")
