"""Which servers get hints: only those that say that they understand them.

A hosted service answers 400 to a field it does not know, so nothing is added to a request unless the
server is known to be ours. It is asked once per base URL, before the first call there: `GET {base}/models`
through the caller's own client (its transport, its key), no retries, two seconds. The bundled server
answers with the header `x-agentspec`.

Rules:
  * A clear answer is kept for the life of the process. No answer (connection refused, timeout, 5xx, 401)
    counts as "no" for now and is asked again after a pause that doubles, so a server that was still
    starting is found and a dead one is not hammered.
  * One probe at a time per base URL; calls that come meanwhile wait for it, at most as long as it may take.
  * Azure and api.openai.com are never asked and never get hints, whatever the settings.
  * A server that refuses a request because of what we added gets nothing from then on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

from agentspec_runtime.errors import ConfigurationError

__all__ = ["CAPABILITY_HEADER", "Capability", "Servers", "read_servers"]

CAPABILITY_HEADER: Final = "x-agentspec"
HINTS_VARIABLE: Final = "AGENTSPEC_HINTS"
_PROBE_TIMEOUT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0
_POLL_S: Final = 0.005
"""How often a call looks whether the probe of another call is over; a probe takes 1-5 ms on a LAN."""
_HOSTED: Final = (".azure.com", ".azure.us", ".azure.cn", "api.openai.com")

Servers = Literal["auto", "always", "off"] | frozenset[str]

_log = logging.getLogger("agentspec")


class Client(Protocol):
    """What is used of the SDK's client classes."""

    @property
    def base_url(self) -> object:
        """Base URL of all requests."""
        ...


class _Response(Protocol):
    @property
    def headers(self) -> Mapping[str, str]: ...


def read_servers(given: str | Iterable[str] | None) -> Servers:
    """The setting out of the argument, else the environment, else "auto".

    Raises:
        ConfigurationError: a word that is none of "auto", "always", "off".
    """
    if given is not None and not isinstance(given, str):
        return frozenset(_normal(url) for url in given)
    source = "servers" if given is not None else HINTS_VARIABLE
    word = given if given is not None else os.environ.get(HINTS_VARIABLE, "auto")
    match word.strip().lower():
        case "auto" | "":
            return "auto"
        case "always":
            return "always"
        case "off":
            return "off"
        case _ if given is not None and "://" in given:
            return frozenset({_normal(given)})
    raise ConfigurationError(
        f"{source}={word!r}: expected 'auto', 'always' or 'off'"
        + (", or a list of base URLs such as ['http://localhost:8000/v1']" if given is not None else "")
    )


def _normal(url: str) -> str:
    return url.strip().rstrip("/").lower()


@dataclass(slots=True)
class _Server:
    """What is known about one base URL."""

    answer: bool | None = None
    probing: bool = False
    failures: int = 0
    ask_again_at: float = 0.0


class Capability:
    """Answers "does the server of this client understand hints?" and remembers it."""

    def __init__(self, servers: Servers = "auto", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers: Final = servers
        self._clock = clock
        self._known: dict[str, _Server] = {}
        self._lock = Lock()

    def ask(self, client: Client, base_url: str | None = None) -> bool:
        """For a synchronous client; sends the probe if it is due. `base_url` spares asking for it again."""
        url = _normal(base_url or str(client.base_url))
        deadline = self._clock() + _PROBE_TIMEOUT_S
        while (answer := self._claim(client, url)) is None or answer == "wait":
            if answer is None:
                return self._settle(url, _probe(client))
            if self._clock() >= deadline:
                return False
            time.sleep(_POLL_S)
        return answer == "yes"

    async def ask_async(self, client: Client, base_url: str | None = None) -> bool:
        """For an asynchronous client; sends the probe if it is due."""
        url = _normal(base_url or str(client.base_url))
        deadline = self._clock() + _PROBE_TIMEOUT_S
        while (answer := self._claim(client, url)) is None or answer == "wait":
            if answer is None:
                found: bool | None = None
                try:
                    found = await _probe_async(client)
                finally:  # a cancelled probe must not leave the others waiting
                    self._settle(url, found)
                return found is True
            if self._clock() >= deadline:
                return False
            import anyio

            await anyio.sleep(_POLL_S)
        return answer == "yes"

    def refuse(self, client: Client) -> None:
        """The server did not take what we added: send it nothing more."""
        url = _normal(str(client.base_url))
        with self._lock:
            server = self._known.setdefault(url, _Server())
            server.answer = False
        _log.warning(
            "%s refused a request because of the fields added for speculation; they are left out from now on",
            _shown(url),
        )

    def refused(self, client: Client) -> bool:
        """Whether this server was seen to refuse hints (which overrides "always")."""
        server = self._known.get(_normal(str(client.base_url)))
        return server is not None and server.answer is False

    def _claim(self, client: Client, url: str) -> Literal["yes", "no", "wait"] | None:
        """The answer, or "wait" while another call is asking, or None: the caller has to ask now."""
        if self.servers == "off":
            return "no"
        server = self._known.get(url)
        if server is not None and server.answer is not None:
            return "yes" if server.answer else "no"
        if _is_azure(client) or _is_hosted(url):
            return "no"
        if self.servers == "always":
            return "yes"
        if isinstance(self.servers, frozenset):
            return "yes" if any(url == one or url.startswith(f"{one}/") for one in self.servers) else "no"
        with self._lock:
            server = self._known.setdefault(url, _Server())
            if server.answer is not None:
                return "yes" if server.answer else "no"
            if server.probing:
                return "wait"
            if self._clock() < server.ask_again_at:
                return "no"
            server.probing = True
            return None

    def _settle(self, url: str, found: bool | None) -> bool:
        """Write down the result of a probe; None: there was no clear answer."""
        with self._lock:
            server = self._known[url]
            server.probing = False
            if server.answer is not None:  # refused meanwhile
                return server.answer
            if found is None:
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**server.failures)
                server.failures += 1
                server.ask_again_at = self._clock() + pause
                return False
            server.answer = found
        _log.debug("%s %s hints", _shown(url), "understands" if found else "does not know")
        return found


def _shown(url: str) -> str:
    """A base URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _is_azure(client: Client) -> bool:
    return any(kind.__name__ == "BaseAzureClient" for kind in type(client).__mro__)


def _is_hosted(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return any(host == name or host.endswith(name) for name in _HOSTED)


# The SDK's `get` with the raw response header gives headers without parsing a body.
_OPTIONS: Final = {
    "timeout": _PROBE_TIMEOUT_S,
    "max_retries": 0,
    "headers": {"X-Stainless-Raw-Response": "true"},
}


def _probe(client: Client) -> bool | None:
    try:
        response: _Response = client.get("/models", cast_to=object, options=_OPTIONS)  # type: ignore[attr-defined]  # of the SDK, which is optional here
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, the answer is "not now"
        return _from_error(error)
    return CAPABILITY_HEADER in response.headers


async def _probe_async(client: Client) -> bool | None:
    try:
        response: _Response = await client.get("/models", cast_to=object, options=_OPTIONS)  # type: ignore[attr-defined]  # of the SDK, which is optional here
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, the answer is "not now"
        return _from_error(error)
    return CAPABILITY_HEADER in response.headers


def _from_error(error: Exception) -> bool | None:
    """An error status may carry the header too; a plain 4xx is a clear "no", anything else is no answer."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if response is not None and CAPABILITY_HEADER in response.headers:
        return True
    return False if 400 <= status < 500 and status not in (401, 403, 408, 429) else None
