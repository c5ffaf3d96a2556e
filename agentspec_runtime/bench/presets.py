"""Roofline step times of GPUs that are not here. Estimates, for planning; measure before deciding.

    T(n, b) = t_fixed + max( (weights(n) + b * context * kv) / (e_mem * bandwidth),
                             2 * active * n / (e_math * flops) )

n tokens in the step, b requests. weights(n) are the bytes read: all of them for a dense model; for a
mixture of experts the shared part plus the experts that n tokens touch, E * (1 - (1 - k / E)^n) of E
experts, k per token (independent routing; MoESD, arXiv 2505.19645, uses the same form). `kv` are bytes per
context token.

Hardware, from the vendor's data sheets, dense rates without sparsity:
    A100-80G SXM   312 TFLOPS bf16, 2,039 GB/s   (NVIDIA A100 80GB data sheet, 2021)
    H100 SXM       989 TFLOPS bf16, 3,350 GB/s   (NVIDIA H100 data sheet, 2023)
    H200 SXM       989 TFLOPS bf16, 4,800 GB/s   (NVIDIA H200 data sheet, 2024)
Models, from their published configurations:
    dense-8b   Llama-3.1-8B in bf16: 8.03e9 parameters; 32 layers, 8 KV heads of 128: 131,072 B per context
               token
    moe-20b    gpt-oss-20b, MXFP4 experts (4.25 bits): 20.9e9 parameters, 3.6e9 of them active; 32 experts,
               4 per token, 19.1e9 parameters in experts; 24 layers, 8 KV heads of 64: 49,152 B, half of the
               layers see 128 tokens only: 24,576 B per context token
Assumed, because no sheet says it: e_mem 0.8, e_math 0.6, t_fixed 1.5 ms (launch, sampling, scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentspec_runtime.errors import ConfigurationError

__all__ = ["PRESET_NAMES", "Roofline", "preset"]

_MEMORY_EFFICIENCY: Final = 0.8
_MATH_EFFICIENCY: Final = 0.6
_FIXED_S: Final = 1.5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    shared_bytes: float
    expert_bytes: float
    active_parameters: float
    kv_bytes: float
    experts: int = 1
    experts_per_token: int = 1


_MACHINES: Final = {
    "a100-80g": _Machine(flops=312e12, bytes_per_s=2.039e12),
    "h100": _Machine(flops=989e12, bytes_per_s=3.35e12),
    "h200": _Machine(flops=989e12, bytes_per_s=4.8e12),
}

_MODELS: Final = {
    "dense-8b": _Model(
        shared_bytes=2 * 8.03e9, expert_bytes=0.0, active_parameters=8.03e9, kv_bytes=131_072.0
    ),
    "moe-20b": _Model(
        shared_bytes=2 * 1.8e9,
        expert_bytes=19.1e9 * 4.25 / 8,
        active_parameters=3.6e9,
        kv_bytes=24_576.0,
        experts=32,
        experts_per_token=4,
    ),
}

PRESET_NAMES: Final = tuple(f"{machine}/{model}" for machine in _MACHINES for model in _MODELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Step time of a preset. `context_tokens` is what every request has in its KV cache."""

    name: str
    machine: _Machine
    model: _Model
    context_tokens: int

    def step_s(self, tokens: float, requests: float) -> float:
        """See the module docstring."""
        model, machine = self.model, self.machine
        touched: float = 1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens
        read = model.shared_bytes + model.expert_bytes * touched
        read += requests * self.context_tokens * model.kv_bytes
        memory_s = read / (_MEMORY_EFFICIENCY * machine.bytes_per_s)
        math_s = 2.0 * model.active_parameters * tokens / (_MATH_EFFICIENCY * machine.flops)
        return float(_FIXED_S + max(memory_s, math_s))


def preset(name: str, context_tokens: int = 4096) -> Roofline:
    """Step time of "MACHINE/MODEL".

    Raises:
        ConfigurationError: unknown name.
    """
    machine, _, model = name.lower().partition("/")
    if machine not in _MACHINES or model not in _MODELS:
        raise ConfigurationError(f"unknown preset {name!r}: known are {', '.join(PRESET_NAMES)}")
    return Roofline(
        name=f"{model} on {machine} (roofline, {context_tokens} tokens of context)",
        machine=_MACHINES[machine],
        model=_MODELS[model],
        context_tokens=context_tokens,
    )
