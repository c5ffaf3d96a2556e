"""The vLLM arguments that turn our scheduler on, for `vllm.LLM(**kwargs)` and for `vllm serve` alike.

Settings, each with its reason:

- `scheduler_cls`: drafting and budget live in a subclass of vLLM's scheduler (docs/architecture.md).
- `speculative_config`: makes the worker verify drafts. The method is vLLM's `custom_class` with a proposer
  that proposes nothing, and `num_speculative_tokens` is the most that one request may draft in a step.
- `async_scheduling=False`: drafts are made from the tokens of the step before, so that step must be over.
- With a model drafter of the worker beside ours (`AssistModel`), that method and model instead; on a CPU a
  worker class that repairs sampling (`worker.py`), which our proposer does otherwise.
- `distributed_executor_backend`, on a CPU only: vLLM's executor without a question to the worker after every
  step that our empty proposer, or a model drafter that was not to draft, would answer with "nothing"
  (`executor.py`).
- `additional_config["agentspec"]`: our own knobs (`EngineConfig`).
- `VLLM_USE_V2_MODEL_RUNNER=0` in the environment: vLLM's second model runner has no `custom_class`. vLLM
  0.32 and 0.33 fall back by themselves; saying so keeps it true when that changes.

Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NotRequired, TypedDict

from agentspec_runtime.engine.config import ADDITIONAL_CONFIG_KEY, EngineConfig
from agentspec_runtime.errors import ConfigurationError

__all__ = [
    "ASSIST_EXECUTOR",
    "ASSIST_METHODS",
    "COMPILE_VARIABLE",
    "CPU_WORKER",
    "DEFAULT_NUM_SPECULATIVE_TOKENS",
    "EXECUTOR",
    "PRELOAD_VARIABLE",
    "PROPOSER",
    "RUNNER_VARIABLE",
    "SCHEDULER",
    "THREADS_VARIABLE",
    "AssistModel",
    "EngineArguments",
    "EngineKwargs",
    "SpeculativeKwargs",
    "cpu_environment",
    "cpu_kv_cache_bytes",
    "dotted",
    "engine_args",
    "parse_assist",
]

ASSIST_EXECUTOR: Final = "agentspec_runtime.engine.executor.AssistMultiprocExecutor"
EXECUTOR: Final = "agentspec_runtime.engine.executor.QuietMultiprocExecutor"
SCHEDULER: Final = "agentspec_runtime.engine.scheduler.AgentSpecScheduler"
PROPOSER: Final = "agentspec_runtime.engine.proposer.NullProposer"
CPU_WORKER: Final = "agentspec_runtime.engine.worker.RepairedCPUWorker"
COMPILE_VARIABLE: Final = "VLLM_USE_AOT_COMPILE"
THREADS_VARIABLE: Final = "VLLM_CPU_OMP_THREADS_BIND"
PRELOAD_VARIABLE: Final = "LD_PRELOAD"
RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"

DEFAULT_NUM_SPECULATIVE_TOKENS: Final = 32
"""Copied runs in agent traffic are often longer than this, but a step that verifies 32 tokens of one request
already costs little more per token than an endless one, and vLLM reserves KV slots for all of them."""

_GIB: Final = 1 << 30

_FEW_CORES: Final = 4

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


class SpeculativeKwargs(TypedDict):
    """vLLM's `speculative_config` as we set it."""

    method: str
    model: str
    num_speculative_tokens: int
    disable_eagle_block_drop: NotRequired[bool]


ASSIST_METHODS: Final = ("eagle3", "eagle", "draft_model")
"""vLLM's methods whose proposer drafts as many tokens as the scheduler asks for, step by step (0.32)."""


_EAGLE: Final = ("eagle3", "eagle")


@dataclass(frozen=True, slots=True)
class AssistModel:
    """A model drafter for vLLM's worker: one of `ASSIST_METHODS`, and its folder or name."""

    method: str
    model: str


def parse_assist(text: str) -> AssistModel:
    """`METHOD:MODEL`, e.g. `eagle3:path/to/head`.

    Raises:
        ConfigurationError: it is not.
    """
    method, colon, model = text.partition(":")
    if method not in ASSIST_METHODS or not colon or not model:
        raise ConfigurationError(
            f"assist {text!r}: expected METHOD:MODEL with one of the methods {', '.join(ASSIST_METHODS)}, "
            "for example eagle3:examples/eagle_head/head"
        )
    return AssistModel(method, model)


class EngineKwargs(TypedDict, total=False):
    """Keyword arguments of `vllm.LLM` and `vllm.EngineArgs`."""

    scheduler_cls: str
    speculative_config: SpeculativeKwargs
    async_scheduling: bool
    distributed_executor_backend: str
    worker_cls: str
    additional_config: dict[str, dict[str, JsonValue]]
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"]
    kv_cache_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """vLLM arguments in both spellings. `environment` must be set before vLLM starts."""

    kwargs: EngineKwargs
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def cli(self) -> tuple[str, ...]:
        """The same for `vllm serve`, in vLLM's dotted form, which needs no quotes in a shell."""
        arguments: list[str] = []
        for name, value in self.kwargs.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, dict):
                arguments += dotted(flag, value)
            elif isinstance(value, bool):
                arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
            else:
                arguments += [flag, str(value)]
        return tuple(arguments)


def engine_args(
    config: EngineConfig | None = None,
    *,
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS,
    per_request_metrics: bool = True,
    cpu: bool = False,
    kv_cache_memory_bytes: int | None = None,
    assist: AssistModel | None = None,
) -> EngineArguments:
    """Arguments that make vLLM use our scheduler.

    Args:
        config: our own knobs; None takes the defaults.
        num_speculative_tokens: the most that one request may draft in one step.
        per_request_metrics: let vLLM count drafted and accepted tokens per request and step.
        cpu: whether vLLM is a CPU build, which always has its workers in processes of their own.
        kv_cache_memory_bytes: fixed size of the KV cache, instead of a share of the machine's memory.
        assist: a model drafter of the worker beside ours.
    """
    settings = (config or EngineConfig()).model_dump(mode="json", exclude_defaults=True)
    method, model = (assist.method, assist.model) if assist else ("custom_class", PROPOSER)
    kwargs = EngineKwargs(
        scheduler_cls=SCHEDULER,
        speculative_config=SpeculativeKwargs(
            method=method, model=model, num_speculative_tokens=num_speculative_tokens
        ),
        async_scheduling=False,
        additional_config={ADDITIONAL_CONFIG_KEY: settings},
    )
    if assist and assist.method in _EAGLE:
        # Else vLLM computes the last cached block of every prompt anew, for the drafter's sake: 128 tokens of
        # a turn on a CPU, in a replay of tool calls 14,361 instead of 8,347. Its state at one place of that
        # block is that of another token; what is lost is one draft at most, which the target would reject.
        kwargs["speculative_config"]["disable_eagle_block_drop"] = True
    if cpu:
        kwargs["worker_cls"] = CPU_WORKER
        kwargs["distributed_executor_backend"] = ASSIST_EXECUTOR if assist else EXECUTOR
    if per_request_metrics:
        kwargs["per_request_spec_decode_metrics"] = "detailed"
    if kv_cache_memory_bytes is not None:
        kwargs["kv_cache_memory_bytes"] = kv_cache_memory_bytes
    return EngineArguments(kwargs=kwargs, environment=MappingProxyType({RUNNER_VARIABLE: "0"}))


def cpu_kv_cache_bytes(available_bytes: int | None) -> int:
    """Size of the KV cache on a CPU, where the user said nothing.

    vLLM would take 92 % of all memory there and refuses to start when others use some of it. Two fifths of
    what is free leave room for the weights and for a second server; more than 4 GiB (22 full contexts of the
    embedded model in bfloat16) helps nobody who did not ask for it.
    """
    if available_bytes is None:
        return 2 * _GIB
    return max(_GIB, min(4 * _GIB, available_bytes * 2 // 5 // _GIB * _GIB))


def cpu_environment(
    cores: Iterable[int], openmp: Path | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """What to add to an environment for vLLM on a CPU; what is set there already stays.

    `cores`: their numbers (none: leave threads to vLLM). `openmp`: Intel's OpenMP runtime, if there is one.

    vLLM keeps one core free for its other processes. Of two cores that is half: 87 tok/s at 16 in flight
    became 143 with both (embedded model, float32). From five cores on its own choice is left alone.

    vLLM 0.32 saves the compiled model ahead of time and, with torch 2.13, cannot load it again ("no attribute
    finalize_loading"): every start compiles anew. torch's own cache works: later starts took 71 s, not 187.

    With GNU's OpenMP the many short parallel regions of a decode step are slow to begin; vLLM warns that this
    halves the speed of speculation (vllm-project/vllm issue 44191). Intel's comes with the CPU wheel on x86,
    but has to be loaded first. Embedded model on two cores, plain and ours at 1, 8 and 32 agents: 1.16, 1.12,
    1.10 and 1.09, 1.08, 1.06 times as fast in bfloat16; half of that in float32. Its threads spin while they
    wait, and that is what helps: with KMP_BLOCKTIME=1 the gain was gone.
    """
    variables = {COMPILE_VARIABLE: "0"}
    known = sorted(cores)
    if 1 < len(known) <= _FEW_CORES:
        variables[THREADS_VARIABLE] = ",".join(map(str, known))
    variables = {name: value for name, value in variables.items() if name not in environment}
    preloaded = environment.get(PRELOAD_VARIABLE, "")
    # Paths there end at colons and blanks; two OpenMP runtimes in one process are one too many.
    if openmp and not re.search(r"lib[gi]?omp", preloaded) and not re.search(r"[:\s]", str(openmp)):
        variables[PRELOAD_VARIABLE] = f"{preloaded}:{openmp}".lstrip(":")
    return variables


def dotted(flag: str, values: Mapping[str, object]) -> list[str]:
    """A nested mapping as vLLM's dotted arguments: `--a {"b": {"c": 1}}` becomes `--a.b.c 1`."""
    arguments: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            arguments += dotted(f"{flag}.{key}", value)
        else:
            arguments += [f"{flag}.{key}", _plain_or_json(value)]
    return arguments


def _plain_or_json(value: object) -> str:
    """vLLM reads a dotted value as JSON, then as a number with a unit ("4k"), then as it is."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./~][\w./:~-]*", value):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)
