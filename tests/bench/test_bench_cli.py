"""The command line: options reach their functions, and heavy packages stay out until they are needed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from small_tokenizer import PLAIN_TEMPLATE, save_tokenizer
from test_tokens import save_recording
from typer.testing import CliRunner

from agentspec_runtime.bench.cli import app
from agentspec_runtime.bench.options import rate
from agentspec_runtime.bench.recordings import file_sha256
from agentspec_runtime.errors import ConfigurationError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)
    words = "one two three four five six seven eight nine ten. " * 3
    chat = [{"role": "user", "content": words}, {"role": "assistant", "content": f"so: {words}"}]
    save_recording(tmp_path / "runs.jsonl", messages=chat, tools=[])
    return tmp_path


def test_sigterm_ends_a_command_and_what_it_has_started() -> None:
    """`kill`, `timeout` and cancelled CI jobs left a server with gigabytes of weights behind."""
    program = textwrap.dedent(
        """
        import time
        from agentspec_runtime.bench.cli import app
        import agentspec_runtime.bench.live as live

        def run(plan, **_):
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("server ended", flush=True)

        live.live = run
        app(args=["live", "--out", "unused"], prog_name="agentspec bench")
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    told, _ = process.communicate(timeout=20)
    assert told.startswith("server ended")
    assert process.returncode not in (0, -signal.SIGTERM)


def test_help_of_every_command_loads_nothing_heavy() -> None:
    for command in ("simulate", "controller", "replay", "gpu-check", "calibrate", "report", "live"):
        code = (
            "import sys\n"
            "from agentspec_runtime.bench.cli import app\n"
            f"try: app(args=['{command}', '--help'], prog_name='agentspec bench')\n"
            "except SystemExit as end: assert end.code == 0\n"
            "heavy = {'numpy', 'numba', 'torch', 'vllm', 'transformers', 'openai'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Usage: agentspec bench" in done.stdout


def test_simulate_prints_every_method_and_writes_all_figures(folder: Path) -> None:
    arguments = ["simulate", "--traces", str(folder / "runs.jsonl"), "--model", str(folder / "model")]
    arguments += ["--methods", "ngram,agentspec,oracle", "--processes", "1", "--cost", "h100/dense-8b"]
    out = folder / "figures.json"
    done = CliRunner().invoke(app, [*arguments, "--batches", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    for shown in ("runs.jsonl: 1 trajectories", "S >= 0.85", "O2/1", "n 2-4, K 5", "agentspec, budget"):
        assert shown in done.output
    figures = json.loads(out.read_text())
    [workload] = figures["workloads"]
    assert {lane["method"] for lane in workload["lanes"]} == {"ngram", "agentspec", "oracle"}
    assert figures["provenance"]["traces"] == {"runs.jsonl": file_sha256(folder / "runs.jsonl")}
    [priced] = figures["goodput"]
    speedups = {row["method"]: row["speedup"] for row in priced["rows"]}
    assert speedups["plain"] == 1.0
    assert 1.0 < speedups["ngram"] <= speedups["LZ"]


def test_report_writes_both_files_and_names_them(folder: Path) -> None:
    from test_report import save

    save(folder)
    done = CliRunner().invoke(app, ["report", str(folder), "--price-per-hour", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.split() == [str(folder / "report.html"), str(folder / "report.md")]
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(("text", "expected"), [("closed", None), ("poisson:0.5", 0.5), ("poisson:2", 2.0)])
def test_arrival_is_read(text: str, expected: float | None) -> None:
    assert rate(text) == expected


@pytest.mark.parametrize("text", ["poisson", "poisson:0", "poisson:-1", "poisson:x", "burst:2", "closed:1"])
def test_an_arrival_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="needed closed, or poisson:RATE"):
        rate(text)
