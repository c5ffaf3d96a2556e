"""The part of the API process: checks hints, and gives every tenant its own memory.

A pure ASGI middleware that vLLM instantiates by its dotted name (`--middleware`), hence configured by the
environment. Its rules:

- A request is read only where something can be wrong with it: a POST to an endpoint that takes hints whose
  body names one, or any request that must be tied to a tenant. All others, and all responses, pass as they
  come; nothing is buffered on the way out.
- A hint that cannot be used is answered with HTTP 400 and the reason, in the format of the OpenAI API. What
  slips through (an escaped key, a body over the bound) is dropped and counted by the scheduler.
- With `AGENTSPEC_TENANT_FROM` the middleware fails closed: what it cannot tie to a tenant is refused. The
  tenant becomes a keyed hash in `cache_salt`, which isolates vLLM's prefix cache and our draft memory alike;
  whatever salt the client sent is replaced. The body is then written anew, otherwise it is not touched.
- It never makes a 500: a fault of its own lets the request pass (or refuses it, with tenants) and is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

from agentspec_runtime.errors import ConfigurationError, HintError
from agentspec_runtime.hints import XARGS_KEY, decode_hint

__all__ = [
    "TENANT_FROM_VARIABLE",
    "TENANT_KEY_VARIABLE",
    "AgentSpecMiddleware",
    "TenantSource",
    "parse_tenant_source",
]

_log = logging.getLogger("agentspec.middleware")

TENANT_FROM_VARIABLE: Final = "AGENTSPEC_TENANT_FROM"
TENANT_KEY_VARIABLE: Final = "AGENTSPEC_TENANT_KEY"

MAX_BODY_BYTES: Final = 64 << 20
"""Most that is read of a body. Larger ones (images, in base64) pass unread, or get 413 with tenants."""

_HINT_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/invocations",
    }
)
"""Endpoints whose body has `vllm_xargs`. `/invocations` (SageMaker) takes the body of any of them."""

_SALTED_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/systemone",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/invocations",
    }
)
"""Endpoints whose body has `cache_salt`."""
_UNSALTED_PREFIXES: Final = (
    "/v1/messages",
    "/v1/audio/",
    "/v1/realtime",
    "/cohere/",
    "/generative_scoring",
    "/v2/",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
)
"""Endpoints that run the model and cannot carry a salt (or carry it in places that vary): with tenants they
are refused, because their text would be shared."""

_Message = MutableMapping[str, Any]  # Any: the ASGI specification's own type of messages and scopes
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_ERROR_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    413: "RequestTooLargeError",
}
_OURS: Final = (b"x-agentspec", b"1")
_JSON_KEY: Final = f'"{XARGS_KEY}"'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSource:
    """Where the name of a tenant comes from: the API key, or a header that a gateway sets."""

    kind: Literal["api-key", "header"]
    header: bytes

    def __str__(self) -> str:
        return self.kind if self.kind == "api-key" else f"header:{self.header.decode()}"


def parse_tenant_source(text: str) -> TenantSource:
    """`api-key` or `header:NAME`.

    Raises:
        ConfigurationError: neither.
    """
    if text == "api-key":
        return TenantSource(kind="api-key", header=b"authorization")
    kind, _, name = text.partition(":")
    usable = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if kind == "header" and usable:
        return TenantSource(kind="header", header=name.lower().encode())
    raise ConfigurationError(
        f"tenants from {text!r}: expected 'api-key' or 'header:NAME' with a header's name"
    )


class _Refusal(Exception):  # noqa: N818 - an answer, not an error
    """The request is answered here."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class AgentSpecMiddleware:
    """See the module. `app` is what vLLM has built so far."""

    def __init__(self, app: _App, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        chosen = environ.get(TENANT_FROM_VARIABLE)
        self._tenants = parse_tenant_source(chosen) if chosen else None
        key = environ.get(TENANT_KEY_VARIABLE)
        # A random key per start is safe: salts only have to agree among the processes of one server.
        self._key = key.encode() if key else secrets.token_bytes(32)

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Handle one ASGI connection."""
        kind = scope["type"]
        if kind == "websocket" and self._tenants is not None:
            await send(
                {"type": "websocket.close", "code": 1008, "reason": "no tenant isolation on websockets"}
            )
            return
        if kind != "http":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _OURS]}
            await send(message)

        try:
            passed = await self._admit(scope, receive)
        except _Refusal as refusal:
            await _answer(refusal, send_marked)
            return
        if passed is not None:
            await self._app(*passed, send_marked)

    async def _admit(self, scope: _Message, receive: _Receive) -> tuple[_Message, _Receive] | None:
        """Scope and receive for the application; None when the client has gone. Raises `_Refusal`."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        wants_salt = self._wants_salt(scope["method"], path)
        if not wants_salt and (scope["method"] != "POST" or path not in _HINT_PATHS):
            return scope, receive
        tenant = self._tenant(scope["headers"]) if wants_salt else b""
        body = await _read_body(receive)
        if body.gone:
            return None
        if body.rest:
            if wants_salt:
                raise _Refusal(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
            return scope, _Replay(body, receive)
        try:
            changed = self._check(body.data, tenant if wants_salt else None, hinted=path in _HINT_PATHS)
        except _Refusal:
            raise
        except Exception:  # noqa: BLE001 - a fault of ours must not become an answer of 500
            _log.exception("request check failed")
            if wants_salt:
                raise _Refusal(400, "the request could not be tied to a tenant") from None
            changed = None
        if changed is None:
            return scope, _Replay(body, receive)
        return _with_length(scope, len(changed)), _Replay(_Body(data=changed), receive)

    def _wants_salt(self, method: str, path: str) -> bool:
        if self._tenants is None or method != "POST":
            return False
        if path in _SALTED_PATHS:
            return True
        if path.startswith(_UNSALTED_PREFIXES) and not path.endswith(("/render", "/count_tokens")):
            raise _Refusal(403, f"{path} cannot be isolated per tenant, which this server is set to do")
        return False

    def _tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        source = self._tenants
        assert source is not None  # noqa: S101 - called with tenants only
        values = [value for name, value in headers if name.lower() == source.header]
        if len(values) != 1 or not values[0].strip():
            what = "several" if len(values) > 1 else "no"
            raise _Refusal(401, f"this server needs one {source.header.decode()} header, and got {what}")
        value = values[0].strip()
        if source.kind == "api-key":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() != b"bearer" or not token.strip():
                raise _Refusal(401, "this server needs an API key: 'Authorization: Bearer KEY'")
            value = token.strip()
        return value

    def _check(self, data: bytes, tenant: bytes | None, *, hinted: bool) -> bytes | None:
        """The body to pass on in place of `data`, or None to leave it. Raises `_Refusal`."""
        if tenant is None and _JSON_KEY not in data:
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            if tenant is not None:
                raise _Refusal(400, "the body is not JSON that this server can read") from None
            return None  # vLLM tells the client what is wrong with it
        if not _is_object(body):
            if tenant is not None:
                raise _Refusal(400, "the body is not a JSON object")
            return None
        if hinted:
            _check_hint(body)
        if tenant is None:
            return None
        body["cache_salt"] = hmac.new(self._key, b"tenant\0" + tenant, hashlib.sha256).hexdigest()
        return json.dumps(body).encode()


def _check_hint(body: Mapping[str, object]) -> None:
    extra = body.get("vllm_xargs")
    if not _is_object(extra) or XARGS_KEY not in extra:
        return
    try:
        decode_hint(extra[XARGS_KEY])
    except HintError as error:
        raise _Refusal(400, str(error), param=f"vllm_xargs.{XARGS_KEY}") from None


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


@dataclass(slots=True, kw_only=True)
class _Body:
    """What has been read of a request. `rest` says that more is to come; `gone` that the client left."""

    data: bytes
    rest: bool = False
    gone: bool = False


async def _read_body(receive: _Receive) -> _Body:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return _Body(data=b"", gone=True)
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        more = bool(message.get("more_body", False))
        if not more or size > MAX_BODY_BYTES:
            return _Body(data=b"".join(chunks), rest=more)


class _Replay:
    """A `receive` that gives back what was read, then whatever comes: a disconnect must still be heard."""

    def __init__(self, body: _Body, receive: _Receive) -> None:
        self._body: _Body | None = body
        self._receive = receive

    async def __call__(self) -> _Message:
        if (body := self._body) is None:
            return await self._receive()
        self._body = None
        return {"type": "http.request", "body": body.data, "more_body": body.rest}


def _with_length(scope: _Message, length: int) -> _Message:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def _answer(refusal: _Refusal, send: _Send) -> None:
    error = {
        "message": str(refusal),
        "type": _ERROR_TYPES[refusal.status],
        "param": refusal.param,
        "code": refusal.status,
    }
    data = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
