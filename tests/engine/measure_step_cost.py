"""What telemetry adds to an engine step: python tests/engine/measure_step_cost.py [--blocks 12]

vLLM's real scheduler with our part in it, 64 requests with drafts, and a worker that takes `--step-ms` per
step (it sleeps, as the engine process does while its GPU computes). Prometheus values are shared through
files, spans go to a collector in another process. Two costs are told apart, in processor time of the engine's
thread per step:

  path     in calls that the step waits for
  beside   while the worker computes: felt only by an engine that never waits for its worker

and what all other threads of the process spend. Means per block of 200 steps, medians over blocks; the
last line is JSON. (Two engines taking turns, with and without telemetry, differ by less than the noise here.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp())  # read when the library is imported
from prometheus_client import CollectorRegistry
from scripted_engine import ScriptedEngine, write_model_config

from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer

REQUESTS = 64
ANSWER_TOKENS = 400
STEPS = 200
HEADERS = {"traceparent": f"00-{'4b' * 16}-{'f0' * 8}-01"}
COLLECTOR = """
import sys
from agentspec_runtime.telemetry.receiver import OtlpReceiver
with OtlpReceiver() as receiver:
    print(receiver.endpoint, flush=True)
    sys.stdin.read()
"""


class Load:
    """One engine that always has 64 requests in flight."""

    def __init__(self, folder: Path, observer: EngineObserver, step_s: float) -> None:
        config = EngineConfig(telemetry=False, budget="fixed", min_survival=0.3, memory_mb=64)
        self.engine = ScriptedEngine(
            folder, config=config, observer=observer, num_blocks=20_000, max_num_batched_tokens=4096,
            max_num_seqs=REQUESTS,
        )  # fmt: skip
        self.engine.scheduler._speculation._clock = time.perf_counter
        self.step_s = step_s
        self.number = 0
        self.spent: Counter[str] = Counter()

    def fill(self) -> None:
        """Answers repeat their prompts with a change every few tokens: about three tokens per step."""
        while len(self.engine.scheduler.requests) < REQUESTS:
            n = self.number
            prompt = [10 + (n * 31 + i * i) % 480 for i in range(ANSWER_TOKENS)]
            answer = [token if i % 4 else 10 + (token + n) % 480 for i, token in enumerate(prompt)]
            request = self.engine.add(f"r{n}", prompt, answer)
            request.trace_headers = HEADERS
            self.number += 1

    def block(self) -> dict[str, float]:
        """Microseconds per step."""
        engine, drafted = self.engine, 0
        self.spent.clear()
        others_s = time.process_time() - time.thread_time()
        for _ in range(STEPS):
            self.fill()
            output = engine.scheduler.schedule()
            result = engine._execute(output)
            engine.scheduler.get_grammar_bitmask(output)
            time.sleep(self.step_s)
            engine.scheduler.update_from_output(output, result)
            drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        others_s = time.process_time() - time.thread_time() - others_s
        per_step = {name: spent_s / STEPS * 1e6 for name, spent_s in self.spent.items()}
        return {
            "path": per_step.get("enter", 0.0) + per_step.get("finish", 0.0),
            "beside": per_step.get("keep", 0.0),
            "others": others_s / STEPS * 1e6,
            "drafted": drafted / STEPS,
        }

    def watch(self) -> None:
        """Time the calls into the accounts, all of which belong to telemetry."""
        accounts = self.engine.scheduler._speculation._accounts
        for name in ("enter", "finish", "keep"):
            setattr(accounts, name, self.timed(name, getattr(accounts, name)))

    def timed(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[name] += time.thread_time() - begin

        return timed


def main() -> None:
    """Print a table for people and one JSON line for programs."""
    parser = argparse.ArgumentParser(description="What telemetry adds to an engine step.")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    command = [sys.executable, "-c", COLLECTOR]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as collector,
    ):
        assert collector.stdout is not None
        assert collector.stdin is not None
        endpoint = collector.stdout.readline().strip()
        observer = build_engine_observer(endpoint=endpoint, registry=CollectorRegistry(), environ={})
        assert isinstance(observer, EngineObserver)
        observer.wait_ready(60.0)
        model = write_model_config(Path(folder))
        load = Load(model, observer, options.step_ms / 1e3)
        load.block()
        load.watch()
        found = [load.block() for _ in range(options.blocks)]
        observer.close()
        collector.stdin.close()
    for name in ("path", "beside", "others"):
        values = sorted(block[name] for block in found)
        middle = statistics.median(values)
        print(
            f"{name:7} {middle:6.1f} us per step ({values[0]:.0f} to {values[-1]:.0f}),"
            f" {middle / options.step_ms / 10:.2f} % of {options.step_ms:.0f} ms"
        )
    print(f"{REQUESTS} requests, {found[-1]['drafted']:.0f} draft tokens per step, lost: {observer.losses}")
    print(json.dumps({"blocks": found, "options": vars(options)}))


if __name__ == "__main__":
    main()
