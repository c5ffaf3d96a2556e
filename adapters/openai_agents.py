"""OpenAI Agents SDK: one line that tells which run and agent a model call belongs to.

    from agentspec_runtime.adapters import openai_agents

    openai_agents.instrument()      # Runner.run, run_sync and run_streamed are covered from here on

It puts a runner of ours in the place of the SDK's default runner. The runner opens a context around a run and
follows its agents, hand-overs included, through run hooks (the caller's hooks run as before); agents used
as tools are runs inside a run. The session is the one that is open, else the run's `Session` or group id,
else a new one.

Tools are marked by `@agentspec_runtime.tool` under `@function_tool`: the SDK's hooks run in tasks of their
own and cannot set a context for the tool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from agentspec_runtime.client.context import CallContext, Session, clean_name, named_session
from agentspec_runtime.client.instrument import instrument as _instrument_sdk
from agentspec_runtime.client.scope import Pieces, Scope, agent_boundary
from agentspec_runtime.errors import MissingDependencyError

try:
    from agents import RunHooks
    from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner
except ImportError as error:
    raise MissingDependencyError(error.name or "agents", "openai-agents") from error

__all__ = ["instrument", "uninstrument"]

_replaced: list[AgentRunner] = []


def instrument() -> Callable[[], None]:
    """Cover every run of the process; returns the function that undoes it. Twice is once."""
    _instrument_sdk()
    if not isinstance(get_default_agent_runner(), _Runner):
        _replaced.append(get_default_agent_runner())
        set_default_agent_runner(_Runner())
    return uninstrument


def uninstrument() -> None:
    """Put the SDK's runner back, unless somebody has replaced ours meanwhile."""
    if isinstance(get_default_agent_runner(), _Runner) and _replaced:
        set_default_agent_runner(_replaced.pop())


class _Runner(AgentRunner):
    """The SDK's runner inside a context."""

    async def run(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:  # noqa: A002 - the SDK's name
        """Run to the end."""
        follower, derive = _prepare(starting_agent, kwargs)
        scope = Scope(derive, agent_boundary)
        scope.enter()
        try:
            result = await super().run(starting_agent, input, **{**kwargs, "hooks": follower})
        except BaseException as failed:
            scope.leave(failed)
            raise
        scope.leave()
        return result

    def run_streamed(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:  # noqa: A002 - the SDK's name
        """Start a run in a task of its own, which takes this context along; the run ends with the task."""
        follower, derive = _prepare(starting_agent, kwargs)
        run = Pieces(derive, agent_boundary)
        try:
            with run.piece():
                result = super().run_streamed(starting_agent, input, **{**kwargs, "hooks": follower})
        except BaseException as failed:
            run.end(failed)
            raise
        task = getattr(result, "run_loop_task", None)
        if task is None:
            run.end(None)
        else:
            task.add_done_callback(lambda done: run.end(None if done.cancelled() else done.exception()))
        return result


def _prepare(
    starting_agent: Any, kwargs: dict[str, Any]
) -> tuple[_Follower, Callable[[CallContext], CallContext]]:
    first = clean_name(getattr(starting_agent, "name", None))
    follower = _Follower(kwargs.get("hooks"), first)
    named = _session_name(kwargs)

    def derive(outer: CallContext) -> CallContext:
        session = outer.session or (named_session(named) if named else Session(uuid4().hex))
        context = outer.refined().under(first)
        return replace(context, session=session, refine=follower.refine)

    return follower, derive


def _session_name(kwargs: dict[str, Any]) -> str | None:
    config = kwargs.get("run_config")
    group = config.get("group_id") if isinstance(config, dict) else getattr(config, "group_id", None)
    return clean_name(getattr(kwargs.get("session"), "session_id", None) or group)


class _Follower(RunHooks[Any]):
    """Hooks of one run: remembers which agent has the floor, and passes everything on."""

    def __init__(self, inner: RunHooks[Any] | None, agent: str | None) -> None:
        self._inner = inner if inner is not None else RunHooks()
        self._first = agent
        self._agent = agent

    def refine(self, context: CallContext) -> CallContext:
        """The context of a call that the agent with the floor makes."""
        if self._agent is None or self._agent == self._first:
            return context
        return replace(context, agent=self._agent, parent=self._first)

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        """An agent takes over."""
        self._agent = clean_name(agent.name)
        await self._inner.on_agent_start(context, agent)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        """Passed on."""
        await self._inner.on_agent_end(context, agent, output)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
        """An agent hands over."""
        self._agent = clean_name(to_agent.name)
        await self._inner.on_handoff(context, from_agent, to_agent)

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:
        """Passed on."""
        await self._inner.on_llm_start(context, agent, system_prompt, input_items)

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        """Passed on."""
        await self._inner.on_llm_end(context, agent, response)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        """Passed on."""
        await self._inner.on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Passed on."""
        await self._inner.on_tool_end(context, agent, tool, result)
