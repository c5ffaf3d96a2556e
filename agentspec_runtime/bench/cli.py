"""`agentspec bench ...`: parse, call one function, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from agentspec_runtime.bench import engine_commands, offline_commands

__all__ = ["app"]

app = typer.Typer(
    name="bench",
    help="Measure before deciding: recorded agent runs against every drafting method, at your concurrency.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bench(context: typer.Context) -> None:
    """Whatever a command has started ends with it, also when it is told to end."""
    context.with_resource(_told_to_end())


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM (`timeout`, a CI job that is cancelled) does what Ctrl-C does: every `finally` runs."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# In the order in which one would use them; the help shows it.
app.command()(offline_commands.simulate)
app.command(help=offline_commands.CONTROLLER_HELP)(offline_commands.controller)
app.command()(offline_commands.plot)
app.command()(engine_commands.replay)
app.command("gpu-check", help=engine_commands.GPU_CHECK_HELP)(engine_commands.gpu_check)
app.command()(engine_commands.calibrate)
app.command()(engine_commands.live)
app.command()(offline_commands.report)
