"""Values of the client: sessions, tool runs, and the context of a model call.

Rules: a session counts its turns behind a lock, so that two parallel calls never get the same number. Named
sessions go on counting when they are entered again (a LangGraph thread that is resumed); what is kept for
the last `_MAX_REMEMBERED` names is a counter and keys of tool results, and nothing of any text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Literal

from agentspec_runtime.hints import SegmentKind

__all__ = [
    "CallContext",
    "Latency",
    "Reach",
    "ResultKey",
    "Session",
    "Speculate",
    "ToolRun",
    "clean_name",
    "named_session",
]

Reach = Literal["corpus", "session", "request"]
Latency = Literal["interactive", "normal", "batch"]
Speculate = Literal["auto", "off"] | int

_MAX_NAME: Final = 128
"""Longest name a hint can carry."""
_MAX_REMEMBERED: Final = 1_024
"""Named sessions whose turn counter is kept."""
_MAX_RESULTS: Final = 32
"""Tool results per session that are recognised when they come back in a message."""
_SAMPLE: Final = 2_048
"""Characters at either end of a tool result that identify it; a 5 MB line is not hashed whole."""


def clean_name(value: object) -> str | None:
    """A name as a hint can carry it: text of 1 to 128 characters without lone surrogates, else None.

    A longer one keeps its beginning and gets a digest of the whole, so that different names stay different.
    """
    if value is None:
        return None
    text = str(value).encode("utf-8", "replace").decode()
    if len(text) > _MAX_NAME:
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        text = f"{text[: _MAX_NAME - 33]}~{digest}"
    return text or None


@dataclass(frozen=True, slots=True)
class ResultKey:
    """Identity of a tool result's text: its length and a hash of both its ends. The text is not kept."""

    length: int
    digest: int

    @classmethod
    def of(cls, text: str) -> ResultKey:
        """Key of a text; cost does not grow with it."""
        return cls(len(text), hash((text[:_SAMPLE], text[-_SAMPLE:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """The tool that is running. `kind` is what its result is, for the server."""

    name: str
    call_id: str | None = None
    kind: str = SegmentKind.TOOL_RESULT


class Session:
    """One agent run. Safe to use from several threads and tasks at once."""

    __slots__ = ("_lock", "_results", "_turns", "id")

    def __init__(self, id: str) -> None:  # noqa: A002 - the word users know it by
        self.id: Final = id
        self._lock = Lock()
        self._turns = 0
        self._results: deque[tuple[ResultKey, ToolRun]] = deque(maxlen=_MAX_RESULTS)

    @property
    def turns(self) -> int:
        """Model calls made in this session so far."""
        return self._turns

    def next_turn(self) -> int:
        """Number of the call that starts now, from 0."""
        with self._lock:
            turn = self._turns
            self._turns += 1
        return turn

    def note_result(self, text: str, run: ToolRun) -> None:
        """Remember that this text was the result of a tool (by its key only)."""
        key = ResultKey.of(text)
        with self._lock:
            self._results.append((key, run))

    def results(self) -> dict[ResultKey, ToolRun]:
        """Recent tool results by key."""
        if not self._results:
            return {}
        with self._lock:
            return dict(self._results)

    def __repr__(self) -> str:
        return f"Session(id={self.id!r}, turns={self._turns})"


_named: OrderedDict[str, Session] = OrderedDict()
_named_lock = Lock()


def named_session(name: str) -> Session:
    """The session of that name; the same one for everybody who asks."""
    with _named_lock:
        found = _named.get(name)
        if found is None:
            found = _named[name] = Session(name)
            if len(_named) > _MAX_REMEMBERED:
                _named.popitem(last=False)
        else:
            _named.move_to_end(name)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What is known about a model call before its request is looked at.

    `refine`, where set, completes the context at the time of a call (an adapter that learns the graph
    node only then); it is dropped as soon as an agent is named explicitly.
    """

    session: Session | None = None
    agent: str | None = None
    parent: str | None = None
    scope: Reach = "corpus"
    latency: Latency = "normal"
    speculate: Speculate = "auto"
    expect: tuple[str, ...] = ()
    tool: ToolRun | None = None
    refine: Callable[[CallContext], CallContext] | None = None

    def refined(self) -> CallContext:
        """The context as it is here and now."""
        return self.refine(self) if self.refine is not None else self

    def under(self, agent: str | None) -> CallContext:
        """The context of an agent that this one calls; itself where no agent is named."""
        if agent is None:
            return self
        parent = self.parent if self.agent == agent else self.agent
        return replace(self, agent=agent, parent=parent, refine=None, tool=None, expect=())
