"""The least that a router in front of two replicas does: a session sticks, a dead replica is passed over.

Stands in for the routers that docs/scale-out.md names. The replica follows from the `X-Session-ID` header
by rendezvous hashing; when it cannot be reached, or answers 5xx before its first byte was passed on, the next
one in the session's order gets the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from typing import Self

import aiohttp
from aiohttp import web

_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class StickyRouter:
    """Serves on `url` from a thread while in its `with` block. `served`: (session, replica) in order."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = list(replicas)
        self.served: list[tuple[str, str]] = []
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),))

    def order(self, session: str) -> list[str]:
        """Replicas in the order in which a session asks for them."""
        return sorted(self._replicas, key=lambda r: hashlib.sha256(f"{session} {r}".encode()).digest())

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _main(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as self._http:
            self._ready.set()
            await self._stop.wait()
        await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get("x-session-id", "")
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        for replica in self.order(session):
            try:
                async with self._http.request(
                    request.method, replica + request.path_qs, data=body, headers=headers
                ) as answer:
                    if answer.status >= 500:
                        continue
                    self.served.append((session, replica))
                    return await _pass_on(request, answer)
            except aiohttp.ClientConnectionError:
                continue
        return web.json_response({"error": {"message": "no replica is left"}}, status=503)


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    passed = web.StreamResponse(status=answer.status)
    for name, value in answer.headers.items():
        if name.lower() not in _HOP_BY_HOP | {"content-encoding"}:
            passed.headers[name] = value
    await passed.prepare(request)
    async for chunk in answer.content.iter_any():
        await passed.write(chunk)
    await passed.write_eof()
    return passed
