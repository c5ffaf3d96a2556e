"""Recordings to tokens: templates, end tokens, the cache and its sharing, the context limit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_tokenizer import FORGETFUL_TEMPLATE, PLAIN_TEMPLATE, TOOLS_TEMPLATE, save_tokenizer

from agentspec_runtime.bench.chat_tokens import load_chat_tokenizer
from agentspec_runtime.bench.recordings import Message
from agentspec_runtime.bench.tokens import TokenTrajectory, fit_context, load_tokens
from agentspec_runtime.errors import ConfigurationError, RecordingError

CALL_TEXT = '{"b": 1, "a": [2]}'
MESSAGES: list[Message] = [
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "q1"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": CALL_TEXT}}],
    },
    {"role": "tool", "content": "r1", "tool_call_id": "c1", "name": "f"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "bye"},
]
TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def save_recording(path: Path, **changes: object) -> Path:
    path.write_text(
        json.dumps({"id": "1", "workload": "w", "messages": MESSAGES, "tools": TOOLS, **changes}) + "\n"
    )
    return path


def texts(folder: str, trajectory: TokenTrajectory) -> list[tuple[str, str]]:
    tokenizer = load_chat_tokenizer(folder)
    return [
        (tokenizer.decode(request.prompt_ids.tolist()), tokenizer.decode(request.output_ids.tolist()))
        for request in trajectory.requests
    ]


def test_the_template_renders_tools_and_calls_with_arguments_as_objects(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "m", TOOLS_TEMPLATE)
    [trajectory] = load_tokens(save_recording(tmp_path / "r.jsonl"), model, cache_dir=tmp_path / "c")
    (prompt, call), (second, done), (third, bye) = texts(model, trajectory)
    assert prompt.startswith("<|im_start|>system\nTOOLS [{")
    assert prompt.endswith("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n")
    assert call == '<call>f {"b": 1, "a": [2]}</call><|im_end|>'
    assert second == f"{prompt}{call}\n<|im_start|>tool\nr1<|im_end|>\n<|im_start|>assistant\n"
    assert third.startswith(second + done)
    assert (done, bye) == ("done<|im_end|>", "bye<|im_end|>")


def test_a_template_without_tools_gets_them_in_the_hermes_form(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "m", PLAIN_TEMPLATE)
    [trajectory] = load_tokens(save_recording(tmp_path / "r.jsonl"), model, cache_dir=tmp_path / "c")
    (prompt, call), (second, _), _ = texts(model, trajectory)
    assert "sys\n\n# Tools" in prompt
    assert prompt.count("<|im_start|>system") == 1
    assert call == f'<tool_call>\n{{"name": "f", "arguments": {CALL_TEXT}}}\n</tool_call><|im_end|>'
    assert "<|im_start|>user\n<tool_response>\nr1\n</tool_response><|im_end|>" in second


def test_a_template_that_rewrites_history_still_gives_the_whole_answer(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "m", FORGETFUL_TEMPLATE)
    plain = [message for message in MESSAGES if not message.get("tool_calls") and message["role"] != "tool"]
    path = save_recording(tmp_path / "r.jsonl", messages=plain, tools=[])
    [trajectory] = load_tokens(path, model, cache_dir=tmp_path / "c")
    (_, done), (prompt, bye) = texts(model, trajectory)
    assert (done, bye) == ("done<|im_end|>", "bye<|im_end|>")
    assert "(gone)" in prompt


def test_an_end_token_inside_a_recorded_answer_does_not_end_it(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "m", PLAIN_TEMPLATE)
    messages = [MESSAGES[1], {"role": "assistant", "content": "a<|im_end|>b"}]
    path = save_recording(tmp_path / "r.jsonl", messages=messages, tools=[])
    [trajectory] = load_tokens(path, model, cache_dir=tmp_path / "c")
    output = trajectory.requests[0].output_ids.tolist()
    assert output.count(output[-1]) == 1
    assert texts(model, trajectory)[0][1] == "ab<|im_end|>"


def test_cached_tokens_are_equal_and_a_growing_chat_is_stored_once(tmp_path: Path) -> None:
    model, cache = save_tokenizer(tmp_path / "m", TOOLS_TEMPLATE), tmp_path / "c"
    recording = save_recording(tmp_path / "r.jsonl")
    [first] = load_tokens(recording, model, cache_dir=cache)
    [stored] = cache.glob("*.npz")
    before = stored.stat().st_mtime_ns
    [again] = load_tokens(recording, model, cache_dir=cache)
    assert stored.stat().st_mtime_ns == before
    for left, right in zip(first.requests, again.requests, strict=True):
        assert np.array_equal(left.prompt_ids, right.prompt_ids)
        assert np.array_equal(left.output_ids, right.output_ids)
    assert all(np.shares_memory(r.prompt_ids, again.requests[0].prompt_ids) for r in again.requests)


def test_separate_requests_survive_the_cache(tmp_path: Path) -> None:
    model, cache = save_tokenizer(tmp_path / "m", PLAIN_TEMPLATE), tmp_path / "c"
    requests = [
        {"prompt": [0, 1], "target": 2},
        {"prompt": [0, 5], "target": 4 + 2},
        {"prompt": [1], "target": 4},
    ]
    path = save_recording(tmp_path / "r.jsonl", requests=requests, waits_s=[0, 1, 2])
    fresh, cached = (load_tokens(path, model, cache_dir=cache)[0] for _ in range(2))
    assert texts(model, fresh) == texts(model, cached)
    assert [request.wait_s for request in cached.requests] == [0, 1, 2]
    assert texts(model, cached)[2][0].endswith("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n")


def test_a_damaged_cache_file_is_made_again_and_another_template_has_its_own(tmp_path: Path) -> None:
    model, cache = save_tokenizer(tmp_path / "m", TOOLS_TEMPLATE), tmp_path / "c"
    recording = save_recording(tmp_path / "r.jsonl")
    [before] = load_tokens(recording, model, cache_dir=cache)
    [stored] = cache.glob("*.npz")
    stored.write_bytes(stored.read_bytes()[:100])
    [after] = load_tokens(recording, model, cache_dir=cache)
    assert texts(model, before) == texts(model, after)
    other = tmp_path / "other.jinja"
    other.write_text(PLAIN_TEMPLATE)
    [different] = load_tokens(recording, model, chat_template=other, cache_dir=cache)
    assert len(list(cache.glob("*.npz"))) == 2
    assert len(different.requests[0].output_ids) != len(after.requests[0].output_ids)


def test_the_context_limit_counts_prompt_and_answer(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "m", TOOLS_TEMPLATE)
    trajectories = load_tokens(save_recording(tmp_path / "r.jsonl"), model, cache_dir=tmp_path / "c")
    sizes = [len(r.prompt_ids) + len(r.output_ids) for r in trajectories[0].requests]
    assert sizes == sorted(sizes)
    fitting = fit_context(trajectories, sizes[1])
    assert [len(t.requests) for t in fitting.trajectories] == [2]
    assert (fitting.skipped_requests, fitting.skipped_trajectories) == (1, 0)
    none = fit_context(trajectories, sizes[0] - 1)
    assert (len(none.trajectories), none.skipped_requests, none.skipped_trajectories) == (0, 3, 1)
    assert fit_context(trajectories, None).skipped_requests == 0


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no chat template"):
        load_chat_tokenizer(save_tokenizer(tmp_path / "m", ""))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="no tokenizer found"):
        load_chat_tokenizer(str(tmp_path / "empty"))
    model = save_tokenizer(tmp_path / "bad", "{{ raise_exception('no system please') }}")
    with pytest.raises(RecordingError, match=r"1, request 0: .*no system please"):
        load_tokens(save_recording(tmp_path / "r.jsonl"), model, cache_dir=tmp_path / "c")
