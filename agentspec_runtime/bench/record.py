"""`agentspec record`: a proxy in front of any OpenAI-compatible server that writes a recording.

For agents whose process cannot be touched; others have `agentspec_runtime.record(...)`. Requests go to the
upstream byte for byte, answers come back as they arrive, streams included. A copy of chat completions and
completions goes to the same `Recorder` that the client uses, so both write the same format and take the same
secrets out. Keys in headers are passed on and never recorded.

Which calls form one run: the session of the hint where the client sends one, else the `X-Session-ID` header,
else the first two messages. Recording never changes, delays or fails a call.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from agentspec_runtime.client.recording import Recorder
from agentspec_runtime.client.report import CallReport, Operation
from agentspec_runtime.client.shield import shielded
from agentspec_runtime.errors import ConfigurationError, HintError
from agentspec_runtime.hints import XARGS_KEY, decode_hint

__all__ = ["RecordingProxy", "app", "recording_proxy"]

_OPERATIONS: Final[Mapping[str, Operation]] = {
    "/chat/completions": "chat",
    "/completions": "text_completion",
}
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers of one connection (RFC 9110, section 7.6.1); everything else is passed on."""

_CHUNK: Final = 1 << 16
_TIMEOUT_S: Final = 3600.0
"""A long answer on a busy server; the client's own timeout ends the call before."""


class RecordingProxy(ThreadingHTTPServer):
    """The proxy. `upstream` is a base URL, with or without /v1."""

    daemon_threads = True

    def __init__(self, upstream: str, recorder: Recorder, *, host: str = "127.0.0.1", port: int = 0) -> None:
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"--upstream {upstream!r}: needed a URL like http://localhost:8000/v1")
        self.upstream = parts
        self.recorder = recorder
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Base URL for clients."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the upstream."""
        kind = http.client.HTTPSConnection if self.upstream.scheme == "https" else http.client.HTTPConnection
        return kind(self.upstream.hostname or "", self.upstream.port, timeout=_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingProxy

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Nothing on the terminal: a line per request helps nobody."""

    def _forward(self) -> None:
        if "chunked" in (self.headers.get("Transfer-Encoding") or "").lower():
            self.close_connection = True
            self._refuse(411, "send the request with Content-Length: this proxy reads no chunked requests")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        connection = self.server.connect()
        try:
            connection.request(self.command, self._path(), body or None, self._headers(self.headers.items()))
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            self._refuse(502, f"the upstream {self.server.upstream.netloc} does not answer: {error}")
            return
        try:
            copy = _Copy.of(self.path, body, self.headers.get("X-Session-ID"), self.server.recorder)
            self._pass_back(response, copy)
            if copy is not None and response.status == 200:
                with shielded("recording a call"):
                    copy.finish()
        except (OSError, http.client.HTTPException):
            # The client went away or the upstream broke off: half an answer is no recording.
            self.close_connection = True
        finally:
            connection.close()

    def _path(self) -> str:
        """Path at the upstream, whose base may be something else than /v1."""
        base = self.server.upstream.path.rstrip("/")
        return base + self.path.removeprefix("/v1") if base else self.path

    def _headers(self, items: object) -> dict[str, str]:
        headers = {
            name: value
            for name, value in dict(items).items()  # type: ignore[call-overload] # (name, value) pairs
            if name.lower() not in _HOP_BY_HOP and name.lower() not in ("host", "accept-encoding")
        }
        # A compressed answer could not be read along.
        return {**headers, "Host": self.server.upstream.netloc, "Accept-Encoding": "identity"}

    def _pass_back(self, response: http.client.HTTPResponse, copy: _Copy | None) -> None:
        self.send_response_only(response.status, response.reason)
        length = response.getheader("Content-Length")
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while chunk := response.read1(_CHUNK):
            if copy is not None:
                copy.absorb(chunk)
            self.wfile.write(chunk if length is not None else b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        if length is None:
            self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, text: str) -> None:
        payload = json.dumps({"error": {"message": text, "type": "proxy_error", "code": status}}).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class _Copy:
    """The copy of one call that is recorded."""

    def __init__(
        self, body: Mapping[str, object], operation: Operation, session: str | None, recorder: Recorder
    ) -> None:
        self._body = body
        self._operation = operation
        self._session = session
        self._recorder = recorder
        self._sink = recorder.begin()
        self._received = bytearray()
        self._started_s = time.monotonic()

    @staticmethod
    def of(path: str, body: bytes, session: str | None, recorder: Recorder) -> _Copy | None:
        """A copy of what is recorded; None for other paths and for what is not JSON."""
        operation = _OPERATIONS.get(urlsplit(path).path.removeprefix("/v1"))
        if operation is None:
            return None
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(parsed, dict):
            return None
        return _Copy(parsed, operation, _hinted_session(parsed) or session, recorder)

    def absorb(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._received += data

    def finish(self) -> None:
        """The answer is over. A stream that did not say so was cut off, and is not recorded."""
        text = self._received.decode("utf-8", "replace")
        if self._body.get("stream"):
            events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
            if "[DONE]" not in events:
                return
            for event in events:
                self._take(event)
        else:
            self._take(text)
        model = self._body.get("model")
        report = CallReport(
            operation=self._operation,
            model=model if isinstance(model, str) else None,
            base_url="",
            session=self._session,
            agent=None,
            parent=None,
            turn=None,
            hinted=False,
            stream=bool(self._body.get("stream")),
            outcome="ok",
            latency_ms=1e3 * (time.monotonic() - self._started_s),
        )
        self._sink.finish(self._body, report)

    def _take(self, text: str) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            self._sink.absorb(json.loads(text))


def _hinted_session(body: Mapping[str, object]) -> str | None:
    arguments = body.get("vllm_xargs")
    if not isinstance(arguments, dict) or XARGS_KEY not in arguments:
        return None
    with contextlib.suppress(HintError):
        return decode_hint(arguments[XARGS_KEY]).session
    return None


@contextmanager
def recording_proxy(
    upstream: str, out: Path, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[RecordingProxy]:
    """A proxy that runs for the time of the block; open runs are written at its end.

    Raises:
        ConfigurationError: no URL.
        RecordingError: the file cannot be written.
    """
    recorder = Recorder(out)
    try:
        with RecordingProxy(upstream, recorder, host=host, port=port) as proxy:
            thread = Thread(target=proxy.serve_forever, name="agentspec-record", daemon=True)
            thread.start()
            try:
                yield proxy
            finally:
                proxy.shutdown()
                thread.join()
    finally:
        recorder.close()


app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def record(
    upstream: Annotated[
        str, typer.Option(help="Server to pass requests on to, e.g. http://localhost:8000/v1.")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to append to; .gz compresses.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8001,
) -> None:
    """Record agent traffic in front of any OpenAI-compatible server, for 'agentspec bench replay'.

    The file holds prompts and answers. Secrets are taken out by rule, personal details are not.
    """
    with recording_proxy(upstream, out, host=host, port=port) as proxy:
        typer.echo(f"recording to {out}: point agents at {proxy.url} (Ctrl-C ends and writes)")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
    typer.echo(f"written: {out}")
