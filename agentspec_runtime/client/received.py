"""What came back: usage, acceptance and how the answer ended, out of bodies and stream events.

Takes decoded JSON and the SDK's models alike, of chat completions, completions and responses. Rules: a
value of an unexpected type is unknown, never zero and never an error; the last usage seen counts (some
servers send it with every chunk).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Received", "carries_token", "is_usage_only", "pick"]

_TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def pick(value: object, name: str) -> object:
    """Field of decoded JSON or of an SDK model (vLLM's own fields are pydantic extras there)."""
    if isinstance(value, dict):
        return value.get(name)
    return getattr(value, name, None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    counts = [count for item in value if (count := _count(item)) is not None]
    return tuple(counts) if len(counts) == len(value) else None


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


@dataclass(slots=True, kw_only=True)
class Received:
    """Fills up while an answer comes in. Counts in tokens, durations in milliseconds, None for unknown."""

    response_id: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    num_spec_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_step_drafted: tuple[int, ...] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    ttft_ms: float | None = None
    queue_ms: float | None = None
    generation_ms: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error_type: str | None = None

    @property
    def num_steps(self) -> int | None:
        """Engine steps that emitted the answer: each emits its accepted draft tokens and one more.

        vLLM counts acceptance before it looks for the end of an answer, so an end inside an accepted draft
        makes the difference too small. Our scheduler drafts no end; of other drafters it is at least known
        that the first token came without a draft (vllm/v1/core/sched/scheduler.py, `update_from_output`).
        """
        if self.completion_tokens is None or self.accepted is None:
            return None
        least = 1 + self.num_spec_steps if self.num_spec_steps else 0
        return max(least, self.completion_tokens - self.accepted)

    def absorb(self, body: object) -> None:
        """Take a response, a chunk of a stream, or an event of the responses endpoint."""
        choices = pick(body, "choices")
        if choices is None:
            if pick(body, "type") in _TERMINAL_EVENTS:
                body = pick(body, "response")
            elif pick(body, "error") is not None and pick(body, "id") is None:
                self.error_type = "APIError"
                return
        self.response_id = _text(pick(body, "id")) or self.response_id
        self.model = _text(pick(body, "model")) or self.model
        for choice in _items(choices):
            reason = _text(pick(choice, "finish_reason"))
            if reason is not None:
                self.finish_reasons.append(reason)
        self._absorb_usage(pick(body, "usage"))
        self._absorb_metrics(pick(body, "metrics"))

    def _absorb_usage(self, usage: object) -> None:
        if usage is None:
            return
        prompt, completion = pick(usage, "prompt_tokens"), pick(usage, "completion_tokens")
        details = pick(usage, "prompt_tokens_details")
        if prompt is None and completion is None:
            prompt, completion = pick(usage, "input_tokens"), pick(usage, "output_tokens")
            details = pick(usage, "input_tokens_details")
        self.prompt_tokens = _count(prompt)
        self.completion_tokens = _count(completion)
        self.cached_tokens = _count(pick(details, "cached_tokens"))

    def _absorb_metrics(self, metrics: object) -> None:
        if metrics is None:
            return
        self.ttft_ms = _number(pick(metrics, "time_to_first_token_ms"))
        self.queue_ms = _number(pick(metrics, "queue_time_ms"))
        self.generation_ms = _number(pick(metrics, "generation_time_ms"))
        spec = pick(metrics, "speculative_decoding")
        if spec is None:
            return
        self.num_spec_steps = _count(pick(spec, "num_spec_steps"))
        self.drafted = _count(pick(spec, "num_draft_tokens"))
        self.accepted = _count(pick(spec, "num_accepted_draft_tokens"))
        self.per_step_drafted = _counts(pick(spec, "per_step_drafted"))
        self.per_step_accepted = _counts(pick(spec, "per_step_accepted"))


def is_usage_only(event: Mapping[str, object]) -> bool:
    """Whether a chunk holds the usage of the answer and no part of it."""
    return event.get("usage") is not None and event.get("choices") == []


_DELTA_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")


def carries_token(event: object) -> bool:
    """Whether a chunk holds generated tokens of any kind; a chunk with a role alone does not."""
    kind = pick(event, "type")
    if isinstance(kind, str):
        return kind.endswith(".delta")
    for choice in _items(pick(event, "choices")):
        delta = pick(choice, "delta")
        if pick(choice, "text") or any(pick(delta, name) for name in _DELTA_FIELDS):
            return True
    return False
