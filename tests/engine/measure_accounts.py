"""What the accounts of a step cost while telemetry is on: python tests/engine/measure_accounts.py [rounds]

Blocks, verdicts and step times of all requests (`drafting.answers`), and the verdicts by block and source
that the step report takes from them (`engine.ledger`): what the scheduler does for a step, without the rest
of it. Beside that what the report of the step costs in the thread of the observer, where it becomes
Prometheus values (shared between processes through files, as in a server), and what the end of a request
costs, on the step's path. Processor time of the calling thread, medians; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time

import numpy as np

os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp())  # read when the library is imported
from prometheus_client import CollectorRegistry

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.engine.ledger import RequestLedger, StepVerdicts
from agentspec_runtime.observe import StepReport
from agentspec_runtime.telemetry.metrics import EngineMetrics

REQUESTS = 64
STEP_S = 0.010
STEPS_PER_REQUEST = 200
MAX_DRAFT = 32
MARKERS = ["```", "<tool_call>", "</tool_call>"]
SLICE = 64
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
    metrics = EngineMetrics(CollectorRegistry())
    reports: list[StepReport] = []
    steps_us, metrics_us, ends_us = [], [], []
    for _ in range(rounds):
        emitted = [rng.randrange(len(WORDS)) for _ in range(REQUESTS * tokens_per_step)]
        tokens = np.array(emitted, np.int32)
        sources = {name: bytes([rng.randrange(3)] * num_drafted) for name in names} if num_drafted else {}
        sampled = dict.fromkeys(sources, tokens_per_step)
        begin = time.thread_time()
        totals = answers.add_step(names, tokens, offsets, step, sources, sampled)
        told = StepVerdicts(totals) if sources else {}
        reports.append(
            StepReport(
                num_sampling=REQUESTS, num_prefill_tokens=0, num_draft_tokens=num_drafted * REQUESTS,
                num_waiting=3, price=0.4, predicted_s=0.01, measured_s=0.0104, draft_s=0.0004, index_s=0.0002,
                index_bytes=1 << 28, verdicts=told,
            )
        )  # fmt: skip
        steps_us.append((time.thread_time() - begin) * 1e6)
        if len(reports) == SLICE:
            begin = time.thread_time()
            metrics.add_steps(reports)
            metrics_us.append((time.thread_time() - begin) * 1e6 / SLICE)
            assert sum(verdict.drafted for verdict in told.values()) == num_drafted * REQUESTS
            reports = []
        for number, name in enumerate(names):
            ages[number] += 1
            if ages[number] == STEPS_PER_REQUEST:
                ends_us.append(end_of(answers, name))
                ages[number] = 0
                answers.start(name, 0)
    return {
        "step_us": statistics.median(steps_us),
        "observer_us": statistics.median(metrics_us),
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
