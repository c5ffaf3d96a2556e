"""Soak and load test of a running server: short agent sessions, every answer checked, memory watched.

    python scripts/soak.py http://127.0.0.1:8000 --seconds 60 --concurrency 8          # as fast as it answers
    python scripts/soak.py http://127.0.0.1:8000 --seconds 90 --rate 2 --pid PID       # open loop, arrivals/s

It starts and stops nothing. Sessions are those of soak_sessions.py. What is checked:

- Each answer: status, finish reason, and as many token ids and log probabilities as `usage` says. One that
  differs has lost or doubled a token.
- Greedy answers: the ids of the first time the same body was asked (`--answers FILE` carries them from one
  server to the next, so that ours is held against a plain one). A difference is looked up afterwards: a near
  tie, by the server's own log probabilities, or a defect.
- The server afterwards: nothing running or waiting, no internal error of ours counted.

Latency counts from when a request should have been sent, so a server that falls behind cannot hide it. The
last line is JSON; exit code 1 if anything was wrong. Needs aiohttp, and psutil for `--pid`: vLLM has both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from soak_sessions import KINDS, WEIGHTS, Body, turns

NEAR_TIE: Final = 1e-3
"""Nats. Noise of float32 is about 1e-5 here; half precision needs --near-tie 0.1."""
MAX_LOOKED_UP: Final = 20
NUM_SLOWEST: Final = 8


@dataclass(slots=True)
class Reply:
    """What came back for one request."""

    status: int = 0
    error: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_logprobs: int = 0
    finish_reason: str | None = None
    completion_tokens: int = -1
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """What happened in the run."""

    latencies: list[tuple[float, str, int]] = field(default_factory=list)
    """Seconds, kind, tokens of the answer."""
    by_kind: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    differing: list[tuple[Body, list[int], list[int]]] = field(default_factory=list)
    num_sessions: int = 0
    num_compared: int = 0
    output_tokens: int = 0
    rss_mib: list[dict[str, float]] = field(default_factory=list)


class Client:
    """Sends requests and reads what comes."""

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._http, self._url, self._timeout_s = http, url, timeout_s

    async def send(
        self, body: Mapping[str, Any], *, stream: bool, session: str, leave: bool = False
    ) -> Reply:
        """One request; errors become a reply. `leave`: close the stream at its first piece."""
        sent = dict(body)
        if stream:
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "completions" if "prompt" in body else "chat/completions"
        reply = Reply()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.post(
                    f"{self._url}/v1/{path}", json=sent, headers={"x-session-id": session}
                ) as response,
            ):
                reply.status = response.status
                if response.status != 200:
                    reply.error = f"HTTP {response.status}"
                    await response.read()
                elif not stream:
                    _add(reply, await response.json())
                else:
                    async for part in _events(response):
                        _add(reply, part)
                        if leave:
                            return reply
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reply.error = type(error).__name__
        return reply

    async def top_logprobs(self, body: Body, at: int) -> dict[str, float]:
        """The server's most likely tokens at one place of a greedy answer, in nats."""
        completion = "prompt" in body
        asked = body | ({"logprobs": 5} if completion else {"logprobs": True, "top_logprobs": 5})
        asked |= {"return_tokens_as_token_ids": True}
        path = "completions" if completion else "chat/completions"
        async with self._http.post(f"{self._url}/v1/{path}", json=asked) as response:
            logprobs = (await response.json())["choices"][0]["logprobs"]
        if completion:
            found: dict[str, float] = logprobs["top_logprobs"][at]
            return found
        return {entry["token"]: entry["logprob"] for entry in logprobs["content"][at]["top_logprobs"]}

    async def model(self) -> str:
        """Name of the model that is served."""
        async with self._http.get(f"{self._url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    async def metrics(self) -> dict[str, float]:
        """Sums of the server's metrics by name."""
        found: dict[str, float] = {}
        async with self._http.get(f"{self._url}/metrics") as response:
            for line in (await response.text()).splitlines():
                if line and not line.startswith("#"):
                    name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
                    found[name] = found.get(name, 0.0) + float(value)
        return found


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _add(reply: Reply, part: Body) -> None:
    if "error" in part:
        reply.error = "error in the stream"
        return
    reply.completion_tokens = (part.get("usage") or {}).get("completion_tokens", reply.completion_tokens)
    for choice in part["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        reply.text += choice.get("text") or message.get("content") or ""
        reply.token_ids += choice.get("token_ids") or []
        reply.num_logprobs += len((choice.get("logprobs") or {}).get("token_logprobs") or [])
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


class Soak:
    """The run: sessions, checks, the account of both."""

    def __init__(self, client: Client, options: argparse.Namespace, model: str) -> None:
        self._client, self._options, self._model = client, options, model
        self._random = random.Random(options.seed)  # noqa: S311 - which request comes next is no secret
        self._numbers = itertools.count()
        self._known: dict[str, list[int]] = {}
        self.tally = Tally()
        if options.answers and options.answers.exists():
            self._known = json.loads(options.answers.read_text(encoding="utf-8"))

    async def closed_loop(self) -> None:
        """So many sessions at once, each followed by the next."""
        end_s = time.monotonic() + self._options.seconds

        async def worker() -> None:
            while time.monotonic() < end_s and self.tally.num_sessions < self._options.sessions:
                await self._session(time.monotonic())

        await asyncio.gather(*(worker() for _ in range(self._options.concurrency)))

    async def open_loop(self) -> None:
        """Sessions arrive at random, `rate` a second, whatever the server does."""
        at_s = time.monotonic()
        end_s = at_s + self._options.seconds
        async with asyncio.TaskGroup() as group:
            while (at_s := at_s + self._random.expovariate(self._options.rate)) < end_s:
                await asyncio.sleep(max(at_s - time.monotonic(), 0.0))
                group.create_task(self._session(at_s))

    async def _session(self, due_s: float) -> None:
        number = next(self._numbers)
        kind = self._random.choices(KINDS, WEIGHTS)[0]
        stream = self._random.random() < 0.5
        variant = str(number) if self._options.fresh else str(self._random.randrange(self._options.variants))
        salt = f"salt {number % self._options.salts}" if self._options.salts else None
        self.tally.num_sessions += 1
        for body in turns(kind, variant, self._model):
            if salt is not None:
                body["cache_salt"] = salt
            body["max_tokens"] = min(body["max_tokens"], self._options.max_tokens)
            reply = await self._ask(kind, body, stream=stream, session=f"soak-{number}")
            reply.seconds = time.monotonic() - due_s
            self._check(kind, body, reply)
            due_s = time.monotonic()

    async def _ask(self, kind: str, body: Body, *, stream: bool, session: str) -> Reply:
        if kind == "leave":
            return await self._client.send(body, stream=True, session=session, leave=True)
        if kind == "cancel":
            task = asyncio.create_task(self._client.send(body, stream=False, session=session))
            await asyncio.sleep(self._random.uniform(0.0, 0.5))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return Reply(error="cancelled by us")
        return await self._client.send(body, stream=stream, session=session)

    def _check(self, kind: str, body: Body, reply: Reply) -> None:
        tally = self.tally
        tally.by_kind[kind] += 1
        if kind == "cancel":
            return
        if kind == "bad hint":
            if reply.status != 400:
                tally.wrong.append(f"a malformed hint was answered with {reply.status} {reply.error}")
            return
        if reply.error:
            tally.errors[f"{kind}: {reply.error}"] += 1
            return
        if kind == "leave":
            return
        tally.latencies.append((reply.seconds, kind, len(reply.token_ids)))
        tally.output_tokens += len(reply.token_ids)
        counts = {reply.completion_tokens, len(reply.token_ids)}
        if kind == "logprobs":
            counts.add(reply.num_logprobs)
        if len(counts) != 1 or not reply.token_ids or reply.finish_reason is None:
            tally.wrong.append(f"{kind}: usage, ids and log probabilities differ: {sorted(counts)}, {reply}")
        elif kind != "sampled":
            self._compare(body, reply)

    def _compare(self, body: Body, reply: Reply) -> None:
        key = json.dumps(
            {name: value for name, value in body.items() if name != "cache_salt"}, sort_keys=True
        )
        first = self._known.get(key)
        if first is None:
            if not self._options.fresh:
                self._known[key] = reply.token_ids
            return
        self.tally.num_compared += 1
        if first != reply.token_ids:
            self.tally.differing.append((body, first, reply.token_ids))

    async def look_up(self) -> list[float]:
        """Gaps, in nats, of the near ties behind differing answers; any other difference is wrong."""
        gaps: list[float] = []
        for body, first, second in self.tally.differing[:MAX_LOOKED_UP]:
            gap = await self._gap(body, first, second)
            if gap is None or gap > self._options.near_tie:
                self.tally.wrong.append(f"differs (gap {gap}): {first} and {second} for {body}")
            else:
                gaps.append(gap)
        return gaps

    async def _gap(self, body: Body, first: Sequence[int], second: Sequence[int]) -> float | None:
        pairs = enumerate(zip(first, second, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None:
            return None  # one is the beginning of the other: a token was lost
        top = await self._client.top_logprobs(body, at)
        a, b = top.get(f"token_id:{first[at]}"), top.get(f"token_id:{second[at]}")
        return None if a is None or b is None else abs(a - b)

    def save_answers(self) -> None:
        """For the next run, against another server."""
        if self._options.answers:
            self._options.answers.write_text(json.dumps(self._known), encoding="utf-8")


def rss_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process and its children, MiB; several of one name are added up."""
    import psutil

    found: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            name = "api" if process.pid == pid else ("engine" if "EngineCore" in title else "other")
            found[name] = round(found.get(name, 0.0) + process.memory_info().rss / 2**20, 1)
    return found


async def watch_memory(pid: int, tally: Tally, every_s: float) -> None:
    """Sample until cancelled; the first one now."""
    began_s = time.monotonic()
    while True:
        seconds = round(time.monotonic() - began_s, 1)
        tally.rss_mib.append({"seconds": seconds, "sessions": tally.num_sessions, **rss_mib(pid)})
        await asyncio.sleep(every_s)


async def settle(client: Client, timeout_s: float = 30.0) -> dict[str, float]:
    """Metrics once nothing runs any more, or after the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metrics = await client.metrics()
        busy = metrics.get("vllm:num_requests_running", 0) + metrics.get("vllm:num_requests_waiting", 0)
        if not busy or time.monotonic() > deadline_s:
            return metrics
        await asyncio.sleep(1.5)


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Nearest rank; nan without values."""
    if not sorted_values:
        return float("nan")
    return sorted_values[min(int(share * len(sorted_values)), len(sorted_values) - 1)]


def summary(tally: Tally, metrics: Mapping[str, float], seconds: float, gaps: Sequence[float]) -> Body:
    """The account, as it is printed."""
    slowest = sorted(tally.latencies, reverse=True)[:NUM_SLOWEST]
    latencies = sorted(seconds for seconds, _, _ in tally.latencies)
    named = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        "seconds": round(seconds, 1),
        "sessions": tally.num_sessions,
        "sessions_per_s": round(tally.num_sessions / seconds, 3),
        "requests": sum(tally.by_kind.values()),
        "answered": len(latencies),
        "output_tokens_per_s": round(tally.output_tokens / seconds, 1),
        "latency_s": {name: round(percentile(latencies, share), 3) for name, share in named.items()},
        "compared": tally.num_compared,
        "near_ties": [round(gap, 6) for gap in gaps],
        "errors": dict(tally.errors),
        "wrong": len(tally.wrong),
        "slowest": [[round(seconds, 3), kind, tokens] for seconds, kind, tokens in slowest],
        "by_kind": dict(tally.by_kind),
        "left_running": metrics.get("vllm:num_requests_running", 0.0),
        "internal_errors": metrics.get("agentspec_internal_errors_total", 0.0),
        "accepted_tokens": metrics.get("agentspec_accepted_tokens_total", 0.0),
        "index_mib": round(metrics.get("agentspec_index_bytes", 0.0) / 2**20, 1),
        "rss_mib": tally.rss_mib,
    }


async def run(options: argparse.Namespace) -> int:
    """Exit code."""
    connector = aiohttp.TCPConnector(limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit, read_bufsize=1 << 20) as http:
        client = Client(http, options.url.rstrip("/").removesuffix("/v1"), options.timeout)
        soak = Soak(client, options, await client.model())
        watch = None
        if options.pid:
            watch = asyncio.create_task(watch_memory(options.pid, soak.tally, options.watch_every))
        began_s = time.monotonic()
        await (soak.open_loop() if options.rate else soak.closed_loop())
        seconds = time.monotonic() - began_s
        try:
            metrics = await settle(client)
        except aiohttp.ClientError as error:
            soak.tally.errors[f"metrics: {type(error).__name__}"] += 1
            metrics = {}
        if watch is not None:
            watch.cancel()
            soak.tally.rss_mib.append({"sessions": soak.tally.num_sessions, **rss_mib(options.pid)})
        gaps = await soak.look_up()
    soak.save_answers()
    found = summary(soak.tally, metrics, seconds, gaps)
    for line in soak.tally.wrong[:MAX_LOOKED_UP]:
        print(f"WRONG {line}", file=sys.stderr)
    print(json.dumps(found))
    bad = soak.tally.wrong or soak.tally.errors or found["left_running"] or found["internal_errors"]
    return 1 if bad else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long sessions begin")
    parser.add_argument("--sessions", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions at once")
    parser.add_argument("--rate", type=float, default=0.0, help="sessions per second, open loop")
    parser.add_argument("--variants", type=int, default=6, help="different texts per kind")
    parser.add_argument("--fresh", action="store_true", help="a new text in every session; no comparison")
    parser.add_argument("--salts", type=int, default=0, help="so many cache salts in turn")
    parser.add_argument("--max-tokens", type=int, default=400, help="no answer is longer")
    parser.add_argument("--answers", type=Path, help="greedy answers: read if there, written at the end")
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE, help="nats")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per request")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    parser.add_argument("--watch-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
