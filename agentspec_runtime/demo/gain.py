"""What drafting did for some model calls, in one line for people."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec_runtime.client.report import CallReport

__all__ = ["describe_gain"]


def describe_gain(calls: Sequence[CallReport]) -> str:
    """One line about calls, as `collect_calls()` gives them. What the server did not tell is not made up."""
    num_tokens = sum(call.completion_tokens or 0 for call in calls)
    seconds = sum(call.latency_ms for call in calls) / 1000
    head = f"{len(calls)} model calls, {num_tokens} tokens, {seconds:.1f} s"
    told = [call for call in calls if call.drafted is not None and call.num_steps is not None]
    if not told:
        return f"{head}; this server says nothing about drafting"
    drafted = sum(call.drafted or 0 for call in told)
    accepted = sum(call.accepted or 0 for call in told)
    steps = sum(call.num_steps or 0 for call in told)
    share = f" ({accepted / num_tokens:.0%} of the tokens)" if num_tokens else ""
    kept = f"{accepted} accepted{share}, {drafted - accepted} rejected"
    return f"{head}; {steps} steps: {drafted} tokens drafted, {kept}"
