"""The committed recordings can be read, are small, and hold nothing of the machine they come from."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from agentspec_runtime.bench.gpu_check import OWN_RECORDINGS
from agentspec_runtime.bench.recordings import read_recordings

FOLDER = OWN_RECORDINGS.parent
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".jsonl", ".gz"))


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recording_is_whole_and_small(path: Path) -> None:
    runs = list(read_recordings(path))
    assert len(runs) >= 3
    assert all(answer["role"] == "assistant" for run in runs for _, answer in run.calls())
    assert path.stat().st_size < 200_000
    assert path.name in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recording_says_nothing_about_its_machine(path: Path) -> None:
    assert re.findall(r"/(?:home|root|tmp|work|Users)/[\w./-]+", text_of(path)) == []


def test_the_demo_is_recorded_with_its_tools_and_repetition() -> None:
    runs = {run.group: run for run in read_recordings(FOLDER / "demo_agents.jsonl")}
    assert len(runs["coder-factorial"].tools) == 4
    calls = [
        call["function"]["name"]
        for _, answer in runs["coder-factorial"].calls()
        for call in answer.get("tool_calls", [])
    ]
    assert calls.count("write_file") == 2
    assert sum(len(list(run.calls())) for run in runs.values()) == 29
