"""What the demo prints: one line per turn while it runs, then tables for people new to all this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from agentspec_runtime.demo.summary import BlockTotals, DemoSummary, Side
from agentspec_runtime.demo.turns import Tokens, Turn

__all__ = ["print_blocks", "print_result", "print_totals", "print_turns", "turn_line"]

_NUMBERS: Final = ("tokens", "steps", "drafted", "accepted", "rejected")
_MIN_BLOCK_TOKENS: Final = 5
"""Shorter blocks have no row of their own: they are markers, as `<tool_call>` is (four tokens here)."""

_WIDE: Final = 95
"""From this width on, columns are set apart by two spaces instead of one."""

_LEGEND: Final = (
    "A [bold]turn[/] is one model call; where its answer holds several blocks, they stand below it. A "
    "[bold]step[/] is one run of the model: without drafting every token takes one. [bold]Drafted[/] tokens "
    "are copied from earlier text and checked by the model, all in one step: [bold]accepted[/] ones came for "
    "free, [bold]rejected[/] ones were thrown away. [bold]time[/] is that of the whole turn in seconds, "
    "reading the prompt included, and [bold]plain[/] the same on the plain server. Blocks under five tokens "
    "(markers such as <tool_call>) have no row of their own."
)


def turn_line(number: int, turn: Turn) -> str:
    """One line of progress."""
    count = turn.count
    drafts = f", {count.accepted} of {count.drafted} drafted accepted" if count.drafted else ""
    what = f"{number:>3}  {f'{turn.task} · {turn.step}':<24}"
    return f"{what} {count.tokens:>4} tokens in {count.steps:>3} steps, {turn.seconds:5.1f} s{drafts}"


def print_turns(console: Console, plain: Side, drafting: Side) -> None:
    """Every turn and block of the drafting server, and what the turn took on the plain one."""
    table = _turn_table(wide=console.width >= _WIDE)
    # After a difference the two runs may take other turns, and a time beside a time would mislead.
    comparable = [turn.step for turn in plain.turns] == [turn.step for turn in drafting.turns]
    task = ""
    for index, turn in enumerate(drafting.turns):
        if turn.task != task:
            task = turn.task
            table.add_section()
            table.add_row("", f"[bold]{task}[/]")
        plain_time = _time(plain.turns[index].seconds) if comparable else "-"
        blocks = [block for block in turn.blocks if block.count.tokens >= _MIN_BLOCK_TOKENS]
        kind = blocks[0].kind if len(blocks) == 1 else ""
        table.add_row(str(index + 1), turn.step, kind, *_cells(turn.count), _time(turn.seconds), plain_time)
        for block in blocks if len(blocks) > 1 else []:
            table.add_row("", "", block.kind, *_cells(block.count), _time(block.seconds), style="dim")
    console.print(table)
    console.print()
    console.print(_LEGEND)
    console.print()


def _turn_table(*, wide: bool) -> Table:
    """Ten columns that fit 80 characters; the rule for units is in the legend."""
    table = Table(
        title="Every turn, with structure-aware drafting",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, int(wide), 0, 0),
        show_edge=False,
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("turn", no_wrap=True)
    table.add_column("block", no_wrap=True)
    for name in (*_NUMBERS, "time", "plain"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_blocks(console: Console, blocks: dict[str, BlockTotals]) -> None:
    """Totals by kind of block; nothing where the server reported none."""
    if not blocks:
        return
    table = Table(title="By kind of text", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("block")
    for name in (*_NUMBERS, "tokens per step"):
        table.add_column(name, justify="right")
    for kind, part in blocks.items():
        per_step = f"{part.tokens / part.steps:.2f}" if part.steps else "-"
        table.add_row(kind, *(str(getattr(part, name)) for name in _NUMBERS), per_step)
    console.print(table)


def print_totals(console: Console, summary: DemoSummary) -> None:
    """Both servers side by side."""
    table = Table(title="Totals", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("with drafting", justify="right")
    plain, drafting = summary.plain, summary.drafting
    for name in _NUMBERS:
        table.add_row(name, str(getattr(plain, name)), str(getattr(drafting, name)))
    table.add_row("tokens per step", f"{plain.tokens_per_step:.2f}", f"{drafting.tokens_per_step:.2f}")
    table.add_row("time of all turns", f"{plain.seconds:.1f} s", f"{drafting.seconds:.1f} s")
    table.add_row("tokens per second", f"{plain.tokens_per_s:.1f}", f"{drafting.tokens_per_s:.1f}")
    table.add_row(
        "tasks solved", f"{plain.solved} of {plain.tasks}", f"{drafting.solved} of {drafting.tasks}"
    )
    console.print(table)


def print_result(
    console: Console, summary: DemoSummary, plain: Sequence[Turn], drafting: Sequence[Turn]
) -> None:
    """The verdict, in words."""
    same, num_turns = summary.identical_turns, summary.turns
    if summary.identical:
        console.print(f"Both servers gave the same answers in all {num_turns} turns, to the character.")
    else:
        console.print(f"[bold]The answers differ[/]: only {same} of {num_turns} turns are the same.")
        for number, (left, right) in enumerate(zip(plain, drafting, strict=False), start=1):
            if left.answer != right.answer:
                console.print(f"The first difference is in turn {number} ({left.task}, {left.step}).")
                break
        console.print(
            "At temperature 0 that happens where two tokens are so close that the order of additions\n"
            "decides (half precision, mostly). In float32 on one machine, please report it."
        )
    console.print(f"The plain server took [bold]{summary.speedup:.2f}[/] times as long for the same work.")


def _cells(count: Tokens) -> list[str]:
    return [str(getattr(count, name)) for name in _NUMBERS]


def _time(seconds: float) -> str:
    return f"{seconds:.2f}"
