"""The demo's last line: one JSON document with the totals of both servers.

`docs/demo.md` describes the fields; a test compares the two. Fields are added, never renamed, as long as
`schema` stays the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentspec_runtime.demo.turns import TaskResult, Tokens, Turn, total

__all__ = ["SCHEMA", "BlockTotals", "DemoSummary", "Side", "SideTotals", "identical_turns", "summarize"]

SCHEMA: Final = "agentspec-demo/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one server did."""

    turns: tuple[Turn, ...]
    results: tuple[TaskResult, ...]


class BlockTotals(BaseModel):
    """Tokens of one kind of block. `accepted` + `rejected` = `drafted`."""

    model_config = ConfigDict(frozen=True)

    tokens: int = Field(description="output tokens")
    steps: int = Field(description="engine steps that emitted them; plain decoding needs one per token")
    drafted: int = Field(description="draft tokens that were verified")
    accepted: int = Field(description="draft tokens that became output")
    rejected: int = Field(description="draft tokens that gave nothing")


class SideTotals(BlockTotals):
    """Totals of one server."""

    seconds: float = Field(description="sum of the turns' latencies at the client")
    tokens_per_s: float = Field(description="tokens / seconds")
    tokens_per_step: float = Field(description="tokens / steps")
    tasks: int = Field(description="tasks tried")
    solved: int = Field(description="tasks whose tests passed, hidden ones included")


class DemoSummary(BaseModel):
    """The whole document."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: Literal["agentspec-demo/1"] = Field(
        default=SCHEMA, alias="schema", description="name and version of this form"
    )
    model: str = Field(description="model that was served")
    turns: int = Field(description="model calls per server")
    identical_turns: int = Field(description="turns in which both servers said the same, to the character")
    identical: bool = Field(description="all turns were identical")
    plain: SideTotals = Field(description="the server without speculation")
    drafting: SideTotals = Field(description="the server with structure-aware drafting")
    blocks: dict[str, BlockTotals] = Field(description="the drafting server's totals by kind of block")
    speedup: float = Field(description="plain.seconds / drafting.seconds")
    trace_file: str = Field(description="OTLP JSON lines of both runs")
    log_files: list[str] = Field(description="output of the servers")
    elapsed_s: float = Field(description="duration of the demo, starting the servers included")

    def line(self) -> str:
        """The document on one line."""
        return self.model_dump_json(by_alias=True)


def identical_turns(plain: Sequence[Turn], drafting: Sequence[Turn]) -> int:
    """Turns, position by position, in which both said the same."""
    return sum(
        left.answer == right.answer and left.step == right.step
        for left, right in zip(plain, drafting, strict=False)
    )


def summarize(
    plain: Side,
    drafting: Side,
    *,
    model: str,
    trace_file: str,
    log_files: Sequence[str],
    elapsed_s: float,
) -> DemoSummary:
    """Add everything up."""
    same = identical_turns(plain.turns, drafting.turns)
    num_turns = max(len(plain.turns), len(drafting.turns))
    left, right = _side(plain), _side(drafting)
    return DemoSummary(
        model=model,
        turns=num_turns,
        identical_turns=same,
        identical=same == num_turns,
        plain=left,
        drafting=right,
        blocks=_blocks(drafting.turns),
        speedup=_ratio(left.seconds, right.seconds),
        trace_file=trace_file,
        log_files=list(log_files),
        elapsed_s=round(elapsed_s, 1),
    )


def _side(side: Side) -> SideTotals:
    count = total([turn.count for turn in side.turns])
    seconds = sum(turn.seconds for turn in side.turns)
    return SideTotals(
        **_fields(count),
        seconds=round(seconds, 3),
        tokens_per_s=_ratio(count.tokens, seconds),
        tokens_per_step=_ratio(count.tokens, count.steps),
        tasks=len(side.results),
        solved=sum(result.solved for result in side.results),
    )


def _blocks(turns: Sequence[Turn]) -> dict[str, BlockTotals]:
    by_kind: defaultdict[str, list[Tokens]] = defaultdict(list)
    for turn in turns:
        for block in turn.blocks:
            by_kind[block.kind].append(block.count)
    return {kind: BlockTotals(**_fields(total(parts))) for kind, parts in sorted(by_kind.items())}


def _fields(count: Tokens) -> dict[str, int]:
    return {
        "tokens": count.tokens,
        "steps": count.steps,
        "drafted": count.drafted,
        "accepted": count.accepted,
        "rejected": count.rejected,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
