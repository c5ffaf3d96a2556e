"""However a stream is left, its call ends exactly once and the server is told to stop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import openai
import pytest

import agentspec_runtime
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.testing import MockVLLM, Reply

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
LONG = Reply(" ".join(f"word{number}" for number in range(200)), chunk_delay_s=0.002)
SHORT = Reply("one two three")


@pytest.fixture(autouse=True)
def _instrumented() -> Iterator[None]:
    with agentspec_runtime.instrument():
        yield


def full(client: openai.OpenAI) -> None:
    assert len(list(client.chat.completions.create(**CHAT))) > 3


def brk(client: openai.OpenAI) -> None:
    for _ in client.chat.completions.create(**CHAT):
        break


def break_in_with(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**CHAT) as stream:
        for _ in stream:
            break


def close_before_first(client: openai.OpenAI) -> None:
    client.chat.completions.create(**CHAT).close()


def close_after_some(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**CHAT)
    next(stream)
    stream.close()
    stream.close()


def consumer_raises(client: openai.OpenAI) -> None:
    with suppress(KeyError), client.chat.completions.create(**CHAT) as stream:
        for _ in stream:
            raise KeyError


def never_iterated(client: openai.OpenAI) -> None:
    client.chat.completions.create(**CHAT)


def helper_left_early(client: openai.OpenAI) -> None:
    arguments = {key: value for key, value in CHAT.items() if key != "stream"}
    with client.chat.completions.stream(**arguments) as stream:
        next(stream)


def streaming_response_left_early(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(**CHAT) as response:
        next(response.iter_lines())


def interrupted(client: openai.OpenAI) -> None:
    with suppress(KeyboardInterrupt), client.chat.completions.create(**CHAT) as stream:
        for _ in stream:
            raise KeyboardInterrupt


def read_twice(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**CHAT)
    assert list(stream)
    assert list(stream) == []


WAYS: list[tuple[Callable[[openai.OpenAI], None], Reply, str]] = [
    (full, SHORT, "ok"),
    (read_twice, SHORT, "ok"),
    *(
        (way, LONG, "incomplete")
        for way in (
            brk,
            break_in_with,
            close_before_first,
            close_after_some,
            consumer_raises,
            never_iterated,
            helper_left_early,
            streaming_response_left_early,
            interrupted,
        )
    ),
]


def settled(server: MockVLLM) -> bool:
    deadline = time.monotonic() + 5
    while server.num_open and time.monotonic() < deadline:
        time.sleep(0.005)
    return server.num_open == 0


@pytest.mark.parametrize(
    ("way", "reply", "outcome"), WAYS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_sync_stream_ends_once(way: Callable[[openai.OpenAI], None], reply: Reply, outcome: str) -> None:
    with MockVLLM([reply]) as server, openai.OpenAI(base_url=server.url, api_key="x") as client:
        with agentspec_runtime.session("s"), agentspec_runtime.collect_calls() as calls:
            way(client)
            gc.collect()
        assert [call.outcome for call in calls] == [outcome]
        check(calls[0], outcome)
        assert settled(server)
        # A stream that was dropped unread is closed by nobody: the SDK leaves that to its client.
        assert server.num_aborted == (0 if outcome == "ok" or way is never_iterated else 1)


def check(call: CallReport, outcome: str) -> None:
    if outcome == "ok":
        assert (call.accepted, call.completion_tokens) == (2, SHORT.num_tokens)
    else:
        assert (call.accepted, call.drafted, call.completion_tokens, call.num_steps) == (None,) * 4


async def afull(client: openai.AsyncOpenAI) -> None:
    assert len([chunk async for chunk in await client.chat.completions.create(**CHAT)]) > 3


async def abreak(client: openai.AsyncOpenAI) -> None:
    async for _ in await client.chat.completions.create(**CHAT):
        break


async def abreak_in_with(client: openai.AsyncOpenAI) -> None:
    async with await client.chat.completions.create(**CHAT) as stream:
        async for _ in stream:
            break


async def aclose(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**CHAT)
    await anext(stream)
    await stream.close()


async def acancel(client: openai.AsyncOpenAI) -> None:
    async def read() -> None:
        async for _ in await client.chat.completions.create(**CHAT):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def anever(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**CHAT)


async def agenerator(client: openai.AsyncOpenAI) -> None:
    async def chunks() -> AsyncIterator[Any]:
        async with await client.chat.completions.create(**CHAT) as stream:
            async for chunk in stream:
                yield chunk

    async with aclosing(chunks()) as items:
        await anext(items)


@pytest.mark.parametrize(
    ("way", "reply", "outcome"),
    [
        (afull, SHORT, "ok"),
        *((way, LONG, "incomplete") for way in (abreak_in_with, aclose, acancel, anever, agenerator)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_an_async_stream_ends_once(
    way: Callable[[openai.AsyncOpenAI], Any], reply: Reply, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MockVLLM([reply]) as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x") as client:
            with agentspec_runtime.session("s"), agentspec_runtime.collect_calls() as calls:
                await way(client)
                gc.collect()
                await asyncio.sleep(0.05)
        assert [call.outcome for call in calls] == [outcome]
        check(calls[0], outcome)
        assert await asyncio.to_thread(settled, server)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_async_stream_that_is_left_by_break_alone_ends_at_the_latest_with_the_loop() -> None:
    """The SDK closes nothing on a bare `break` either; the event loop does, when it is shut down."""

    async def run(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
            await abreak(client)

    with MockVLLM([LONG]) as server, agentspec_runtime.collect_calls() as calls:
        asyncio.run(run(server.url))
        gc.collect()
        assert [call.outcome for call in calls] == ["incomplete"]


def test_a_connection_that_breaks_in_mid_stream_is_an_error_for_caller_and_report() -> None:
    """The SDK retries nothing then, and which exception it raises depends on its version."""
    with MockVLLM([Reply("one two three four", cut_after=2)]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=2)

        def failure() -> BaseException:
            with pytest.raises(Exception) as caught:
                list(client.chat.completions.create(**CHAT))
            return caught.value

        with agentspec_runtime.collect_calls() as calls:
            ours = failure()
        agentspec_runtime.uninstrument()
        plain = failure()
        assert (type(ours), str(ours)) == (type(plain), str(plain))
        assert len(server.requests) == 2
    assert [(call.outcome, call.completion_tokens) for call in calls] == [("error", None)]
    assert calls[0].error_type in {kind.__name__ for kind in (*type(ours).__mro__, type(ours.__cause__))}


def test_the_time_to_the_first_token_counts_tokens_of_any_kind_and_no_role_chunk() -> None:
    reply = Reply("text", reasoning="first thought", chunk_delay_s=0.05)
    with MockVLLM([reply]) as server, agentspec_runtime.collect_calls() as calls:
        list(openai.OpenAI(base_url=server.url, api_key="x").chat.completions.create(**CHAT))
    # The role comes at once, the first thought 50 ms later, the text after another 100 ms.
    first = calls[0].first_token_ms
    assert first is not None
    assert 50 <= first < calls[0].latency_ms - 90
    assert calls[0].ttft_ms == 12.5
