"""The stream filter: whatever the cut of the bytes, the caller gets the events of an unwatched stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec_runtime._scripted import Reply, ToolCall, chunks_of
from agentspec_runtime.client.answer import Answer
from agentspec_runtime.client.received import Received, carries_token
from agentspec_runtime.client.tap import BodyReader, SseFilter

REPLY = Reply("Grüße 日本 🍸", tool_calls=[ToolCall("f", {"a": "ü"}, "c1"), ToolCall("g", '{"b": ', "c2")])


def events(*, usage: bool) -> list[dict[str, Any]]:
    request = {"model": "m", "stream_options": {"include_usage": usage}}
    found = list(chunks_of("/v1/chat/completions", request, REPLY))
    return [{**event, "id": "chatcmpl-1"} for event in found]


def as_bytes(chunks: list[dict[str, Any]], end: str = "\n\n", *, ascii_only: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk, ensure_ascii=ascii_only)}{end}" for chunk in chunks]
    return "".join((": keep-alive" + end, *lines, f"data: [DONE]{end}")).encode()


def decoded(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def filtered(data: bytes, cuts: list[int], *, hide: bool, sink: Any) -> bytes:
    reader = SseFilter(sink, hide_usage=hide)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    out = [reader.feed(data[start:stop]) for start, stop in pairwise(places)]
    out.append(reader.flush())
    assert reader.complete
    return b"".join(out)


@given(
    cuts=st.lists(st.integers(min_value=0), max_size=12),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    ascii_only=st.booleans(),
)
def test_an_added_usage_chunk_is_taken_out_and_nothing_else(
    cuts: list[int], end: str, ascii_only: bool
) -> None:
    received = Received()
    data = as_bytes(events(usage=True), end, ascii_only=ascii_only)
    out = filtered(data, cuts, hide=True, sink=received.absorb)
    assert decoded(out) == [*events(usage=False), "[DONE]"]
    assert (received.accepted, received.completion_tokens) == (2, REPLY.num_tokens)


@given(cuts=st.lists(st.integers(min_value=0), max_size=12))
def test_with_nothing_to_hide_bytes_pass_unchanged(cuts: list[int]) -> None:
    data = as_bytes(events(usage=True))
    assert filtered(data, cuts, hide=False, sink=lambda _: None) == data


@given(cuts=st.lists(st.integers(min_value=0), max_size=12))
def test_tool_calls_come_together_from_any_cut(cuts: list[int]) -> None:
    answer = Answer()
    reader = SseFilter(answer.absorb, hide_usage=False, every_event=True)
    data = as_bytes(events(usage=False))
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        reader.feed(data[start:stop])
    message: Any = answer.message()
    assert message["content"] == REPLY.content
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": "\\u00fc"}', '{"b": ']


def usage_chunk(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}, **fields}


def text_chunk(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


@pytest.mark.parametrize(
    ("chunks", "left", "completion"),
    [
        ([text_chunk("a"), usage_chunk()], [text_chunk("a")], 2),
        ([usage_chunk(), text_chunk("a")], [text_chunk("a")], 2),
        (
            [
                text_chunk("a", usage={"completion_tokens": 1}),
                text_chunk("b", usage={"completion_tokens": 7}),
            ],
            [
                text_chunk("a", usage={"completion_tokens": 1}),
                text_chunk("b", usage={"completion_tokens": 7}),
            ],
            7,
        ),
        ([{"id": "x", "choices": []}, text_chunk("a")], [{"id": "x", "choices": []}, text_chunk("a")], None),
        ([text_chunk("a", usage=None)], [text_chunk("a", usage=None)], None),
        ([text_chunk('a "usage": {"completion_tokens": 9} \\"usage\\"')], None, None),
    ],
    ids=["last", "first", "every", "keep-alive", "none", "only in the text"],
)
def test_where_usage_may_stand(
    chunks: list[dict[str, Any]], left: list[dict[str, Any]] | None, completion: int | None
) -> None:
    received = Received()
    out = filtered(as_bytes(chunks), [], hide=True, sink=received.absorb)
    assert decoded(out) == [*(chunks if left is None else left), "[DONE]"]
    assert received.completion_tokens == completion


def test_a_stream_that_ends_without_done_gives_up_what_was_held() -> None:
    chunks = [{**text_chunk("a"), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    reader = SseFilter(lambda _: None, hide_usage=True)
    data = f"data: {json.dumps(chunks[0])}\n\ndata: {{half".encode()
    assert reader.feed(data) == b""
    assert reader.flush() == data
    assert not reader.complete


@pytest.mark.parametrize(
    "data", [b"data: {not json}\n\n", b"\xff\xfe\n\n", b"\n\n\n\n", b"event: x\n\n", b"data: 7\n\n"]
)
def test_bytes_that_are_no_events_pass(data: bytes) -> None:
    reader = SseFilter(lambda _: None, hide_usage=True)
    assert reader.feed(data) + reader.flush() == data


def test_an_error_event_is_an_error_of_the_answer() -> None:
    received = Received()
    reader = SseFilter(received.absorb, hide_usage=True)
    reader.feed(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
    assert received.error_type == "APIError"


@pytest.mark.parametrize(
    ("delta", "token"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"reasoning": "hm"}, True),
        ({"reasoning_content": "hm"}, True),
        ({"tool_calls": [{"index": 0}]}, True),
        ({"content": "x"}, True),
        ({}, False),
    ],
)
def test_what_counts_as_a_first_token(delta: Mapping[str, object], token: bool) -> None:
    assert carries_token({"choices": [{"index": 0, "delta": delta}]}) is token


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        {"speculative_decoding": None},
        {"speculative_decoding": {"num_draft_tokens": "3", "num_accepted_draft_tokens": True}},
        {"speculative_decoding": {"per_step_accepted": [1, None], "num_draft_tokens": -1}},
        "nonsense",
        [1],
    ],
)
def test_absent_or_odd_metrics_are_unknown_and_never_zero(metrics: object) -> None:
    received = Received()
    received.absorb({"id": "x", "choices": [], "usage": {"completion_tokens": 5}, "metrics": metrics})
    assert (received.drafted, received.accepted, received.num_steps) == (None, None, None)
    assert received.per_step_accepted is None
    assert received.completion_tokens == 5


def test_every_step_of_a_long_answer_is_kept() -> None:
    steps = [1] * 2_000
    spec = {"num_draft_tokens": 4_000, "num_accepted_draft_tokens": 2_000, "num_spec_steps": 2_000}
    spec_metrics = {
        "speculative_decoding": {**spec, "per_step_accepted": steps, "per_step_drafted": [2] * 2_000}
    }
    received = Received()
    received.absorb({"choices": [], "usage": {"completion_tokens": 4_001}, "metrics": spec_metrics})
    assert received.num_steps == 2_001
    assert len(received.per_step_accepted or ()) == 2_000


@pytest.mark.parametrize(
    ("tokens", "accepted", "steps"),
    [
        (10, (3, 2), 5),  # 1 + 4 + 3 tokens of three steps, and two steps without a draft
        (8, (3, 2), 3),  # no step without a draft but the first
        (7, (3, 2), 3),  # the end was the last accepted token: the step gave no token of its own
        (6, (3, 2), 3),  # it was the one before: vLLM counted an accepted token behind it
        (10, (), 10),
    ],
)
def test_steps_are_counted_right_where_a_draft_held_the_end(
    tokens: int, accepted: tuple[int, ...], steps: int
) -> None:
    """vLLM counts acceptance before it looks for the end, also with drafters that draft ends."""
    spec = {
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": 4 * len(accepted),
    }
    received = Received()
    body = {"usage": {"completion_tokens": tokens}, "metrics": {"speculative_decoding": spec}}
    received.absorb({"id": "x", "choices": [], **body})
    assert received.num_steps == steps


def test_a_body_is_handed_over_whole_and_unchanged() -> None:
    seen: list[Any] = []
    reader = BodyReader(seen.append)
    data = json.dumps({"id": "x", "choices": []}).encode()
    assert reader.feed(data[:5]) + reader.feed(data[5:]) + reader.flush() == data
    assert seen == [{"id": "x", "choices": []}]


@pytest.mark.parametrize("dialect", ["index", "index always 0", "no index", "id on every fragment"])
def test_three_calls_come_apart_in_every_dialect(dialect: str) -> None:
    calls = [("c0", "f", '{"a": 1}'), ("c1", "g", '{"b": 2}'), ("c2", "f", '{"c": 3}')]
    answer = Answer()

    def send(call_id: str | None, index: int, function: dict[str, str]) -> None:
        fragment: dict[str, object] = {"function": function}
        if call_id is not None:
            fragment["id"] = call_id
        if dialect != "no index":
            fragment["index"] = 0 if dialect == "index always 0" else index
        answer.absorb({"choices": [{"index": 0, "delta": {"tool_calls": [fragment]}}]})

    interleaved = dialect in ("index", "id on every fragment")
    every = dialect == "id on every fragment"
    if interleaved:
        for index, (call_id, name, _) in enumerate(calls):
            send(call_id, index, {"name": name, "arguments": ""})
        for start in range(0, 8, 4):
            for index, (call_id, _, arguments) in enumerate(calls):
                send(call_id if every else None, index, {"arguments": arguments[start : start + 4]})
    else:
        for index, (call_id, name, arguments) in enumerate(calls):
            send(call_id, index, {"name": name, "arguments": arguments[:4]})
            send(None, index, {"arguments": arguments[4:]})
    message: Any = answer.message()
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message["tool_calls"]
    ] == calls
