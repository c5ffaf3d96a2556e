"""What the accounts of a step cost while telemetry is on: python tests/engine/measure_accounts.py [rounds]

Blocks of the emitted tokens (`drafting.tracker`) and the ledgers of all requests (`engine.ledger`), as the
scheduler keeps them, without the rest of a step. Processor time of the calling thread; the last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.tracker import BlockTracker
from agentspec_runtime.engine.ledger import RequestLedger, StepContext, VerdictCounts

REQUESTS = 64
STEP_S = 0.010
MARKERS = ["```", "<tool_call>", "</tool_call>"]
WORDS = ["the", " quick", " brown", "\n", "python", " = ", "(x)", '{"a": 1}'] * 40 + MARKERS


def measure(rounds: int, tokens_per_step: int) -> dict[str, float]:
    """Median microseconds per step of blocks and ledgers."""
    rng = random.Random(0)
    tracker = BlockTracker(TokenTable([word.encode() for word in WORDS]))
    names = [f"r{number}" for number in range(REQUESTS)]
    ledgers = [RequestLedger(hint=None, num_prompt_tokens=10, arrival_s=0.0) for _ in names]
    for name in names:
        tracker.start(name, 0)
    step = StepContext(end_s=1.0, duration_s=STEP_S, batch=REQUESTS, budget=REQUESTS * tokens_per_step)
    blocks_us, ledgers_us = [], []
    for _ in range(rounds):
        emitted = [[rng.randrange(len(WORDS)) for _ in range(tokens_per_step)] for _ in names]
        drafted = [[rng.randrange(3)] * (2 * (tokens_per_step - 1)) for _ in names]
        begin = time.thread_time()
        blocks = tracker.advance(names, emitted)
        middle = time.thread_time()
        totals = VerdictCounts()
        for ledger, spans, sources in zip(ledgers, blocks, drafted, strict=True):
            ledger.add_step(spans, sources, tokens_per_step - 1, 0, step, totals)
        blocks_us.append((middle - begin) * 1e6)
        ledgers_us.append((time.thread_time() - middle) * 1e6)
    return {"blocks_us": statistics.median(blocks_us), "ledgers_us": statistics.median(ledgers_us)}


def main() -> None:
    """Plain decoding (one token per request and step) and drafting (three)."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    found = {}
    for name, tokens in (("plain", 1), ("drafting", 3)):
        found[name] = measure(rounds, tokens)
        share = sum(found[name].values()) / STEP_S / 1e4
        print(
            f"{name}: {REQUESTS} requests, {tokens} tokens each: blocks {found[name]['blocks_us']:.0f} us,"
            f" ledgers {found[name]['ledgers_us']:.0f} us per step, {share:.2f} % of {STEP_S * 1e3:.0f} ms"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
