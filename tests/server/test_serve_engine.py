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
from pathlib import Path

import psutil
import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

from sticky_router import StickyRouter

import agentspec_runtime
from agentspec_runtime.engine.compat import require_vllm
from agentspec_runtime.engine.host import intel_openmp
from agentspec_runtime.hints import Hint, encode_hint

openai = pytest.importorskip("openai", reason="needs the extra openai")

pytestmark = pytest.mark.engine

MODEL = "SmolLM2-135M-Instruct"


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


def test_workers_compute_with_intels_openmp(engine_server, plain_server):
    """vLLM starts its processes so that what the environment says is loaded first."""
    library = intel_openmp()
    if library is None or not require_vllm().cpu:
        pytest.skip("comes with vLLM's CPU wheel on x86")
    for server in (engine_server, plain_server):
        processes = psutil.Process(server.pid).children(recursive=True)
        loaded = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
        workers = [maps for maps in loaded if "libtorch_cpu" in maps]
        assert workers
        assert all(str(library) in maps for maps in workers)


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


@pytest.mark.slow
def test_tenants_share_nothing_and_spans_arrive(tenant_server, engine_spans):
    url = tenant_server.base_url
    body = {
        "model": MODEL,
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
    assert cached(**{"x-tenant": "b", "x-request-id": "tenants-b"}) == 0

    engine_spans.wait_for(lambda spans: any("tenants-b" in str(span) for span in spans), timeout_s=20)


@pytest.mark.slow
def test_a_session_moves_on_when_its_replica_dies(engine_server, tenant_server, all_servers):
    """Two replicas behind a router: a session sticks to one, which dies under a request of it. The other one
    answers, with the same text, and nobody is told. Until then the metrics of both add up to what was said.
    """
    replicas = [engine_server.root_url, tenant_server.root_url]
    messages = [{"role": "user", "content": COPY}]
    arguments = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0}
    agentspec_runtime.instrument()
    try:
        with (
            StickyRouter(replicas) as router,
            agentspec_runtime.collect_calls() as calls,
            openai.OpenAI(
                base_url=f"{router.url}/v1",
                api_key="none",
                max_retries=0,
                default_headers={"x-tenant": "replicas"},
            ) as client,
        ):

            def turn(session: str, **more: object) -> str:
                with agentspec_runtime.session(session):
                    answer = client.chat.completions.create(**arguments | more)
                return answer.choices[0].message.content

            before = sum(metric(url, "agentspec_accepted_tokens_total") for url in replicas)
            names = [next(n for n in map(str, range(99)) if router.order(n)[0] == url) for url in replicas]
            texts = [turn(name) for name in names * 2]
            assert len(set(texts)) == 1
            posted = [pair for pair in router.served if pair[0]]
            assert [replica for _, replica in posted] == replicas * 2, "each session stuck to its replica"
            time.sleep(1.5)  # the telemetry thread writes in slices
            after = sum(metric(url, "agentspec_accepted_tokens_total") for url in replicas)
            assert after - before == sum(call.accepted for call in calls) > 10

            engine = next(
                int(pid)
                for pid in subprocess.check_output(["pgrep", "-g", str(tenant_server.pid)], text=True).split()
                if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
            kill = threading.Timer(0.5, os.kill, (engine, signal.SIGKILL))
            kill.start()
            long = turn(names[1], max_tokens=300, extra_body={"ignore_eos": True})
            kill.join()
            assert all_servers.exit_code("tenant_server") == 2
            assert "agentspec: vLLM's engine process ended by itself" in tenant_server.log.read_text()
            assert router.served[-1] == (names[1], engine_server.root_url)
            assert turn(names[1]) == texts[0]
            assert turn(names[1], max_tokens=300, extra_body={"ignore_eos": True}) == long
    finally:
        agentspec_runtime.uninstrument()
