"""Where the agent is: session, agent, turn, and what the next answer is expected to hold.

One context variable holds a chain of frames. `session()` and the adapters push a frame; the wrapper on
the OpenAI SDK reads the innermost one when a call is made. Context variables reach asyncio tasks and the
thread pools of LangGraph; a plain `ThreadPoolExecutor` starts without them, so submit
`contextvars.copy_context().run` there, or open `session(id)` again inside the thread.

Rules:
  * A frame is removed by identity, not by token. A generator may be closed in another context than the
    one that entered the block; that must neither raise nor leave the frame behind.
  * A session counts its turns behind a lock: two parallel calls never get the same number. Named sessions
    go on counting when they are entered again (a LangGraph thread that is resumed); the counters of the
    last `_MAX_REMEMBERED` names are kept, a few hundred bytes each, and nothing of any text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Final, Literal
from uuid import uuid4

from agentspec_runtime.client.observer import BoundaryStart, BoundaryWatch
from agentspec_runtime.hints import SegmentKind

__all__ = [
    "CallContext",
    "Latency",
    "Reach",
    "ResultKey",
    "Scope",
    "Session",
    "Speculate",
    "ToolRun",
    "clean_name",
    "current",
    "session",
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


def _named_session(name: str) -> Session:
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

    def under(self, agent: str | None) -> CallContext:
        """The context of an agent that this one calls; itself where no agent is named."""
        if agent is None:
            return self
        parent = self.parent if self.agent == agent else self.agent
        return replace(self, agent=agent, parent=parent, refine=None, tool=None, expect=())


@dataclass(frozen=True, slots=True)
class _Frame:
    owner: Scope
    context: CallContext
    outer: _Frame | None
    entry: _Entry


@dataclass(slots=True)
class _Entry:
    """What one `with` has to undo. `token` proves that it is left in the context it was entered in."""

    token: Token[None]
    watch: BoundaryWatch | None = None
    stack: ExitStack = field(default_factory=ExitStack)


_EMPTY: Final = CallContext()
_frames: ContextVar[_Frame | None] = ContextVar("agentspec_frames", default=None)
_mark: ContextVar[None] = ContextVar("agentspec_mark")


def current() -> CallContext:
    """The context of a call made here, completed by the adapter that set it."""
    frame = _frames.get()
    if frame is None:
        return _EMPTY
    context = frame.context
    return context.refine(context) if context.refine is not None else context


class Scope:
    """A block with its own `CallContext`, for `with` and `async with`; may be entered more than once.

    `derive` turns the enclosing context into that of the block. `boundary`, where given, says what
    begins there, and observers are told.
    """

    __slots__ = ("_boundary", "_derive", "_open")

    def __init__(
        self,
        derive: Callable[[CallContext], CallContext],
        boundary: Callable[[CallContext], BoundaryStart | None] | None = None,
    ) -> None:
        self._derive = derive
        self._boundary = boundary
        self._open: list[_Entry] = []

    def enter(self) -> CallContext:
        """Open the block."""
        outer = _frames.get()
        context = self._derive(outer.context if outer is not None else _EMPTY)
        entry = _Entry(_mark.set(None))
        boundary = self._boundary(context) if self._boundary is not None else None
        if boundary is not None:
            entry.watch = BoundaryWatch(boundary)
            entry.stack.enter_context(entry.watch.active())
        self._open.append(entry)
        _frames.set(_Frame(self, context, outer, entry))
        return context

    def leave(self, error: BaseException | None = None) -> None:
        """Close the innermost open block of this scope that is visible from here."""
        entry = self._remove_frame()
        if entry is None:
            if not self._open:
                return
            entry = self._open[-1]
        if entry in self._open:
            self._open.remove(entry)
        try:
            _mark.reset(entry.token)
        except ValueError:
            # Another context: what was made current there is gone with it, and must not be undone here.
            entry.stack.pop_all()
        else:
            entry.stack.close()
        if entry.watch is not None:
            entry.watch.finish(error)

    def _remove_frame(self) -> _Entry | None:
        """Take our innermost frame out of the chain, keeping frames that others pushed later."""
        above: list[_Frame] = []
        frame = _frames.get()
        while frame is not None and frame.owner is not self:
            above.append(frame)
            frame = frame.outer
        if frame is None:
            return None
        chain = frame.outer
        for other in reversed(above):
            chain = replace(other, outer=chain)
        _frames.set(chain)
        return frame.entry


class SessionScope:
    """What `session()` returns: a block for `with` and `async with` that yields the `Session`."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> Session:
        session = self._scope.enter().session
        if session is None:  # `derive` of session() always sets one
            raise AssertionError("a session scope without a session")
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.leave(error)

    async def __aenter__(self) -> Session:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.leave(error)


def session(
    id: str | None = None,  # noqa: A002 - the word users know it by
    *,
    agent: str | None = None,
    scope: Reach | None = None,
    latency: Latency | None = None,
    speculate: Speculate | None = None,
    expect: Iterable[SegmentKind | str] | None = None,
) -> SessionScope:
    """Mark a block as one agent run, or as one agent inside a run.

    ::

        with session("ticket-4711", agent="coder"):
            client.chat.completions.create(...)
            with session(agent="critic"):  # same session, agent "critic", parent "coder"
                client.chat.completions.create(...)

    Args:
        id: name of the session. Without one the enclosing session is kept; where there is none, a new one
            gets a random name.
        agent: agent that makes the calls; the enclosing agent becomes its parent.
        scope: the widest text that drafts may come from ("corpus", "session", "request").
        latency: "interactive" weighs these calls up, "batch" down.
        speculate: "auto", "off", or the greatest draft length.
        expect: kinds of block that the answers are expected to hold, in order.

    What is not given is inherited from the enclosing block.
    """
    name = clean_name(id)
    agent = clean_name(agent)
    kinds = None if expect is None else tuple(str(kind) for kind in expect)

    def derive(outer: CallContext) -> CallContext:
        inner = _named_session(name) if name is not None else outer.session or Session(uuid4().hex)
        context = outer.under(agent)
        return replace(
            context,
            session=inner,
            scope=scope or context.scope,
            latency=latency or context.latency,
            speculate=context.speculate if speculate is None else speculate,
            expect=context.expect if kinds is None else kinds,
        )

    return SessionScope(Scope(derive, agent_boundary if agent is not None else None))


def agent_boundary(context: CallContext) -> BoundaryStart | None:
    """The boundary that observers see where an agent begins."""
    if context.agent is None:
        return None
    return BoundaryStart(
        kind="agent",
        name=context.agent,
        call_id=None,
        session=context.session.id if context.session else None,
        agent=context.agent,
        parent=context.parent,
    )


def tool_boundary(context: CallContext) -> BoundaryStart | None:
    """The boundary that observers see where a tool begins."""
    if context.tool is None:
        return None
    return BoundaryStart(
        kind="tool",
        name=context.tool.name,
        call_id=context.tool.call_id,
        session=context.session.id if context.session else None,
        agent=context.agent,
        parent=context.parent,
    )
