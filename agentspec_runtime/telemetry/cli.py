"""`agentspec trace`: look at traces without a browser, compare two, send a file to a collector.

Errors of this package pass through: the `agentspec` command turns them into one line and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["app"]

app = typer.Typer(
    name="trace",
    help="Look at traces of agent turns: OTLP JSON-lines files, or a Jaeger.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TARGET = "FILE, FILE#ID (ids may be cut short), or a trace id in Jaeger."

JaegerOption = Annotated[
    str, typer.Option("--jaeger", envvar="AGENTSPEC_JAEGER", help="URL of Jaeger's query service.")
]
DEFAULT_JAEGER = "http://localhost:16686"


@app.command("open")
def open_trace(
    target: Annotated[str | None, typer.Argument(help=f"{_TARGET} Default: the newest in Jaeger.")] = None,
    jaeger: JaegerOption = DEFAULT_JAEGER,
    service: Annotated[str | None, typer.Option(help="Newest trace of this service only.")] = None,
) -> None:
    """Draw one turn: its timeline by block, what was accepted, and where drafts came from."""
    from agentspec_runtime.telemetry.draw import draw_trace
    from agentspec_runtime.telemetry.load import load_target

    draw_trace(load_target(target, jaeger=jaeger, service=service), _console())


@app.command("list")
def list_traces(
    file: Annotated[Path, typer.Argument(help="OTLP JSON-lines file.", exists=True, dir_okay=False)],
) -> None:
    """List the traces of a file, the newest last."""
    from agentspec_runtime.telemetry.draw import format_s
    from agentspec_runtime.telemetry.load import traces_in_file

    for trace in traces_in_file(file):
        first = next(span for _, span in trace.walk())
        typer.echo(
            f"{trace.trace_id}  {format_s(trace.duration_s):>9}  {len(trace.spans):>5} spans  {first.name}"
        )


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help=_TARGET)],
    second: Annotated[str, typer.Argument(help="The other one, for example with speculation off.")],
    jaeger: JaegerOption = DEFAULT_JAEGER,
) -> None:
    """Put two turns side by side, for example speculation off against on."""
    from agentspec_runtime.telemetry.draw import draw_comparison
    from agentspec_runtime.telemetry.load import load_target

    one, other = load_target(first, jaeger=jaeger), load_target(second, jaeger=jaeger)
    draw_comparison(one, other, _console())


@app.command()
def upload(
    file: Annotated[Path, typer.Argument(help="OTLP JSON-lines file.", exists=True, dir_okay=False)],
    endpoint: Annotated[str, typer.Argument(help="OTLP endpoint, for example http://localhost:4318.")],
) -> None:
    """Send the spans of a file to a collector."""
    from agentspec_runtime.telemetry.load import upload as send

    typer.echo(f"{send(file, endpoint)} spans sent to {endpoint}")


def _console() -> Console:
    # Piped output gets a fixed width, so that it can be compared and pasted.
    return Console() if sys.stdout.isatty() else Console(width=120)
