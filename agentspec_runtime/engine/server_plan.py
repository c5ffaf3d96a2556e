"""What `agentspec serve` is about to start: the user's vLLM arguments joined with ours.

A pure function, so that every combination can be tested without a vLLM. The user's arguments pass through
word for word and win over ours; where they contradict what the command is for, `ConfigurationError` says so.
No vLLM flag is declared here a second time: which ones the user gave, in which of vLLM's many spellings
(underscores, `=`, dotted JSON, a YAML file), is asked of vLLM's own parser through the protocol below.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from pydantic import ValidationError

from agentspec_runtime.engine.args import (
    CPU_WORKER,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    RUNNER_VARIABLE,
    SCHEDULER,
    AssistModel,
    SpeculativeKwargs,
    cpu_environment,
    cpu_kv_cache_bytes,
    dotted,
    engine_args,
)
from agentspec_runtime.engine.config import ADDITIONAL_CONFIG_KEY, EngineConfig
from agentspec_runtime.engine.middleware import TENANT_FROM_VARIABLE, TENANT_KEY_VARIABLE, TenantSource
from agentspec_runtime.errors import ConfigurationError

__all__ = ["EmbeddedFiles", "ServeOptions", "ServePlan", "VllmParser", "plan_server"]

# With several workers, the variable for threads has a part for each.
_SEVERAL_WORKERS: Final = {"tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"}
MIDDLEWARE: Final = "agentspec_runtime.engine.middleware.AgentSpecMiddleware"
# Requests in flight get that long to finish after SIGTERM; a third of what Kubernetes grants by default.
_SHUTDOWN_TIMEOUT_S: Final = 10
# Settings of vLLM that are made of several flags: ours and the user's are merged into one value.
_SPECULATIVE_DESTS: Final = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_MERGED_DESTS: Final = (*_SPECULATIVE_DESTS, "additional_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Our own options of `agentspec serve`.

    `plain` starts the same server without our scheduler; `assist` is a model drafter of vLLM's beside ours;
    `otlp` is endpoint and protocol for spans.
    """

    plain: bool = False
    config: EngineConfig = field(default_factory=EngineConfig)
    assist: AssistModel | None = None
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

    def batch_limits(self, given: Mapping[str, object]) -> tuple[int, int]:
        """Tokens and requests that a step may have at most, vLLM's defaults where nothing is given."""
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
    fast_bfloat16: bool = True,
    cores: Collection[int] = (),
    openmp: Path | None = None,
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
        ours, merged = _scheduler_arguments(given, options, _draft_length(given, parser), cpu=cpu)
        if RUNNER_VARIABLE not in environment:
            variables[RUNNER_VARIABLE] = "0"
    if "enable_per_request_metrics" not in given and not given.get("disable_log_stats"):
        ours.append("--enable-per-request-metrics")
    if "shutdown_timeout" not in given:
        # With vLLM's own 0 the engine is killed at once: clients hang on open connections, spans are lost.
        ours += ["--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S)]
    if "host" not in given and "uds" not in given:
        ours += ["--host", "127.0.0.1"]
    kv_given = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & given.keys()
    if cpu and not kv_given and not environment.get("VLLM_CPU_KVCACHE_SPACE"):
        ours += ["--kv-cache-memory-bytes", str(cpu_kv_cache_bytes(available_bytes))]
    if cpu:
        usable = () if _SEVERAL_WORKERS & given.keys() else cores
        variables |= cpu_environment(usable, openmp, environment)
    if cpu and "worker_cls" not in given:
        ours += ["--worker-cls", CPU_WORKER]
    ours += ["--middleware", MIDDLEWARE]
    ours += _otlp_arguments(given, options.otlp, environment, variables)
    _plan_tenants(given, options.tenant_from, environment, variables)

    rest = parser.without(arguments, _MERGED_DESTS) if merged else list(arguments)
    model: list[str] = []
    if "model_tag" not in given and "model" not in given:  # `model` may also come from a YAML file
        files = embedded()
        model = [str(files.folder)]
        ours += _embedded_arguments(given, files)
        if cpu and not fast_bfloat16 and "dtype" not in given:
            ours += ["--dtype", "float32"]  # 540 MB of weights; other models may not fit twice
    elif rest and not rest[0].startswith("-"):
        model, rest = rest[:1], rest[1:]
    return ServePlan(arguments=(*model, *ours, *rest, *merged), environment=MappingProxyType(variables))


def _refuse_contradictions(given: Mapping[str, object], environment: Mapping[str, str]) -> None:
    way_out = "leave it out, or use --plain for a server without our scheduler"
    if given.get("scheduler_cls") not in (None, SCHEDULER):
        raise ConfigurationError(
            f"--scheduler-cls {given['scheduler_cls']} contradicts `agentspec serve`, which sets its own: "
            + way_out
        )
    if given.get("async_scheduling"):
        raise ConfigurationError(
            "--async-scheduling: drafts are made from the tokens of the step before, so that step must be "
            f"over: {way_out}"
        )
    if environment.get(RUNNER_VARIABLE, "0").lower() in ("1", "true"):
        raise ConfigurationError(
            f"{RUNNER_VARIABLE}={environment[RUNNER_VARIABLE]}: that model runner has no custom proposers: "
            + way_out
        )


def _refuse_other_drafters(theirs: Mapping[str, object], ours: SpeculativeKwargs) -> None:
    for key, value in (("method", ours["method"]), ("model", ours["model"])):
        if theirs.get(key, value) != value:
            raise ConfigurationError(
                f"speculative {key} {theirs[key]!r} contradicts `agentspec serve`, which makes drafts "
                "itself: leave it out, or use --plain for a server without our scheduler. EAGLE-3 or a "
                "draft model beside our drafts: --assist METHOD:MODEL. How many tokens a draft may have is "
                "set with --spec-tokens"
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


def _draft_length(given: Mapping[str, object], parser: VllmParser) -> int:
    """Draft tokens of a request at most. With LoRA, all of a step must fit into it (vLLM's arg_utils.py)."""
    asked = _speculative(given).get("num_speculative_tokens")
    length = DEFAULT_NUM_SPECULATIVE_TOKENS if asked is None else asked
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigurationError(
            f"num_speculative_tokens {length!r}: expected a whole number from 1 "
            "(--speculate off drafts nothing)"
        )
    if not given.get("enable_lora"):
        return length
    tokens, requests = parser.batch_limits(given)
    room = tokens // requests - 1
    if room < 1 or (asked is not None and length > room):
        raise ConfigurationError(
            f"--enable-lora with drafts of {length} tokens: vLLM needs --max-num-batched-tokens ({tokens}) "
            f"to be at least --max-num-seqs ({requests}) x {length + 1}. Raise the first, lower the second"
            + (f", or --spec-tokens {room}" if room > 0 else "")
        )
    return min(length, room)


def _scheduler_arguments(
    given: Mapping[str, object], options: ServeOptions, length: int, *, cpu: bool
) -> tuple[list[str], list[str]]:
    """Arguments that the user did not give, and the two merged settings."""
    ours = engine_args(options.config, num_speculative_tokens=length, cpu=cpu, assist=options.assist)
    _refuse_other_drafters(_speculative(given), ours.kwargs["speculative_config"])
    plain: list[str] = ["--scheduler-cls", SCHEDULER, "--no-async-scheduling"]
    executor = ours.kwargs.get("distributed_executor_backend")
    if executor and "distributed_executor_backend" not in given:
        plain += ["--distributed-executor-backend", executor]
    if cpu and options.assist and given.get("worker_cls", CPU_WORKER) != CPU_WORKER:
        raise ConfigurationError(
            f"--worker-cls {given['worker_cls']} with --assist on a CPU: ours repairs the sampling of "
            "drafts there (vLLM issue 55005). Leave one of them out"
        )
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
    try:
        checked = EngineConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{where}: {first['msg']}"
        ) from None
    additional[ADDITIONAL_CONFIG_KEY] = checked.model_dump(mode="json", exclude_defaults=True)
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
    # vLLM's spans would otherwise come from a service "unknown_service:python", beside ours.
    if "OTEL_SERVICE_NAME" not in environment:
        variables["OTEL_SERVICE_NAME"] = "agentspec-engine"
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
