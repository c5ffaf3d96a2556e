"""PydanticAI: a capability that tells which run, agent and tool call a model call belongs to.

    agent = Agent(model, capabilities=[AgentSpecCapability()])

It sets context variables around model requests and tool runs and nothing else. The session is the one that
is open, else the run's `conversation_id`, else its `run_id`; the agent is `Agent(name=...)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from agentspec_runtime.client.context import CallContext, ToolRun, clean_name, named_session
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.client.scope import Scope, agent_boundary, tool_boundary
from agentspec_runtime.client.tool import result_kinds
from agentspec_runtime.errors import MissingDependencyError

try:
    from pydantic_ai import RunContext
    from pydantic_ai.capabilities import AbstractCapability
except ImportError as error:
    raise MissingDependencyError(error.name or "pydantic_ai", "pydantic-ai") from error

__all__ = ["AgentSpecCapability"]


@dataclass
class AgentSpecCapability(AbstractCapability[Any]):
    """Marks runs, model requests and tool runs of an agent; changes neither requests nor results."""

    def __post_init__(self) -> None:
        instrument()

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Callable[[], Awaitable[Any]]) -> Any:
        """An agent begins."""
        boundary = agent_boundary if _agent_of(ctx) is not None else None
        return await _inside(Scope(lambda outer: _place(ctx, outer), boundary), handler)

    async def wrap_model_request(
        self, ctx: RunContext[Any], *, request_context: Any, handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """A model call. Marked by itself too: under `Agent.iter` it may run outside of `wrap_run`."""
        scope = Scope(lambda outer: _place(ctx, outer))
        return await _inside(scope, lambda: handler(request_context))

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: Any,
        args: Any,
        handler: Callable[[Any], Awaitable[Any]],
        **_: Any,
    ) -> Any:
        """A tool runs."""
        kind = result_kinds().get(call.tool_name)
        run = ToolRun(name=call.tool_name, call_id=clean_name(call.tool_call_id))
        if kind is not None:
            run = replace(run, kind=kind)
        scope = Scope(lambda outer: replace(_place(ctx, outer), tool=run), tool_boundary)
        return await _inside(scope, lambda: handler(args))


def _agent_of(ctx: RunContext[Any]) -> str | None:
    return clean_name(ctx.agent.name) if ctx.agent is not None else None


def _place(ctx: RunContext[Any], outer: CallContext) -> CallContext:
    session = outer.session or named_session(clean_name(ctx.conversation_id or ctx.run_id) or "run")
    return replace(outer.refined().under(_agent_of(ctx)), session=session)


async def _inside(scope: Scope, body: Callable[[], Awaitable[Any]]) -> Any:
    scope.enter()
    try:
        result = await body()
    except BaseException as error:
        scope.leave(error)
        raise
    scope.leave()
    return result
