"""The seam where something else may watch model calls, tool runs and agents: spans, above all.

Two protocols with the same three verbs. `start` is called before anything is sent and returns a token of
the observer's own choosing, or None: then it is not told of this call again. `active` gives a context manager
that is entered and left **in one frame** around the sending of the request (or the body of the tool), so
that an observer may make its span current there and nowhere else; a stream is read outside of it. `finish`
is called exactly once per token, maybe in another thread, task or context (a stream may be dropped and
collected anywhere).

Rules: observers never see tool arguments or results; they may read the body of a model request and must
not change it; the only thing an observer adds to a request is headers (`traceparent`). Whatever an observer
raises is logged once per observer and dropped: watching never changes what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Final, Generic, Literal, Protocol, TypeVar

from agentspec_runtime.client.report import CallReport, Operation
from agentspec_runtime.client.shield import shielded
from agentspec_runtime.hints import Hint

__all__ = [
    "BoundaryObserver",
    "BoundaryStart",
    "BoundaryWatch",
    "CallObserver",
    "CallStart",
    "CallWatch",
    "ReportedToolError",
    "is_control_flow",
    "register_boundary_observer",
    "register_call_observer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """One model call that is about to be sent.

    `body` is the request as the caller made it, for reading only. `headers` holds what this package adds to
    the request; an observer may add more. `hint` is None where no hint is sent.
    """

    operation: Operation
    model: str | None
    base_url: str
    server_address: str | None
    server_port: int | None
    stream: bool
    session: str | None
    agent: str | None
    parent: str | None
    turn: int | None
    hint: Hint | None
    body: Mapping[str, object]
    headers: MutableMapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryStart:
    """A tool or an agent that is about to run. `call_id` is the id of the tool call, where known.

    `framework` names the framework whose hook noticed it ("langchain"); None for what the user marked.
    """

    kind: Literal["agent", "tool"]
    name: str
    call_id: str | None
    session: str | None
    agent: str | None
    parent: str | None
    framework: str | None = None


class CallObserver(Protocol):
    """Watches model calls."""

    def start(self, call: CallStart, /) -> object:
        """A call begins; the result is handed back as `token`. None: not interested in it."""
        ...

    def active(self, token: object, /) -> AbstractContextManager[object]:
        """Entered while the request is being sent, until the response (or the stream object) is there."""
        ...

    def finish(self, token: object, report: CallReport, error: BaseException | None, /) -> None:
        """The call is over; `error` is what the caller gets raised, if anything."""
        ...


class BoundaryObserver(Protocol):
    """Watches tools and agents.

    `error` of `finish` is None where the run ended by control flow (an interrupt, a hand-over, a
    generator closed early); a tool whose failure was turned into a message for the model has an error.
    """

    def start(self, boundary: BoundaryStart, /) -> object:
        """A tool or an agent begins. None: not interested in it."""
        ...

    def active(self, token: object, /) -> AbstractContextManager[object]:
        """Entered around the body. Generators: around each resumption."""
        ...

    def finish(self, token: object, error: BaseException | None, /) -> None:
        """The run is over."""
        ...


class ReportedToolError(Exception):
    """A tool failed and its framework told the model so instead of raising. Seen by observers only."""


ObserverT = TypeVar("ObserverT")


class _Registry(Generic[ObserverT]):
    """Registered observers of one kind; reading takes no lock (the tuple is replaced, never changed)."""

    def __init__(self) -> None:
        self.observers: tuple[ObserverT, ...] = ()
        self._lock = Lock()

    def add(self, observer: ObserverT) -> Callable[[], None]:
        with self._lock:
            if not any(other is observer for other in self.observers):
                self.observers = (*self.observers, observer)

        def remove() -> None:
            with self._lock:
                self.observers = tuple(other for other in self.observers if other is not observer)

        return remove


_calls: _Registry[CallObserver] = _Registry()
_boundaries: _Registry[BoundaryObserver] = _Registry()


def register_call_observer(observer: CallObserver) -> Callable[[], None]:
    """Add an observer of model calls, once. Returns the function that removes it."""
    return _calls.add(observer)


def register_boundary_observer(observer: BoundaryObserver) -> Callable[[], None]:
    """Add an observer of tools and agents, once. Returns the function that removes it."""
    return _boundaries.add(observer)


def _shield(observer: object) -> shielded:
    return shielded(f"observer {type(observer).__name__}", id(observer))


_NOTHING: Final = nullcontext()


@contextmanager
def _active(
    tokens: tuple[tuple[CallObserver, object], ...] | tuple[tuple[BoundaryObserver, object], ...],
) -> Iterator[None]:
    with ExitStack() as stack:
        for observer, token in tokens:
            with _shield(observer):
                manager = observer.active(token)
                manager.__enter__()
                # Only the clean-up is registered: what the body raises is not the observer's business.
                stack.callback(_leave, observer, manager)
        yield


def _leave(observer: object, manager: AbstractContextManager[object]) -> None:
    with _shield(observer):
        manager.__exit__(None, None, None)


class CallWatch:
    """All call observers of one call."""

    __slots__ = ("_tokens",)

    def __init__(self, call: CallStart) -> None:
        tokens: list[tuple[CallObserver, object]] = []
        for observer in _calls.observers:
            with _shield(observer):
                token = observer.start(call)
                if token is not None:
                    tokens.append((observer, token))
        self._tokens = tuple(tokens)

    def active(self) -> AbstractContextManager[None]:
        """Enter every observer's `active`; to be left in the same frame."""
        return _active(self._tokens) if self._tokens else _NOTHING

    def finish(self, report: CallReport, error: BaseException | None) -> None:
        """Tell every observer that the call is over."""
        for observer, token in self._tokens:
            with _shield(observer):
                observer.finish(token, report, error)


class BoundaryWatch:
    """All boundary observers of one run of a tool or an agent."""

    __slots__ = ("_tokens",)

    def __init__(self, boundary: BoundaryStart) -> None:
        tokens: list[tuple[BoundaryObserver, object]] = []
        for observer in _boundaries.observers:
            with _shield(observer):
                token = observer.start(boundary)
                if token is not None:
                    tokens.append((observer, token))
        self._tokens = tuple(tokens)

    def active(self) -> AbstractContextManager[None]:
        """Enter every observer's `active`; to be left in the same frame."""
        return _active(self._tokens) if self._tokens else _NOTHING

    def finish(self, error: BaseException | None) -> None:
        """Tell every observer that the run is over; control flow counts as no error."""
        if error is not None and is_control_flow(error):
            error = None
        for observer, token in self._tokens:
            with _shield(observer):
                observer.finish(token, error)


# Exceptions by which frameworks steer a run. They pass through untouched and are no failure of a tool.
# Named and not imported: none of these packages has to be installed.
_CONTROL_FLOW = frozenset(
    {
        ("langgraph", "GraphBubbleUp"),
        ("pydantic_ai", "CallDeferred"),
        ("pydantic_ai", "ApprovalRequired"),
        ("pydantic_ai", "ModelRetry"),
    }
)


def is_control_flow(error: BaseException) -> bool:
    """Whether an exception steers the run and does not mean that something failed."""
    if isinstance(error, GeneratorExit):
        return True
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) in _CONTROL_FLOW for kind in type(error).__mro__
    )
