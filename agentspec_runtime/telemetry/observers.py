"""Observers of the client layer that make spans: model calls, tools, agents.

Rules:
  * A span is current only inside `active`, which is entered and left in one frame. Streams are read, and
    their spans ended, without it.
  * No text: neither prompts nor answers nor tool arguments nor messages of exceptions. The request body is
    read for sampling settings and ids of tool calls.
  * One span per call. Inside an official instrumentation's span our attributes are merged into it. A
    third-party span of the same call is enriched, and where a third party reports tokens in spans of its
    own, `gen_ai.usage.*` is left to it: backends add tokens up. `agentspec.*` counts are always there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentspec_runtime.client.observer import BoundaryStart, CallStart
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.telemetry import attributes as names
from agentspec_runtime.telemetry.genai import SCOPE, AgentSpan, ChatSpan, GenAi, ToolSpan
from agentspec_runtime.telemetry.origins import Origins, new_tool_results
from agentspec_runtime.telemetry.spans import accepted_histogram, fold_steps

__all__ = ["BoundarySpans", "CallSpans", "Mode"]

Mode = Literal["own", "enrich"]

# vLLM understands W3C headers only, so this does not follow OTEL_PROPAGATORS.
_propagator: Final = TraceContextTextMapPropagator()

_FOREIGN_SCOPES: Final = ("openinference.instrumentation.", "opentelemetry.instrumentation.openai")
# Instrumentations that report tokens in spans of their own which are not current around the HTTP call.
_FOREIGN_INSTRUMENTORS: Final = (
    ("openinference.instrumentation.langchain", "LangChainInstrumentor"),
    ("opentelemetry.instrumentation.langchain", "LangchainInstrumentor"),
)
_OFFICIAL_LANGCHAIN: Final = ("opentelemetry.instrumentation.genai.langchain", "LangChainInstrumentor")


@dataclass(slots=True)
class _Call:
    """A model call under way: `chat` is our invocation, or `foreign` the span that we add to."""

    chat: ChatSpan | None
    foreign: Span | None
    context: Context
    tokens: bool


class CallSpans:
    """Implements `client.observer.CallObserver`."""

    def __init__(self, genai: GenAi, *, mode: Mode, origins: Origins, private: bool) -> None:
        self._genai = genai
        self._mode: Mode = mode
        self._origins = origins
        self._private = private

    def start(self, call: CallStart, /) -> _Call | None:
        """Begin (or find) the span of a call and put its context into the request's headers."""
        if not self._private and not _provider_set():
            return None
        current = trace.get_current_span()
        if _is_foreign_call(current):
            under_way = _Call(None, current, get_current(), tokens=False)
        elif self._mode == "enrich" and not self._genai.inside_inference():
            return None
        else:
            chat = self._begin(call)
            under_way = _Call(chat, None, chat.context, tokens=not _tokens_reported_elsewhere())
        _propagator.inject(call.headers, context=under_way.context)
        self._link(trace.get_current_span(under_way.context), call)
        return under_way

    @contextmanager
    def active(self, token: object, /) -> Iterator[None]:
        """The call's span is current while the request is being sent."""
        if isinstance(token, _Call) and token.chat is not None:
            with token.chat.activate():
                yield
        else:
            yield

    def finish(self, token: object, report: CallReport, error: BaseException | None, /) -> None:
        """Write what is known and end the span."""
        if not isinstance(token, _Call):
            return
        values = names.clean(_call_attributes(report))
        if token.foreign is not None:
            token.foreign.set_attributes(values)
            return
        chat = token.chat
        if chat is None:
            return
        chat.attributes.update(values)
        chat.response_id = report.response_id
        chat.response_model_name = report.model
        chat.finish_reasons = list(report.finish_reasons) or None
        chat.request_stream = report.stream
        if report.first_token_ms is not None:
            chat.ttfc_seconds = report.first_token_ms / 1e3
        if token.tokens:
            chat.input_tokens = report.prompt_tokens
            chat.output_tokens = report.completion_tokens
            chat.cache_read_input_tokens = report.cached_tokens
        failed = report.outcome == "error"
        self._genai.end(chat, (report.error_type or _type_of(error)) if failed else None)

    def _begin(self, call: CallStart) -> ChatSpan:
        chat = self._genai.chat(
            # The conventions call a Responses call a chat, too.
            operation="text_completion" if call.operation == "text_completion" else "chat",
            # A hint is only sent to servers that understand it; others are named after their protocol.
            provider_name="vllm" if call.hint is not None else "openai",
            model=call.model,
            server_address=call.server_address,
            server_port=call.server_port,
            conversation=call.session,
        )
        body = call.body
        chat.temperature = _number(body.get("temperature"))
        chat.top_p = _number(body.get("top_p"))
        chat.max_tokens = _count(body.get("max_completion_tokens") or body.get("max_tokens"))
        chat.seed = _count(body.get("seed"))
        count = _count(body.get("n"))
        chat.request_choice_count = count if count != 1 else None
        return chat

    def _link(self, span: Span, call: CallStart) -> None:
        if not span.is_recording():
            return
        for call_id in new_tool_results(call.body):
            origin = self._origins.tool(call_id)
            if origin is not None:
                span.add_link(origin, {names.LINK: "tool_result"})
        if call.session is not None:
            before = self._origins.swap_chat(call.session, call.agent, span.get_span_context())
            if before is not None:
                span.add_link(before, {names.LINK: "previous_turn"})


@dataclass(slots=True)
class _Run:
    """A tool or an agent under way; `span` is None where somebody else's span stands for it."""

    span: ToolSpan | AgentSpan | None
    merged: Span | None = None


class BoundarySpans:
    """Implements `client.observer.BoundaryObserver`."""

    def __init__(self, genai: GenAi, *, mode: Mode, origins: Origins, private: bool) -> None:
        self._genai = genai
        self._mode: Mode = mode
        self._origins = origins
        self._private = private

    def start(self, boundary: BoundaryStart, /) -> _Run | None:
        """Begin the span of a tool or an agent, unless the current span already stands for it."""
        if not self._private and not _provider_set():
            return None
        current = trace.get_current_span()
        if _stands_for(current, boundary):
            run = _Run(span=None, merged=current)
        elif self._mode == "enrich" or _drawn_by_langchain(boundary):
            return None
        else:
            run = _Run(span=self._begin(boundary))
        span = run.span.span if run.span is not None else current
        if boundary.kind == "tool" and boundary.call_id is not None and span.is_recording():
            self._origins.note_tool(boundary.call_id, span.get_span_context())
        return run

    @contextmanager
    def active(self, token: object, /) -> Iterator[None]:
        """The span is current around the body."""
        if isinstance(token, _Run) and token.span is not None:
            with token.span.activate():
                yield
        else:
            yield

    def finish(self, token: object, error: BaseException | None, /) -> None:
        """End the span. A merged one is somebody else's, but learns of an error turned into a message."""
        if not isinstance(token, _Run):
            return
        if token.span is not None:
            self._genai.end(token.span, _type_of(error))
        elif error is not None and token.merged is not None and token.merged.is_recording():
            token.merged.set_status(Status(StatusCode.ERROR))
            token.merged.set_attribute("error.type", _type_of(error) or "_OTHER")

    def _begin(self, boundary: BoundaryStart) -> ToolSpan | AgentSpan:
        if boundary.kind == "tool":
            return self._genai.tool(name=boundary.name, call_id=boundary.call_id, agent=boundary.agent)
        agent = self._genai.agent(name=boundary.name, conversation=boundary.session)
        agent.attributes.update(
            names.clean({names.SESSION: boundary.session, names.PARENT_AGENT: boundary.parent})
        )
        return agent


def _call_attributes(report: CallReport) -> dict[str, object]:
    values: dict[str, object] = {
        names.SESSION: report.session,
        names.AGENT: report.agent,
        names.PARENT_AGENT: report.parent,
        names.TURN: report.turn,
        names.HINTED: report.hinted,
        names.OUTCOME: report.outcome,
        names.ATTEMPTS: report.attempts,
        names.PROMPT_TOKENS: report.prompt_tokens,
        names.CACHED_TOKENS: report.cached_tokens,
        names.OUTPUT_TOKENS: report.completion_tokens,
        names.QUEUE_S: report.queue_ms / 1e3 if report.queue_ms is not None else None,
        names.DRAFTED: report.drafted,
        names.ACCEPTED: report.accepted,
        names.REJECTED: report.rejected,
        names.ACCEPTANCE_RATE: report.acceptance_rate,
        names.STEPS: report.num_steps,
    }
    if report.num_steps and report.completion_tokens is not None:
        values[names.STEPS_SAVED] = report.completion_tokens - report.num_steps
        values[names.TOKENS_PER_STEP] = report.completion_tokens / report.num_steps
    if report.per_step_drafted is not None and report.per_step_accepted is not None:
        values[names.STEP_DRAFTED], stride = fold_steps(report.per_step_drafted)
        values[names.STEP_ACCEPTED], _ = fold_steps(report.per_step_accepted)
        values[names.STEP_STRIDE] = stride
        values[names.ACCEPTED_HISTOGRAM] = accepted_histogram(report.per_step_accepted)
    return values


def _provider_set() -> bool:
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _scope_of(span: Span) -> str:
    # Only SDK spans tell their scope; the API's `Span` has no such field.
    return str(getattr(getattr(span, "instrumentation_scope", None), "name", ""))


def _attributes_of(span: Span) -> Mapping[str, object]:
    found = getattr(span, "attributes", None)
    return found if isinstance(found, Mapping) else {}


def _is_foreign_call(span: Span) -> bool:
    """Whether a third-party instrumentation has made this span for the model call that we are in."""
    if not span.is_recording() or not _scope_of(span).startswith(_FOREIGN_SCOPES):
        return False
    attributes = _attributes_of(span)
    return (
        attributes.get("openinference.span.kind") == "LLM"
        or "llm.request.type" in attributes
        or attributes.get("gen_ai.operation.name") in ("chat", "text_completion")
    )


def _stands_for(span: Span, boundary: BoundaryStart) -> bool:
    """Whether the current span already is the span of this tool or agent.

    An official instrumentation makes its own current around the body. Of ours, a tool without a call id
    inside a tool of the same name with one is the decorated function inside the framework's hook.
    """
    if not span.is_recording():
        return False
    attributes = _attributes_of(span)
    operation = attributes.get("gen_ai.operation.name")
    if boundary.kind == "agent":
        same = operation == "invoke_agent" and attributes.get("gen_ai.agent.name") == boundary.name
        return same and _scope_of(span) != SCOPE
    if operation != "execute_tool" or attributes.get("gen_ai.tool.name") != boundary.name:
        return False
    return _scope_of(span) != SCOPE or boundary.call_id is None


def _drawn_by_langchain(boundary: BoundaryStart) -> bool:
    """Whether the official instrumentation is about to draw this itself: our adapter's hooks begin first."""
    return boundary.framework == "langchain" and _active(*_OFFICIAL_LANGCHAIN)


def _tokens_reported_elsewhere() -> bool:
    return any(_active(*instrumentor) for instrumentor in _FOREIGN_INSTRUMENTORS)


def _active(module_name: str, class_name: str) -> bool:
    """Whether an instrumentation is loaded and in force."""
    module = sys.modules.get(module_name)
    instrumentor = getattr(module, class_name, None) if module is not None else None
    # Instrumentors are singletons: making one gives the one that may be in force.
    return instrumentor is not None and bool(instrumentor().is_instrumented_by_opentelemetry)


def _type_of(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__qualname__


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
