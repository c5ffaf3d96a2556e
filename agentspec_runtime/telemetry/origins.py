"""Where the text of a prompt was made: spans to link a model call to.

A `chat` span links to the `execute_tool` spans whose results came into the prompt with this call, and to
the previous `chat` of its session: the places that the answer's drafts can copy from. Matching is by ids
(tool call id, session); no text is looked at or kept. Memory is bounded: the oldest entries go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.trace import SpanContext

__all__ = ["MAX_LINKS", "Origins", "new_tool_results"]

MAX_LINKS: Final = 32
"""A span keeps 128 links; 32 tool results in one turn are already more than a page can show."""
_MAX_REMEMBERED: Final = 4096
_MAX_MESSAGES: Final = 256
"""Newest messages that are looked at for results: a turn with more tool calls than that is cut."""


class Origins:
    """Span contexts by tool call id and by session. Safe to use from several threads."""

    def __init__(self) -> None:
        self._spans: OrderedDict[tuple[str, ...], SpanContext] = OrderedDict()
        self._lock = threading.Lock()

    def note_tool(self, call_id: str, span: SpanContext) -> None:
        """This span ran the tool call."""
        self._note(("tool", call_id), span)

    def tool(self, call_id: str) -> SpanContext | None:
        """The span that ran a tool call, if it is remembered."""
        with self._lock:
            return self._spans.get(("tool", call_id))

    def swap_chat(self, session: str, agent: str | None, span: SpanContext) -> SpanContext | None:
        """The previous model call of this agent in this session; `span` takes its place."""
        key = ("chat", session, agent or "")
        with self._lock:
            before = self._spans.get(key)
        self._note(key, span)
        return before

    def _note(self, key: tuple[str, ...], span: SpanContext) -> None:
        with self._lock:
            self._spans[key] = span
            self._spans.move_to_end(key)
            while len(self._spans) > _MAX_REMEMBERED:
                self._spans.popitem(last=False)


def new_tool_results(body: Mapping[str, object]) -> list[str]:
    """Ids of the tool calls whose results are new in this request, oldest first, at most `MAX_LINKS`.

    New are those behind the last message of the assistant. Knows chat messages and Responses items.
    """
    messages = body.get("messages") or body.get("input")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    found: list[str] = []
    for message in reversed(messages[-_MAX_MESSAGES:]):
        if not isinstance(message, Mapping):
            continue
        if message.get("role") == "assistant" or message.get("type") == "function_call":
            break
        call_id = message.get("tool_call_id") or message.get("call_id")
        if isinstance(call_id, str) and len(found) < MAX_LINKS:
            found.append(call_id)
    return found[::-1]
