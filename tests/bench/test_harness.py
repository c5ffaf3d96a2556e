"""The harness against a scripted engine whose true values are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from virtual_time import ScriptedEngine, VirtualLoop, run_virtual

from agentspec_runtime.bench.load import CellLoad, LoadPlan, run_load
from agentspec_runtime.bench.measure import CellKey, ResultRow, StepRecord, measure_cell, percentiles
from agentspec_runtime.bench.provenance import collect_provenance
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory

KEY = CellKey(method="m", concurrency=1, repeat=0, workload="w", mode="closed loop")


def trajectory(name: str, sizes: list[int], wait_s: float = 0.0) -> TokenTrajectory:
    requests = tuple(
        TokenRequest(
            prompt_ids=np.arange(10 * (turn + 1), dtype=np.int32),
            output_ids=np.arange(100, 100 + size, dtype=np.int32),
            wait_s=wait_s if turn else 0.0,
        )
        for turn, size in enumerate(sizes)
    )
    return TokenTrajectory(id=name, group=name, workload="w", model="", fidelity="exact", requests=requests)


def drive(
    trajectories: list[TokenTrajectory], engine: ScriptedEngine, plan: LoadPlan
) -> tuple[CellLoad, ResultRow]:
    loop = VirtualLoop()
    load = run_virtual(run_load(trajectories, engine, plan, clock=loop.time), loop)
    return load, measure_cell(KEY, load, [])


def test_latencies_of_a_chunked_stream_are_those_of_the_script() -> None:
    """Chunks of 1, 4, 4, 4, 1 tokens at 100 ms: the gap between chunks is not the time per token."""
    engine = ScriptedEngine({("a", 0): [(0.1, 1), (0.1, 4), (0.1, 4), (0.1, 4), (0.1, 1)]})
    _, row = drive([trajectory("a", [14])], engine, LoadPlan(concurrency=1))
    assert row.ttft_p50 == pytest.approx(0.1)
    assert row.gap_p50 == pytest.approx(0.1)
    assert row.tpot_p50 == pytest.approx(0.4 / 13, abs=1e-6)
    assert row.turn_p50 == pytest.approx(0.5)
    assert (row.out_tokens, row.wall_s, row.tok_s) == (14, 0.5, 28.0)
    assert (row.turns, row.trajectories, row.mismatched) == (1, 1, 0)
    assert row.prefix_hit_rate == 0.5


def test_an_empty_first_chunk_is_not_the_first_token() -> None:
    engine = ScriptedEngine({("a", 0): [(0.01, 0), (0.2, 2)]})
    _, row = drive([trajectory("a", [2])], engine, LoadPlan(concurrency=1))
    assert row.ttft_p50 == pytest.approx(0.21)


def test_a_turn_without_tokens_has_no_ttft_and_counts_as_mismatched() -> None:
    engine = ScriptedEngine({("a", 0): [(0.5, 0)]})
    _, row = drive([trajectory("a", [3])], engine, LoadPlan(concurrency=1))
    assert (row.ttft_p50, row.tpot_p50) == (None, None)
    assert (row.mismatched, row.out_tokens, row.turn_p50) == (1, 0, 0.5)


@pytest.mark.parametrize("fault", ["lose", "corrupt"])
def test_a_lost_or_changed_token_is_seen(fault: str) -> None:
    wrong = frozenset({("a", 1)})
    engine = ScriptedEngine(
        {("a", 0): [(1.0, 3)], ("a", 1): [(1.0, 3)]},
        **{fault: wrong},  # type: ignore[arg-type]
    )
    load, row = drive([trajectory("a", [3, 3])], engine, LoadPlan(concurrency=1))
    assert [turn.mismatched for turn in load.turns] == [False, True]
    assert (row.mismatched, row.out_tokens) == (1, 6 - (fault == "lose"))


def test_percentiles_over_a_hundred_known_turns() -> None:
    """Turn k takes k / 100 seconds, k from 1 to 100."""
    script = {(f"t{k}", 0): [(k / 100, 1)] for k in range(1, 101)}
    engine = ScriptedEngine(script)
    _, row = drive([trajectory(f"t{k}", [1]) for k in range(1, 101)], engine, LoadPlan(concurrency=100))
    assert row.turn_p50 == pytest.approx(0.505)
    assert row.turn_p95 == pytest.approx(0.9505)
    assert row.turn_p99 == pytest.approx(0.9901)
    assert engine.most_running == 100
    assert row.wall_s == pytest.approx(1.0)


def test_closed_loop_keeps_the_number_of_agents_and_the_order_of_turns() -> None:
    """Five agents of two one-second turns, two at a time: three rounds, six seconds."""
    names = [f"t{k}" for k in range(5)]
    engine = ScriptedEngine({(name, turn): [(1.0, 2)] for name in names for turn in range(2)})
    load, row = drive([trajectory(name, [2, 2]) for name in names], engine, LoadPlan(concurrency=2))
    assert engine.most_running == 2
    assert row.wall_s == pytest.approx(6.0)
    assert row.task_p50 == pytest.approx(2.0)
    for name in names:
        turns = [turn for turn in load.turns if turn.trajectory == name]
        assert [turn.turn for turn in turns] == [0, 1]
        assert turns[1].sent_s >= turns[0].end_s
    assert [prompt for name, turn, prompt in engine.prompts if (name, turn) == ("t4", 1)] == [list(range(20))]


@pytest.mark.parametrize(("honour", "task_s"), [(True, 5.0), (False, 2.0)])
def test_recorded_tool_times_are_part_of_the_task_unless_switched_off(honour: bool, task_s: float) -> None:
    engine = ScriptedEngine({("a", 0): [(1.0, 1)], ("a", 1): [(1.0, 1)]})
    plan = LoadPlan(concurrency=1, honour_waits=honour)
    _, row = drive([trajectory("a", [1, 1], wait_s=3.0)], engine, plan)
    assert row.task_p50 == pytest.approx(task_s)
    assert row.turn_p99 == pytest.approx(1.0)
    assert row.slip_p95 == pytest.approx(0.0)


def test_open_loop_waits_for_a_slot_are_measured_from_the_schedule() -> None:
    """Half a second of work at 10 agents per second through one slot: the queue shows in the task time."""
    names = [f"t{k}" for k in range(8)]
    engine = ScriptedEngine({(name, 0): [(0.5, 1)] for name in names})
    plan = LoadPlan(concurrency=1, rate_per_s=10.0, seed=3)
    load, row = drive([trajectory(name, [1]) for name in names], engine, plan)
    source = random.Random(3)
    due = [0.0]
    for _ in names:
        due.append(due[-1] + source.expovariate(10.0))
    last = max(load.turns, key=lambda turn: turn.end_s)
    assert last.due_s == pytest.approx(due[-1])
    assert last.end_s == pytest.approx(due[1] + 8 * 0.5)
    assert row.turn_p99 == pytest.approx(0.5)
    assert row.task_p99 is not None
    assert row.task_p99 > 2.5
    assert row.slip_p95 is not None
    assert row.slip_p95 > 2.0


def test_open_loop_without_a_limit_starts_everybody_when_due() -> None:
    names = [f"t{k}" for k in range(8)]
    engine = ScriptedEngine({(name, 0): [(100.0, 1)] for name in names})
    load, row = drive([trajectory(n, [1]) for n in names], engine, LoadPlan(concurrency=0, rate_per_s=10.0))
    assert engine.most_running == 8
    assert all(turn.sent_s == pytest.approx(turn.due_s) for turn in load.turns)
    assert row.task_p99 == pytest.approx(100.0)


def step(begin_s: float, rows: list[tuple[int, int, int]], prompt_tokens: int = 0) -> StepRecord:
    return StepRecord(
        begin_s=begin_s,
        sampled_s=begin_s + 0.05,
        draft_s=0.002,
        tokens=1,
        prompt_tokens=prompt_tokens,
        preempted=1,
        fillers=0,
        rows=tuple(rows),
    )


def test_counts_come_from_all_steps_with_and_without_drafts() -> None:
    steps = [
        step(0.0, [(0, 0, 1)], prompt_tokens=50),
        step(0.1, [(4, 3, 4), (0, 0, 1)]),
        step(0.2, [(4, 0, 1)]),
        step(0.3, []),
        step(0.4, [(2, 2, 2)]),
    ]
    row = measure_cell(KEY, CellLoad(begin_s=0.0, end_s=1.0), steps)
    assert (row.steps, row.drafted, row.accepted, row.rejected) == (5, 10, 5, 5)
    assert row.tokens_per_step == pytest.approx(9 / 5)
    assert row.rejected_share == 0.5
    assert row.batch_histogram == {"1": 3, "2": 1}
    assert row.tokens_histogram == {"1": 3, "2": 1, "4": 1}
    assert row.preemptions == 5
    assert row.draft_ms_per_step == pytest.approx(1e3 * 5 * 0.002 / 4)
    # 6 tokens in the two decode steps that another one follows; the last step has no measured end.
    assert row.decode_tok_s == pytest.approx(6 / 0.2)


def test_a_pause_between_steps_is_not_decode_time() -> None:
    steps = [step(0.0, [(0, 0, 1)]), step(0.1, [(0, 0, 1)]), step(60.0, [(0, 0, 1)]), step(60.1, [(0, 0, 1)])]
    row = measure_cell(KEY, CellLoad(begin_s=0.0, end_s=61.0), steps)
    assert row.decode_tok_s == pytest.approx(2 / 0.2)


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == (None, None, None)


def test_the_result_row_has_the_fields_that_others_build_on() -> None:
    needed = (
        "method concurrency repeat workload trajectories turns out_tokens wall_s tok_s ttft_p50 ttft_p95 "
        "ttft_p99 tpot_p50 tpot_p95 tpot_p99 turn_p50 turn_p95 turn_p99 task_p50 task_p95 task_p99 steps "
        "tokens_per_step drafted accepted rejected rejected_share draft_ms_per_step by_block by_source "
        "batch_histogram mismatched preemptions prefix_hit_rate"
    )
    assert set(needed.split()) <= set(ResultRow.__dataclass_fields__)


def test_provenance_names_libraries_and_not_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/home/me/env/lib/libiomp5.so:/usr/lib/libtcmalloc.so.4")
    assert collect_provenance(files=[]).environment["LD_PRELOAD"] == "libiomp5.so:libtcmalloc.so.4"
