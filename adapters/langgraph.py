"""LangGraph: one line that tells which run, agent and tool call a model call belongs to.

    graph = wrap(builder.compile(checkpointer=...))     # any compiled graph, `create_agent` included

or, where a graph cannot be replaced, in `create_agent(..., middleware=[AgentSpecMiddleware()])`.

Both set context variables and nothing else: state, messages, model settings, config, streamed values,
exceptions and interrupts are those of the graph itself. Hints and reports are made at the OpenAI SDK, so
`agentspec_runtime.instrument()` has to be called as well (`wrap` does it).

What is derived:
    session   the session that is open where the graph is called, else the run's `thread_id`, else a new one;
    agent     the name of a `create_agent` agent, else the node that calls the model, unless it has one of the
              names that every graph uses ("model", "agent", ...): then the subgraph's or the graph's name;
    parent    the agent around it;
    tool      name and call id of what a `ToolNode` runs, parallel calls each for itself.

`wrap` returns a copy whose class is a subclass of the graph's class; the original is left as it was.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, Final, TypeVar, cast
from uuid import uuid4

from agentspec_runtime.client.context import CallContext, Session, ToolRun, clean_name, named_session
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.client.observer import BoundaryStart, ReportedToolError
from agentspec_runtime.client.scope import Pieces, Scope, agent_boundary, current, tool_boundary
from agentspec_runtime.client.tool import result_kinds
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.messages import ToolMessage
    from langchain_core.runnables.config import var_child_runnable_config
    from langgraph.prebuilt import ToolNode
    from langgraph.pregel import Pregel
except ImportError as error:
    raise MissingDependencyError(error.name or "langgraph", "langgraph") from error

__all__ = ["AgentSpecMiddleware", "wrap"]

GraphT = TypeVar("GraphT")

_UNNAMED: Final = "LangGraph"
"""Name that LangGraph gives to a graph without one."""
_PLAIN_NODES: Final = frozenset(
    {
        "agent",
        "assistant",
        "call_llm",
        "call_model",
        "chat",
        "chatbot",
        "llm",
        "model",
        "model_request",
        "tools",
    }
)
"""Node names that say what a node does in every graph and not who it is."""


def wrap(graph: GraphT, *, name: str | None = None) -> GraphT:
    """A copy of a compiled graph whose runs, agents and tool calls are known to model calls.

    Subgraphs that are nodes and `ToolNode`s are covered too. Wrapping twice is wrapping once.

    Args:
        graph: a compiled `StateGraph`, the result of `create_agent`, or an `@entrypoint`.
        name: name of the agent, where the graph's own name is not it.

    Raises:
        ConfigurationError: not a compiled graph.
    """
    if not isinstance(graph, Pregel):
        raise ConfigurationError(
            f"wrap() needs a compiled graph, got {type(graph).__name__}: call .compile() first"
            " (a RemoteGraph runs elsewhere: wrap the graph there)"
        )
    instrument()
    return cast("GraphT", _wrap(graph, name))


def _wrap(graph: Pregel[Any, Any, Any, Any], name: str | None) -> Pregel[Any, Any, Any, Any]:
    if getattr(type(graph), "agentspec_wrapped", False):
        return graph
    marked = copy.copy(graph)
    marked.nodes = {key: _mark_node(node) for key, node in graph.nodes.items()}
    marked.__class__ = _marked_graph(type(graph), name)
    return marked


def _mark_node(node: Any) -> Any:
    """A copy of a node whose tools or subgraph are marked; the node itself where there are none."""
    bound = node.bound
    if isinstance(bound, ToolNode):
        return node.copy({"bound": _mark_tools(bound)})
    if isinstance(bound, Pregel):
        marked = _wrap(bound, None)
        subgraphs = [marked if graph is bound else graph for graph in node.subgraphs]
        return node.copy({"bound": marked, "subgraphs": subgraphs})
    return node


@cache
def _marked_graph(base: type[Any], name: str | None) -> type[Any]:
    """Subclass of a graph's class that sets the context around every piece of a run.

    `invoke`, `ainvoke` and the event streams all read `stream` or `astream`, so these two are enough.
    """

    class Marked(base):  # type: ignore[misc]  # the base is the class of the user's graph
        agentspec_wrapped = True

        @wraps(base.stream)
        def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            pieces = _run_pieces(self, name, _config_of(args, kwargs))
            error: BaseException | None = None
            source = super().stream(*args, **kwargs)
            try:
                while True:
                    try:
                        with pieces.piece():
                            item = next(source)
                    except StopIteration:
                        return
                    yield item
            except BaseException as failed:
                error = failed
                raise
            finally:
                with pieces.piece():
                    source.close()
                pieces.end(error)
                del error  # it holds this frame

        @wraps(base.astream)
        async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            pieces = _run_pieces(self, name, _config_of(args, kwargs))
            error: BaseException | None = None
            source = super().astream(*args, **kwargs)
            try:
                while True:
                    try:
                        with pieces.piece():
                            item = await anext(source)
                    except StopAsyncIteration:
                        return
                    yield item
            except BaseException as failed:
                error = failed
                raise
            finally:
                with pieces.piece():
                    await source.aclose()
                pieces.end(error)
                del error  # it holds this frame

    Marked.__name__, Marked.__qualname__, Marked.__module__ = (
        base.__name__,
        base.__qualname__,
        base.__module__,
    )
    Marked.__doc__ = base.__doc__
    return Marked


def _config_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return kwargs.get("config", args[1] if len(args) > 1 else None)


def _thread_of(*configs: object) -> str | None:
    """The thread id of the first config that has one."""
    for config in configs:
        configurable = config.get("configurable") if isinstance(config, Mapping) else None
        if isinstance(configurable, Mapping) and (thread := configurable.get("thread_id")) is not None:
            return clean_name(thread)
    return None


def _run_pieces(graph: Pregel[Any, Any, Any, Any], name: str | None, config: object) -> Pieces:
    """The block of one run of a graph."""
    own = clean_name(name) or _name_of(graph)

    def derive(outer: CallContext) -> CallContext:
        thread = _thread_of(config, graph.config, var_child_runnable_config.get())
        session = outer.session or (named_session(thread) if thread else Session(uuid4().hex))
        place = _Place.here()
        # A nameless graph that is a node of another one goes by the name of that node.
        agent = own or (outer.refined().agent if place.path else None)
        context = outer.under(agent)
        return replace(context, session=session, refine=lambda inner: _at_node(inner, context, place))

    return Pieces(derive, _agent_boundary if own is not None else _nameless_boundary)


# Observers are told that LangChain's hooks noticed these, because official instrumentations see them too.
_agent_boundary: Final = partial(agent_boundary, framework="langchain")
_tool_boundary: Final = partial(tool_boundary, framework="langchain")


def _nameless_boundary(context: CallContext) -> BoundaryStart | None:
    """A run of a graph without a name is a boundary where nothing is around it: one run, one trace."""
    if context.agent is not None:
        return None
    session = context.session.id if context.session is not None else None
    return BoundaryStart(
        kind="agent",
        name=_UNNAMED,
        call_id=None,
        session=session,
        agent=None,
        parent=context.parent,
        framework="langchain",
    )


def _name_of(graph: Pregel[Any, Any, Any, Any]) -> str | None:
    return None if graph.name == _UNNAMED else clean_name(graph.name)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in which graph the code runs: names of the nodes from the outermost graph in, and LangChain's
    name of the agent around it."""

    path: tuple[str, ...]
    agent: str | None

    @classmethod
    def here(cls) -> _Place:
        metadata = (var_child_runnable_config.get() or {}).get("metadata") or {}
        namespace = str(metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node") or "")
        path = tuple(part.partition(":")[0] for part in namespace.split("|") if part)
        return cls(path, clean_name(metadata.get("lc_agent_name")))


_NOWHERE: Final = _Place((), None)


def _at_node(inner: CallContext, run: CallContext, start: _Place) -> CallContext:
    """The context of a call that is made by the node that runs here, in a run that began at `start`."""
    here = _Place.here()
    nodes = [name for name in here.path[len(start.path) :] if name not in _PLAIN_NODES]
    agent = here.agent if here.agent != start.agent else None
    agent = agent or (clean_name(nodes[-1]) if nodes else None)
    if agent is None or agent == run.agent:
        return inner
    return replace(inner, agent=agent, parent=run.agent or run.parent)


def _run_of(call: Mapping[str, Any]) -> ToolRun:
    """The tool run of a tool call."""
    name = str(call.get("name") or "tool")
    call_id = call.get("id")
    kind = result_kinds().get(name)
    run = ToolRun(name=name, call_id=call_id if isinstance(call_id, str) else None)
    return replace(run, kind=kind) if kind is not None else run


def _tool_scope(
    call: Mapping[str, Any], place: Callable[[CallContext], CallContext] | None = None
) -> Scope | None:
    """The block of one tool call; None where another layer has opened it already."""
    run = _run_of(call)
    here = current().tool
    if here is not None and here.call_id == run.call_id and here.name == run.name:
        return None
    return Scope(
        lambda context: replace(place(context) if place is not None else context, tool=run), _tool_boundary
    )


def _error_in(result: object) -> BaseException | None:
    """The error of a tool that its node turned into a message."""
    for message in result if isinstance(result, list) else [result]:
        if isinstance(message, ToolMessage) and message.status == "error":
            return ReportedToolError("the tool failed and its error was given to the model")
    return None


def _mark_tools(node: ToolNode) -> ToolNode:
    """A copy of a `ToolNode` that opens a block around every call, outside of the node's own wrappers."""
    if getattr(type(node), "agentspec_wrapped", False) or not hasattr(node, "_run_one"):
        return node
    marked = copy.copy(node)
    marked.__class__ = _marked_tools(type(node))
    # The node keeps bound methods of the original.
    marked.func, marked.afunc = marked._func, marked._afunc  # noqa: SLF001
    return marked


@cache
def _marked_tools(base: type[Any]) -> type[Any]:
    # Around the whole call and not through `wrap_tool_call`: with a wrapper, ToolNode handles errors
    # differently (an exception that `handle_tool_errors` does not name becomes a message).
    class Marked(base):  # type: ignore[misc]  # the base is the class of the user's node
        agentspec_wrapped = True

        def _run_one(self, call: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return _in_scope(_tool_scope(call), lambda: super(Marked, self)._run_one(call, *args, **kwargs))

        async def _arun_one(self, call: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return await _in_scope_async(
                _tool_scope(call), lambda: super(Marked, self)._arun_one(call, *args, **kwargs)
            )

    Marked.__name__, Marked.__qualname__, Marked.__module__ = (
        base.__name__,
        base.__qualname__,
        base.__module__,
    )
    return Marked


def _in_scope(scope: Scope | None, body: Callable[[], Any]) -> Any:
    if scope is None:
        return body()
    scope.enter()
    try:
        result = body()
    except BaseException as error:
        scope.leave(error)
        raise
    scope.leave(_error_in(result))
    return result


async def _in_scope_async(scope: Scope | None, body: Callable[[], Awaitable[Any]]) -> Any:
    if scope is None:
        return await body()
    scope.enter()
    try:
        result = await body()
    except BaseException as error:
        scope.leave(error)
        raise
    scope.leave(_error_in(result))
    return result


class AgentSpecMiddleware(AgentMiddleware[Any, Any, Any]):
    """Marks the model and tool calls of a `create_agent` agent; changes neither requests nor results.

    Use it where the agent itself cannot be wrapped. Without a `thread_id` and outside of `session()`, the
    calls of one run are put together by the id of its first message.

    Args:
        agent: name of the agent, where it is not the one given to `create_agent`.
    """

    def __init__(self, agent: str | None = None) -> None:
        super().__init__()
        self._agent = clean_name(agent)
        instrument()

    def _place(self, request: Any) -> Callable[[CallContext], CallContext]:
        def derive(outer: CallContext) -> CallContext:
            session = outer.session or named_session(self._run_name(request))
            context = replace(outer.refined(), session=session)
            return _at_node(context, context, _NOWHERE) if self._agent is None else context.under(self._agent)

        return derive

    def _run_name(self, request: Any) -> str:
        thread = _thread_of(var_child_runnable_config.get())
        messages = request.state.get("messages") or []
        first = getattr(messages[0], "id", None) if messages else None
        return thread or f"run-{first or uuid4().hex}"

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Set the context around a model call."""
        return _in_scope(Scope(self._place(request)), lambda: handler(request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Set the context around a model call."""
        return await _in_scope_async(Scope(self._place(request)), lambda: handler(request))

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Set the context around a tool call."""
        return _in_scope(_tool_scope(request.tool_call, self._place(request)), lambda: handler(request))

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Set the context around a tool call."""
        return await _in_scope_async(
            _tool_scope(request.tool_call, self._place(request)), lambda: handler(request)
        )
