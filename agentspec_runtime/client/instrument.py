"""`instrument()`: one wrapper at the place through which the OpenAI SDK sends everything.

`SyncAPIClient.request` and `AsyncAPIClient.request` run once per logical call (the SDK retries inside), for
every way to get a completion: `create`, `parse`, `stream`, raw and streaming responses, and whatever
framework is built on them. A third, smaller hook on `_build_request` counts the attempts.

Rules: a request that is no model call passes untouched. What the caller gets is the SDK's own object.
A fault of this package is logged once and the call is made as if it were not there. `uninstrument()` puts
the SDK back; where somebody else has wrapped it since, our wrapper stays and does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Final, Literal, Self

import wrapt

from agentspec_runtime.client.call import (
    Call,
    CallRecorder,
    Options,
    Request,
    find_request,
    is_sending,
    note_attempt,
)
from agentspec_runtime.client.capability import Capability, read_servers
from agentspec_runtime.client.shield import attempt, shielded
from agentspec_runtime.errors import MissingDependencyError

__all__ = ["Instrumentation", "instrument", "uninstrument"]

Wrapped = Callable[..., Any]

_REFUSED_STATUS: Final = (400, 404, 415, 422)
_OUR_WORDS: Final = ("vllm_xargs", "agentspec", "stream_options", "include_usage")


@dataclass(slots=True)
class Settings:
    """What is in force."""

    capability: Capability
    recorder: CallRecorder | None = None


class Instrumentation:
    """What `instrument()` returns: `with instrument():` undoes at its end what that call has changed."""

    __slots__ = ("_before", "settings")

    def __init__(self, settings: Settings, before: Settings | None) -> None:
        self.settings = settings
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.restore(self._before)


class _State:
    """The patched attributes and what is in force; one per process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._patches: list[tuple[type, str, object, object]] = []
        self.active: Settings | None = None

    def put(self, wanted: Settings, replace: bool) -> Instrumentation:
        with self._lock:
            self._patch()
            before = self.active
            if before is None or replace:
                self.active = wanted
                return Instrumentation(wanted, before)
            return Instrumentation(before, before)

    def restore(self, before: Settings | None) -> None:
        with self._lock:
            dropped, self.active = self.active, before
            if dropped is not None and dropped is not before and dropped.recorder is not None:
                with shielded("closing a recording"):
                    dropped.recorder.close()
            if before is not None:
                return
            left = []
            for owner, name, original, ours in self._patches:
                if owner.__dict__.get(name) is ours:
                    setattr(owner, name, original)
                else:  # somebody has wrapped over it: it stays, and does nothing
                    left.append((owner, name, original, ours))
            self._patches = left

    def _patch(self) -> None:
        try:
            from openai import _base_client as sdk  # optional, and slow to import
        except ImportError as error:
            raise MissingDependencyError("openai", "openai") from error
        self._wrap(sdk.SyncAPIClient, "request", _request)
        self._wrap(sdk.AsyncAPIClient, "request", _request_async)
        self._wrap(sdk.BaseClient, "_build_request", _build_request)

    def _wrap(self, owner: type, name: str, wrapper: Wrapped) -> None:
        if any(patch[:2] == (owner, name) for patch in self._patches) or name not in owner.__dict__:
            return
        original = owner.__dict__[name]
        ours = wrapt.FunctionWrapper(original, wrapper)
        setattr(owner, name, ours)
        self._patches.append((owner, name, original, ours))


_state: Final = _State()


def instrument(
    *,
    servers: Literal["auto", "always", "off"] | Iterable[str] | None = None,
    record: str | Path | None = None,
) -> Instrumentation:
    """Send hints with every model call made through the OpenAI SDK, and read back what drafting did.

    Call it once, at any time; clients that exist already are covered. A second call changes the settings
    only if it names any.

    Args:
        servers: which servers get hints. "auto" asks each server once (the default), "always" asks none,
            "off" sends nothing and still reports calls, a list of base URLs names them. The environment
            variable `AGENTSPEC_HINTS` sets it where the argument is not given. Azure never gets any.
        record: file to append a recording of all calls to, prompts and answers included (see
            `record`).

    Raises:
        MissingDependencyError: the OpenAI SDK is not installed.
        ConfigurationError: an unknown word for `servers`.
    """
    recorder: CallRecorder | None = None
    if record is not None:
        from agentspec_runtime.client.recording import Recorder

        recorder = Recorder(Path(record))
    wanted = Settings(Capability(read_servers(servers)), recorder)
    with shielded("looking for OpenTelemetry"):
        # A program that has OpenTelemetry set up gets its spans without a second line.
        from agentspec_runtime.telemetry.client import ensure_span_observers  # loads OTel's API

        ensure_span_observers()
    return _state.put(wanted, replace=servers is not None or record is not None)


@contextmanager
def recording_to(recorder: CallRecorder) -> Iterator[None]:
    """Let `recorder` see all calls of a block; the SDK is instrumented for it where it is not."""
    with instrument() as instrumented:
        settings = instrumented.settings
        outer, settings.recorder = settings.recorder, recorder
        try:
            yield
        finally:
            settings.recorder = outer


def uninstrument() -> None:
    """Undo `instrument()`. Does nothing where it is not in force."""
    _state.restore(None)


def _find(client: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request | None:
    return attempt("looking at a request", None, find_request, client, args, kwargs)


def _begin(request: Request, active: Settings, capable: bool) -> Call | None:
    return attempt("preparing a call", None, Call, request, capable=capable, recorder=active.recorder)


def _with(
    options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `request` with other options."""
    if "options" in kwargs:
        return args, {**kwargs, "options": options}
    return (args[0], options, *args[2:]), kwargs


def _is_refusal(error: Exception, call: Call) -> bool:
    """Whether a server says that it does not know what we added. Servers differ in how they say it."""
    if not call.changed or getattr(error, "status_code", None) not in _REFUSED_STATUS:
        return False
    said = f"{error} {getattr(error, 'body', '')}"
    return any(word in said for word in _OUR_WORDS)


def _attach(call: Call, response: object) -> None:
    with shielded("reading a response"):
        call.attach(response)
        return
    call.finish(None)


def _request(wrapped: Wrapped, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return send(_state.active, wrapped, client, args, kwargs)


async def _request_async(
    wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return await send_async(_state.active, wrapped, client, args, kwargs)


def send(
    active: Settings | None, wrapped: Wrapped, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a request of the SDK: as a watched call where it is one, else as it is."""
    request = _find(client, args, kwargs) if active is not None and not is_sending() else None
    if active is None or request is None:
        return wrapped(*args, **kwargs)
    capable = attempt("asking a server", False, active.capability.ask, client, request.base_url)
    call = _begin(request, active, capable)
    if call is None:
        return wrapped(*args, **kwargs)
    try:
        with call.sending():
            args, kwargs = _with(call.options, args, kwargs)
            try:
                response = wrapped(*args, **kwargs)
            except Exception as error:
                if not _is_refusal(error, call):
                    raise
                active.capability.refuse(client)
                args, kwargs = _with(call.without_additions(), args, kwargs)
                response = wrapped(*args, **kwargs)
    except BaseException as error:
        call.finish(error)
        raise
    _attach(call, response)
    return response


async def send_async(
    active: Settings | None,
    wrapped: Callable[..., Awaitable[Any]],
    client: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The same for an asynchronous client."""
    request = _find(client, args, kwargs) if active is not None and not is_sending() else None
    if active is None or request is None:
        return await wrapped(*args, **kwargs)
    capable = False
    with shielded("asking a server"):
        capable = await active.capability.ask_async(client, request.base_url)
    call = _begin(request, active, capable)
    if call is None:
        return await wrapped(*args, **kwargs)
    try:
        with call.sending():
            args, kwargs = _with(call.options, args, kwargs)
            try:
                response = await wrapped(*args, **kwargs)
            except Exception as error:
                if not _is_refusal(error, call):
                    raise
                active.capability.refuse(client)
                args, kwargs = _with(call.without_additions(), args, kwargs)
                response = await wrapped(*args, **kwargs)
    except BaseException as error:
        call.finish(error)
        raise
    _attach(call, response)
    return response


def _build_request(wrapped: Wrapped, _client: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    retries = kwargs.get("retries_taken", 0)
    if isinstance(retries, int):
        note_attempt(retries)
    return wrapped(*args, **kwargs)
