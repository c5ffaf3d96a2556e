"""Every public way to get a completion: hinted once, with a result of the same type and content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import agentspec_runtime
from agentspec_runtime.client.instrument import _state
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall


class Verdict(BaseModel):
    verdict: str


MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi"}
REPLY = Reply('{"verdict": "good as it is"}', reasoning="let me see")


def raw(response: Any) -> list[Any]:
    parsed = response.parse()
    return [type(response), "content-type" in response.headers, response.status_code, shown(parsed)]


def shown(value: Any) -> Any:
    """Type and content, without random ids."""
    if isinstance(value, BaseModel):
        fields = value.model_dump(exclude={"id"})
        fields.pop("response", None)
        return [type(value), {key: item for key, item in fields.items() if key != "_request_id"}]
    if isinstance(value, openai.Stream):
        return [type(value), [shown(item) for item in value]]
    return [type(value), value if isinstance(value, (str, bytes)) else None]


def streaming_raw(manager: Any) -> list[Any]:
    with manager as response:
        return [type(response), "content-type" in response.headers, shown(response.parse())]


def streaming_lines(manager: Any) -> list[str]:
    with manager as response:
        return [line.split('"id"')[0][:6] for line in response.iter_lines()]


def streaming_read(manager: Any) -> list[Any]:
    with manager as response:
        return [type(response.read()), response.http_response.is_closed]


def helper(manager: Any) -> list[Any]:
    with manager as stream:
        events = [event.type for event in stream]
        return [events, shown(stream.get_final_completion())]


def response_helper(manager: Any) -> list[Any]:
    with manager as stream:
        events = [event.type for event in stream]
        return [events, stream.get_final_response().output_text]


PATHS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "chat.create": lambda c: shown(c.chat.completions.create(**CHAT)),
    "chat.create n=2": lambda c: shown(c.chat.completions.create(**CHAT, n=2)),
    "chat.create stream": lambda c: shown(c.chat.completions.create(**CHAT, stream=True)),
    "chat.create stream n=2": lambda c: shown(c.chat.completions.create(**CHAT, stream=True, n=2)),
    "chat.create stream usage": lambda c: shown(
        c.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    ),
    "chat.create stream no usage": lambda c: shown(
        c.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": False})
    ),
    "chat.parse": lambda c: shown(c.chat.completions.parse(**CHAT, response_format=Verdict)),
    "chat.stream": lambda c: helper(c.chat.completions.stream(**CHAT)),
    "chat.stream parsed": lambda c: helper(c.chat.completions.stream(**CHAT, response_format=Verdict)),
    "beta.chat.parse": lambda c: shown(c.beta.chat.completions.parse(**CHAT, response_format=Verdict)),
    "chat raw": lambda c: raw(c.chat.completions.with_raw_response.create(**CHAT)),
    "chat raw stream": lambda c: raw(c.chat.completions.with_raw_response.create(**CHAT, stream=True)),
    "chat raw parse": lambda c: raw(
        c.chat.completions.with_raw_response.parse(**CHAT, response_format=Verdict)
    ),
    "chat streaming": lambda c: streaming_raw(c.chat.completions.with_streaming_response.create(**CHAT)),
    "chat streaming stream": lambda c: streaming_raw(
        c.chat.completions.with_streaming_response.create(**CHAT, stream=True)
    ),
    "chat streaming lines": lambda c: streaming_lines(
        c.chat.completions.with_streaming_response.create(**CHAT, stream=True)
    ),
    "chat streaming read": lambda c: streaming_read(
        c.chat.completions.with_streaming_response.create(**CHAT)
    ),
    "with_options": lambda c: shown(c.with_options(timeout=5).chat.completions.create(**CHAT)),
    "completions": lambda c: shown(c.completions.create(**TEXT)),
    "completions stream": lambda c: shown(c.completions.create(**TEXT, stream=True)),
    "responses": lambda c: shown(c.responses.create(**RESPONSE)),
    "responses stream": lambda c: shown(c.responses.create(**RESPONSE, stream=True)),
    "responses.stream": lambda c: response_helper(c.responses.stream(**RESPONSE)),
    "responses raw": lambda c: raw(c.responses.with_raw_response.create(**RESPONSE)),
    "post": lambda c: shown(c.post("/chat/completions", body=CHAT, cast_to=openai.types.chat.ChatCompletion)),
}


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    agentspec_runtime.uninstrument()


def client_of(server: MockVLLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_gives_the_same_and_is_hinted_once(path: str) -> None:
    with MockVLLM([REPLY]) as server, client_of(server) as client:
        expected = PATHS[path](client)
        agentspec_runtime.instrument()
        with agentspec_runtime.session("s", agent="a"), agentspec_runtime.collect_calls() as calls:
            got = PATHS[path](client)
        plain, hinted = server.requests
        assert got == expected
        assert "vllm_xargs" not in plain.body
        assert hinted.hint is not None
        assert (hinted.hint.session, hinted.session_header) == ("s", "s")
        ours = ("vllm_xargs", "stream_options")
        theirs = {key: value for key, value in hinted.body.items() if key not in ours}
        assert theirs == {key: value for key, value in plain.body.items() if key not in ours}
    assert len(calls) == 1
    known = "n=2" not in path and "responses" not in path and "no usage" not in path
    assert (calls[0].accepted == 2) is known
    assert calls[0].outcome == "ok"
    silent = path in ("chat.create stream no usage", "chat.create stream n=2")
    assert calls[0].completion_tokens == (None if silent else REPLY.num_tokens)


ASYNC_PATHS: dict[str, Callable[[openai.AsyncOpenAI], Any]] = {}


def asynchronous(name: str) -> Callable[[Callable[[openai.AsyncOpenAI], Any]], None]:
    def put(function: Callable[[openai.AsyncOpenAI], Any]) -> None:
        ASYNC_PATHS[name] = function

    return put


@asynchronous("create")
async def _(c: openai.AsyncOpenAI) -> Any:
    return shown(await c.chat.completions.create(**CHAT))


@asynchronous("create stream")
async def _(c: openai.AsyncOpenAI) -> Any:
    stream = await c.chat.completions.create(**CHAT, stream=True)
    return [type(stream), [shown(chunk) async for chunk in stream]]


@asynchronous("parse")
async def _(c: openai.AsyncOpenAI) -> Any:
    return shown(await c.chat.completions.parse(**CHAT, response_format=Verdict))


@asynchronous("stream helper")
async def _(c: openai.AsyncOpenAI) -> Any:
    async with c.chat.completions.stream(**CHAT) as stream:
        events = [event.type async for event in stream]
        return [events, shown(await stream.get_final_completion())]


@asynchronous("raw")
async def _(c: openai.AsyncOpenAI) -> Any:
    return raw(await c.chat.completions.with_raw_response.create(**CHAT))


@asynchronous("raw stream")
async def _(c: openai.AsyncOpenAI) -> Any:
    response = await c.chat.completions.with_raw_response.create(**CHAT, stream=True)
    return [type(response), [shown(chunk) async for chunk in response.parse()]]


@asynchronous("streaming")
async def _(c: openai.AsyncOpenAI) -> Any:
    async with c.chat.completions.with_streaming_response.create(**CHAT) as response:
        return [type(response), shown(await response.parse())]


@asynchronous("streaming stream")
async def _(c: openai.AsyncOpenAI) -> Any:
    async with c.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        return [type(response), [shown(chunk) async for chunk in await response.parse()]]


@asynchronous("streaming text")
async def _(c: openai.AsyncOpenAI) -> Any:
    async with c.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        return "".join([text async for text in response.iter_text()]).count("data:")


@asynchronous("completions stream")
async def _(c: openai.AsyncOpenAI) -> Any:
    stream = await c.completions.create(**TEXT, stream=True)
    return [type(stream), [shown(chunk) async for chunk in stream]]


@pytest.mark.parametrize("path", ASYNC_PATHS)
def test_an_async_path_gives_the_same_and_is_hinted_once(path: str) -> None:
    async def run(server: MockVLLM) -> Any:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            return await ASYNC_PATHS[path](client)

    with MockVLLM([REPLY]) as server:
        expected = asyncio.run(run(server))
        agentspec_runtime.instrument()
        with agentspec_runtime.session("s"), agentspec_runtime.collect_calls() as calls:
            assert asyncio.run(run(server)) == expected
        assert [request.hint is not None for request in server.requests] == [False, True]
    assert [(call.accepted, call.outcome) for call in calls] == [(2, "ok")]


def test_other_requests_pass_untouched() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
        assert [model.id for model in client.models.list()] == ["mock-model"]
        assert "x-session-id" not in server.received[0].headers


def test_the_callers_own_extras_win_and_survive() -> None:
    agentspec_runtime.instrument()
    extra = {"vllm_xargs": {"mine": [1, "a"]}, "top_k": 4}
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
        client.chat.completions.create(
            **CHAT, extra_body=extra, extra_headers={"x-session-ID": "own", "x-a": "b"}
        )
        own = {"vllm_xargs": {"agentspec": '{"v":1,"session":"mine"}'}}
        client.chat.completions.create(**CHAT, extra_body=own)
        first, second = server.requests
    assert extra == {"vllm_xargs": {"mine": [1, "a"]}, "top_k": 4}
    assert (first.body["vllm_xargs"]["mine"], first.body["top_k"]) == ([1, "a"], 4)
    assert first.hint is not None
    assert (first.session_header, first.headers["x-a"]) == ("own", "b")
    assert second.hint is not None
    assert second.hint.session == "mine"


def test_a_session_header_of_the_client_wins() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server, agentspec_runtime.session("s"):
        headers = {"X-SESSION-ID": "of-the-client"}
        with openai.OpenAI(base_url=server.url, api_key="x", default_headers=headers) as client:
            client.chat.completions.create(**CHAT)
        assert server.requests[0].session_header == "of-the-client"


def test_with_no_context_there_is_no_hint_and_still_a_report() -> None:
    agentspec_runtime.instrument()
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.collect_calls() as calls:
        client.chat.completions.create(**CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
        assert "vllm_xargs" not in server.requests[0].body
    assert (calls[0].session, calls[0].turn, calls[0].accepted) == (None, None, 2)


def test_retries_are_attempts_of_one_call_with_one_turn() -> None:
    agentspec_runtime.instrument()
    script = [
        Reply(status=500, headers={"retry-after-ms": "1"}),
        Reply(status=429, headers={"retry-after-ms": "1"}),
    ]
    with MockVLLM([*script, Reply("ok")]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=2)
        with agentspec_runtime.session(), agentspec_runtime.collect_calls() as calls:
            client.chat.completions.create(**CHAT)
        assert [request.hint.turn for request in server.requests if request.hint] == [0, 0, 0]
        assert len({str(request.body) for request in server.requests}) == 1
    assert [(call.attempts, call.outcome) for call in calls] == [(3, "ok")]


def test_the_callers_timeout_and_retry_settings_are_respected() -> None:
    agentspec_runtime.instrument()
    with MockVLLM([Reply("late", delay_s=1)]) as server, agentspec_runtime.collect_calls() as calls:
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0, timeout=0.2)
        with agentspec_runtime.session(), pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**CHAT)
        assert len(server.requests) == 1
    assert [(call.outcome, call.error_type, call.completion_tokens) for call in calls] == [
        ("error", "APITimeoutError", None)
    ]


def test_history_with_arguments_that_are_no_json_passes_unchanged() -> None:
    agentspec_runtime.instrument()
    bad = ['{"value": ', '{"t": "He said "hi""}', "", "[]", '{"city": "Münster", "note": "日本語 🍸"}']
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(bad)
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
        client.chat.completions.create(model="m", messages=messages)
        assert server.requests[0].body["messages"] == messages


def test_instrumenting_twice_is_once_and_undoing_restores_the_sdk() -> None:
    from openai import _base_client as sdk

    before = dict.fromkeys(("request",), sdk.SyncAPIClient.__dict__["request"])
    first = agentspec_runtime.instrument()
    assert agentspec_runtime.instrument().settings is first.settings
    assert agentspec_runtime.instrument(servers="off").settings is not first.settings
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
        client.chat.completions.create(**CHAT)
        assert "vllm_xargs" not in server.requests[0].body
    agentspec_runtime.uninstrument()
    agentspec_runtime.uninstrument()
    assert sdk.SyncAPIClient.__dict__["request"] is before["request"]


def test_a_block_undoes_only_what_it_installed() -> None:
    with agentspec_runtime.instrument() as outer:
        with agentspec_runtime.instrument() as inner:
            assert inner.settings is outer.settings
        assert _state.active is outer.settings
        with agentspec_runtime.instrument(servers="off"):
            assert _state.active is not outer.settings
        assert _state.active is outer.settings
    assert _state.active is None


def test_where_somebody_wrapped_over_us_we_stay_and_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from openai import _base_client as sdk

    original = sdk.SyncAPIClient.__dict__["request"]
    agentspec_runtime.instrument()
    ours = sdk.SyncAPIClient.__dict__["request"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours.__get__(self, type(self))(*args, **kwargs)

    sdk.SyncAPIClient.request = theirs  # type: ignore[method-assign, assignment]  # what other packages do
    try:
        agentspec_runtime.uninstrument()
        with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
            client.chat.completions.create(**CHAT)
            assert "vllm_xargs" not in server.requests[0].body
            agentspec_runtime.instrument()
            client.chat.completions.create(**CHAT)
            assert server.requests[1].hint is not None
    finally:
        agentspec_runtime.uninstrument()
        sdk.SyncAPIClient.request = original  # type: ignore[method-assign]
        _state._patches.clear()


def test_a_fault_of_ours_never_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of ours")

    agentspec_runtime.instrument()
    with MockVLLM() as server, client_of(server) as client, agentspec_runtime.session("s"):
        for target in ("wire.build_hint", "tap.SseFilter.feed", "received.Received.absorb"):
            monkeypatch.setattr(f"agentspec_runtime.client.{target}", broken)
            assert client.chat.completions.create(**CHAT).choices[0].message.content == "ok"
            assert shown(client.chat.completions.create(**CHAT, stream=True))
            monkeypatch.undo()
    assert "a bug of ours" in caplog.text


def test_parallel_calls_in_a_stream_keep_their_pieces() -> None:
    agentspec_runtime.instrument()
    calls = [ToolCall("f", {"city": "Münster", "note": "日本語 🍸"}, f"c{number}") for number in range(3)]
    with (
        MockVLLM([Reply(tool_calls=calls)]) as server,
        client_of(server) as client,
        agentspec_runtime.session("s"),
    ):
        with client.chat.completions.stream(**CHAT) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls is not None
        assert [(call.id, call.function.arguments) for call in message.tool_calls] == [
            (call.id, call.wire(0)["function"]["arguments"])
            for call in calls  # type: ignore[index]
        ]
