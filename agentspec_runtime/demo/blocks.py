"""Blocks of every turn, out of the engine's spans.

The engine names its request spans by the id of the response that the client got (vLLM may add a suffix),
and hangs one child span per block below. Names and meanings are in `telemetry/attributes.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from agentspec_runtime.demo.turns import Block, Tokens, Turn
from agentspec_runtime.telemetry import attributes as names
from agentspec_runtime.telemetry.otlp import SpanRecord

__all__ = ["REQUEST_SPAN", "with_blocks"]

REQUEST_SPAN = "agentspec.request"
_BLOCK_SPAN = "agentspec.block"


def with_blocks(turns: Sequence[Turn], spans: Sequence[SpanRecord]) -> list[Turn]:
    """The turns with the blocks that the engine reported for them; without any where it reported none."""
    children: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    requests: dict[str, SpanRecord] = {}
    for span in spans:
        if span.name.startswith(_BLOCK_SPAN):
            children[span.parent_id].append(span)
        elif span.name == REQUEST_SPAN:
            requests[str(span.attributes.get(names.REQUEST_ID, ""))] = span
    found = []
    for turn in turns:
        request = _request_of(turn.report.response_id, requests)
        blocks = sorted(children[request.span_id], key=lambda span: span.start_ns) if request else []
        found.append(replace(turn, blocks=tuple(_block(span) for span in blocks)))
    return found


def _request_of(response_id: str | None, requests: dict[str, SpanRecord]) -> SpanRecord | None:
    if response_id is None:
        return None
    exact = requests.get(response_id)
    if exact is not None:
        return exact
    return next((span for key, span in requests.items() if key.startswith(f"{response_id}-")), None)


def _block(span: SpanRecord) -> Block:
    return Block(
        kind=str(span.attributes.get(names.BLOCK_KIND, "text")),
        count=Tokens(
            tokens=_number(span, names.OUTPUT_TOKENS),
            steps=_number(span, names.STEPS),
            drafted=_number(span, names.DRAFTED),
            accepted=_number(span, names.ACCEPTED),
        ),
        seconds=span.duration_s,
    )


def _number(span: SpanRecord, name: str) -> int:
    value = span.attributes.get(name, 0)
    return value if isinstance(value, int) else 0
