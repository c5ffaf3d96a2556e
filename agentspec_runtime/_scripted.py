"""Scripted answers and how the API shows them, as JSON bodies and as stream events. No I/O here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final
from uuid import uuid4

__all__ = ["Reply", "ToolCall", "body_of", "chunks_of"]

_CREATED: Final = 1_700_000_000


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in an answer. `arguments` may be a text that is no JSON, as models write it at times."""

    name: str
    arguments: Mapping[str, object] | str = field(default_factory=dict)
    id: str = ""

    def wire(self, index: int) -> dict[str, object]:
        """The call as the API shows it."""
        arguments = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        return {
            "id": self.id or f"call_{index}_{self.name}",
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer.

    Attributes:
        content: text of the answer; split into words when streamed.
        reasoning: streamed before the text, as vLLM does with a reasoning parser.
        tool_calls: calls of the answer.
        status: another HTTP status than 200 makes it an error with `error` as message.
        headers: extra response headers (`Retry-After`).
        delay_s: waiting time before the answer starts.
        chunk_delay_s: waiting time between chunks of a stream.
        cut_after: drop the connection after this many chunks of a stream.
        drafted, accepted: per verify step; they become `metrics.speculative_decoding`. None: no metrics.
        completion_tokens: default is one per word and 4 per tool call.
        usage: False leaves usage out altogether.
    """

    content: str | None = None
    _: KW_ONLY
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    status: int = 200
    error: str = "scripted failure"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    cut_after: int | None = None
    drafted: Sequence[int] | None = (3, 2)
    accepted: Sequence[int] = (2, 0)
    prompt_tokens: int = 11
    completion_tokens: int | None = None
    usage: bool = True

    @property
    def num_tokens(self) -> int:
        """Completion tokens of the answer."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        words = len(f"{self.reasoning or ''} {self.content or ''}".split())
        # As in vLLM: the first step has no draft, and each verify step gives one token more than it accepts.
        least = 1 + len(self.drafted) + sum(self.accepted) if self.drafted else 0
        return max(1, least, words + 4 * len(self.tool_calls))


def body_of(path: str, request: Mapping[str, Any], reply: Reply) -> dict[str, object]:
    """The JSON body of an answer."""
    if path.endswith("/responses"):
        return _response(request, reply, "completed")
    chat = path.endswith("/chat/completions")
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": _finish(reply)}
    if chat:
        message: dict[str, object] = {"role": "assistant", "content": reply.content}
        if reply.reasoning is not None:
            message["reasoning"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [call.wire(index) for index, call in enumerate(reply.tool_calls)]
        choice["message"] = message
    else:
        choice["text"] = reply.content or ""
    count = request.get("n") or 1
    body = _head(request, "chat.completion" if chat else "text_completion", chat)
    body["choices"] = [{**choice, "index": index} for index in range(count)]
    body["system_fingerprint"] = _FINGERPRINT
    if reply.usage:
        body["usage"] = _usage(reply)
    if count == 1:
        body["metrics"] = _metrics(reply)
    return body


_FINGERPRINT: Final = "vllm-0.0.0-mock"


def chunks_of(path: str, request: Mapping[str, Any], reply: Reply) -> Iterator[dict[str, object]]:
    """The events of a streamed answer, without the closing `[DONE]`."""
    if path.endswith("/responses"):
        yield from _response_events(request, reply)
        return
    chat = path.endswith("/chat/completions")
    head = _head(request, "chat.completion.chunk" if chat else "text_completion", chat)
    options = request.get("stream_options") or {}
    wants_usage = bool(options.get("include_usage")) and reply.usage
    for index in range(request.get("n") or 1):
        parts = _deltas(reply) if chat else ({"text": text} for text in _words(reply.content))
        for part in parts:
            yield {**head, "choices": [{"index": index, **part, "logprobs": None, "finish_reason": None}]}
        choice: dict[str, object] = {"index": index, "finish_reason": _finish(reply)}
        choice["delta" if chat else "text"] = {} if chat else ""
        end: dict[str, object] = {**head, "choices": [choice]}
        if not wants_usage:
            end["system_fingerprint"] = _FINGERPRINT  # with usage, vLLM puts it on the usage chunk
        yield end
    if wants_usage:
        metrics = _metrics(reply)
        yield {
            **head,
            "choices": [],
            "usage": _usage(reply),
            "system_fingerprint": _FINGERPRINT,
            **({"metrics": metrics} if metrics is not None else {}),
        }


def _head(request: Mapping[str, Any], kind: str, chat: bool) -> dict[str, object]:
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
    return {"id": name, "object": kind, "created": _CREATED, "model": request.get("model")}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else "stop"


def _words(text: str | None) -> list[str]:
    """Pieces as a server streams them; joined they are the text."""
    return re.findall(r"\s*\S+\s*$|\s*\S+|\s+", text or "")


def _deltas(reply: Reply) -> Iterator[dict[str, object]]:
    yield {"delta": {"role": "assistant", "content": ""}}
    for text in _words(reply.reasoning):
        yield {"delta": {"reasoning": text}}
    for text in _words(reply.content):
        yield {"delta": {"content": text}}
    for index, call in enumerate(reply.tool_calls):
        wire = call.wire(index)
        function: Any = wire["function"]
        first = {**wire, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield {"delta": {"tool_calls": [first]}}
        arguments = function["arguments"]
        for start in range(0, len(arguments), 7):
            piece = {"index": index, "function": {"arguments": arguments[start : start + 7]}}
            yield {"delta": {"tool_calls": [piece]}}


def _usage(reply: Reply) -> dict[str, object]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.prompt_tokens + reply.num_tokens,
    }


def _metrics(reply: Reply) -> dict[str, object] | None:
    if reply.drafted is None:
        return None
    drafted, accepted = list(reply.drafted), list(reply.accepted)
    steps = max(1, len(drafted))
    return {
        "time_to_first_token_ms": 12.5,
        "generation_time_ms": 80.0,
        "queue_time_ms": 0.5,
        "mean_itl_ms": 8.0,
        "tokens_per_second": 50.0,
        "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(accepted) / steps,
            "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted)),
            "acceptance_histogram": [accepted.count(count) for count in range(max([0, *drafted]) + 1)],
            "num_spec_steps": len(drafted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": 32,
            "per_step_accepted": accepted,
            "per_step_drafted": drafted,
        },
    }


def _response(request: Mapping[str, Any], reply: Reply, status: str) -> dict[str, object]:
    """A body of the responses endpoint; vLLM gives no acceptance there."""
    text = {"type": "output_text", "text": reply.content or "", "annotations": []}
    output: list[dict[str, object]] = []
    if reply.content is not None:
        output.append(
            {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        )
    for index, call in enumerate(reply.tool_calls):
        wire = call.wire(index)
        function: Any = wire["function"]
        output.append({"id": f"fc_{index}", "type": "function_call", "call_id": wire["id"], **function})
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": _CREATED,
        "model": request.get("model"),
        "status": status,
        "output": output if status == "completed" else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.num_tokens,
        }
        if status == "completed"
        else None,
    }


def _response_events(request: Mapping[str, Any], reply: Reply) -> Iterator[dict[str, object]]:
    done = _response(request, reply, "completed")
    begun = {**_response(request, reply, "in_progress"), "id": done["id"]}
    events: list[dict[str, object]] = [{"type": "response.created", "response": begun}]
    item = {"id": "msg_0", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    where = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    if reply.content is not None:
        events.append({"type": "response.output_item.added", "output_index": 0, "item": item})
        events.append({"type": "response.content_part.added", **where, "part": part})
        events.extend(
            {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}
            for text in _words(reply.content)
        )
        events.append({"type": "response.output_text.done", **where, "text": reply.content, "logprobs": []})
    events.append({"type": "response.completed", "response": done})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}
