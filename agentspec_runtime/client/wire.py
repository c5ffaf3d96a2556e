"""From context to request: the hint, its place in the body, the session header. Pure functions.

Rules: nothing that the caller passed is changed or copied deeply; the caller's own keys win, including a
hint of their own; a message is looked at and never re-serialised; whatever cannot be read is left unmarked
and nothing raises because of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

from agentspec_runtime.client.context import CallContext, ResultKey, ToolRun
from agentspec_runtime.errors import HintError
from agentspec_runtime.hints import XARGS_KEY, Hint, MessageMark, SegmentKind, encode_hint

__all__ = [
    "SESSION_HEADER",
    "asks_for_usage",
    "build_hint",
    "find_marks",
    "fit_hint",
    "merge_body",
    "session_header",
]

SESSION_HEADER: Final = "X-Session-ID"
"""vLLM's own session header; routers use it to keep a session on one replica."""

_WINDOW: Final = 32
"""Newest messages that are looked at for marks, so that the cost of a call does not grow with its history (a
message takes 2 us) and marks take 1.5 KB of hint at most. What is older was marked in earlier turns."""


def build_hint(
    context: CallContext,
    *,
    turn: int | None,
    body: Mapping[str, object],
    kinds: Mapping[str, str],
) -> Hint:
    """The hint of one request.

    Args:
        context: where the call is made.
        turn: its number in the session.
        body: the request.
        kinds: result kind by tool name, for tools whose result is not simply a tool result.
    """
    tools = body.get("tools")
    results = context.session.results() if context.session is not None else {}
    return Hint(
        session=context.session.id if context.session is not None else None,
        agent=context.agent,
        parent=context.parent,
        turn=turn,
        expect=context.expect[:16],
        marks=find_marks(body.get("messages"), kinds=kinds, results=results),
        tools=len(tools) if isinstance(tools, Sequence) and not isinstance(tools, str) else None,
        speculate=context.speculate,
        latency=context.latency,
        scope=context.scope,
    )


def fit_hint(hint: Hint) -> str:
    """Wire form of a hint; the oldest marks are left out until it fits."""
    while True:
        try:
            return encode_hint(hint)
        except HintError:
            if not hint.marks:
                raise
            hint = hint.model_copy(update={"marks": hint.marks[(len(hint.marks) + 1) // 2 :]})


def find_marks(
    messages: object, *, kinds: Mapping[str, str], results: Mapping[ResultKey, ToolRun]
) -> tuple[MessageMark, ...]:
    """Marks of the messages whose role does not tell what they are.

    Two cases: a tool message whose tool returns something special (a file), found by the name of the
    call it answers; and a message of another role that repeats a tool's result, as frameworks do that
    write observations as user text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not (kinds or results):
        return ()
    found: list[tuple[int, str, str | None]] = []
    names: dict[object, object] = {}
    first = max(0, len(messages) - _WINDOW)
    for index, message in enumerate(messages[first:], start=first):
        if not isinstance(message, dict):  # the SDK sends plain ones; a Mapping check costs ten times more
            continue
        match message.get("role"):
            case "assistant":
                if kinds:
                    names.update(_call_names(message.get("tool_calls")))
            case "tool":
                call_id = message.get("tool_call_id")
                kind = kinds.get(str(message.get("name") or names.get(call_id)))
                if kind is not None and kind != SegmentKind.TOOL_RESULT:
                    found.append((index, kind, _call_id(call_id)))
            case _:
                run = _repeated(message.get("content"), results) if results else None
                if run is not None:
                    found.append((index, run.kind, _call_id(run.call_id)))
    return tuple(MessageMark(index=index, kind=kind, call_id=call_id) for index, kind, call_id in found)


def _call_id(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 128 else None


def _call_names(calls: object) -> dict[object, object]:
    """Tool name by call id; tolerant of everything that is not as it should be."""
    if not isinstance(calls, Sequence):
        return {}
    return {
        call["id"]: function.get("name")
        for call in calls
        if isinstance(call, Mapping)
        and isinstance(call.get("id"), str)
        and isinstance(function := call.get("function"), Mapping)
    }


def _repeated(content: object, results: Mapping[ResultKey, ToolRun]) -> ToolRun | None:
    """The tool run whose result this content is, whole or behind a heading line ("Observation:")."""
    for text in _texts(content):
        found = results.get(ResultKey.of(text))
        if found is None:
            _, newline, rest = text.partition("\n")
            found = results.get(ResultKey.of(rest)) if newline else None
        if found is not None:
            return found
    return None


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        return []
    return [
        text for block in content if isinstance(block, Mapping) and isinstance(text := block.get("text"), str)
    ]


def asks_for_usage(body: Mapping[str, object]) -> bool:
    """Whether the caller decided about `stream_options.include_usage`, either way."""
    options = body.get("stream_options")
    return isinstance(options, Mapping) and "include_usage" in options


def has_own_hint(body: Mapping[str, object]) -> bool:
    """Whether the caller sends a hint of their own (or something under our key that must be left alone)."""
    xargs = body.get("vllm_xargs")
    return xargs is not None and (not isinstance(xargs, Mapping) or XARGS_KEY in xargs)


def merge_body(body: Mapping[str, object], *, hint: str | None, include_usage: bool) -> dict[str, object]:
    """The keys that have to be added to a request: our part merged into what the caller has there."""
    added: dict[str, object] = {}
    if hint is not None:
        xargs = body.get("vllm_xargs")
        added["vllm_xargs"] = {**(xargs if isinstance(xargs, Mapping) else {}), XARGS_KEY: hint}
    if include_usage:
        options = body.get("stream_options")
        added["stream_options"] = {
            **(options if isinstance(options, Mapping) else {}),
            "include_usage": True,
        }
    return added


def session_header(session_id: str) -> str:
    """A session id as a header value: as it is where it is printable ASCII, else percent-encoded."""
    if session_id.isascii() and session_id.isprintable() and session_id == session_id.strip():
        return session_id
    return quote(session_id, safe="!#$&'()*+,/:;=?@[]~-._|{}^` ").strip()
