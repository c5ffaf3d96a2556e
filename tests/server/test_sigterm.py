"""SIGTERM while requests are in flight. It ends `engine_server`, so it runs as the last test of all."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Server, _Servers

    from agentspec_runtime.telemetry.receiver import OtlpReceiver

pytestmark = [pytest.mark.engine, pytest.mark.ends_server]

NUM_REQUESTS = 6


@dataclass(slots=True)
class Ending:
    """How a request ended for its client."""

    how: str = ""
    num_chunks: int = 0


def ask(server: Server, number: int, ending: Ending) -> None:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": f"{number} red green blue " * 20,  # about three seconds, with the others
        "max_tokens": 40,
        "ignore_eos": True,
        "temperature": 0,
        "stream": number % 2 == 0,
    }
    headers = {"content-type": "application/json", "x-request-id": f"sigterm-{number}"}
    request = urllib.request.Request(f"{server.base_url}/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                ending.num_chunks += 1
                if b"[DONE]" in line or b'"finish_reason":"length"' in line:
                    ending.how = "finished"
                elif b'"error"' in line:
                    ending.how = "error"
        ending.how = ending.how or "cut off"
    except urllib.error.HTTPError as error:
        with error:
            ending.how = f"HTTP {error.code}"
    except (http.client.HTTPException, OSError) as error:
        ending.how = "hangs" if isinstance(error, TimeoutError) else "closed"


def num_running(server: Server) -> float:
    with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running")
    )


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: it has ended, and in a container nobody may ask for its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_sigterm_under_load(engine_server: Server, engine_spans: OtlpReceiver, all_servers: _Servers) -> None:
    """Requests in flight finish, their spans arrive, no process is left. (vLLM's own default kills the engine
    at once: clients of vLLM 0.32 then wait for ever, and spans are lost.)
    """
    processes = psutil.Process(engine_server.pid).children(recursive=True)
    assert processes, "the engine runs in a process of its own"
    endings = [Ending() for _ in range(NUM_REQUESTS)]
    threads = [
        threading.Thread(target=ask, args=(engine_server, number, ending))
        for number, ending in enumerate(endings)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while num_running(engine_server) < NUM_REQUESTS:
        assert time.monotonic() < deadline, "the requests were to run at the same time"
        time.sleep(0.1)

    told = time.monotonic()
    all_servers.terminate("engine_server")
    for thread in threads:
        thread.join(60)
    assert [ending.how for ending in endings] == ["finished"] * NUM_REQUESTS
    assert all_servers.exit_code("engine_server") == 0
    assert time.monotonic() - told < 25
    deadline = time.monotonic() + 10  # Python's own helpers of the server notice its end a moment later
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.1)

    def of_ours(spans: Any) -> set[str]:
        return {
            name
            for number in range(NUM_REQUESTS)
            for name in [f"sigterm-{number}"]
            if any(name in str(span) for span in spans)
        }

    engine_spans.wait_for(lambda spans: len(of_ours(spans)) == NUM_REQUESTS, timeout_s=10)
    assert "agentspec: error in" not in engine_server.log.read_text(errors="replace")
