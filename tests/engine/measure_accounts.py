"""What the accounts of a step cost while telemetry is on: python tests/engine/measure_accounts.py [rounds]

Blocks, verdicts and step times of all requests (`drafting.answers`), and the verdicts by block and source
that the step report takes from them (`engine.ledger`): what the scheduler does for a step, without the rest
of it. Beside that what it takes to name those verdicts, in the thread of the observer, and what the end of a
request costs, on the step's path. Processor time of the calling thread, medians; the last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

import numpy as np

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.engine.ledger import RequestLedger, StepVerdicts

REQUESTS = 64
STEP_S = 0.010
STEPS_PER_REQUEST = 200
MAX_DRAFT = 32
MARKERS = ["```", "<tool_call>", "</tool_call>"]
WORDS = ["the", " quick", " brown", "\n", "python", " = ", "(x)", '{"a": 1}'] * 40 + MARKERS


def measure(rounds: int, tokens_per_step: int) -> dict[str, float]:
    """Median microseconds per step, and per request that ends after `STEPS_PER_REQUEST` steps."""
    rng = random.Random(0)
    answers = Answers(TokenTable([word.encode() for word in WORDS]), MAX_DRAFT)
    step = StepContext(end_s=1.0, duration_s=STEP_S, batch=REQUESTS, budget=REQUESTS * tokens_per_step)
    num_drafted = 2 * (tokens_per_step - 1)
    offsets = np.arange(0, REQUESTS * tokens_per_step + 1, tokens_per_step)
    # They end one after the other, as in a busy engine.
    ages = [number * STEPS_PER_REQUEST // REQUESTS for number in range(REQUESTS)]
    names = [f"r{number}" for number in range(REQUESTS)]
    for name in names:
        answers.start(name, 0)
    steps_us, names_us, ends_us = [], [], []
    for _ in range(rounds):
        emitted = [rng.randrange(len(WORDS)) for _ in range(REQUESTS * tokens_per_step)]
        tokens = np.array(emitted, np.int32)
        sources = {name: bytes([rng.randrange(3)] * num_drafted) for name in names} if num_drafted else {}
        sampled = dict.fromkeys(sources, tokens_per_step)
        begin = time.thread_time()
        totals = answers.add_step(names, tokens, offsets, step, sources, sampled)
        told = StepVerdicts(totals) if sources else {}
        middle = time.thread_time()
        num_told = sum(verdict.drafted for verdict in told.values())
        steps_us.append((middle - begin) * 1e6)
        names_us.append((time.thread_time() - middle) * 1e6)
        assert num_told == num_drafted * REQUESTS
        for number, name in enumerate(names):
            ages[number] += 1
            if ages[number] == STEPS_PER_REQUEST:
                ends_us.append(end_of(answers, name))
                ages[number] = 0
                answers.start(name, 0)
    return {
        "step_us": statistics.median(steps_us),
        "observer_us": statistics.median(names_us),
        "request_us": statistics.median(ends_us),
    }


def end_of(answers: Answers, name: str) -> float:
    """Microseconds that the end of a request takes."""
    ledger = RequestLedger(hint=None, num_prompt_tokens=10, arrival_s=0.0)
    begin = time.thread_time()
    ledger.report(
        answers.read(name), req_id=name, trace_headers=None, session=None, end_s=2.0, num_preemptions=0,
        finish_reason="stop", model="m",
    )  # fmt: skip
    answers.finish(name)
    return (time.thread_time() - begin) * 1e6


def main() -> None:
    """Plain decoding (one token per request and step) and drafting (three)."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    found = {}
    for name, tokens in (("plain", 1), ("drafting", 3)):
        found[name] = measure(rounds, tokens)
        step_us = found[name]["step_us"]
        print(
            f"{name}: {REQUESTS} requests, {tokens} tokens each: {step_us:.0f} us per step"
            f" ({step_us / STEP_S / 1e4:.2f} % of {STEP_S * 1e3:.0f} ms),"
            f" {found[name]['observer_us']:.0f} us in the observer,"
            f" {found[name]['request_us']:.0f} us per request that ends"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
