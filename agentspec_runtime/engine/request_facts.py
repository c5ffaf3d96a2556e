"""What is read from vLLM's requests and sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentspec_runtime.engine.stop_strings import StopStrings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.request import Request

__all__ = ["end_tokens", "may_draft", "namespace", "room", "stop_strings", "temperature_bucket"]

_MAX_END_TOKENS: Final = 16
"""Models have up to five; a request with a long list of its own gets drafts that may run past its end."""


def namespace(request: Request) -> str:
    """What isolates vLLM's prefix cache isolates draft memory: adapter and cache salt."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return f"{len(adapter)}:{adapter}:{request.cache_salt or ''}"


def end_tokens(params: SamplingParams) -> tuple[int, ...]:
    """Tokens with which the answer ends (vLLM: `check_stop` in vllm/v1/core/sched/utils.py)."""
    ends = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        ends.insert(0, params.eos_token_id)
    return tuple(ends[:_MAX_END_TOKENS])


def may_draft(params: SamplingParams) -> bool:
    """False where vLLM samples otherwise with drafts than without.

    A thinking budget changes its state on the way to the last row, before the rows of the drafts are looked
    at (`RejectionSampler.forward`; vLLM issue 41758).
    """
    return getattr(params, "thinking_token_budget", None) is None


def room(request: Request, params: SamplingParams, max_model_len: int) -> int:
    """Most tokens that a draft may have, one more token coming from the step itself; 0 or less for none."""
    done = request.num_output_tokens
    most: int = min(request.max_tokens - done, max_model_len - request.num_tokens) - 1
    if done < params.min_tokens:
        # vLLM masks the ends in the row behind a draft as long as the step begins below `min_tokens`, even
        # where that row is beyond it (`MinTokensLogitsProcessor.apply`): it has to be within.
        most = min(most, params.min_tokens - done - 1)
    return most


def stop_strings(params: SamplingParams) -> StopStrings | None:
    """The strings that end the answer; None where vLLM will not look for any."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    if not stops or not params.detokenize:
        return None
    return StopStrings(stops=tuple(stop.encode() for stop in stops), min_tokens=params.min_tokens)


def temperature_bucket(temperature: float) -> int:
    """Greedy (0) to hot (3): acceptance is learned for each."""
    if temperature < 1e-5:
        return 0
    return 1 if temperature <= 0.5 else (2 if temperature <= 1.0 else 3)
