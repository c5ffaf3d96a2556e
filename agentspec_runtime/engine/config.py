"""Our own knobs of the engine. Everything else is vLLM's and is read from its config, never redefined.

They travel in vLLM's `additional_config` under one key, so that `vllm serve`, `vllm.LLM` and
`agentspec serve` configure the scheduler in the same way and every engine process sees them.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ADDITIONAL_CONFIG_KEY", "EngineConfig"]

ADDITIONAL_CONFIG_KEY: Final = "agentspec"


class EngineConfig(BaseModel):
    """Settings of `AgentSpecScheduler`.

    Attributes:
        speculate: "off" keeps the scheduler in place and never drafts (to measure its tax).
        budget: "auto" chooses draft lengths by expected goodput; "fixed" drafts every slot whose
            survival is at least `min_survival`, whatever the load.
        min_survival: threshold of the fixed budget, 0..1.
        hints: False ignores what clients send (for the with/without comparison).
        scope: the widest text that drafts may come from; a hint narrows it.
        memory_mb: bound on draft memory over all tenants, in MiB.
        cost_curve: file with a step-time curve of this model and machine to start from (`agentspec
            bench calibrate` writes it); "auto" starts from what was learned here last time, and keeps
            what is learned; None learns from the first steps.
        assist_depth: most tokens that a model drafter of the worker (EAGLE-3, a draft model) makes per
            request and step, where vLLM's speculative method is one (`args.AssistModel`).
        telemetry: emit records to Prometheus and, where an OTLP endpoint is set, spans.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    speculate: Literal["auto", "off"] = "auto"
    budget: Literal["auto", "fixed"] = "auto"
    min_survival: float = Field(default=0.3, ge=0.0, le=1.0)
    hints: bool = True
    scope: Literal["corpus", "session", "request"] = "corpus"
    memory_mb: int = Field(default=512, ge=8)
    cost_curve: str | None = None
    assist_depth: int = Field(default=4, ge=1, le=16)
    telemetry: bool = True
