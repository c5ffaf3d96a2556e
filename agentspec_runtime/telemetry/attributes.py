"""Names of everything that a span of this package carries, and the one way a value gets onto a span.

Rules of this file:
  * A name is written here once, with its type and meaning; `docs/tracing.md` prints this table and a test
    compares the two.
  * The `gen_ai.*` names are OpenTelemetry's (semantic-conventions-genai v0.1.0, status Development). Ours
    live under `agentspec.`: there is no convention for speculative decoding. Engine spans carry no
    `gen_ai.*` at all: backends take such a span for one more model call and count its tokens twice.
  * No attribute holds text of a request: kinds, counts, times and identifiers only.

A value of a wrong type makes the SDK drop it, and a value that protobuf refuses makes the exporter drop
the whole batch. `attribute_value` therefore stands between every value and every span.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentspec_runtime.observe import DraftSource

__all__ = [
    "ATTRIBUTES",
    "MAX_STRING",
    "SOURCE_ACCEPTED",
    "SOURCE_DRAFTED",
    "SOURCE_REJECTED",
    "Attribute",
    "Value",
    "attribute_value",
    "clean",
    "markdown_table",
]

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]

MAX_STRING: Final = 4096
"""Longest string value in characters. Collectors behind gRPC commonly refuse messages above 4 MiB."""

_INT64: Final = 1 << 63
_MAX_ITEMS: Final = 1024
"""Longest array. A larger one is cut; our own arrays are folded to this size before (see `spans.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One row of the attribute table; `spans` are the spans that carry it."""

    name: str
    type: str
    spans: tuple[str, ...]
    meaning: str


_TABLE: list[Attribute] = []


def _define(name: str, kind: str, spans: str, meaning: str) -> str:
    _TABLE.append(Attribute(name=name, type=kind, spans=tuple(spans.split()), meaning=meaning))
    return name


# -- identity ------------------------------------------------------------------------------------------
REQUEST_ID = _define("agentspec.request_id", "string", "request", "Id of the sequence in the engine.")
SESSION = _define(
    "agentspec.session", "string", "request chat invoke_agent", "Session of the hint: one agent run."
)
AGENT = _define("agentspec.agent", "string", "request chat", "Agent that made the call, from the hint.")
TURN = _define("agentspec.turn", "int", "request chat", "Number of this model call in its session, from 0.")
MODEL = _define("agentspec.model", "string", "request", "Model that answered, by its served name.")

# -- one request in the engine -------------------------------------------------------------------------
PROMPT_TOKENS = _define("agentspec.prompt_tokens", "int", "request prefill chat", "Prompt tokens.")
CACHED_TOKENS = _define(
    "agentspec.cached_tokens", "int", "request prefill chat", "Prompt tokens found in the prefix cache."
)
OUTPUT_TOKENS = _define(
    "agentspec.output_tokens",
    "int",
    "request block chat",
    "Output tokens after stop handling; exact over the blocks.",
)
PREEMPTIONS = _define("agentspec.preemptions", "int", "request", "Times the request was put back to waiting.")
FINISH_REASON = _define(
    "agentspec.finish_reason", "string", "request", "Why it ended: stop, length, abort, error."
)
QUEUE_S = _define(
    "agentspec.queue_s", "double", "request chat", "Seconds from arrival to the first scheduling."
)
PREFILL_S = _define("agentspec.prefill_s", "double", "request", "Seconds from scheduling to the first token.")
DECODE_S = _define("agentspec.decode_s", "double", "request", "Seconds from the first token to the end.")
FIRST_TOKEN_S = _define(
    "agentspec.time_to_first_token_s", "double", "request", "Seconds from arrival to the first token."
)
BLOCKS_MERGED = _define(
    "agentspec.blocks_merged",
    "int",
    "request",
    "Blocks folded into the last block span because of its cap; 0 = none.",
)

# -- speculation ---------------------------------------------------------------------------------------
_SPEC = "request block chat"
STEPS = _define("agentspec.spec.steps", "int", _SPEC, "Engine steps that sampled for it, drafts or not.")
STEPS_SAVED = _define("agentspec.spec.steps_saved", "int", _SPEC, "Output tokens minus steps.")
DRAFTED = _define(
    "agentspec.spec.draft_tokens", "int", _SPEC, "Draft tokens verified. accepted + rejected = this."
)
ACCEPTED = _define("agentspec.spec.accepted_tokens", "int", _SPEC, "Draft tokens that became output.")
REJECTED = _define("agentspec.spec.rejected_tokens", "int", _SPEC, "Draft tokens that gave nothing.")
DISCARDED = _define(
    "agentspec.spec.discarded_tokens", "int", "request block",
    "Rejected tokens that were equal but lay behind the end of the answer.",
)  # fmt: skip
ACCEPTANCE_RATE = _define(
    "agentspec.spec.acceptance_rate", "double", _SPEC, "accepted / drafted; absent without drafts."
)
TOKENS_PER_STEP = _define(
    "agentspec.spec.tokens_per_step", "double", _SPEC, "Output tokens per step, all steps counted."
)
STEP_DRAFTED = _define(
    "agentspec.spec.per_step_drafted",
    "int[]",
    "request chat",
    "Draft tokens per step. `request`: every step; `chat`: the steps that verified a draft.",
)
STEP_ACCEPTED = _define(
    "agentspec.spec.per_step_accepted",
    "int[]",
    "request chat",
    "Accepted tokens of the same steps.",
)
STEP_STRIDE = _define(
    "agentspec.spec.per_step_stride", "int", "request chat",
    "Steps summed in one array entry: 1 up to 1024 steps, then more, so that the arrays' sums stay exact.",
)  # fmt: skip
ACCEPTED_HISTOGRAM = _define(
    "agentspec.spec.accepted_histogram", "int[]", "request chat",
    "Entry k: steps that accepted k draft tokens; the last entry means k or more.",
)  # fmt: skip
SOURCE_DRAFTED: Final[Mapping[DraftSource, str]] = {
    source: _define(
        f"agentspec.spec.{source}.draft_tokens",
        "int",
        "request block",
        f"Draft tokens whose text came from: {source}.",
    )
    for source in DraftSource
}
SOURCE_ACCEPTED: Final[Mapping[DraftSource, str]] = {
    source: _define(
        f"agentspec.spec.{source}.accepted_tokens", "int", "request block", f"Of them accepted ({source})."
    )
    for source in DraftSource
}
SOURCE_REJECTED: Final[Mapping[DraftSource, str]] = {
    source: _define(
        f"agentspec.spec.{source}.rejected_tokens", "int", "request block", f"Of them rejected ({source})."
    )
    for source in DraftSource
}

# -- one call, seen by the agent -------------------------------------------------------------------------
HINTED = _define("agentspec.hinted", "boolean", "chat", "Whether a hint was sent with the request.")
OUTCOME = _define(
    "agentspec.outcome", "string", "chat", "ok, incomplete (the caller stopped reading) or error."
)
ATTEMPTS = _define(
    "agentspec.attempts", "int", "chat", "HTTP requests that this call took, retries included."
)
PARENT_AGENT = _define("agentspec.parent_agent", "string", "chat invoke_agent", "Agent that called this one.")
LINK = _define(
    "agentspec.link", "string", "link",
    "On a span link of `chat`, what its target is: `tool_result` (its result is new in this prompt) or"
    " `previous_turn` (the call before, of this agent in this session).",
)  # fmt: skip

# -- one block -----------------------------------------------------------------------------------------
BLOCK_KIND = _define(
    "agentspec.block.kind", "string", "block", "Structural kind; `mixed` for the folded last span."
)
BLOCK_INDEX = _define("agentspec.block.index", "int", "block", "Position in the answer, from 0.")
MEAN_BATCH = _define(
    "agentspec.mean_batch", "double", "block", "Mean number of requests that sampled in its steps."
)
MEAN_BUDGET = _define(
    "agentspec.mean_budget", "double", "block", "Mean draft tokens allowed for the whole batch."
)
STEP_P50 = _define(
    "agentspec.step_s_p50", "double", "block",
    "Median time of its steps, in seconds, without the first step of the request, which is its prefill.",
)  # fmt: skip
STEP_P95 = _define(
    "agentspec.step_s_p95", "double", "block", "95th percentile of the time of the same steps, in seconds."
)

ATTRIBUTES: Final[tuple[Attribute, ...]] = tuple(_TABLE)


def markdown_table() -> str:
    """The table as `docs/tracing.md` shows it."""
    rows = ["| attribute | type | on | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{each.name}` | {each.type} | {', '.join(each.spans)} | {each.meaning} |" for each in ATTRIBUTES
    ]
    return "\n".join(rows)


def attribute_value(value: object) -> Value | None:
    """A value that SDK, protobuf and backends take, or None where there is none.

    Numbers, strings and homogeneous lists stay; numpy and tensor scalars become Python numbers; a list
    of ints and floats becomes floats; other lists and mappings become JSON text. None, NaN, bytes and
    unknown objects give None: their repr could hold text of a request, or raise.
    """
    try:
        scalar = _scalar(value)
        if scalar is not None:
            return scalar
        if isinstance(value, Mapping):
            return _text(json.dumps(value, default=_type_name, allow_nan=False, skipkeys=True))
        if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Iterable):
            return None
        return _array(list(value)[:_MAX_ITEMS])
    except Exception:  # noqa: BLE001 - a foreign __iter__ or __bool__ may raise anything; telemetry must not
        return None


def clean(values: Mapping[str, object]) -> dict[str, Value]:
    """Attributes with every value converted and those without a value left out."""
    return {name: good for name, value in values.items() if (good := attribute_value(value)) is not None}


def _scalar(value: object) -> Scalar | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        # OTLP integers have 64 bits; a larger one would fail the whole batch.
        return int(value) if -_INT64 <= value < _INT64 else _text(str(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return _text(str.__str__(value))  # not str(): an enum's own __str__ would name its class
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        # numpy and tensor scalars. Strings and objects inside them come back as such.
        plain = item()
        return _scalar(plain) if isinstance(plain, (bool, int, float, str)) else None
    return None


def _array(items: list[object]) -> Value | None:
    # Nearly every array of ours: plain ints, hundreds of them.
    if set(map(type, items)) == {int}:
        plain = [item for item in items if isinstance(item, int)]
        if min(plain) >= -_INT64 and max(plain) < _INT64:
            return plain
    scalars = [_scalar(item) for item in items]
    if all(type(item) is int for item in scalars):
        return [item for item in scalars if isinstance(item, int)]
    if all(type(item) in (int, float) for item in scalars):
        return [float(item) for item in scalars if item is not None]
    if all(isinstance(item, str) for item in scalars):
        return [item for item in scalars if isinstance(item, str)]
    if all(isinstance(item, bool) for item in scalars):
        return [item for item in scalars if isinstance(item, bool)]
    return _text(json.dumps(items, default=_type_name, allow_nan=True))


def _text(text: str) -> str:
    # A lone surrogate (from badly decoded bytes) cannot be UTF-8: protobuf would refuse the batch.
    return text[:MAX_STRING].encode("utf-8", "replace").decode("utf-8")


def _type_name(value: object) -> str:
    return type(value).__name__
