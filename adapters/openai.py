"""One client of the OpenAI SDK instead of all of them.

    client = wrap(openai.OpenAI(base_url="http://localhost:8000/v1"))

does for this client, and for what `with_options()` makes of it, what `agentspec_runtime.instrument()`
does for the whole process. Beside `instrument()` it changes nothing: a call is never watched twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any, Literal, TypeVar

from agentspec_runtime.client.capability import Capability, read_servers
from agentspec_runtime.client.instrument import Settings, instrument, send, send_async, uninstrument
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError

try:
    from openai._base_client import AsyncAPIClient, SyncAPIClient
except ImportError as error:
    raise MissingDependencyError(error.name or "openai", "openai") from error

__all__ = ["instrument", "uninstrument", "wrap"]

ClientT = TypeVar("ClientT", bound="SyncAPIClient | AsyncAPIClient")

_MARK = "_agentspec_wrapped"


def wrap(
    client: ClientT, *, servers: Literal["auto", "always", "off"] | Iterable[str] | None = None
) -> ClientT:
    """Send hints with the calls of this client and report them; returns the client itself.

    Args:
        client: a synchronous or asynchronous client.
        servers: as for `agentspec_runtime.instrument()`.

    Raises:
        ConfigurationError: not a client of the SDK.
    """
    return _wrap(client, Settings(Capability(read_servers(servers))))


def _wrap(client: ClientT, settings: Settings) -> ClientT:
    if not isinstance(client, (SyncAPIClient, AsyncAPIClient)):
        raise ConfigurationError(f"wrap() needs an openai client, got {type(client).__name__}")
    if _MARK in vars(client):
        return client
    original = client.request
    if isinstance(client, AsyncAPIClient):

        @wraps(original)
        async def request_async(*args: Any, **kwargs: Any) -> Any:
            return await send_async(settings, original, client, args, kwargs)

        vars(client)["request"] = request_async
    else:

        @wraps(original)
        def request(*args: Any, **kwargs: Any) -> Any:
            return send(settings, original, client, args, kwargs)

        vars(client)["request"] = request
    for name in ("copy", "with_options"):
        vars(client)[name] = _copying(getattr(client, name), settings)
    vars(client)[_MARK] = True
    return client


def _copying(method: Any, settings: Settings) -> Any:
    @wraps(method)
    def copying(*args: Any, **kwargs: Any) -> Any:
        return _wrap(method(*args, **kwargs), settings)

    return copying
