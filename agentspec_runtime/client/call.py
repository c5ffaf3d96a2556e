"""One logical model call, from the context it starts in to the report at its end.

Used by the synchronous and the asynchronous wrapper alike; nothing here waits for anything. A `Call` ends
exactly once, in whatever thread its answer is finished or dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

from pydantic import BaseModel

from agentspec_runtime.client import wire
from agentspec_runtime.client.context import CallContext
from agentspec_runtime.client.observer import CallStart, CallWatch
from agentspec_runtime.client.received import Received, carries_token
from agentspec_runtime.client.report import CallReport, Operation, Outcome, deliver, listeners_here
from agentspec_runtime.client.scope import current
from agentspec_runtime.client.shield import shielded
from agentspec_runtime.client.tap import BodyReader, HttpResponse, SseFilter, tap
from agentspec_runtime.client.tool import result_kinds
from agentspec_runtime.hints import Hint

__all__ = ["Call", "CallRecorder", "Options", "Request", "find_request", "is_sending", "note_attempt"]

_OPERATIONS: Final[Mapping[str, Operation]] = {
    "chat/completions": "chat",
    "completions": "text_completion",
    "responses": "responses",
}


class Options(Protocol):
    """What is used of the SDK's `FinalRequestOptions`."""

    method: str
    url: str
    headers: object
    json_data: object
    extra_json: Mapping[str, object] | None

    def model_copy(self, *, update: Mapping[str, object]) -> Options:
        """A copy with other values."""
        ...


class CallRecorder(Protocol):
    """Takes every finished call with what was asked and answered (see `recording.py`)."""

    def begin(self) -> AnswerSink:
        """A call starts; the sink is fed with its answer."""
        ...

    def close(self) -> None:
        """Write what is open."""
        ...


class AnswerSink(Protocol):
    """Collects one answer."""

    def absorb(self, body: object) -> None:
        """A response, a chunk or an event."""
        ...

    def finish(self, body: Mapping[str, object], report: CallReport) -> None:
        """The call is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the SDK that is a model call."""

    client: Any
    base_url: str
    options: Options
    operation: Operation
    stream: bool
    body: Mapping[str, object]


def find_request(client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request | None:
    """The model call in the arguments of the SDK's `request(cast_to, options, *, stream, stream_cls)`."""
    options = kwargs["options"] if "options" in kwargs else args[1]
    if options.method.lower() != "post":
        return None
    operation = _OPERATIONS.get(options.url.strip("/"))
    if operation is None or not isinstance(options.json_data, Mapping):
        return None
    extra = options.extra_json
    body = {**options.json_data, **extra} if extra else options.json_data
    return Request(
        client=client,
        base_url=str(client.base_url),
        options=options,
        operation=operation,
        stream=bool(kwargs.get("stream")),
        body=body,
    )


_EMPTY: Final = CallContext()
_sending: ContextVar[Call | None] = ContextVar("agentspec_sending", default=None)


def is_sending() -> bool:
    """Whether a watched call is being sent here already (a client wrapped twice)."""
    return _sending.get() is not None


def note_attempt(retries_taken: int) -> None:
    """The SDK builds an HTTP request for the call that is being sent here."""
    call = _sending.get()
    if call is not None:
        call.attempts = retries_taken + 1


class Call:
    """Life of one call: `start`, `sending`, then `attach` or `finish`."""

    def __init__(self, request: Request, *, capable: bool, recorder: CallRecorder | None) -> None:
        self._started_s = time.perf_counter()
        self._request = request
        self._context: CallContext = current()
        self._listeners = listeners_here()
        self._received = Received()
        self._first_token_ms: float | None = None
        self._lock = Lock()
        self._over = False
        self._sink = recorder.begin() if recorder is not None else None
        session = self._context.session
        self._turn = session.next_turn() if session is not None else None
        self.attempts: int | None = None
        self.asked_for_usage = capable and self._may_ask_for_usage()
        hint = self._hint() if capable and not wire.has_own_hint(request.body) else None
        self.hinted = hint is not None
        headers = self._headers() if capable else {}
        self._watch = CallWatch(self._start(hint, headers))
        self.options = self._options(hint, headers)

    @property
    def changed(self) -> bool:
        """Whether anything was added to the body that a server could object to."""
        return self.hinted or self.asked_for_usage

    def _may_ask_for_usage(self) -> bool:
        """A stream gives its metrics with the usage, and only where there is one choice."""
        request = self._request
        return (
            request.stream
            and request.operation != "responses"
            and request.body.get("n") in (None, 1)
            and not wire.asks_for_usage(request.body)
        )

    def _hint(self) -> Hint | None:
        hint = wire.build_hint(self._context, turn=self._turn, body=self._request.body, kinds=result_kinds())
        # The number of tools says nothing that the request does not say: with no context, no hint.
        return hint if hint.marks or self._context != _EMPTY else None

    def _headers(self) -> dict[str, str]:
        session = self._context.session
        if session is None:
            return {}
        return {wire.SESSION_HEADER: wire.session_header(session.id)}

    def _start(self, hint: Hint | None, headers: MutableMapping[str, str]) -> CallStart:
        request, context = self._request, self._context
        url = urlsplit(request.base_url)
        model = request.body.get("model")
        return CallStart(
            operation=request.operation,
            model=model if isinstance(model, str) else None,
            base_url=request.base_url,
            server_address=url.hostname,
            server_port=url.port,
            stream=request.stream,
            session=context.session.id if context.session is not None else None,
            agent=context.agent,
            parent=context.parent,
            turn=self._turn,
            hint=hint,
            body=request.body,
            headers=headers,
        )

    def _options(self, hint: Hint | None, headers: Mapping[str, str]) -> Options:
        """A copy of the SDK's options with our part; the given ones are never touched."""
        options = self._request.options
        update: dict[str, object] = {}
        added = wire.merge_body(
            self._request.body,
            hint=wire.fit_hint(hint) if hint is not None else None,
            include_usage=self.asked_for_usage,
        )
        if added:
            update["extra_json"] = {**(options.extra_json or {}), **added}
        if headers:
            update["headers"] = _merge_headers(self._request.client, options.headers, headers)
        return options.model_copy(update=update) if update else options

    @contextmanager
    def sending(self) -> Iterator[None]:
        """The request is being sent, retries included."""
        before = _sending.get()
        _sending.set(self)
        try:
            with self._watch.active():
                yield
        finally:
            # Set and not reset: a coroutine may be closed in another context than it was started in.
            _sending.set(before)

    def without_additions(self) -> Options:
        """The caller's own options, for the server that did not take ours."""
        self.hinted = self.asked_for_usage = False
        return self._request.options

    def attach(self, response: object) -> None:
        """The SDK has an answer, or the object from which it will be read."""
        raw = _http_response(response)
        if raw is None:
            if response is not None:
                self._absorb(response)
            self.finish(None)
        elif getattr(raw, "is_closed", False) and not self._request.stream:
            reader = BodyReader(self._absorb)
            reader.feed(raw.content)
            reader.flush()
            self.finish(None)
        else:
            self._tap(cast("HttpResponse", raw))

    def _tap(self, raw: HttpResponse) -> None:
        if "text/event-stream" in raw.headers.get("content-type", ""):
            reader: SseFilter | BodyReader = SseFilter(
                self._absorb,
                hide_usage=self.asked_for_usage,
                every_event=self._sink is not None,
            )
        else:
            reader = BodyReader(self._absorb)
        tap(raw, reader, self._read_to)

    def _read_to(self, error: BaseException | None, complete: bool) -> None:
        self.finish(error, complete=complete)

    def _absorb(self, body: object) -> None:
        first = self._first_token_ms is None and self._request.stream and isinstance(body, Mapping)
        if first and carries_token(body):
            self._first_token_ms = (time.perf_counter() - self._started_s) * 1e3
        self._received.absorb(body)
        if self._sink is not None:
            self._sink.absorb(body)

    def finish(self, error: BaseException | None, *, complete: bool = True) -> None:
        """The call is over. Only the first of several calls counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
        with shielded("finishing a call"):
            report = self._report(error, complete)
            self._watch.finish(report, error)
            if self._sink is not None:
                self._sink.finish(self._request.body, report)
            deliver(report, self._listeners)

    def _report(self, error: BaseException | None, complete: bool) -> CallReport:
        received, context, body = self._received, self._context, self._request.body
        outcome: Outcome = "ok" if complete else "incomplete"
        error_type = received.error_type
        if error is not None:
            outcome = "error" if isinstance(error, Exception) else "incomplete"
            error_type = type(error).__name__
        elif error_type is not None:
            outcome = "error"
        model = received.model or body.get("model")
        return CallReport(
            operation=self._request.operation,
            model=model if isinstance(model, str) else None,
            base_url=self._request.base_url,
            session=context.session.id if context.session is not None else None,
            agent=context.agent,
            parent=context.parent,
            turn=self._turn,
            hinted=self.hinted,
            stream=self._request.stream,
            outcome=outcome,
            error_type=error_type,
            latency_ms=(time.perf_counter() - self._started_s) * 1e3,
            attempts=self.attempts,
            first_token_ms=self._first_token_ms,
            response_id=received.response_id,
            finish_reasons=tuple(received.finish_reasons),
            prompt_tokens=received.prompt_tokens,
            cached_tokens=received.cached_tokens,
            completion_tokens=received.completion_tokens,
            num_steps=received.num_steps,
            num_spec_steps=received.num_spec_steps,
            drafted=received.drafted,
            accepted=received.accepted,
            per_step_drafted=received.per_step_drafted,
            per_step_accepted=received.per_step_accepted,
            ttft_ms=received.ttft_ms,
            queue_ms=received.queue_ms,
            generation_ms=received.generation_ms,
        )


def _http_response(response: object) -> Any:
    """The HTTP response behind what the SDK returned; None for a parsed answer."""
    if isinstance(response, BaseModel):  # almost always; asking a model for what it has not is slow
        return None
    raw = getattr(response, "http_response", None)
    if raw is None:
        raw = response if hasattr(response, "iter_bytes") else getattr(response, "response", None)
    return raw if hasattr(raw, "iter_bytes") else None


def _merge_headers(client: object, given: object, added: Mapping[str, str]) -> dict[str, object]:
    """Headers of the call, with ours where the caller (or the client) has none of that name."""
    headers: dict[str, object] = dict(given) if isinstance(given, Mapping) else {}
    own = getattr(client, "_custom_headers", None)
    taken = {name.lower() for name in headers}
    if isinstance(own, Mapping):
        taken.update(str(name).lower() for name in own)
    headers.update((name, value) for name, value in added.items() if name.lower() not in taken)
    return headers
