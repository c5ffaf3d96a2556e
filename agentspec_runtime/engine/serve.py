"""`agentspec serve`: vLLM's own OpenAI server, in this process, with our scheduler and middleware.

What is started is what `vllm serve` would start with the arguments that are printed: vLLM's own serve
command is called with them. (The `vllm` script itself asks for the metadata of a distribution named `vllm`
and therefore fails in the CPU wheel.) The user's vLLM flags are passed through word for word and win over
ours; where they contradict what `agentspec serve` is for, it says so and stops before anything is loaded.

No vLLM flag is declared here a second time. Which flags the user gave, and in which of vLLM's many
spellings (underscores, `=`, dotted JSON, a YAML file), is found out by vLLM's own parser with all its
defaults removed.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from agentspec_runtime.engine.args import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    PROPOSER,
    RUNNER_VARIABLE,
    SCHEDULER,
    EngineArguments,
    cpu_kv_cache_bytes,
    dotted,
    engine_args,
)
from agentspec_runtime.engine.compat import require_vllm
from agentspec_runtime.engine.config import ADDITIONAL_CONFIG_KEY, EngineConfig
from agentspec_runtime.engine.host import available_memory_bytes, port_problem
from agentspec_runtime.engine.middleware import TENANT_FROM_VARIABLE, TENANT_KEY_VARIABLE, TenantSource
from agentspec_runtime.errors import ConfigurationError, ServerError

__all__ = ["ServeOptions", "ServePlan", "plan_server", "serve"]

MIDDLEWARE: Final = "agentspec_runtime.engine.middleware.AgentSpecMiddleware"
_DEFAULT_PORT: Final = 8000
# Settings of vLLM that are made of several flags: ours and the user's are merged into one value.
_SPECULATIVE_DESTS: Final = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_MERGED_DESTS: Final = (*_SPECULATIVE_DESTS, "additional_config")
# What vLLM logs when its engine process ends by itself; its API process then stops as if it had been told.
_ENGINE_DIED: Final = "engine core exited unexpectedly"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Our own options of `agentspec serve`.

    `plain` starts the same server without our scheduler; `otlp` is endpoint and protocol for spans.
    """

    plain: bool = False
    config: EngineConfig = field(default_factory=EngineConfig)
    tenant_from: TenantSource | None = None
    otlp: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedFiles:
    """The embedded model as vLLM arguments need it."""

    name: str
    folder: Path
    chat_template: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """What is about to be started: the words after `vllm serve`, and the environment that they need."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def command(self) -> str:
        """As one would type it."""
        shown = {key: value for key, value in self.environment.items() if key != TENANT_KEY_VARIABLE}
        settings = [f"{key}={shlex.quote(value)}" for key, value in shown.items()]
        return " ".join([*settings, "vllm serve", shlex.join(self.arguments)])


class VllmParser(Protocol):
    """The parser of `vllm serve`."""

    def given(self, arguments: Sequence[str]) -> dict[str, object]:
        """Only what the arguments (and a YAML file they name) set, by vLLM's own names."""
        ...

    def without(self, arguments: Sequence[str], dests: Sequence[str]) -> list[str]:
        """The arguments less those that set one of `dests`."""
        ...


def plan_server(
    arguments: Sequence[str],
    options: ServeOptions,
    *,
    parser: VllmParser,
    embedded: Callable[[], EmbeddedFiles],
    cpu: bool,
    environment: Mapping[str, str],
    available_bytes: int | None,
) -> ServePlan:
    """Join the user's vLLM arguments with ours. Starts nothing, except that `embedded` may convert.

    Raises:
        ConfigurationError: the user's arguments contradict our scheduler, or each other.
    """
    given = parser.given(arguments)
    ours: list[str] = []
    variables: dict[str, str] = {}
    merged: list[str] = []
    if not options.plain:
        _refuse_contradictions(given, environment)
        ours, merged = _scheduler_arguments(given, options.config)
        if RUNNER_VARIABLE not in environment:
            variables[RUNNER_VARIABLE] = "0"
    if "enable_per_request_metrics" not in given and not given.get("disable_log_stats"):
        ours.append("--enable-per-request-metrics")
    if "host" not in given and "uds" not in given:
        ours += ["--host", "127.0.0.1"]
    kv_given = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & given.keys()
    if cpu and not kv_given and not environment.get("VLLM_CPU_KVCACHE_SPACE"):
        ours += ["--kv-cache-memory-bytes", str(cpu_kv_cache_bytes(available_bytes))]
    ours += ["--middleware", MIDDLEWARE]
    ours += _otlp_arguments(given, options.otlp, environment, variables)
    _plan_tenants(given, options.tenant_from, environment, variables)

    rest = parser.without(arguments, _MERGED_DESTS) if merged else list(arguments)
    model: list[str] = []
    if "model_tag" not in given and "model" not in given:  # `model` may also come from a YAML file
        files = embedded()
        model = [str(files.folder)]
        ours += _embedded_arguments(given, files)
    elif rest and not rest[0].startswith("-"):
        model, rest = rest[:1], rest[1:]
    return ServePlan(arguments=(*model, *ours, *rest, *merged), environment=MappingProxyType(variables))


def _refuse_contradictions(given: Mapping[str, object], environment: Mapping[str, str]) -> None:
    way_out = "leave it out, or use --plain for a server without our scheduler"
    if given.get("scheduler_cls") not in (None, SCHEDULER):
        raise ConfigurationError(
            f"--scheduler-cls {given['scheduler_cls']} contradicts `agentspec serve`, which sets {SCHEDULER}: "
            + way_out
        )
    if given.get("async_scheduling"):
        raise ConfigurationError(
            "--async-scheduling: drafts are made from the tokens of the step before, so that step must be over: "
            + way_out
        )
    speculative = _speculative(given)
    for key, value in (("method", "custom_class"), ("model", PROPOSER)):
        if speculative.get(key, value) != value:
            raise ConfigurationError(
                f"speculative {key} {speculative[key]!r} contradicts `agentspec serve`, which makes drafts itself: "
                f"{way_out}. How many tokens a draft may have is set with --spec-tokens"
            )
    if environment.get(RUNNER_VARIABLE, "0").lower() in ("1", "true"):
        raise ConfigurationError(
            f"{RUNNER_VARIABLE}={environment[RUNNER_VARIABLE]}: that model runner has no custom proposers: "
            + way_out
        )


def _speculative(given: Mapping[str, object]) -> dict[str, object]:
    value = given.get("speculative_config")
    merged = dict(value) if isinstance(value, Mapping) else {}
    for dest, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        if given.get(dest) is not None:
            merged[key] = given[dest]
    return {str(key).replace("-", "_"): value for key, value in merged.items()}


def _scheduler_arguments(given: Mapping[str, object], config: EngineConfig) -> tuple[list[str], list[str]]:
    """Arguments that the user did not give, and the two merged settings."""
    length = _speculative(given).get("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigurationError(
            f"num_speculative_tokens {length!r}: expected a whole number from 1 (--speculate off drafts nothing)"
        )
    ours: EngineArguments = engine_args(config, num_speculative_tokens=length)
    plain: list[str] = ["--scheduler-cls", SCHEDULER, "--no-async-scheduling"]
    if "per_request_spec_decode_metrics" not in given:
        plain += ["--per-request-spec-decode-metrics", "detailed"]
    merged = dotted("--speculative-config", {**_speculative(given), **ours.kwargs["speculative_config"]})
    theirs = given.get("additional_config")
    additional: dict[str, object] = dict(theirs) if isinstance(theirs, Mapping) else {}
    own = additional.get(ADDITIONAL_CONFIG_KEY)
    settings = {
        **ours.kwargs["additional_config"][ADDITIONAL_CONFIG_KEY],
        **(own if isinstance(own, dict) else {}),
    }
    additional[ADDITIONAL_CONFIG_KEY] = EngineConfig.model_validate(settings).model_dump(
        mode="json", exclude_defaults=True
    )
    return plain, merged + dotted("--additional-config", additional)


def _otlp_arguments(
    given: Mapping[str, object],
    otlp: tuple[str, str] | None,
    environment: Mapping[str, str],
    variables: dict[str, str],
) -> list[str]:
    if otlp is None:
        return []
    if "otlp_traces_endpoint" in given:
        raise ConfigurationError("--otlp-endpoint and --otlp-traces-endpoint: give one of them")
    endpoint, protocol = otlp
    # vLLM looks at this variable only, takes gRPC without it, and then sends to an HTTP port in vain.
    if "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" not in environment:
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = protocol
    return ["--otlp-traces-endpoint", endpoint]


def _plan_tenants(
    given: Mapping[str, object],
    source: TenantSource | None,
    environment: Mapping[str, str],
    variables: dict[str, str],
) -> None:
    if source is None:
        return
    if given.get("grpc") or environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigurationError(
            "--tenant-from needs vLLM's Python HTTP server: remove --grpc and VLLM_USE_RUST_FRONTEND"
        )
    variables[TENANT_FROM_VARIABLE] = str(source)
    if not environment.get(TENANT_KEY_VARIABLE):
        # All API processes of this server must derive the same salts.
        variables[TENANT_KEY_VARIABLE] = secrets.token_hex(32)


def _embedded_arguments(given: Mapping[str, object], files: EmbeddedFiles) -> list[str]:
    arguments: list[str] = []
    if "served_model_name" not in given:
        arguments += ["--served-model-name", files.name]
    if "chat_template" not in given:
        arguments += ["--chat-template", str(files.chat_template)]
    if "tool_call_parser" not in given:
        arguments += ["--tool-call-parser", "hermes"]
    if "enable_auto_tool_choice" not in given:
        arguments.append("--enable-auto-tool-choice")
    return arguments


def serve(arguments: Sequence[str], options: ServeOptions, say: Callable[[str], None]) -> None:
    """Start the server and stay until it is told to stop.

    Raises:
        AgentSpecError: it cannot start with these arguments, or it ended by itself.
    """
    installation = require_vllm()
    with _metrics_folder(shared=not options.plain):
        say(f"loading {installation}")
        started_s = time.monotonic()
        from agentspec_runtime.engine.vllm_serve import VllmServe

        vllm_serve = VllmServe()
        plan = plan_server(
            arguments,
            options,
            parser=vllm_serve,
            embedded=lambda: _embedded_files(say),
            cpu=installation.cpu,
            environment=os.environ,
            available_bytes=available_memory_bytes(),
        )
        os.environ.update(plan.environment)
        parsed = vllm_serve.parse(plan.arguments)
        _check_port(parsed)
        for name, value in plan.environment.items():
            if name == RUNNER_VARIABLE:
                say(f"using vLLM's first model runner ({name}={value}): the second has no custom proposers")
        say(plan.command)
        say(f"starting after {time.monotonic() - started_s:.0f} s; Ctrl-C stops")
        with _engine_watch() as died:
            try:
                vllm_serve.run(parsed)
            except KeyboardInterrupt:
                say("stopped before the server was ready")
                return
            except Exception as error:
                raise ServerError(
                    f"vLLM did not start: {error} (its own messages above say more; `agentspec doctor` "
                    "checks this machine)"
                ) from error
        if died:
            raise ServerError("vLLM's engine process ended by itself; its last messages above say why")
        say("stopped")


def _embedded_files(say: Callable[[str], None]) -> EmbeddedFiles:
    from agentspec_runtime.embedded import EMBEDDED_MODEL_NAME, chat_template_path, prepare_embedded_model

    say(f"no model named: serving the embedded {EMBEDDED_MODEL_NAME}")
    return EmbeddedFiles(
        name=EMBEDDED_MODEL_NAME, folder=prepare_embedded_model(say), chat_template=chat_template_path()
    )


def _check_port(parsed: argparse.Namespace) -> None:
    """vLLM finds a taken port only after it has read the model's configuration, and says less."""
    if parsed.uds or parsed.headless:
        return
    port = parsed.port if parsed.port is not None else _DEFAULT_PORT
    if problem := port_problem(parsed.host or "", port):
        raise ServerError(f"{problem}: stop what runs there, or choose another one with --port N")


@contextmanager
def _metrics_folder(*, shared: bool) -> Iterator[None]:
    """Let what the engine process counts appear under the API process's /metrics.

    Must be entered before anything imports prometheus_client, which reads the variable once.
    """
    if not shared or os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        yield
        return
    from agentspec_runtime.telemetry.metrics import prepare_multiprocess

    folder = prepare_multiprocess(os.environ)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _EngineDeath(logging.Handler):
    """Hears vLLM say that its engine died: its server then ends as if somebody had stopped it."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message if it is the one."""
        if _ENGINE_DIED in str(record.msg):
            self.seen.append(str(record.msg))


@contextmanager
def _engine_watch() -> Iterator[list[str]]:
    handler = _EngineDeath()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)
