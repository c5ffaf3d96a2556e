"""Totals, blocks and tables: every number comes from the reports and spans that were put in."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentspec_runtime.client.report import CallReport
from agentspec_runtime.demo.blocks import with_blocks
from agentspec_runtime.demo.summary import BlockTotals, DemoSummary, Side, SideTotals, summarize
from agentspec_runtime.demo.tables import print_blocks, print_result, print_totals, print_turns, turn_line
from agentspec_runtime.demo.turns import Block, TaskResult, Tokens, Turn, TurnLog
from agentspec_runtime.telemetry import attributes as names
from agentspec_runtime.telemetry.otlp import SpanRecord

DOCS = Path(__file__).resolve().parents[2] / "docs" / "demo.md"


def report(**fields: object) -> CallReport:
    values: dict[str, object] = {
        "operation": "chat",
        "model": "m",
        "base_url": "http://127.0.0.1/v1",
        "session": "s",
        "agent": "coder",
        "parent": None,
        "turn": 0,
        "hinted": True,
        "stream": False,
        "outcome": "ok",
        "latency_ms": 2000.0,
        "response_id": "chatcmpl-1",
        "completion_tokens": 40,
    }
    return CallReport(**{**values, **fields})  # type: ignore[arg-type]


def turn(answer: str = "x", step: str = "code", **fields: object) -> Turn:
    return Turn(task="area", step=step, answer=answer, report=report(**fields))


def side(*turns: Turn, solved: bool = True) -> Side:
    return Side(turns=turns, results=(TaskResult(agent="coder", task="area", solved=solved, attempts=1),))


DRAFTED = {"num_steps": 10, "drafted": 50, "accepted": 30, "latency_ms": 500.0}


def summary_of(plain: Side, drafting: Side) -> DemoSummary:
    return summarize(
        plain, drafting, model="m", trace_file="t.jsonl", log_files=["a.log", "b.log"], elapsed_s=12.34
    )


def span(name: str, span_id: str, parent_id: str = "", start_ns: int = 0, **attributes: object) -> SpanRecord:
    return SpanRecord(
        trace_id="t", span_id=span_id, parent_id=parent_id, name=name, kind="SERVER", start_ns=start_ns,
        end_ns=start_ns + 1_500_000_000, service="vllm", scope="agentspec",
        attributes={key.replace("__", "."): value for key, value in attributes.items()},  # type: ignore[misc]
    )  # fmt: skip


def block_span(kind: str, parent_id: str, start_ns: int, tokens: int) -> SpanRecord:
    values = {
        names.BLOCK_KIND: kind,
        names.OUTPUT_TOKENS: tokens,
        names.STEPS: 2,
        names.DRAFTED: 9,
        names.ACCEPTED: 8,
    }
    return span(f"agentspec.block {kind}", f"b{start_ns}", parent_id, start_ns, **values)


def test_a_plain_turn_takes_one_step_per_token() -> None:
    assert turn().count == Tokens(tokens=40, steps=40, drafted=0, accepted=0)
    assert turn(**DRAFTED).count == Tokens(tokens=40, steps=10, drafted=50, accepted=30)
    assert turn(**DRAFTED).count.rejected == 20


def test_steps_are_the_engines_where_it_reported_them() -> None:
    blocks = (
        Block(kind="text", count=Tokens(tokens=4, steps=3), seconds=0.1),
        Block(kind="code", count=Tokens(tokens=36, steps=8), seconds=0.1),
    )
    assert replace(turn(**DRAFTED), blocks=blocks).count.steps == 11


def test_blocks_are_found_by_response_id_in_order_of_time() -> None:
    spans = [
        block_span("text", "r1", 2, tokens=7),
        block_span("code", "r1", 1, tokens=33),
        block_span("code", "r2", 0, tokens=99),
        span("agentspec.request", "r2", **{names.REQUEST_ID: "chatcmpl-10"}),
        span("agentspec.request", "r1", **{names.REQUEST_ID: "chatcmpl-1-0-abc"}),
    ]
    found, unknown, nameless = with_blocks(
        [turn(), turn(response_id="chatcmpl-2"), turn(response_id=None)], spans
    )
    assert [(block.kind, block.count.tokens) for block in found.blocks] == [("code", 33), ("text", 7)]
    assert found.blocks[0].seconds == 1.5
    assert found.blocks[0].count.rejected == 1
    assert unknown.blocks == nameless.blocks == ()


def test_totals_add_up() -> None:
    blocks = tuple(Block(kind=kind, count=Tokens(tokens=20, steps=5, drafted=25, accepted=15), seconds=0.2)
                   for kind in ("code", "text"))  # fmt: skip
    drafted = turn(**DRAFTED)
    drafting = side(Turn(task="area", step="code", answer="x", report=drafted.report, blocks=blocks), drafted)
    summary = summary_of(side(turn(), turn(), solved=False), drafting)
    assert summary.plain.tokens == summary.plain.steps == summary.drafting.tokens == 80
    assert (summary.drafting.steps, summary.drafting.drafted) == (20, 100)
    assert summary.drafting.accepted + summary.drafting.rejected == summary.drafting.drafted
    assert summary.plain.seconds == 4.0
    assert summary.speedup == 4.0
    assert summary.drafting.tokens_per_s == 80.0
    assert summary.drafting.tokens_per_step == 4.0
    assert (summary.plain.solved, summary.drafting.solved, summary.plain.tasks) == (0, 1, 1)
    assert summary.blocks["code"] == BlockTotals(tokens=20, steps=5, drafted=25, accepted=15, rejected=10)
    assert summary.identical


@pytest.mark.parametrize(
    ("plain", "drafting", "same"),
    [
        ([turn("a"), turn("b")], [turn("a"), turn("c")], 1),
        ([turn("a")], [turn("a"), turn("b")], 1),
        ([turn("a", step="code")], [turn("a", step="report")], 0),
    ],
)
def test_a_difference_is_not_called_identical(plain: list[Turn], drafting: list[Turn], same: int) -> None:
    summary = summary_of(side(*plain), side(*drafting))
    assert not summary.identical
    assert summary.identical_turns == same
    assert summary.turns == max(len(plain), len(drafting))


def test_nothing_done_divides_by_nothing() -> None:
    summary = summary_of(side(), side())
    assert summary.speedup == 0.0
    assert summary.identical


def test_the_last_line_is_the_documented_form() -> None:
    summary = summary_of(side(turn()), side(turn(**DRAFTED)))
    line = summary.line()
    assert "\n" not in line
    assert json.loads(line)["schema"] == "agentspec-demo/1"
    assert DemoSummary.model_validate_json(line) == summary
    text = DOCS.read_text(encoding="utf-8")
    for model in (DemoSummary, SideTotals, BlockTotals):
        for name, info in model.model_fields.items():
            assert f"`{info.alias or name}`" in text, f"docs/demo.md does not describe {name}"


def rendered(show: object, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=110, highlight=False)
    show(console, *arguments)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_turn_table_shows_blocks_and_hides_markers() -> None:
    blocks = (
        Block(kind="text", count=Tokens(tokens=4, steps=1), seconds=0.1),
        Block(kind="tool_call", count=Tokens(tokens=30, steps=3, drafted=40, accepted=27), seconds=0.2),
        Block(kind="text", count=Tokens(tokens=6, steps=6), seconds=0.2),
    )
    drafted = Turn(task="area", step="code", answer="x", report=report(**DRAFTED), blocks=blocks)
    text = rendered(print_turns, side(turn()), side(drafted))
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "code", "40", "10", "50", "30", "20", "0.50", "2.00"] in lines
    assert ["tool_call", "30", "3", "40", "27", "13", "0.20"] in lines
    assert ["text", "6", "6", "0", "0", "0", "0.20"] in lines
    assert not any(line[:2] == ["text", "4"] for line in lines)
    assert ["area"] in lines
    assert all(len(line) <= 110 for line in text.splitlines())
    assert "…" not in text


def test_times_are_not_put_beside_each_other_when_the_runs_went_different_ways() -> None:
    text = rendered(print_turns, side(turn(step="read_file")), side(turn(**DRAFTED)))
    assert "2.00" not in text


@pytest.mark.parametrize("width", [80, 110])
def test_the_turn_table_fits_a_terminal(width: int) -> None:
    block = Block(kind="tool_call", count=Tokens(tokens=1000, steps=1000, drafted=1000), seconds=100.0)
    slow = report(completion_tokens=1000, num_steps=1000, drafted=10000, accepted=5000, latency_ms=123_456.0)
    wide = Turn(task="is_palindrome", step="list_files", answer="x", report=slow, blocks=(block, block))
    turns = side(*[wide] * 120)
    console = Console(file=io.StringIO(), width=width)
    print_turns(console, turns, turns)
    assert isinstance(console.file, io.StringIO)
    table = console.file.getvalue().split("A turn")[0]
    assert "…" not in table
    assert "is_palindrome" in table
    assert "\n120 " in table
    assert table.count("123.46") == 240


def test_the_verdict_names_the_first_difference() -> None:
    plain, drafting = side(turn("a"), turn("b")), side(turn("a"), turn("c"))
    text = rendered(print_result, summary_of(plain, drafting), plain.turns, drafting.turns)
    assert "only 1 of 2 turns" in text
    assert "turn 2 (area, code)" in text
    same = rendered(print_result, summary_of(plain, plain), plain.turns, plain.turns)
    assert "the same answers in all 2 turns" in same


def test_totals_and_blocks_are_printed() -> None:
    summary = summary_of(side(turn()), side(turn(**DRAFTED)))
    text = rendered(print_totals, summary)
    assert ["steps", "40", "10"] in [line.split() for line in text.splitlines()]
    assert rendered(print_blocks, {}) == ""
    blocks = {"code": BlockTotals(tokens=20, steps=5, drafted=25, accepted=15, rejected=10)}
    assert "4.00" in rendered(print_blocks, blocks)


def test_a_line_of_progress_mentions_drafts_only_where_there_were_any() -> None:
    assert "accepted" not in turn_line(1, turn())
    assert "30 of 50 drafted accepted" in turn_line(1, turn(**DRAFTED))


def test_a_turn_without_a_call_is_a_mistake_of_the_program() -> None:
    with pytest.raises(RuntimeError, match="instrument"):
        TurnLog().add(task="area", step="code", answer="x")
