"""Reading an answer along with its caller, and taking out what the caller did not ask for.

The hook is on the HTTP response object, at the two public methods through which every reader goes:
`iter_bytes` (streams of the SDK, its `.stream()` helpers, raw and streaming responses, `iter_lines`, `read`)
and `close` (end of iteration, early break, `with`, cancellation). So the objects that the caller holds are
the SDK's own, of their own types. `iter_raw` is not read along: it serves bytes before decompression.

`SseFilter` is free of I/O. With `hide_usage` it removes the chunk that was sent only because this package
asked for it, and nothing else; vLLM puts its `system_fingerprint` on that chunk then, so the fingerprint
is put back where it stands without it. Otherwise bytes pass through untouched.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Final, Protocol

from agentspec_runtime.client.received import carries_token, is_usage_only
from agentspec_runtime.client.shield import attempt

__all__ = ["BodyReader", "HttpResponse", "Reader", "SseFilter", "tap"]

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_MAX_BODY: Final = 16 << 20
"""Bytes of a JSON body that are kept to read its usage; a larger one passes unread."""


class HttpResponse(Protocol):
    """What is used of a response of httpx or httpx2."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers."""
        ...

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """Decoded body."""
        ...

    def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """Decoded body, of an asynchronous response."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...

    def aclose(self) -> Awaitable[None]:
        """Release the connection, of an asynchronous response."""
        ...


class Reader(Protocol):
    """Takes a body as it comes and says what of it goes on to the caller."""

    def feed(self, data: bytes) -> bytes:
        """Bytes in, bytes out."""
        ...

    def flush(self) -> bytes:
        """The body is over; what was held back."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer was read to its end."""
        ...


class BodyReader:
    """A JSON body: passes through, and is handed to `sink` as a whole."""

    def __init__(self, sink: Callable[[Mapping[str, object]], None]) -> None:
        self._sink = sink
        self._parts: list[bytes] = []
        self._size = 0
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """Keep a copy."""
        self._size += len(data)
        if self._size <= _MAX_BODY:
            self._parts.append(data)
        return data

    def flush(self) -> bytes:
        """Hand over the body."""
        self.complete = True
        if self._size <= _MAX_BODY:
            event = _decode(b"".join(self._parts))
            if event is not None:
                self._sink(event)
        self._parts.clear()
        return b""


class SseFilter:
    """Server-sent events: hands those worth reading to `sink`, hides what was not asked for.

    Args:
        sink: gets every decoded event that says something about usage, errors or the end, and all
            events until the first token (or for ever, with `every_event`).
        hide_usage: remove the usage-only chunk (of an answer with one choice).
    """

    def __init__(
        self,
        sink: Callable[[Mapping[str, object]], None],
        *,
        hide_usage: bool,
        every_event: bool = False,
    ) -> None:
        self._sink = sink
        self._hide = hide_usage
        self._every = every_event
        self._buffer = b""
        self._held: list[bytes] = []
        self._started = False
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns those that go on to the caller."""
        if self.complete or (self._started and self._nothing_in(data)):
            return data
        self._buffer += data
        out: list[bytes] = []
        start = 0
        for match in _EVENT_END.finditer(self._buffer):
            self._event(self._buffer[start : match.end()], out)
            start = match.end()
        self._buffer = self._buffer[start:]
        if not self._hide:
            return data
        out.append(self._rest())
        return b"".join(out)

    def _nothing_in(self, data: bytes) -> bool:
        """Whether these bytes are whole events that nobody here has to look at; true of most."""
        idle = not (self._every or self._held or self._buffer)
        return idle and data.endswith(b"\n\n") and not _is_worth_reading(data)

    def _rest(self) -> bytes:
        """What follows the end of the answer is not looked at."""
        if not self.complete:
            return b""
        rest, self._buffer = self._buffer, b""
        return rest

    def flush(self) -> bytes:
        """The stream is over, in whatever way; returns what was held back."""
        rest = b"".join((*self._held, self._buffer)) if self._hide else b""
        self._held.clear()
        self._buffer = b""
        return rest

    def _event(self, raw: bytes, out: list[bytes]) -> None:
        event: Mapping[str, object] | None = None
        if self._every or not self._started or _is_worth_reading(raw):
            data = _data_of(raw)
            if data.startswith(b"[DONE]"):
                self.complete = True
                out.extend((*self._held, raw))
                self._held.clear()
                return
            event = _decode(data)
        if event is not None:
            self._sink(event)
            self._started = self._started or carries_token(event)
            self.complete = str(event.get("type")) in _TERMINAL
        if not self._hide:
            return
        if event is not None and is_usage_only(event):
            self._release(event.get("system_fingerprint"), out)
        elif self._held or (event is not None and _ends_choice(event)):
            self._held.append(raw)
        else:
            out.append(raw)

    def _release(self, fingerprint: object, out: list[bytes]) -> None:
        """Let held events go, the first with the fingerprint that it has when usage is not asked for."""
        if self._held and isinstance(fingerprint, str):
            event = _decode(_data_of(self._held[0]))
            if event is not None and event.get("system_fingerprint") is None:
                changed = {**event, "system_fingerprint": fingerprint}
                text = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
                self._held[0] = b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"
        out.extend(self._held)
        self._held.clear()


def _is_worth_reading(raw: bytes) -> bool:
    """Whether raw events may say something about usage, errors or an end; cheap, and true too often."""
    return (
        b'"usage"' in raw
        or b"[DONE]" in raw
        or b'"error"' in raw
        or b'_reason":"' in raw
        or b'_reason": "' in raw
        or b'"response.' in raw
    )


def _ends_choice(event: Mapping[str, object]) -> bool:
    choices = event.get("choices")
    return (
        isinstance(choices, list)
        and len(choices) == 1
        and isinstance(choices[0], dict)
        and choices[0].get("finish_reason") is not None
    )


def _data_of(raw: bytes) -> bytes:
    """The data of one event; almost always one line."""
    lines = [line[5:].lstrip(b" ") for line in raw.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _decode(data: bytes) -> Mapping[str, object] | None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


class _Tap:
    """The hook on one response; calls `ended` once, when the answer is over for its reader."""

    def __init__(
        self, response: HttpResponse, reader: Reader, ended: Callable[[BaseException | None, bool], None]
    ) -> None:
        self._reader = reader
        self._ended = ended
        self._reading = False
        self._done = False
        self._response = weakref.ref(response)
        # Never iterated and dropped: the collector tells.
        self._finalizer = weakref.finalize(response, self.end, None)
        self._finalizer.atexit = False

    def end(self, error: BaseException | None) -> None:
        if self._done:
            return
        self._done = True
        self._finalizer.detach()
        response = self._response()
        if response is not None:
            for name in ("iter_bytes", "aiter_bytes", "close", "aclose"):
                response.__dict__.pop(name, None)
        self._ended(error, self._reader.complete)

    def closed(self) -> None:
        # While bytes are being read, the close is the transport's: the reading code ends the call.
        if not self._reading:
            self.end(None)

    def feed(self, data: bytes) -> bytes:
        return attempt("reading a response", data, self._reader.feed, data)

    def flush(self) -> bytes:
        return attempt("reading a response", b"", self._reader.flush)

    def read(self, source: Iterator[bytes]) -> Iterator[bytes]:
        error: BaseException | None = None
        try:
            while True:
                self._reading = True
                data = next(source, None)
                self._reading = False
                out = self.flush() if data is None else self.feed(data)
                if out:
                    yield out
                if data is None:
                    return
        except GeneratorExit:
            raise
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._reading = False
            self.end(error)
            del error  # it holds this frame

    async def aread(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        error: BaseException | None = None
        try:
            while True:
                self._reading = True
                data = await anext(source, None)
                self._reading = False
                out = self.flush() if data is None else self.feed(data)
                if out:
                    yield out
                if data is None:
                    return
        except GeneratorExit:
            raise
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._reading = False
            self.end(error)
            del error  # it holds this frame


def tap(response: HttpResponse, reader: Reader, ended: Callable[[BaseException | None, bool], None]) -> None:
    """Read `response` along with its caller through `reader`.

    `ended(error, complete)` is called once: `error` is what reading raised, `complete` tells whether the
    answer was read to its end.
    """
    state = _Tap(response, reader, ended)
    iter_bytes, aiter_bytes = response.iter_bytes, response.aiter_bytes
    close, aclose = response.close, response.aclose

    def tapped_iter_bytes(chunk_size: int | None = None) -> Iterator[bytes]:
        return state.read(iter_bytes(chunk_size))

    def tapped_aiter_bytes(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        return state.aread(aiter_bytes(chunk_size))

    def tapped_close() -> None:
        try:
            close()
        finally:
            state.closed()

    async def tapped_aclose() -> None:
        try:
            await aclose()
        finally:
            state.closed()

    vars(response).update(
        iter_bytes=tapped_iter_bytes, aiter_bytes=tapped_aiter_bytes, close=tapped_close, aclose=tapped_aclose
    )
