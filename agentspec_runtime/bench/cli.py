"""`agentspec bench ...`: parse, call one function, print. Heavy imports happen inside the commands."""

from __future__ import annotations

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

# In the order in which one would use them; the help shows it.
app.command()(offline_commands.simulate)
app.command(help=offline_commands.CONTROLLER_HELP)(offline_commands.controller)
app.command()(offline_commands.plot)
app.command()(engine_commands.replay)
app.command("gpu-check", help=engine_commands.GPU_CHECK_HELP)(engine_commands.gpu_check)
app.command()(engine_commands.calibrate)
app.command()(engine_commands.live)
app.command()(offline_commands.report)
