"""`session()`: mark a block as one agent run, or as one agent inside a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from uuid import uuid4

from agentspec_runtime.client.context import (
    CallContext,
    Latency,
    Reach,
    Session,
    Speculate,
    clean_name,
    named_session,
)
from agentspec_runtime.client.scope import Scope, agent_boundary
from agentspec_runtime.hints import SegmentKind

__all__ = ["SessionScope", "session"]


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
        inner = named_session(name) if name is not None else outer.session or Session(uuid4().hex)
        context = outer if agent is None else outer.refined().under(agent)
        return replace(
            context,
            session=inner,
            scope=scope or context.scope,
            latency=latency or context.latency,
            speculate=context.speculate if speculate is None else speculate,
            expect=context.expect if kinds is None else kinds,
        )

    return SessionScope(Scope(derive, agent_boundary if agent is not None else None))
