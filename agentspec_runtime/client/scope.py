"""The chain of frames that says where a call is made, and the blocks that push one.

One context variable holds the innermost frame. Context variables reach asyncio tasks and the thread pools
of LangGraph; a plain `ThreadPoolExecutor` starts without them, so submit
`contextvars.copy_context().run` there, or open `session(id)` again inside the thread.

Rule: a frame is removed by identity, not by token. A generator may be closed in another context than the one
that entered the block; that must neither raise nor leave the frame behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Final

from agentspec_runtime.client.context import CallContext
from agentspec_runtime.client.observer import BoundaryStart, BoundaryWatch

__all__ = ["Pieces", "Scope", "agent_boundary", "current", "tool_boundary"]

Derive = Callable[[CallContext], CallContext]
Boundary = Callable[[CallContext], BoundaryStart | None]


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
    return frame.context.refined() if frame is not None else _EMPTY


class Scope:
    """A block with its own `CallContext`, for `with` and `async with`; may be entered more than once.

    `derive` turns the enclosing context into that of the block. `boundary`, where given, says what
    begins there, and observers are told.
    """

    __slots__ = ("_boundary", "_derive", "_open")

    def __init__(
        self,
        derive: Derive,
        boundary: Boundary | None = None,
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


class Pieces:
    """A block whose body runs in pieces: a function once, a generator once per resumption.

    Between the pieces nothing of ours is current, so that what consumes a generator is not taken for a
    part of it. Observers see one boundary. The context is derived at the first piece and stays.
    """

    __slots__ = ("_boundary", "_context", "_derive", "_watch")

    def __init__(self, derive: Derive, boundary: Boundary | None = None) -> None:
        self._derive = derive
        self._boundary = boundary
        self._context: CallContext | None = None
        self._watch: BoundaryWatch | None = None

    def piece(self) -> AbstractContextManager[None]:
        """The body runs."""
        return _Piece(self)

    def context(self, outer: CallContext) -> CallContext:
        """The context of the block."""
        if self._context is None:
            self._context = self._derive(outer)
            boundary = self._boundary(self._context) if self._boundary is not None else None
            self._watch = BoundaryWatch(boundary) if boundary is not None else None
        return self._context

    def active(self) -> AbstractContextManager[None] | None:
        """The observers' part of a piece."""
        return self._watch.active() if self._watch is not None else None

    def end(self, error: BaseException | None) -> None:
        """The block is over."""
        if self._watch is not None:
            self._watch.finish(error)


class _Piece(AbstractContextManager[None]):
    """One piece. A class and not a generator: StopIteration passes through it."""

    __slots__ = ("_pieces", "_scope", "_stack")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._scope = Scope(pieces.context)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._scope.enter()
        active = self._pieces.active()
        if active is not None:
            self._stack.enter_context(active)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._scope.leave()


def agent_boundary(context: CallContext, framework: str | None = None) -> BoundaryStart | None:
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
        framework=framework,
    )


def tool_boundary(context: CallContext, framework: str | None = None) -> BoundaryStart | None:
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
        framework=framework,
    )
