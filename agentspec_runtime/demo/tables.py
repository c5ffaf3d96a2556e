"""What the demo prints: one line per turn while it runs, then three tables for people new to all this."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from agentspec_runtime.demo.summary import BlockTotals, DemoSummary, Side
from agentspec_runtime.demo.turns import Tokens, Turn

__all__ = ["print_blocks", "print_result", "print_totals", "print_turns", "turn_line"]

_NUMBERS = ("tokens", "steps", "drafted", "accepted", "rejected")


def turn_line(number: int, turn: Turn) -> str:
    """One line of progress."""
    count = turn.count
    drafts = f", {count.accepted} of {count.drafted} drafted tokens accepted" if count.drafted else ""
    what = f"{turn.task} · {turn.step}"
    return f"{number:>3}  {what:<26} {count.tokens:>4} tokens in {count.steps:>3} steps, {turn.seconds:5.1f} s{drafts}"


def print_turns(console: Console, plain: Side, drafting: Side) -> None:
    """Every turn and every block of the drafting server; beside it what the turn took on the plain one."""
    table = Table(title="Every turn, with structure-aware drafting", title_justify="left")
    table.add_column("turn", justify="right")
    for name in ("task", "step", "block"):
        table.add_column(name, no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    table.add_column("drafting", justify="right")
    table.add_column("plain", justify="right")
    same_length = len(plain.turns) == len(drafting.turns)
    for index, turn in enumerate(drafting.turns):
        last_of_task = index + 1 == len(drafting.turns) or drafting.turns[index + 1].task != turn.task
        plain_time = f"{plain.turns[index].seconds:.2f} s" if same_length else "-"
        head = [str(index + 1), turn.task, turn.step]
        times = [f"{turn.seconds:.2f} s", plain_time]
        if len(turn.blocks) == 1:
            kind = turn.blocks[0].kind
            table.add_row(*head, kind, *_cells(turn.count), *times, end_section=last_of_task)
            continue
        table.add_row(*head, "", *_cells(turn.count), *times, end_section=last_of_task and not turn.blocks)
        for position, block in enumerate(turn.blocks):
            last = last_of_task and position + 1 == len(turn.blocks)
            cells = [f"[dim]{cell}[/]" for cell in (*_cells(block.count), f"{block.seconds:.2f} s", "")]
            table.add_row("", "", "", f"[dim]└ {block.kind}[/]", *cells, end_section=last)
    console.print(table)
    console.print(
        "A [bold]turn[/] is one model call. A [bold]step[/] is one run of the model; without drafting each token takes one.\n"
        "[bold]Drafted[/] tokens were guessed from earlier text and checked by the model in the same step: "
        "[bold]accepted[/]\nones came for free, [bold]rejected[/] ones were thrown away. The times are whole turns, "
        "reading the prompt included;\nthat of a block (└) is from its first to its last step."
    )


def print_blocks(console: Console, blocks: dict[str, BlockTotals]) -> None:
    """Totals by kind of block."""
    table = Table(title="By kind of text", title_justify="left")
    table.add_column("block")
    for name in (*_NUMBERS, "tokens per step"):
        table.add_column(name, justify="right")
    for kind, part in blocks.items():
        per_step = f"{part.tokens / part.steps:.2f}" if part.steps else "-"
        table.add_row(
            kind,
            *(str(value) for value in (part.tokens, part.steps, part.drafted, part.accepted, part.rejected)),
            per_step,
        )
    console.print(table)


def print_totals(console: Console, summary: DemoSummary) -> None:
    """Both servers side by side."""
    table = Table(title="Totals", title_justify="left")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("with drafting", justify="right")
    plain, drafting = summary.plain, summary.drafting
    rows: list[tuple[str, str, str]] = [
        (name, str(getattr(plain, name)), str(getattr(drafting, name))) for name in _NUMBERS
    ]
    rows += [
        ("tokens per step", f"{plain.tokens_per_step:.2f}", f"{drafting.tokens_per_step:.2f}"),
        ("time of all turns", f"{plain.seconds:.1f} s", f"{drafting.seconds:.1f} s"),
        ("tokens per second", f"{plain.tokens_per_s:.1f}", f"{drafting.tokens_per_s:.1f}"),
        ("tasks solved", f"{plain.solved} of {plain.tasks}", f"{drafting.solved} of {drafting.tasks}"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_result(
    console: Console, summary: DemoSummary, plain: Sequence[Turn], drafting: Sequence[Turn]
) -> None:
    """The verdict, in words."""
    if summary.identical:
        console.print(f"Both servers gave the same answers in all {summary.turns} turns, to the character.")
    else:
        console.print(
            f"[bold]The answers differ[/]: {summary.identical_turns} of {summary.turns} turns are the same."
        )
        for number, (left, right) in enumerate(zip(plain, drafting, strict=False), start=1):
            if left.answer != right.answer:
                console.print(f"First difference in turn {number} ({left.task}, {left.step}).")
                break
        console.print(
            "With temperature 0 this happens where two tokens are so close that the shape of the computation decides\n"
            "(half precision, mostly). In float32, report it as a defect."
        )
    console.print(f"The same work took [bold]{summary.speedup:.2f}[/] times as long on the plain server.")


def _cells(count: Tokens) -> list[str]:
    return [str(getattr(count, name)) for name in _NUMBERS]
