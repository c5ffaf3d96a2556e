"""The demo's servers: started, waited for, and gone afterwards, whatever happened in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentspec_runtime.demo import server as server_module
from agentspec_runtime.demo.server import RunningServer, ServerCommand, free_port, running_server
from agentspec_runtime.errors import ServerError

# A server with a child process, as vLLM has, that answers /health a moment after its start.
SERVER = textwrap.dedent(
    """
    import http.server, os, subprocess, sys, time
    mode, port = sys.argv[1], int(sys.argv[2])
    print("environment:", sorted(name for name in os.environ if name.startswith("OTEL_")), flush=True)
    if mode == "dies":
        sys.exit("cannot load the model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    print("child", child.pid, flush=True)
    if mode == "stubborn":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.0)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *args): pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake(ServerCommand):
    script: Path
    mode: str = "fine"

    def arguments(self) -> list[str]:
        return [sys.executable, str(self.script), self.mode, str(self.port)]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return Fake(plain=True, port=free_port(), otlp_endpoint="", script=script)


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_is_ready_inside_the_block_and_gone_after_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:4318")
    waits: list[float] = []
    log = tmp_path / "log"
    with running_server(fake, log=log, on_wait=waits.append) as server:
        with urllib.request.urlopen(server.base_url.removesuffix("/v1") + "/health") as answer:
            assert answer.status == 200
        assert isinstance(server, RunningServer)
        assert server.started_s > 0.2
    assert waits == sorted(waits)
    assert len(waits) > 0
    assert "environment: []" in log.read_text()
    assert gone(server.pid)
    assert gone(child_of(log))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{fake.port}/health")


def test_a_server_that_dies_shows_the_end_of_its_log(fake: Fake, tmp_path: Path) -> None:
    dying = Fake(plain=True, port=fake.port, otlp_endpoint="", script=fake.script, mode="dies")
    with (
        pytest.raises(ServerError, match="status 1") as failure,
        running_server(dying, log=tmp_path / "log", on_wait=lambda _: None),
    ):
        pytest.fail("it was never ready")
    assert "cannot load the model" in str(failure.value)
    assert str(tmp_path / "log") in str(failure.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_ends_the_server_too(fake: Fake, tmp_path: Path, error: type[BaseException]) -> None:
    log = tmp_path / "log"
    with pytest.raises(error), running_server(fake, log=log, on_wait=lambda _: None):
        raise error
    assert gone(child_of(log))


def test_ctrl_c_while_it_is_loading_ends_it(fake: Fake, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupt(_: float) -> None:
        if "child" in log.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), running_server(fake, log=log, on_wait=interrupt):
        pytest.fail("it was never ready")
    assert gone(child_of(log))


def test_a_server_that_does_not_listen_to_signals_is_killed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_STOP_TIMEOUT_S", 0.5)
    stubborn = Fake(plain=True, port=fake.port, otlp_endpoint="", script=fake.script, mode="stubborn")
    log = tmp_path / "log"
    with running_server(stubborn, log=log, on_wait=lambda _: None) as server:
        pass
    assert gone(server.pid)
    assert gone(child_of(log))


def test_a_server_that_never_answers_is_given_up(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_START_TIMEOUT_S", 0.2)
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match="did not answer within"),
        running_server(fake, log=log, on_wait=lambda _: None),
    ):
        pytest.fail("it was never ready")


def test_a_real_ctrl_c_leaves_no_process(fake: Fake, tmp_path: Path) -> None:
    """The signal goes to the process that runs the demo; the server sits in another group."""
    log = tmp_path / "log"
    program = textwrap.dedent(
        f"""
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_demo_server import Fake
        from agentspec_runtime.demo.server import running_server
        fake = Fake(plain=True, port={fake.port}, otlp_endpoint="", script=Path({str(fake.script)!r}))
        with running_server(fake, log=Path({str(log)!r}), on_wait=lambda s: None):
            print("ready", flush=True)
            time.sleep(60)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in stderr
    assert gone(child_of(log))


def test_arguments_pass_on_what_the_user_gave() -> None:
    command = ServerCommand(
        plain=True,
        port=8123,
        otlp_endpoint="http://x/v1/traces",
        model="M",
        vllm_flags=("--dtype", "float32"),
    )
    words = command.arguments()
    assert words[1:5] == ["-m", "agentspec_runtime", "serve", "M"]
    assert "--plain" in words
    assert words[words.index("--") :] == ["--", "--port=8123", "--dtype", "float32"]
    ours = ServerCommand(plain=False, port=1, otlp_endpoint="").arguments()
    assert "--plain" not in ours
