"""The only module that knows `opentelemetry-util-genai`.

That package writes spans by the GenAI conventions, emits their metrics, and merges a model call into the
span of an official instrumentation that is already open around it. It is a beta, so everything that we use
of it is behind these few functions and types, and its version is pinned in the extra `otel`.

Two things are ours: nothing is ever left attached to the context (a span that is current while a generator
is suspended gets detached in a foreign context), and an exception gives its type, never its message.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.context import get_value
from opentelemetry.trace import TracerProvider

from agentspec_runtime.errors import MissingDependencyError

if TYPE_CHECKING:
    from opentelemetry.util.genai.invocation import (
        GenAIInvocation,
        InferenceInvocation,
        LocalAgentInvocation,
        ToolInvocation,
    )

__all__ = ["SCOPE", "AgentSpan", "ChatSpan", "GenAi", "ToolSpan"]

SCOPE: Final = "agentspec.client"

ChatSpan: TypeAlias = "InferenceInvocation"
ToolSpan: TypeAlias = "ToolInvocation"
AgentSpan: TypeAlias = "LocalAgentInvocation"


class GenAi:
    """Starts spans. `provider` None means the global one, whenever it is set.

    Raises:
        MissingDependencyError: util-genai is not installed.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        try:
            from opentelemetry.util.genai.handler import TelemetryHandler
            from opentelemetry.util.genai.invocation import (
                CLIENT_INFERENCE_CONTEXT_KEY,
            )
            from opentelemetry.util.genai.types import Error
        except ImportError as error:
            raise MissingDependencyError("opentelemetry-util-genai", "otel") from error
        self._error = Error
        self._inference_key: str = CLIENT_INFERENCE_CONTEXT_KEY
        self._handler = TelemetryHandler(
            tracer_provider=provider,
            instrumentation_scope_name=SCOPE,
            instrumentation_scope_version=_version(),
        )

    def inside_inference(self) -> bool:
        """Whether an official instrumentation's span of the same call is open: `chat` merges into it."""
        return get_value(self._inference_key) is not None

    def chat(
        self,
        *,
        operation: str,
        provider_name: str,
        model: str | None,
        server_address: str | None,
        server_port: int | None,
        conversation: str | None,
    ) -> ChatSpan:
        """A model call begins under the current span, or inside the official span of the same call."""
        span = self._handler.inference(
            provider_name,
            request_model=model,
            server_address=server_address,
            server_port=server_port,
            operation_name=operation,
            conversation_id=conversation,
        )
        span.suspend()
        return span

    def tool(self, *, name: str, call_id: str | None, agent: str | None) -> ToolSpan:
        """A tool begins."""
        span = self._handler.tool(name, tool_type="function", agent_name=agent)
        span.suspend()
        span.tool_call_id = call_id
        return span

    def agent(self, *, name: str, conversation: str | None) -> AgentSpan:
        """An agent begins."""
        span = self._handler.invoke_local_agent(agent_name=name, conversation_id=conversation)
        span.suspend()
        return span

    def end(self, span: GenAIInvocation, error_type: str | None) -> None:
        """End a span; with an error type it is an error, without any text of the exception."""
        if error_type is None:
            span.stop()
        else:
            span.fail(self._error(message=None, type=error_type))


def _version() -> str:
    try:
        return metadata.version("agentspec-runtime")
    except metadata.PackageNotFoundError:
        return ""
