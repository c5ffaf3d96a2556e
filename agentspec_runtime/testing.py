"""Public test doubles: a scripted server that is as strict as vLLM, and pytest fixtures.

    from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

    with MockVLLM([Reply(tool_calls=[ToolCall("add", {"a": 1, "b": 2})]), Reply("3")]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="unused")
        ...
        assert server.requests[0].hint.session == "s-1"

`MockVLLM` is a real HTTP server on a thread: use it with any client, any framework, sync or async. It checks
`vllm_xargs` as vLLM does (text, numbers and flat lists of those) and hints as the bundled server does,
streams with or without a usage chunk, fails and stalls on request, and returns vLLM's `metrics`. With
`poses_as="foreign"` it is somebody else's strict server that refuses every field it does not know.

The fixtures `mock_vllm` and `agentspec_calls` are there for a test suite that asks for them with
`pytest_plugins = ["agentspec_runtime.testing"]`; nothing is active by itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Literal, Self

from agentspec_runtime._scripted import Reply, ToolCall, body_of, chunks_of
from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.client.report import CallReport, collect_calls
from agentspec_runtime.errors import HintError
from agentspec_runtime.hints import XARGS_KEY, Hint, decode_hint

__all__ = ["MockVLLM", "RecordedRequest", "Reply", "ToolCall"]

_KNOWN_FIELDS: Final = frozenset(
    {
        *("model", "messages", "prompt", "input", "instructions", "text", "reasoning", "store", "metadata"),
        *("stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop"),
        *("temperature", "top_p", "n", "seed", "user", "frequency_penalty", "presence_penalty", "logit_bias"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs"),
    }
)
"""What a hosted service knows; `poses_as="foreign"` refuses the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One HTTP request that the server received, retries included."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Mapping[str, Any]

    @property
    def hint(self) -> Hint | None:
        """The hint in the request, decoded; None where there is none."""
        xargs = self.body.get("vllm_xargs") or {}
        return decode_hint(xargs[XARGS_KEY]) if XARGS_KEY in xargs else None

    @property
    def session_header(self) -> str | None:
        """vLLM's session id header."""
        return self.headers.get("x-session-id")


Script = Iterable[Reply] | Callable[[RecordedRequest], Reply]


class MockVLLM:
    """A scripted OpenAI-compatible server; see the module docstring.

    Args:
        script: replies in order (the last one is repeated), or a function from request to reply; it may be
            called from several threads.
        poses_as: "agentspec" answers as the bundled server, "vllm" as a plain one (no capability header),
            "foreign" as a strict hosted service.
        models: what `/v1/models` lists.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        poses_as: Literal["agentspec", "vllm", "foreign"] = "agentspec",
        models: Sequence[str] = ("mock-model",),
    ) -> None:
        self.poses_as: Final = poses_as
        self.models: Final = tuple(models)
        self.received: list[RecordedRequest] = []
        """Every request, `/v1/models` included."""
        self.num_aborted = 0
        """Streams whose client went away before the end."""
        self._lock = threading.Lock()
        self._open = 0
        self._replies: list[Reply] = []
        self._answer: Callable[[RecordedRequest], Reply] | None = None
        self.script(script)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.mock = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def script(self, script: Script) -> None:
        """Replace the script."""
        with self._lock:
            self._answer = script if callable(script) else None
            self._replies = [] if callable(script) else list(script) or [Reply(content="ok")]

    @property
    def url(self) -> str:
        """Base URL for a client."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def requests(self) -> list[RecordedRequest]:
        """Requests for an answer, in the order of arrival."""
        return [request for request in self.received if request.method == "POST"]

    @property
    def num_probes(self) -> int:
        """How often `/v1/models` was asked for."""
        return sum(request.path.endswith("/models") for request in self.received)

    @property
    def num_open(self) -> int:
        """Answers being written at this moment."""
        return self._open

    def start(self) -> Self:
        """Start to listen."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and drop what is connected."""
        self._server.shutdown()
        self._server.drop_connections()
        self._server.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def reply_to(self, request: RecordedRequest) -> Reply:
        """The scripted reply to a request; errors of validation come first, as in vLLM."""
        with self._lock:
            self.received.append(request)
            reason = self._objection(request)
            if reason is not None:
                return Reply(status=400, error=reason)
            if self._answer is None:
                return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return self._answer(request)

    def _objection(self, request: RecordedRequest) -> str | None:
        if self.poses_as == "foreign":
            unknown = sorted(set(request.body) - _KNOWN_FIELDS)
            return f"Unrecognized request argument supplied: {', '.join(unknown)}" if unknown else None
        xargs = request.body.get("vllm_xargs")
        if xargs is None:
            return None
        if not isinstance(xargs, dict):
            return "vllm_xargs: Input should be a valid dictionary"
        for name, value in xargs.items():
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, (str, int, float)):
                    return f"vllm_xargs.{name}: Input should be a valid string, number or list of those"
        if self.poses_as == "agentspec" and XARGS_KEY in xargs:
            try:
                decode_hint(xargs[XARGS_KEY])
            except HintError as error:
                return str(error)
        return None

    def count_open(self, change: int, *, aborted: bool = False) -> None:
        """Bookkeeping of the handler."""
        with self._lock:
            self._open += change
            self.num_aborted += aborted


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 refuses connections when forty agents start at once
    mock: MockVLLM

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._sockets: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        for request in list(self._sockets):
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes; without this each answer takes 40 ms
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - signature of the base class
        """Quiet."""

    def do_GET(self) -> None:
        """`/v1/models` and `/health`."""
        mock = self.server.mock
        mock.received.append(self._record({}))
        if self.path.endswith("/models"):
            data = [{"id": name, "object": "model", "created": 0, "owned_by": "vllm"} for name in mock.models]
            extra = {"x-agentspec": "1"} if mock.poses_as == "agentspec" else {}
            self._json(200, {"object": "list", "data": data}, extra)
        else:
            self._json(200 if self.path == "/health" else 404, {}, {})

    def do_POST(self) -> None:
        """Completions, chat completions and responses."""
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        request = self._record(body)
        mock = self.server.mock
        reply = mock.reply_to(request)
        mock.count_open(+1)
        aborted = False
        try:
            if reply.delay_s:
                time.sleep(reply.delay_s)
            if reply.status != 200:
                error = {"message": reply.error, "type": "BadRequestError", "code": reply.status}
                self._json(reply.status, {"error": error}, reply.headers)
            elif body.get("stream"):
                self._stream(chunks_of(request.path, request.body, reply), reply)
            else:
                self._json(200, body_of(request.path, request.body, reply), reply.headers)
        except (BrokenPipeError, ConnectionResetError):
            aborted = True
            self.close_connection = True
        finally:
            mock.count_open(-1, aborted=aborted)

    def _record(self, body: Mapping[str, Any]) -> RecordedRequest:
        headers = {name.lower(): value for name, value in self.headers.items()}
        return RecordedRequest(method=self.command, path=self.path, headers=headers, body=body)

    def _json(self, status: int, body: Mapping[str, object], headers: Mapping[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            **headers,
            "content-type": "application/json",
            "content-length": len(data),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: Iterator[Mapping[str, object]], reply: Reply) -> None:
        self.send_response(200)
        for name, value in {**reply.headers, "content-type": "text/event-stream; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index, chunk in enumerate(chunks):
            if reply.cut_after is not None and index >= reply.cut_after:
                self.close_connection = True
                return
            name = f"event: {chunk['type']}\n" if "type" in chunk else ""
            self._write(f"{name}data: {json.dumps(chunk)}\n\n".encode())
            if reply.chunk_delay_s:
                time.sleep(reply.chunk_delay_s)
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


try:
    import pytest
except ImportError:  # the fixtures are for test suites; the server works without pytest
    pass
else:

    @pytest.fixture
    def mock_vllm() -> Iterator[MockVLLM]:
        """A `MockVLLM` that answers "ok"; give it a script with `mock_vllm.script(...)`."""
        with MockVLLM() as server:
            yield server

    @pytest.fixture
    def agentspec_calls() -> Iterator[list[CallReport]]:
        """`instrument()` is in force; reports of all calls of the test, from whatever thread."""
        with instrument(), collect_calls(everywhere=True) as calls:
            yield calls
