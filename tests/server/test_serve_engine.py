"""`agentspec serve` as a user runs it: real processes, real vLLM, real clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentspec_runtime.hints import Hint, encode_hint

openai = pytest.importorskip("openai", reason="needs the extra openai")

pytestmark = pytest.mark.engine


def chat(url: str, body: dict[str, object], **headers: str) -> tuple[int, dict[str, str], dict]:
    request = urllib.request.Request(
        f"{url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert values, f"no metric {name}"
    return sum(values)


CODE = "Write a python function that adds two numbers, then repeat it."
COPY = "Repeat this line five times: the quick brown fox jumps over the lazy dog"


def test_stock_client_gets_the_same_text_as_from_the_plain_server(engine_server, plain_server):
    answers = []
    for server in (engine_server, plain_server):
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        arguments = {
            "model": server.model,
            "messages": [{"role": "user", "content": COPY}],
            "max_tokens": 100,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**arguments).choices[0].message.content
        chunks = client.chat.completions.create(**arguments, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == whole
        answers.append(whole)
    assert answers[0] == answers[1]


def test_answer_says_what_was_drafted_and_metrics_add_it_up(engine_server):
    before = metric(engine_server.root_url, "agentspec_accepted_tokens_total")
    body = {
        "model": engine_server.model,
        "messages": [{"role": "user", "content": CODE}],
        "max_tokens": 120,
        "temperature": 0,
        "vllm_xargs": {"agentspec": encode_hint(Hint(session="metrics", turn=0))},
    }
    chat(engine_server.base_url, body)
    status, headers, answer = chat(engine_server.base_url, body)
    assert (status, headers["x-agentspec"]) == (200, "1")
    spec = answer["metrics"]["speculative_decoding"]
    # The second answer is the first one again: nearly all of it can be drafted. A proposer that is one token
    # late, or scheduling that is asynchronous after all, would accept next to nothing.
    assert spec["num_accepted_draft_tokens"] >= 0.7 * answer["usage"]["completion_tokens"]
    assert spec["draft_acceptance_rate"] > 0.8
    time.sleep(1.5)  # the telemetry thread writes in slices
    assert metric(engine_server.root_url, "agentspec_accepted_tokens_total") - before >= 70


def test_bad_hint_is_a_400_that_a_stock_client_understands(engine_server):
    client = openai.OpenAI(base_url=engine_server.base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="speculate") as caught:
        client.chat.completions.create(
            model=engine_server.model,
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"vllm_xargs": {"agentspec": '{"speculate": "force"}'}},
        )
    assert caught.value.param == "vllm_xargs.agentspec"


def test_required_tool_call_is_parsed(engine_server):
    client = openai.OpenAI(base_url=engine_server.base_url, api_key="none")
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    answer = client.chat.completions.create(
        model=engine_server.model,
        messages=[{"role": "user", "content": "Read the file notes.txt"}],
        tools=[{"type": "function", "function": {"name": "read_file", "parameters": parameters}}],
        tool_choice={"type": "function", "function": {"name": "read_file"}},
        max_tokens=80,
        temperature=0,
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "read_file"


def test_plain_server_makes_no_drafts_and_checks_hints_alike(plain_server):
    body = {"model": plain_server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    status, headers, answer = chat(plain_server.base_url, body)
    assert (status, headers["x-agentspec"]) == (200, "1")
    assert answer["metrics"]["speculative_decoding"] is None
    assert chat(plain_server.base_url, {**body, "vllm_xargs": {"agentspec": "{"}})[0] == 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "agentspec_runtime", "serve", *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def check_alive(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    assert process.poll() is None, log.read_text()[-3000:]
    assert time.monotonic() < deadline, log.read_text()[-3000:]


def test_taken_port_is_said_before_a_model_is_loaded(engine_server, tmp_path: Path):
    port = engine_server.base_url.split(":")[2].split("/")[0]
    process = start("--", "--port", port, log=tmp_path / "log")
    assert process.wait(180) == 2
    said = (tmp_path / "log").read_text()
    assert f"agentspec: port {port} is in use by process" in said
    assert "--port N" in said
    assert "Traceback" not in said
    assert "Starting to load model" not in said


def test_ctrl_c_while_it_starts_ends_it_at_once(tmp_path: Path):
    log = tmp_path / "log"
    process = start("--port", str(free_port()), "--enforce-eager", log=log)
    deadline = time.monotonic() + 180
    while b"Initializing a V1 LLM engine" not in log.read_bytes():
        check_alive(process, log, deadline)
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    assert process.wait(30) == 0, log.read_text()[-3000:]
    assert "agentspec: stopped before the server was ready" in log.read_text()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP/HTTP endpoint that keeps what it gets."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        check_alive(process, log, deadline)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)


@pytest.mark.slow
def test_tenants_spans_and_the_death_of_the_engine(collector: tuple[str, list[bytes]], tmp_path: Path):
    """One more server, for what needs options of its own; it ends by losing its engine process."""
    endpoint, received = collector
    port, log = free_port(), tmp_path / "log"
    process = start(
        "--tenant-from=header:x-tenant",
        f"--otlp-endpoint={endpoint}",
        "--",
        f"--port={port}",
        "--enforce-eager",
        "--max-model-len=2048",
        "--kv-cache-memory-bytes=1073741824",
        "--enable-prompt-tokens-details",
        log=log,
    )
    try:
        wait_until_healthy(port, process, log)
        url = f"http://127.0.0.1:{port}/v1"
        body = {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "count: " + " ".join(map(str, range(200)))}],
            "max_tokens": 4,
            "cache_salt": "chosen by the client",
        }

        def cached(**headers: str) -> int:
            status, _, answer = chat(url, body, **headers)
            assert status == 200, answer
            return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        assert chat(url, body)[0] == 401
        assert cached(**{"x-tenant": "a"}) == 0
        assert cached(**{"x-tenant": "a"}) > 0
        assert cached(**{"x-tenant": "b"}) == 0

        deadline = time.monotonic() + 20
        while not received and time.monotonic() < deadline:
            time.sleep(0.2)
        assert received, "no span arrived"

        engines = [
            int(pid) for pid in subprocess.check_output(["pgrep", "-g", str(process.pid)], text=True).split()
        ]
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in engines if pid != process.pid}
        engine = next(pid for pid, name in names.items() if b"EngineCore" in name)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(60) == 2
        assert "agentspec: vLLM's engine process ended by itself" in log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
