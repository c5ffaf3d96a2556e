"""The progress of a replay on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from agentspec_runtime.bench.replay import Progress

__all__ = ["shown_progress"]


@contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar per cell, and one line for every cell that is over."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            label = f"{progress.method}, repeat {progress.repeat}"
            if progress.workload:
                label = f"{progress.workload}: {label}"
            if progress.event == "start":
                bar.reset(task, description=f"{label}: starting the engine", total=None)
            elif progress.event == "begin":
                what = f"{label}, concurrency {progress.concurrency}: turns"
                bar.reset(task, description=what, total=progress.turns)
            elif progress.event == "turn":
                bar.advance(task)
            elif progress.event == "cell" and progress.row is not None:
                row = progress.row
                console.print(
                    f"{label}, concurrency {row.concurrency}: {row.tok_s:.1f} tok/s, "
                    f"{row.tokens_per_step:.2f} tokens/step, rejected {row.rejected_share:.0%}, "
                    f"mismatched {row.mismatched}"
                )

        yield show
