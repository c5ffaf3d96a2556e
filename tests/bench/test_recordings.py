"""Reading recordings: what is accepted, and what every refusal says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from agentspec_runtime.bench.recordings import Recording, read_recordings
from agentspec_runtime.errors import RecordingError

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "hi again"},
]


def record(**changes: object) -> dict[str, object]:
    return {"id": "w/r/1", "group": "g", "workload": "w", "messages": CHAT, **changes}


def write(tmp_path: Path, *lines: object, packed: bool = False) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path = tmp_path / ("file.jsonl.gz" if packed else "file.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def read_one(path: Path) -> Recording:
    [recording] = read_recordings(path)
    return recording


@pytest.mark.parametrize("packed", [False, True])
def test_a_growing_chat_gives_one_request_per_assistant_message(tmp_path: Path, packed: bool) -> None:
    recording = read_one(write(tmp_path, record(), packed=packed))
    assert [(request.prompt, request.target) for request in recording.requests] == [
        ((0, 1), 2),
        ((0, 1, 2, 3), 4),
    ]
    prompt, answer = list(recording.calls())[1]
    assert [message["content"] for message in prompt] == ["be brief", "hello", "hi", "again"]
    assert answer["content"] == "hi again"


def test_separate_requests_keep_their_own_prompts_and_waits(tmp_path: Path) -> None:
    requests = [{"prompt": [0, 3], "target": 4}, {"prompt": [1], "target": 2}]
    recording = read_one(write(tmp_path, record(requests=requests, waits_s=[0, 2.5])))
    assert [(r.prompt, r.target, r.wait_s) for r in recording.requests] == [((0, 3), 4, 0.0), ((1,), 2, 2.5)]


def test_blank_lines_are_skipped_and_a_limit_stops_early(tmp_path: Path) -> None:
    path = write(tmp_path, record(id="a"), "", record(id="b"), "not json")
    assert [recording.id for recording in read_recordings(path, limit=2)] == ["a", "b"]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ANSWER = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "needed a JSON object, got list"),
        (record(id=""), "'id' must be a non-empty string"),
        (record(messages=[]), "'messages' must be a non-empty list"),
        (record(messages=[{"role": "robot", "content": "x"}]), "role 'robot' is none of"),
        (record(messages=[{"role": "user", "content": ["x"]}]), "content must be text or null"),
        (record(messages=[CHAT[0]]), "no assistant message"),
        (record(messages=[{"role": "assistant", "content": "x"}]), "has no prompt"),
        (record(messages=[CHAT[0], ANSWER]), "neither content nor tool calls"),
        (record(messages=[CHAT[0], {**ANSWER, "tool_calls": [CALL]}]), "must be the JSON string"),
        (record(requests=[{"prompt": [0], "target": 2}]), "target of exactly one request"),
        (record(requests=[{"prompt": [3], "target": 2}] * 2), "must be smaller than the target"),
        (record(requests=[{"prompt": 0}]), "needed {'prompt': [indices], 'target': index}"),
        (record(waits_s=[1.0]), "one entry per request (2)"),
        (record(waits_s=[1.0, -1.0]), "seconds, 0 or more"),
        (record(tools="none"), "'tools' must be a list"),
    ],
)
def test_a_refusal_names_file_line_and_reason(tmp_path: Path, line: object, says: str) -> None:
    path = write(tmp_path, record(id="fine"), line)
    with pytest.raises(RecordingError) as refused:
        list(read_recordings(path))
    assert f"{path}:2" in str(refused.value)
    assert says in str(refused.value)


def test_damaged_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    whole = write(tmp_path, *(record(id=str(n)) for n in range(200)), packed=True)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole.read_bytes()[:-20])
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, says in ((cut, "cut off"), (binary, "not UTF-8"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(RecordingError, match=says):
            list(read_recordings(path))


def test_ids_must_be_unique_and_a_file_must_hold_something(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="appeared before"):
        list(read_recordings(write(tmp_path, record(), record())))
    with pytest.raises(RecordingError, match="holds no recording"):
        list(read_recordings(write(tmp_path, "")))
