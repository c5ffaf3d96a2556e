"""Where two greedy answers part, and how near a tie it was there, by a server's own log probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from conversation import post

NEAR_TIE = 1e-3
"""Difference of two log probabilities, in nats. Noise of float32 is about 1e-5 here."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Place of the first differing token; None when one is the beginning of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def gap_at(url: str, body: Mapping[str, Any], at: int, a: int, b: int) -> tuple[float, float] | None:
    """Gap between tokens a and b, and between the server's two most likely ones, at that place; None where
    one of them is not among its 20 most likely.
    """
    more = {"logprobs": True, "top_logprobs": 20} if "messages" in body else {"logprobs": 20}
    with post(url, {**body, **more, "return_tokens_as_token_ids": True}) as response:
        found = json.load(response)["choices"][0]["logprobs"]
    if "messages" in body:
        places = [{e["token"]: e["logprob"] for e in entry["top_logprobs"]} for entry in found["content"]]
    else:
        places = found["top_logprobs"]
    if at >= len(places):
        return None
    first, other = (places[at].get(f"token_id:{token}") for token in (a, b))
    best, second = sorted(places[at].values(), reverse=True)[:2]
    return None if first is None or other is None else (abs(first - other), best - second)


def explain(url: str, body: Mapping[str, Any], mine: Sequence[int], theirs: Sequence[int]) -> None:
    """A difference is a near tie, by the plain server's own numbers, or a defect."""
    at = first_difference(mine, theirs)
    assert at is not None, f"one answer is the beginning of the other: {mine} {theirs}"
    gaps = gap_at(url, body, at, mine[at], theirs[at])
    assert gaps is not None, f"token {at}: {mine[at]} instead of {theirs[at]}, not even among the likely ones"
    assert gaps[0] < NEAR_TIE, f"token {at}: {mine[at]} instead of {theirs[at]}, {gaps[0]} nats apart"
