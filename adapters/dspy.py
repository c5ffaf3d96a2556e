"""DSPy: a callback that tells which program and tool a model call belongs to.

    dspy.configure(lm=dspy.LM("openai/...", api_base=..., engine="litellm"), callbacks=[AgentSpecCallback()])

Hints and reports are made at the OpenAI SDK, which DSPy reaches through litellm: say `engine="litellm"`. The
engine that DSPy 3.4 prefers by itself speaks HTTP on its own; the server infers structure there. The
callback sets context variables: the outermost module that runs is the run (a session of its own, unless one
is open) and the agent; a `dspy.Predict` inside a module is part of that module, any other module inside it
is an agent with a parent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

from agentspec_runtime.client.context import CallContext, Session, ToolRun, clean_name
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.client.scope import Scope, agent_boundary, tool_boundary
from agentspec_runtime.client.tool import result_kinds
from agentspec_runtime.errors import MissingDependencyError

try:
    import dspy
    from dspy.utils.callback import BaseCallback
except ImportError as error:
    raise MissingDependencyError(error.name or "dspy", "dspy") from error

__all__ = ["AgentSpecCallback"]


class AgentSpecCallback(BaseCallback):  # type: ignore[misc]  # DSPy is not typed
    """Marks modules and tools. Start and end of a callback run in the frame of what they are about."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, Scope] = {}
        instrument()

    def on_module_start(self, call_id: str, instance: Any, **_: Any) -> None:
        """A module begins."""
        name = None if isinstance(instance, dspy.Predict) else clean_name(type(instance).__name__)

        def derive(outer: CallContext) -> CallContext:
            inner = outer.under(name or (None if outer.agent else type(instance).__name__))
            return replace(inner, session=outer.session or Session(uuid4().hex))

        self._enter(call_id, Scope(derive, agent_boundary if name is not None else None))

    def on_module_end(self, call_id: str, exception: BaseException | None = None, **_: Any) -> None:
        """A module is over."""
        self._leave(call_id, exception)

    def on_tool_start(self, call_id: str, instance: Any, **_: Any) -> None:
        """A tool begins."""
        run = ToolRun(name=str(instance.name))
        kind = result_kinds().get(run.name)
        if kind is not None:
            run = replace(run, kind=kind)
        self._enter(call_id, Scope(lambda outer: replace(outer, tool=run), tool_boundary))

    def on_tool_end(self, call_id: str, exception: BaseException | None = None, **_: Any) -> None:
        """A tool is over."""
        self._leave(call_id, exception)

    def _enter(self, call_id: str, scope: Scope) -> None:
        scope.enter()
        self._open[call_id] = scope

    def _leave(self, call_id: str, error: BaseException | None) -> None:
        scope = self._open.pop(call_id, None)
        if scope is not None:
            scope.leave(error)
