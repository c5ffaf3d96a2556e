"""vLLM's engine loop without a model: the real scheduler, real requests, a target model that has a script.

`ScriptedEngine` builds `AgentSpecScheduler` (or vLLM's own `Scheduler`) over a real `VllmConfig`, as
`EngineCore` does, and steps it in the same order. The worker's part is played by `Script`: it verifies
drafts against the answer that each request is going to get, as greedy decoding would.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from agentspec_runtime.engine.args import engine_args
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.engine.scheduler import AgentSpecScheduler
from agentspec_runtime.hints import XARGS_KEY, Hint, encode_hint
from agentspec_runtime.observe import RequestReport, StepReport

VOCAB = 512
EOS = 2
BLOCK_SIZE = 16


def write_model_config(folder: Path) -> Path:
    """A Llama of no size: enough for a config, never loaded."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(slots=True)
class Recorder:
    """An observer that keeps what it is told, and can be made to fail."""

    steps: list[StepReport] = field(default_factory=list)
    requests: list[RequestReport] = field(default_factory=list)
    closed: int = 0
    broken: bool = False

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)
        if self.broken:
            raise RuntimeError("observer broken on purpose")

    def on_request(self, report: RequestReport) -> None:
        self.requests.append(report)
        if self.broken:
            raise RuntimeError("observer broken on purpose")

    def close(self) -> None:
        self.closed += 1
        if self.broken:
            raise RuntimeError("observer broken on purpose")


@dataclass(slots=True)
class Answered:
    """What came out for one request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    num_steps: int = 0


class Fault:
    """Replaces a method; raises on the chosen calls and works on the others."""

    def __init__(self, real: Callable[..., object], *, first: int, last: int) -> None:
        self._real = real
        self._bad = range(first, last + 1)
        self.num_calls = 0
        self.num_raised = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.num_calls += 1
        if self.num_calls in self._bad:
            self.num_raised += 1
            raise RuntimeError("injected")
        return self._real(*args, **kwargs)


class ScriptedEngine:
    """See the module docstring. `plain` takes vLLM's own scheduler."""

    def __init__(
        self,
        model: Path,
        *,
        plain: bool = False,
        config: EngineConfig | None = None,
        num_blocks: int = 1000,
        max_model_len: int = 1024,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        prefix_caching: bool = True,
        observer: Recorder | None = None,
    ) -> None:
        ours: Mapping[str, Any] = {"async_scheduling": False}
        if not plain:
            config = config or EngineConfig(telemetry=False, memory_mb=8)
            ours = engine_args(config, num_speculative_tokens=8).kwargs
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=prefix_caching,
            block_size=BLOCK_SIZE,
            **ours,
        )
        vllm_config = arguments.create_engine_config()
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn) if prefix_caching else None
        scheduler_class: type[Scheduler] = Scheduler if plain else AgentSpecScheduler
        self.scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.clock_s = 0.0
        """Steps take the time of a machine that is memory-bound, whatever else runs on this one."""
        if not plain:
            self.scheduler._speculation._clock = lambda: self.clock_s
        self.observer = observer
        if observer is not None:
            self.scheduler._speculation._accounts._observer = observer
        self.script: dict[str, list[int]] = {}
        self.answers: dict[str, Answered] = {}
        self.num_steps = 0
        self.during_step: Callable[[SchedulerOutput], None] | None = None
        """Called while "the worker computes"."""

    def add(
        self,
        req_id: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        hint: Hint | str | None = None,
        max_tokens: int = 10_000,
        cache_salt: str | None = None,
        adapter: str | None = None,
        extra: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Request:
        """A request that will be answered with `answer` and then the end token. `extra`: `extra_args`."""
        extra = dict(extra or {})
        if hint is not None:
            extra[XARGS_KEY] = hint if isinstance(hint, str) else encode_hint(hint)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=extra or None, **sampling)
        params.update_from_generation_config({}, EOS)
        request = Request(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=LoRARequest(adapter, 1 + ord(adapter[0]), f"/adapters/{adapter}")
            if adapter
            else None,
            block_hasher=self._hasher,
        )
        self.script[req_id] = [*answer, EOS]
        self.answers[req_id] = Answered()
        self.scheduler.add_request(request)
        return request

    def abort(self, *req_ids: str) -> None:
        self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One `EngineCore.step`."""
        output = self.scheduler.schedule()
        self.scheduler.get_grammar_bitmask(output)
        result = self._execute(output)
        self.clock_s += 0.010 + 1e-5 * output.total_num_scheduled_tokens
        if self.during_step is not None:
            self.during_step(output)
        emitted = self.scheduler.update_from_output(output, result)
        self.num_steps += output.total_num_scheduled_tokens > 0
        for group in emitted.values():
            for item in group.outputs:
                answered = self.answers[item.request_id]
                answered.tokens += item.new_token_ids
                answered.num_steps += 1
                if item.finish_reason is not None:
                    answered.reason = str(item.finish_reason)
        return output

    def run(self, max_steps: int = 2000) -> None:
        """Until every request is over."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"requests left after {max_steps} steps: {list(self.scheduler.requests)}")

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for req_id in req_ids:
            request = self.scheduler.requests[req_id]
            # vLLM has already advanced `num_computed_tokens` over everything that was scheduled.
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            # A real worker looks every draft up in the embedding, and dies of an id that is not there.
            assert all(0 <= token < VOCAB for token in drafts), drafts
            if request.num_computed_tokens - len(drafts) < request.num_tokens:
                sampled.append([])  # a chunk of the prompt, not its last one
                continue
            rest = self.script[req_id][request.num_output_tokens :]
            # Behind its end a real model goes on with something.
            truth = itertools.chain(rest, itertools.repeat(EOS))
            new = []
            for draft in [*drafts, None]:
                token = next(truth)
                new.append(token)
                if token != draft:
                    break
            sampled.append(new)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )
