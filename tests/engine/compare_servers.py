"""By hand: the request mix on a plain server and on ours, in a precision that has near ties.

    python tests/engine/compare_servers.py PLAIN_URL OURS_URL [--at-once 4] [--rounds 3] [--varied 500] \
        [--long 40] [--models lora-0,lora-1]

URLs end in /v1. `--varied`: so many more requests, made from a seed. `--long`: so many that repeat a text for
300 tokens, for a server with so little memory that it preempts. `--models`: every request also to these, as
adapters of the model are served. The plain server answers everything one
at a time (the reference), then `--at-once` at a time: how far it differs from itself is the measure for ours.
Each differing answer is printed with the place and the gap, in nats, between the two tokens there, and
between the two most likely ones, by the plain server's own log probabilities: start it with
`--logprobs-mode processed_logprobs`, or penalties are not in them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from conversation import Answer, ask, ask_all
from near_tie import first_difference, gap_at
from request_mix import greedy_requests
from varied_requests import varied_requests

MODEL = "SmolLM2-135M-Instruct"


def compare(
    url: str,
    bodies: Mapping[str, Any],
    reference: Mapping[str, Answer],
    answers: Mapping[str, Answer],
    label: str,
) -> list[float | None]:
    """Gaps behind differing answers; None for one that no gap explains."""
    gaps: list[float | None] = []
    for name, answer in answers.items():
        want, got = reference[name].choices[0].token_ids, answer.choices[0].token_ids
        if want == got:
            continue
        at = first_difference(want, got)
        found = None if at is None else gap_at(url, bodies[name], at, want[at], got[at])
        gaps.append(found[0] if found else None)
        print(f"{label}: {name!r} differs at token {at} of {len(want)}, gaps {found}")
    return gaps


def long_requests(number: int) -> dict[str, dict[str, Any]]:
    """Short prompts whose answers need much more room than they do."""
    return {
        f"long {i}": {
            "model": MODEL,
            "prompt": f"Item {i}: the quick brown fox number {i * i} jumps over {i} lazy dogs.\n" * 2,
            "temperature": 0,
            "max_tokens": 300,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i in range(number)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plain")
    parser.add_argument("ours")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--varied", type=int, default=0)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--models", default="")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bodies = greedy_requests(MODEL) | varied_requests(MODEL, options.varied, options.seed)
    bodies |= long_requests(options.long)
    models = [name for name in options.models.split(",") if name]
    bodies |= {f"{name} of {m}": {**body, "model": m} for m in models for name, body in bodies.items()}
    reference = ask_all(options.plain, bodies, at_once=1)
    account: dict[str, object] = {"requests": len(bodies)}
    runs = [("plain again, at once", options.plain, options.at_once)]
    runs += [("ours, one at a time", options.ours, 1)]
    runs += [(f"ours, at once, round {i}", options.ours, options.at_once) for i in range(options.rounds)]
    for label, url, at_once in runs:
        answers = ask_all(url, bodies, at_once=at_once)
        assert all(answer.status == 200 for answer in answers.values())
        gaps = compare(options.plain, bodies, reference, answers, label)
        accepted = sum((a.speculative or {}).get("num_accepted_draft_tokens", 0) for a in answers.values())
        account[label] = {"differing": len(gaps), "gaps": gaps, "accepted": accepted}
    account["tokens"] = sum(answer.completion_tokens for answer in reference.values())
    assert ask(options.ours, bodies["copy"]).status == 200
    print(json.dumps(account))


if __name__ == "__main__":
    main()
