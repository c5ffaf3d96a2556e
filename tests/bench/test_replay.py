"""The whole replay on the real engine: every method emits the recording, and counts what it did."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_replay import ScriptedEngines
from small_tokenizer import PLAIN_TEMPLATE, save_tokenizer
from test_recordings import write

from agentspec_runtime.bench.measure import ResultRow
from agentspec_runtime.bench.methods import parse_method, split_methods
from agentspec_runtime.bench.replay import recorded_trajectories, replay, replay_together
from agentspec_runtime.bench.replay_engine import CONTEXT_MARGIN
from agentspec_runtime.bench.replay_plan import ReplayPlan, separated
from agentspec_runtime.bench.results import load_rows, read_raw
from agentspec_runtime.bench.summary import doubts, summarise
from agentspec_runtime.embedded import prepare_embedded_model
from agentspec_runtime.errors import ConfigurationError

CODE = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
    "    return result\n"
)


def recordings(tmp_path: Path) -> Path:
    """Three agents that repeat code; the model that runs would never write this."""
    runs = []
    for number in range(3):
        messages = [
            {"role": "user", "content": f"Task {number}. Change this:\n{CODE}"},
            {"role": "assistant", "content": f"Here it is, no {number}:\n{CODE}"},
            {"role": "user", "content": "Once more."},
            {"role": "assistant", "content": f"{CODE}\nThat is no {number} again."},
        ]
        runs.append({"id": f"run-{number}", "workload": "repeat", "messages": messages})
    return write(tmp_path, *runs)


def plan(tmp_path: Path, **changes: object) -> ReplayPlan:
    settings: dict[str, object] = {
        "files": (recordings(tmp_path),),
        "model": "",
        "out": tmp_path / "out",
        "methods": ("plain",),
        "concurrency": (1, 3),
        "max_model_len": 1024,
        "engine": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 29, "dtype": "float32"},
    }
    return ReplayPlan(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.engine
@pytest.mark.slow
def test_a_replay_emits_the_recording_and_counts_every_token(tmp_path: Path) -> None:
    model = str(prepare_embedded_model(lambda _text: None))
    # Every method is an engine more: a minute and a half beside the servers of the other tests.
    long = bool(os.environ.get("AGENTSPEC_LONG_TESTS"))
    methods = ("plain", "agentspec") if long else ("agentspec",)
    rows = replay(plan(tmp_path, model=model, methods=methods))
    assert [(row.method, row.concurrency) for row in rows] == [(m, c) for m in methods for c in (1, 3)]
    assert {row.mismatched for row in rows} == {0}
    assert len({row.out_tokens for row in rows}) == 1
    assert load_rows(tmp_path / "out" / "results.jsonl") == rows
    found = {(row.method, row.concurrency): row for row in rows}
    for row in rows:
        _check_sums(row, tmp_path / "out")
        _check_steps(tmp_path / "out" / "cells" / f"{row.method}-r0-c{row.concurrency}.json")
    assert "3" in found["agentspec", 3].batch_histogram
    if long:
        assert {found["plain", size].tokens_per_step for size in (1, 3)} == {1.0}
    assert doubts(summarise(rows), rows)[0].startswith("Fewer than 30 turns"), "counted right, nothing filled"
    ours = found["agentspec", 1]
    assert ours.tokens_per_step > 2.0
    assert ours.draft_ms_per_step > 0
    assert ours.accepted > 0.5 * ours.out_tokens
    for counts in (ours.by_block, ours.by_source):
        assert sum(count.drafted for count in counts.values()) == ours.drafted
        assert sum(count.accepted for count in counts.values()) == ours.accepted
    _check_that_nothing_is_done_twice(tmp_path, model, methods)


def _check_sums(row: ResultRow, out: Path) -> None:
    assert (row.turns, row.trajectories) == (6, 3)
    assert sum(int(size) * count for size, count in row.tokens_histogram.items()) == row.out_tokens
    assert sum(row.tokens_histogram.values()) == row.steps
    assert sum(int(size) * count for size, count in row.batch_histogram.items()) == row.steps
    assert row.accepted + row.rejected == row.drafted
    # A step whose draft held the end of the answer sampled no token of its own.
    assert row.out_tokens <= row.steps + row.accepted <= row.out_tokens + row.turns
    assert (out / "provenance.json").is_file()


def _check_steps(raw_file: Path) -> None:
    """Without a draft a step emits one token, on the real engine, which is all that plain ever does. In its
    asynchronous scheduling (AGENTSPEC_LONG_TESTS=1) a step may run behind the end of an answer, and is not
    counted: test_replay_worker has that step, and `doubts` checks every published result.
    """
    rows = [row for step in read_raw(raw_file)[1] for row in step.rows]
    without = [(accepted, emitted) for drafted, accepted, emitted in rows if not drafted]
    assert len(without) > 5
    assert set(without) == {(0, 1)}
    assert all(emitted - accepted in (0, 1) and accepted <= drafted for drafted, accepted, emitted in rows)


def _check_that_nothing_is_done_twice(tmp_path: Path, model: str, methods: tuple[str, ...]) -> None:
    """The same command after a crash that cut off the last line: only that cell would run; here, none."""
    results = tmp_path / "out" / "results.jsonl"
    whole = results.read_text()
    results.write_text(whole + '{"method": "cut')
    assert replay(plan(tmp_path, model=model, methods=methods)) == []
    assert results.read_text() == whole
    limits = json.loads((tmp_path / "out" / "limits.json").read_text())
    assert [limit["concurrency"] for limit in limits] == [1, 3]
    assert all(1 < limit["o2"] <= limit["o3"] <= limit["lz"] for limit in limits)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"concurrency": (0,)}, "numbers from 1"),
        ({"trajectories": (1, 2, 3)}, "one per concurrency"),
        ({"methods": ("plain", "plain")}, "named twice"),
        ({"files": ()}, "no recording given"),
        ({"files": (Path("/none"),)}, "no such file"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
    ],
)
def test_plans_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        replay(plan(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["old/runs.jsonl", "old/runs.jsonl.gz", "runs.tune.jsonl"])
def test_separate_recordings_of_the_same_name_are_refused_before_anything_starts(
    tmp_path: Path, other: str
) -> None:
    """They would share a folder, and the second would find the results of the first there."""
    first, second = tmp_path / "runs.jsonl", tmp_path / other
    second.parent.mkdir(exist_ok=True)
    for file in (first, second):
        recordings(file.parent).rename(file)
    plans = separated(plan(tmp_path, files=(first, second)))
    with pytest.raises(ConfigurationError, match="have the same name, 'runs'") as refused:
        replay_together(plans)
    assert str(first) in str(refused.value)
    assert str(second) in str(refused.value)
    assert not (tmp_path / "out").exists()


SPEEDS = {method: {1: 0.01, 3: 0.02} for method in ("plain", "agentspec")}


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReplayPlan:
    """A plan for engines without a model; they know no speculation of ours to record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)
    return plan(tmp_path, model=model, methods=("plain", "agentspec"), repeat=3)


def test_the_order_of_the_methods_alternates_over_repeats(scripted: ReplayPlan) -> None:
    engines = ScriptedEngines(SPEEDS)
    rows = replay(scripted, engines=engines)
    order = ["plain", "agentspec", "agentspec", "plain", "plain", "agentspec"]
    assert engines.ran == [(method, size) for method in order for size in (1, 3)]
    assert [(row.method, row.repeat) for row in rows[::2]] == list(
        zip(order, (0, 0, 1, 1, 2, 2), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_turns": 1}, "another max_turns"),
        ({"max_model_len": 2048, "honour_waits": False}, "another max_model_len, waits"),
        ({"trajectories": (2,)}, "another trajectories"),
        ({"concurrency": (3, 4), "trajectories": (1, 2)}, "another trajectories"),
    ],
)
def test_results_of_other_requests_are_not_gone_on_with(
    scripted: ReplayPlan, changes: dict[str, object], says: str
) -> None:
    engines = ScriptedEngines(SPEEDS)
    replay(replace(scripted, repeat=1), engines=engines)
    before = (scripted.out / "provenance.json").read_text()
    with pytest.raises(ConfigurationError, match=says):
        replay(replace(scripted, **changes), engines=engines)  # type: ignore[arg-type]
    scripted.files[0].write_text(scripted.files[0].read_text() + "\n")
    with pytest.raises(ConfigurationError, match="another recordings: name another folder"):
        replay(scripted, engines=engines)
    assert (scripted.out / "provenance.json").read_text() == before


def test_a_run_that_goes_on_keeps_where_the_earlier_rows_come_from(scripted: ReplayPlan) -> None:
    replay(replace(scripted, methods=("plain",), concurrency=(1,), repeat=1), engines=ScriptedEngines(SPEEDS))
    replay(replace(scripted, repeat=1), engines=(engines := ScriptedEngines(SPEEDS)))
    assert engines.ran == [("plain", 3), ("agentspec", 1), ("agentspec", 3)]
    provenance = json.loads((scripted.out / "provenance.json").read_text())
    assert list(provenance["engine"]) == ["plain", "agentspec"]
    assert [run["git"] for run in provenance["earlier"]] == [provenance["git"]]
    limits = json.loads((scripted.out / "limits.json").read_text())
    assert [limit["concurrency"] for limit in limits] == [1, 3]


def test_requests_near_the_context_limit_are_left_out(scripted: ReplayPlan) -> None:
    """FR-11: one of them would make vLLM verify zeros for all, whoever drafts in the worker."""
    lengths = [
        len(request.prompt_ids) + len(request.output_ids)
        for trajectory in recorded_trajectories(scripted)
        for request in trajectory.requests
    ]
    near = replace(scripted, max_model_len=max(lengths) + CONTEXT_MARGIN - 1)
    kept = [r for trajectory in recorded_trajectories(near) for r in trajectory.requests]
    assert len(kept) == sum(length < max(lengths) for length in lengths) < len(lengths)


def test_separate_recordings_have_a_folder_each(tmp_path: Path) -> None:
    one, two = separated(plan(tmp_path, files=(tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl")))
    assert (one.out, two.out) == (tmp_path / "out" / "a", tmp_path / "out" / "b")
    assert (one.files, two.files) == ((tmp_path / "a.jsonl.gz",), (tmp_path / "b.jsonl",))


def test_shuffled_answers_are_measured_beside_the_recorded_ones(scripted: ReplayPlan) -> None:
    """The same prompts, tokens and ends; another order; results apart."""
    plans = separated(replace(scripted, repeat=1), scripted.files)
    recorded, shuffled = ([r for t in recorded_trajectories(one) for r in t.requests] for one in plans)
    for one, other in zip(recorded, shuffled, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert sorted(one.output_ids) == sorted(other.output_ids)
        assert one.output_ids[-1] == other.output_ids[-1]
    changed = sum(
        a.output_ids.tolist() != b.output_ids.tolist() for a, b in zip(recorded, shuffled, strict=True)
    )
    assert changed > len(recorded) / 2
    rows = replay_together(plans, engines=ScriptedEngines(SPEEDS))
    stem = scripted.files[0].name.split(".")[0]
    assert {row.workload for row in rows} == {stem, f"{stem}-shuffled"}
    assert plans[1].out.name == f"{stem}-shuffled"
    with pytest.raises(ConfigurationError, match="another shuffled"):
        replay(replace(plans[1], out=plans[0].out), engines=ScriptedEngines(SPEEDS))


def test_settings_of_a_method_reach_the_engine_arguments() -> None:
    labels = split_methods(
        "plain, ngram:num_speculative_tokens=10,prompt_lookup_min=3,suffix,agentspec:budget=fixed"
    )
    assert labels == [
        "plain",
        "ngram:num_speculative_tokens=10,prompt_lookup_min=3",
        "suffix",
        "agentspec:budget=fixed",
    ]
    ngram = parse_method(labels[1]).engine["speculative_config"]
    assert ngram == {
        "method": "ngram",
        "num_speculative_tokens": 10,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 4,
    }
    by_batch = "eagle3:model=h,num_speculative_tokens_per_batch_size=[[1,8,3],[9,64,0]]"
    assert split_methods(f"plain,{by_batch},ngram") == ["plain", by_batch, "ngram"]
    eagle = parse_method(by_batch).engine["speculative_config"]
    assert eagle["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 64, 0]]  # type: ignore[index,call-overload]
    assert parse_method("plain").engine == {}
    assert parse_method("plain-sync").engine == {"async_scheduling": False}
    ours = parse_method("agentspec-nobudget:num_speculative_tokens=8,min_survival=0.5", reuse=False)
    assert ours.engine["speculative_config"]["num_speculative_tokens"] == 8  # type: ignore[index,call-overload]
    assert ours.engine["additional_config"] == {
        "agentspec": {"budget": "fixed", "min_survival": 0.5, "scope": "request", "telemetry": False}
    }
    assert not parse_method("agentspec-nohints").hints
    assisted = parse_method("agentspec-assist:assist=eagle3:heads/mine,assist_depth=2", cpu=True).engine
    assert assisted["speculative_config"]["model"] == "heads/mine"  # type: ignore[index,call-overload]
    assert assisted["additional_config"] == {"agentspec": {"assist_depth": 2, "telemetry": False}}
    suffix = parse_method("suffix", reuse=False).engine["speculative_config"]
    assert suffix["suffix_decoding_max_cached_requests"] == 0  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("plain:x=1", "has no settings"),
        ("eagle3", "needs its head"),
        ("ngram:oops", "needed key=value"),
        ("agentspec:budget=never", "budget"),
        ("agentspec-assist", "needs its drafter"),
        ("agentspec-assist:assist=ngram:x", "METHOD:MODEL"),
        ("agentspec:num_speculative_tokens=0", "above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(label: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_method(label)
