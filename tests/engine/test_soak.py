"""The soak script: a short run against the real server, and servers with a fault that it has to find."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

if TYPE_CHECKING:
    from conftest import Server

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


def soak(url: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the account, what it complained of."""
    command = [sys.executable, str(SCRIPT), url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.engine
def test_a_short_soak_of_the_real_server(engine_server: Server) -> None:
    """Every kind of session at once, left and cancelled ones between them: nothing lost, nothing left."""
    code, found, complaints = soak(
        engine_server.root_url, "--seconds=6", "--concurrency=8", "--variants=2", f"--pid={engine_server.pid}"
    )
    assert (code, found["wrong"], found["errors"]) == (0, 0, {}), complaints
    assert found["answered"] > 10
    assert found["left_running"] == 0
    assert found["rss_mib"][-1]["engine"] > 100


FAULTS = ("none", "a token is lost", "answers change", "an error of ours", "HTTP 500")


@contextmanager
def faulty_server(fault: str) -> Iterator[str]:
    """Three tokens for everybody, but for the fault."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            errors = int(fault == "an error of ours")
            metrics = f"vllm:num_requests_running 0.0\nagentspec_internal_errors_total {errors}.0\n"
            self._send(200, metrics if self.path == "/metrics" else json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if '"turn": -1' in body.get("vllm_xargs", {}).get("agentspec", ""):
                self._send(400, "{}")
                return
            ids = [1, 2] if fault == "a token is lost" else [1, 2, 3]
            if fault == "answers change":
                ids[1] = next(numbers)
            places = [{"top_logprobs": [{"token": f"token_id:{i}", "logprob": -i} for i in range(9)]}] * 3
            choice = {
                "index": 0,
                "message": {"content": "text"},
                "delta": {"content": "text"},
                "token_ids": ids,
                "finish_reason": "stop",
                "logprobs": {
                    "token_logprobs": [-0.1, -0.2, -0.3],
                    "content": places,
                    "top_logprobs": [{f"token_id:{i}": -i for i in range(9)}] * 3,
                },
            }
            answer = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}})
            streamed = f"data: {answer}\n\ndata: [DONE]\n\n"
            self._send(500 if fault == "HTTP 500" else 200, streamed if body.get("stream") else answer)

        def _send(self, status: int, text: str) -> None:
            kind = "text/event-stream" if text.startswith("data:") else "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """Clients leave on purpose."""

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    with faulty_server(fault) as url:
        code, found, complaints = soak(url, "--seconds=5", "--sessions=60", "--concurrency=8", "--variants=1")
    assert code == (0 if fault == "none" else 1), complaints
    assert (found["wrong"] > 0) == (fault in ("a token is lost", "answers change"))
    assert (found["internal_errors"] > 0) == (fault == "an error of ours")
    assert bool(found["errors"]) == (fault == "HTTP 500")
