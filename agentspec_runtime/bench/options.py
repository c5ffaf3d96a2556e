"""Options that several `agentspec bench` commands share, and what their text means."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from agentspec_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from agentspec_runtime.engine.args import JsonValue

__all__ = [
    "DtypeOption",
    "EagerOption",
    "EngineArgOption",
    "KvCacheOption",
    "ModelOption",
    "MoreTraces",
    "RepeatOption",
    "Side",
    "SideOption",
    "Switch",
    "TemplateOption",
    "TracesOption",
    "console",
    "embedded_model",
    "engine_arguments",
    "names",
    "rate",
]

_FILE_COLUMNS: Final = 150


class Side(StrEnum):
    """Values of --set-aside."""

    ALL = "all"
    TUNE = "tune"
    TEST = "test"


class Switch(StrEnum):
    """on or off."""

    ON = "on"
    OFF = "off"


TracesOption = Annotated[
    list[Path],
    typer.Option("--traces", exists=True, dir_okay=False, help="Recordings, JSON Lines or .gz: FILE..."),
]
MoreTraces = Annotated[
    list[Path] | None,
    # `--traces A B C`: an option takes one word, so the others arrive as arguments.
    typer.Argument(exists=True, dir_okay=False, hidden=True),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model directory or hub name. Default: the embedded SmolLM2-135M-Instruct."),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", exists=True, dir_okay=False, help="Chat template instead of the model's."
    ),
]
RepeatOption = Annotated[int, typer.Option(min=1, help="Repeats, methods in alternating order.")]
EagerOption = Annotated[bool, typer.Option("--eager/--compiled", help="Engine mode, for all methods.")]
DtypeOption = Annotated[
    str, typer.Option(help="vLLM's --dtype; auto is float32 on a CPU that has no bfloat16.")
]
KvCacheOption = Annotated[float | None, typer.Option(min=0.1, help="KV cache in GiB; a CPU needs a size.")]
EngineArgOption = Annotated[
    list[str] | None,
    typer.Option(help="name=value for the engine of every method, e.g. tensor_parallel_size=2."),
]
SideOption = Annotated[
    Side,
    typer.Option(
        "--set-aside",
        help="Split by task: tune on [bold]tune[/bold], decide on [bold]test[/bold], a quarter of them.",
    ),
]


def names(text: str) -> list[str]:
    """Parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def rate(arrival: str) -> float | None:
    """Agents per second of --arrival, None for the closed loop.

    Raises:
        ConfigurationError: it is neither "closed" nor "poisson:RATE".
    """
    kind, _, number = arrival.partition(":")
    if kind == "closed" and not number:
        return None
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if kind != "poisson" or value <= 0:
        raise ConfigurationError(f"--arrival {arrival!r}: needed closed, or poisson:RATE with RATE above 0")
    return value


def engine_arguments(
    *, eager: bool, dtype: str, kv_cache_gib: float | None, extra: list[str]
) -> dict[str, JsonValue]:
    """Arguments of vLLM's engine that every method gets, with what `agentspec serve` sets on a CPU.

    Raises:
        MissingDependencyError, UnsupportedVersionError: no vLLM that this release works with.
        ConfigurationError: an --engine-arg without a value.
    """
    from agentspec_runtime.engine.args import cpu_environment, cpu_kv_cache_bytes
    from agentspec_runtime.engine.compat import require_vllm
    from agentspec_runtime.engine.host import (
        available_memory_bytes,
        has_fast_bfloat16,
        intel_openmp,
        usable_cores,
    )

    if require_vllm().cpu:  # what `agentspec serve` sets, for every method
        os.environ.update(cpu_environment(usable_cores(), intel_openmp(), os.environ))
        if dtype == "auto" and not has_fast_bfloat16():
            dtype = "float32"
    engine: dict[str, JsonValue] = {"enforce_eager": eager, "dtype": dtype, "enable_prefix_caching": True}
    if kv_cache_gib is not None:
        engine["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    elif require_vllm().cpu:
        engine["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(available_memory_bytes())
    for item in extra:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--engine-arg {item!r}: needed name=value")
        try:
            engine[name.strip().replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            engine[name.strip().replace("-", "_")] = value
    return engine


def console() -> Console:
    """Where tables go: in a file or a pipe, lines as wide as the tables need; rich would take 80 columns."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_FILE_COLUMNS)


def embedded_model(progress: Callable[[str], None]) -> str:
    """Folder of the embedded model, prepared if need be."""
    from agentspec_runtime.embedded.model import prepare_embedded_model

    return str(prepare_embedded_model(progress))
