"""The ASGI middleware in front of a real Starlette application that records what reached it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="comes with vLLM")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentspec_runtime.engine import middleware as module
from agentspec_runtime.engine.middleware import AgentSpecMiddleware, parse_tenant_source
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.hints import Hint, encode_hint

CHAT = "/v1/chat/completions"
HINT_PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]
BY_KEY = {"AGENTSPEC_TENANT_FROM": "api-key", "AGENTSPEC_TENANT_KEY": "a server's secret"}
BY_HEADER = {"AGENTSPEC_TENANT_FROM": "header:X-Tenant", "AGENTSPEC_TENANT_KEY": "a server's secret"}


@dataclass
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        return json.loads(self.body)["error"]


@dataclass
class Server:
    """The middleware around an application that keeps every body it gets."""

    environ: Mapping[str, str] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    lengths: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def endpoint(request: Request) -> Response:
            self.bodies.append(await request.body())
            self.lengths.append(request.headers.get("content-length"))
            return JSONResponse({"ok": True})

        routes = [Route("/{path:path}", endpoint, methods=["GET", "POST"])]
        self.app = AgentSpecMiddleware(Starlette(routes=routes), environ=self.environ)

    def send(
        self,
        body: bytes | object,
        *,
        path: str = CHAT,
        method: str = "POST",
        headers: Iterable[tuple[bytes, bytes]] = (),
        chunks: int = 1,
    ) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(call(self.app, data, path=path, method=method, headers=headers, chunks=chunks))


async def call(app, data: bytes, *, path: str, method: str, headers, chunks: int = 1) -> Answer:
    size = max(1, -(-len(data) // chunks))
    parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    incoming = [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
        for index, part in enumerate(parts)
    ]
    outgoing: list[dict] = []

    async def receive():
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message):
        outgoing.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-length", str(len(data)).encode()), *headers],
    }
    await app(scope, receive, send)
    start = outgoing[0]
    payload = b"".join(message.get("body", b"") for message in outgoing[1:])
    return Answer(status=start["status"], headers=dict(start["headers"]), body=payload)


def hinted(value: object, **fields: object) -> dict[str, object]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "héllo"}],
        "vllm_xargs": {"agentspec": value},
        **fields,
    }


@pytest.mark.parametrize("path", HINT_PATHS)
@pytest.mark.parametrize("chunks", [1, 7])
def test_good_hint_passes_byte_for_byte(path: str, chunks: int):
    server = Server()
    body = json.dumps(hinted(encode_hint(Hint(session="s", turn=3))), indent=3).encode()
    answer = server.send(body, path=path, chunks=chunks)
    assert answer.status == 200
    assert server.bodies == [body]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{bad", "Invalid JSON"),
        ("[]", "hint"),
        (7, "expected one JSON string, got int"),
        ({"v": 1}, "expected one JSON string, got dict"),
        ('{"turn": -1}', "turn"),
        ('{"turn": true}', "turn"),
        ('{"speculate": "force"}', "speculate"),
        ('{"session": "' + "x" * 5000 + '"}', "larger than 4096 bytes"),
        ('{"scope": "everyone"}', "scope"),
    ],
)
def test_bad_hint_is_answered_with_the_reason(value: object, reason: str):
    server = Server()
    answer = server.send(hinted(value))
    assert answer.status == 400
    assert reason in str(answer.error["message"])
    assert answer.error["type"] == "BadRequestError"
    assert answer.error["param"] == "vllm_xargs.agentspec"
    assert answer.error["code"] == 400
    assert answer.headers[b"content-length"] == str(len(answer.body)).encode()
    assert server.bodies == []


def test_reason_never_repeats_much_of_what_was_sent():
    answer = Server().send(hinted('{"session": "' + "secret" * 100 + '"}'))
    assert answer.status == 400
    assert b"secretsecretsecret" not in answer.body


def test_hint_of_a_newer_version_passes():
    assert Server().send(hinted('{"v": 2, "new_field": [1]}')).status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", CHAT, "/nowhere"])
def test_every_response_is_marked(path: str):
    assert Server().send(b"", path=path, method="GET").headers[b"x-agentspec"] == b"1"
    assert Server().send(hinted("{bad")).headers[b"x-agentspec"] == b"1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'"agentspec"',
        b'["agentspec"]',
        b'\xff"agentspec"',
        b"null",
        b'{"vllm_xargs": ["agentspec"]}',
    ],
)
def test_what_is_not_a_request_is_left_to_vllm(body: bytes):
    server = Server()
    assert server.send(body).status == 200
    assert server.bodies == [body]


def test_large_body_passes_unread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    server = Server()
    body = json.dumps(hinted("{bad", padding="x" * 5000)).encode()
    assert server.send(body, chunks=6).status == 200
    assert server.bodies == [body]


def test_deeply_nested_body_does_no_harm():
    body = b'{"agentspec": 1, "x": ' + b"[" * 200_000
    server = Server()
    assert server.send(body).status == 200
    assert server.bodies == [body]
    assert Server(BY_HEADER).send(body, headers=[(b"x-tenant", b"a")]).status == 400


class TestTenants:
    def salt(self, environ: Mapping[str, str], headers: list[tuple[bytes, bytes]], **fields: object) -> str:
        server = Server(environ)
        assert server.send({"model": "m", **fields}, headers=headers).status == 200
        assert server.lengths == [str(len(server.bodies[0]))]
        return json.loads(server.bodies[0])["cache_salt"]

    def test_salt_follows_the_api_key_and_nothing_else(self):
        a = self.salt(BY_KEY, [(b"authorization", b"Bearer key-a")])
        assert a == self.salt(BY_KEY, [(b"Authorization", b"bearer  key-a ")], cache_salt="mine", user="x")
        assert a != self.salt(BY_KEY, [(b"authorization", b"Bearer key-b")])
        assert a != self.salt(
            {**BY_KEY, "AGENTSPEC_TENANT_KEY": "other"}, [(b"authorization", b"Bearer key-a")]
        )
        assert "key-a" not in a
        assert len(a) <= 128  # what vLLM takes

    def test_salt_follows_a_header(self):
        a = self.salt(BY_HEADER, [(b"x-tenant", b"a")])
        assert a == self.salt(BY_HEADER, [(b"X-TENANT", b"a"), (b"authorization", b"Bearer other")])
        assert a != self.salt(BY_HEADER, [(b"x-tenant", b"b")])

    def test_two_servers_without_a_key_do_not_agree(self):
        environ = {"AGENTSPEC_TENANT_FROM": "header:x-tenant"}
        header = [(b"x-tenant", b"a")]
        assert self.salt(environ, header) != self.salt(environ, header)

    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [(b"x-tenant", b" ")],
            [(b"x-tenant", b"a"), (b"x-tenant", b"b")],
        ],
    )
    def test_without_one_tenant_a_request_is_refused(self, headers: list[tuple[bytes, bytes]]):
        server = Server(BY_HEADER)
        answer = server.send({"model": "m"}, headers=headers)
        assert (answer.status, answer.error["type"], server.bodies) == (401, "AuthenticationError", [])

    @pytest.mark.parametrize("value", [b"Bearer ", b"Basic eDp5", b"key-a"])
    def test_key_must_be_a_bearer_token(self, value: bytes):
        assert Server(BY_KEY).send({"model": "m"}, headers=[(b"authorization", value)]).status == 401

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/audio/transcriptions", "/cohere/v2/chat"])
    def test_endpoints_that_carry_no_salt_are_refused(self, path: str):
        server = Server(BY_HEADER)
        answer = server.send({"model": "m"}, path=path, headers=[(b"x-tenant", b"a")])
        assert (answer.status, server.bodies) == (403, [])

    @pytest.mark.parametrize("body", [b"{", b"[]", b"", b"\xff\xfe\x00"])
    def test_what_cannot_be_salted_is_refused(self, body: bytes):
        server = Server(BY_HEADER)
        assert server.send(body, headers=[(b"x-tenant", b"a")]).status == 400
        assert server.bodies == []

    def test_large_body_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
        answer = Server(BY_HEADER).send({"x": "y" * 5000}, headers=[(b"x-tenant", b"a")], chunks=3)
        assert answer.status == 413

    def test_bad_hint_is_still_refused(self):
        assert Server(BY_HEADER).send(hinted("{bad"), headers=[(b"x-tenant", b"a")]).status == 400

    def test_nothing_else_in_the_body_changes(self):
        body = b'{"a": "\\ud800 \\u00e9 h\xc3\xa9", "n": 12345678901234567890123, "f": 1e-7, "x": [NaN]}'
        server = Server(BY_HEADER)
        assert server.send(body, headers=[(b"x-tenant", b"a")]).status == 200
        sent, got = json.loads(body), json.loads(server.bodies[0])
        del got["cache_salt"]
        assert repr(got) == repr(sent)

    def test_utf16_body_is_salted_like_any_other(self):
        server = Server(BY_HEADER)
        assert server.send('{"model": "m"}'.encode("utf-16"), headers=[(b"x-tenant", b"a")]).status == 200
        assert "cache_salt" in json.loads(server.bodies[0])

    def test_reading_requests_need_no_tenant(self):
        assert Server(BY_HEADER).send(b"", path="/v1/models", method="GET").status == 200
        assert Server(BY_HEADER).send({"prompt": "x"}, path="/tokenize").status == 200

    def test_websocket_is_refused(self):
        sent: list[dict] = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        asyncio.run(
            Server(BY_HEADER).app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
        )
        assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("text", ["", "header", "header:", "header:a b", "header:ü", "api_key", "key"])
def test_unknown_tenant_source_is_refused_at_start(text: str):
    with pytest.raises(ConfigurationError, match="api-key"):
        parse_tenant_source(text)


def test_fault_of_ours_is_never_an_answer_of_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(value: object) -> Hint:
        raise RuntimeError("a bug")

    monkeypatch.setattr(module, "decode_hint", broken)
    assert Server().send(hinted("{}")).status == 200
    assert "request check failed" in caplog.text
    assert Server(BY_HEADER).send(hinted("{}"), headers=[(b"x-tenant", b"a")]).status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["vllm_xargs", "agentspec", "cache_salt", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())


@settings(max_examples=150, deadline=None)
@given(
    body=BODIES,
    path=st.sampled_from([*HINT_PATHS, "/tokenize"]),
    chunks=st.integers(1, 4),
    cut=st.integers(0, 80),
)
def test_any_body_is_passed_on_unchanged_or_refused_with_400(body: bytes, path: str, chunks: int, cut: int):
    server = Server()
    data = body[: len(body) - cut] if cut < len(body) else body
    answer = server.send(data, path=path, chunks=chunks)
    assert answer.status in (200, 400)
    assert server.bodies == ([data] if answer.status == 200 else [])


@settings(max_examples=150, deadline=None)
@given(body=BODIES, path=st.sampled_from([*HINT_PATHS, "/v1/systemone"]))
def test_no_body_gets_past_the_tenant(body: bytes, path: str):
    server = Server(BY_HEADER)
    answer = server.send(body, path=path, headers=[(b"x-tenant", b"a")])
    assert answer.status in (200, 400, 403)
    for received in server.bodies:
        assert len(json.loads(received)["cache_salt"]) == 64


async def test_stream_is_not_held_back():
    """The second chunk is made only after the client has the first."""
    first_seen = asyncio.Event()

    async def stream():
        yield b"data: 1\n\n"
        await asyncio.wait_for(first_seen.wait(), 5)
        yield b"data: 2\n\n"

    async def endpoint(request: Request) -> Response:
        await request.json()
        return StreamingResponse(stream(), media_type="text/event-stream")

    app = AgentSpecMiddleware(Starlette(routes=[Route(CHAT, endpoint, methods=["POST"])]), environ={})
    body = json.dumps(hinted("{}")).encode()
    seen: list[bytes] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if incoming:
            return incoming.pop()
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message):
        if message.get("body"):
            seen.append(message["body"])
            first_seen.set()

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert seen == [b"data: 1\n\n", b"data: 2\n\n"]


async def test_application_hears_the_client_leave():
    heard: list[str] = []

    async def app(scope, receive, send):
        heard.append((await receive())["type"])
        heard.append((await receive())["type"])

    incoming = [
        {"type": "http.request", "body": json.dumps(hinted("{}")).encode()},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await AgentSpecMiddleware(app, environ={})(scope, receive, send)
    assert heard == ["http.request", "http.disconnect"]


async def test_client_that_leaves_in_the_middle_of_its_body_reaches_nobody():
    called = []

    async def app(scope, receive, send):
        called.append(scope)

    incoming = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        raise AssertionError

    await AgentSpecMiddleware(app, environ={})(
        {"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send
    )
    assert called == []
