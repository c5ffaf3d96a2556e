"""`@tool`: mark a function as a tool of the agent, and change nothing else about it.

The result keeps the kind of function (sync, async, generator, async generator), its signature, hints,
docstring, defaults and exceptions; arguments are forwarded exactly as they came, are never bound, copied or
converted, and are neither kept nor shown to anybody. What the decorator adds: observers learn that the
tool ran, and the session remembers a key of the result's text, so that the server can be told which
message is that result where its role does not say it.

It may stand under or over LangChain's `@tool`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast, overload

import wrapt

from agentspec_runtime.client.context import CallContext, ToolRun
from agentspec_runtime.client.scope import Pieces, current, tool_boundary
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.hints import SegmentKind

__all__ = ["result_kinds", "tool"]

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")

_kinds: dict[str, str] = {}


def result_kinds() -> Mapping[str, str]:
    """Kind of result by tool name, for the tools whose result is more than a tool result."""
    return _kinds


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *, name: str | None = None, kind: SegmentKind | str = SegmentKind.TOOL_RESULT
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    kind: SegmentKind | str = SegmentKind.TOOL_RESULT,
) -> F | Callable[[F], F]:
    """Mark a function, method, callable object or LangChain tool as a tool.

    Args:
        function: what to mark, when used without parentheses.
        name: name by which the model calls it, where that is not the function's own.
        kind: what the result is; `SegmentKind.FILE` for a tool that reads files.
    """

    def mark(target: F) -> F:
        return _mark(target, name, str(kind))

    return mark if function is None else mark(function)


def _mark(target: F, name: str | None, kind: str) -> F:
    if isinstance(target, (classmethod, staticmethod)):
        return cast("F", type(target)(_mark(target.__func__, name, kind)))
    marked = _mark_langchain(target, name, kind)
    if marked is not None:
        return marked
    if not callable(target):
        raise ConfigurationError(
            f"@tool needs something callable, got {type(target).__name__}: {target!r:.80}"
        )
    label = name or _name_of(target)
    if kind != SegmentKind.TOOL_RESULT:
        _kinds[label] = kind
    return cast("F", _wrap(target, ToolRun(name=label, kind=kind)))


def _name_of(target: Callable[..., object]) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    found = getattr(target, "__name__", None)
    return found if isinstance(found, str) else type(target).__name__


def _mark_langchain(target: F, name: str | None, kind: str) -> F | None:
    """A copy of a LangChain tool with marked functions; None for anything else."""
    module = sys.modules.get("langchain_core.tools")
    if module is None or not isinstance(target, module.BaseTool):
        return None
    parts = {
        part: _mark(function, name or target.name, kind)
        for part in ("func", "coroutine")
        if (function := getattr(target, part, None)) is not None
    }
    if not parts:
        raise ConfigurationError(
            f"@tool cannot mark {type(target).__name__} {target.name!r}: it has no function to wrap. "
            "Put @agentspec_runtime.tool on its _run and _arun methods instead."
        )
    return cast("F", target.model_copy(update=parts))


def _wrap(target: Callable[..., Any], run: ToolRun) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(target):
        return _wrap_async_generator(target, run)
    if inspect.iscoroutinefunction(target):
        return _wrap_async(target, run)
    if inspect.isgeneratorfunction(target):
        return _wrap_generator(target, run)
    if inspect.isroutine(target) or isinstance(target, functools.partial):
        return _wrap_sync(target, run)
    # A callable object: a transparent proxy keeps its attributes and its type.
    return cast("Callable[..., Any]", wrapt.FunctionWrapper(target, _proxy_call(run)))


def _proxy_call(run: ToolRun) -> Callable[..., Any]:
    def call(
        wrapped: Callable[..., Any], _instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if inspect.iscoroutinefunction(type(wrapped).__call__):
            return _wrap_async(wrapped, run)(*args, **kwargs)
        return _wrap_sync(wrapped, run)(*args, **kwargs)

    return call


class _Run:
    """One run of a tool: its place in the context, and what became of it."""

    __slots__ = ("_pieces", "_run", "_session", "piece")

    def __init__(self, run: ToolRun, kwargs: Mapping[str, object]) -> None:
        outer = current()
        self._session = outer.session
        # An adapter that calls this tool has announced it already, with its call id.
        adopted = outer.tool is not None and outer.tool.name == run.name
        call_id = outer.tool.call_id if adopted and outer.tool else kwargs.get("tool_call_id")
        self._run = replace(run, call_id=call_id) if isinstance(call_id, str) else run
        self._pieces = Pieces(self._derive, None if adopted else tool_boundary)
        self.piece = self._pieces.piece

    def _derive(self, context: CallContext) -> CallContext:
        return replace(context, tool=self._run)

    def end(self, error: BaseException | None, result: object = None) -> None:
        self._pieces.end(error)
        if self._session is not None and isinstance(result, str) and result:
            self._session.note_result(result, self._run)


def _wrap_sync(target: Callable[P, R], run: ToolRun) -> Callable[P, R]:
    @functools.wraps(target)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _Run(run, kwargs)
        try:
            with state.piece():
                result = target(*args, **kwargs)
        except BaseException as error:
            state.end(error)
            raise
        state.end(None, result)
        return result

    return call


def _wrap_async(target: Callable[P, Awaitable[R]], run: ToolRun) -> Callable[P, Awaitable[R]]:
    @functools.wraps(target)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _Run(run, kwargs)
        try:
            with state.piece():
                result = await target(*args, **kwargs)
        except BaseException as error:
            state.end(error)
            raise
        state.end(None, result)
        return result

    return call


def _wrap_generator(
    target: Callable[P, Generator[Any, Any, Any]], run: ToolRun
) -> Callable[P, Generator[Any, Any, Any]]:
    @functools.wraps(target)
    def call(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, Any]:
        state, inner, parts = _Run(run, kwargs), target(*args, **kwargs), _Parts()
        error: BaseException | None = None
        step: Callable[[Any], Any] = inner.send
        value: Any = None
        try:
            while True:
                try:
                    with state.piece():
                        item = step(value)
                except StopIteration as stop:
                    return stop.value
                parts.add(item)
                try:
                    step, value = inner.send, (yield item)
                except GeneratorExit:
                    with state.piece():
                        inner.close()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - handed on to the tool's generator
                    step, value = inner.throw, thrown
        except BaseException as failed:
            error = failed
            raise
        finally:
            state.end(error, parts.text())
            del error  # it holds this frame

    return call


def _wrap_async_generator(
    target: Callable[P, AsyncGenerator[Any, Any]], run: ToolRun
) -> Callable[P, AsyncGenerator[Any, Any]]:
    @functools.wraps(target)
    async def call(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Any, Any]:
        state, inner, parts = _Run(run, kwargs), target(*args, **kwargs), _Parts()
        error: BaseException | None = None
        step: Callable[[Any], Awaitable[Any]] = inner.asend
        value: Any = None
        try:
            while True:
                try:
                    with state.piece():
                        item = await step(value)
                except StopAsyncIteration:
                    return
                parts.add(item)
                try:
                    step, value = inner.asend, (yield item)
                except GeneratorExit:
                    with state.piece():
                        await inner.aclose()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - handed on to the tool's generator
                    step, value = inner.athrow, thrown
        except BaseException as failed:
            error = failed
            raise
        finally:
            state.end(error, parts.text())
            del error  # it holds this frame

    return call


_MAX_PARTS_CHARS = 1 << 20
"""Text of a generator that is put together in order to recognise it later; beyond it, it is not."""


class _Parts:
    """Text that a generator yields, as long as it yields nothing but text."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[str] | None = []
        self._size = 0

    def add(self, item: object) -> None:
        if self._parts is None:
            return
        self._size += len(item) if isinstance(item, str) else _MAX_PARTS_CHARS
        if isinstance(item, str) and self._size < _MAX_PARTS_CHARS:
            self._parts.append(item)
        else:
            self._parts = None

    def text(self) -> str | None:
        return "".join(self._parts) if self._parts else None
