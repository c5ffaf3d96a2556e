"""What telemetry costs the engine: `python -m agentspec_runtime.telemetry.overhead`.

A loop plays an engine under load: every step hands over one step report, and as many requests end as end in
such an engine. Two costs are told apart, both in microseconds per step:

  path     spent in the loop's own thread inside `on_step` and `on_request`; the step waits for it
  cpu      processor time of the whole process above the same loop without an observer: path, the
           background threads, Prometheus, handing reports to the span worker (itself a process apart)

The share is of a step of `--step-ms`. All of `cpu` would be felt only if the engine never waited for its
GPU; `path` is felt always. Spans go to a receiver in another process, as to a collector.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.observe import BlockReport, DraftSource, Observer, RequestReport, StepReport, Verdict

__all__ = ["Cost", "main", "measure"]

_RECEIVER: Final = """
import sys
from agentspec_runtime.telemetry.receiver import OtlpReceiver
with OtlpReceiver() as receiver:
    print(receiver.endpoint, flush=True)
    sys.stdin.read()
"""
_STEPS_PER_REQUEST: Final = 200
_HEADERS: Final = {"traceparent": f"00-{'4b' * 16}-{'f0' * 8}-01"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One setting. Microseconds per step; spread is the range over the rounds."""

    setting: str
    path_us: float
    cpu_us: float
    cpu_spread_us: tuple[float, float]
    spans_lost: int
    share_path: float
    share_cpu: float


def _step_report() -> StepReport:
    verdict = Verdict(drafted=40, accepted=28)
    cells = [(kind, source) for kind in list(SegmentKind)[3:6] for source in list(DraftSource)[:2]]
    return StepReport(
        num_sampling=64, num_prefill_tokens=512, num_draft_tokens=240, num_waiting=3, price=0.4,
        predicted_s=0.01, measured_s=0.0104, draft_s=0.0004, index_s=0.0002, index_bytes=1 << 28,
        verdicts=dict.fromkeys(cells, verdict),
    )  # fmt: skip


def _request_report(req_id: str) -> RequestReport:
    now = time.time()
    verdicts = {source: Verdict(drafted=50, accepted=31, discarded=1) for source in list(DraftSource)[:3]}
    blocks = tuple(
        BlockReport(
            kind=kind, start_s=now - 2 + part / 2, end_s=now - 1.5 + part / 2, num_tokens=100, num_steps=50,
            verdicts=verdicts, mean_batch=63.2, mean_budget=240.0, step_s_p50=0.0101, step_s_p95=0.0142,
        )
        for part, kind in enumerate(("reasoning", "text", "code", "tool_call"))
        for kind in [SegmentKind(kind)]
    )  # fmt: skip
    return RequestReport(
        req_id=req_id, trace_headers=_HEADERS, session="s-1", agent="coder", turn=4, arrival_s=now - 2.6,
        scheduled_s=now - 2.5, first_token_s=now - 2, end_s=now, num_prompt_tokens=6000,
        num_cached_tokens=5800, num_output_tokens=400, num_preemptions=0, finish_reason="stop", blocks=blocks,
        model="m",
        per_step_drafted=(3,) * _STEPS_PER_REQUEST, per_step_accepted=(2,) * _STEPS_PER_REQUEST,
    )  # fmt: skip


def _play(observer: Observer | None, *, steps: int, batch: int, pause_s: float) -> tuple[float, float]:
    """Seconds in the observer and processor seconds of the process, over all steps."""
    path_s = due = 0.0
    ended = 0
    cpu_s = time.process_time()
    for _ in range(steps):
        due += batch / _STEPS_PER_REQUEST
        step = _step_report()
        requests = [_request_report(f"r{ended + extra}") for extra in range(int(due))]
        ended += len(requests)
        due -= len(requests)
        if observer is not None:
            began = time.perf_counter()
            observer.on_step(step)
            for request in requests:
                observer.on_request(request)
            path_s += time.perf_counter() - began
        time.sleep(pause_s)  # where an engine waits for its GPU
    return path_s, time.process_time() - cpu_s


def measure(
    setting: str,
    build: Callable[[], Observer],
    *,
    steps: int,
    batch: int,
    step_s: float,
    rounds: int,
    lost: Callable[[Observer], int],
) -> Cost:
    """Rounds with and without the observer, alternated; medians."""
    paths: list[float] = []
    extras: list[float] = []
    num_lost = 0
    for _ in range(rounds):
        _, without_s = _play(None, steps=steps, batch=batch, pause_s=step_s / 4)
        observer = build()
        path_s, with_s = _play(observer, steps=steps, batch=batch, pause_s=step_s / 4)
        cpu_s = time.process_time()
        observer.close()  # what is queued at the end belongs to these steps
        with_s += time.process_time() - cpu_s
        num_lost += lost(observer)
        paths.append(path_s / steps * 1e6)
        extras.append((with_s - without_s) / steps * 1e6)
    path_us, cpu_us = statistics.median(paths), statistics.median(extras)
    return Cost(
        setting=setting,
        path_us=path_us,
        cpu_us=cpu_us,
        cpu_spread_us=(min(extras), max(extras)),
        spans_lost=num_lost,
        share_path=path_us / step_s / 1e6,
        share_cpu=cpu_us / step_s / 1e6,
    )


@contextmanager
def _receiver() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        if process.stdout is None or process.stdin is None:
            raise OSError("no pipes to the receiver")
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(10)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table for people and one JSON line for programs."""
    from prometheus_client import CollectorRegistry

    from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer

    parser = argparse.ArgumentParser(description="What telemetry costs the engine, per step.")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64, help="requests in flight")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)

    def lost(observer: Observer) -> int:
        return observer.losses.spans if isinstance(observer, EngineObserver) else 0

    def run(setting: str, endpoint: str | None) -> Cost:
        def build() -> Observer:
            observer = build_engine_observer(endpoint=endpoint, registry=CollectorRegistry(), environ={})
            if isinstance(observer, EngineObserver):
                observer.wait_ready(30.0)
            return observer

        return measure(
            setting, build, steps=options.steps, batch=options.batch, step_s=options.step_ms / 1e3,
            rounds=options.rounds, lost=lost,
        )  # fmt: skip

    with _receiver() as endpoint:
        costs = [
            run("metrics", None),
            run("metrics + spans", endpoint),
            run("dead collector", "http://127.0.0.1:9"),
        ]
    print(f"{'':18}{'path':>10}{'share':>9}{'cpu':>10}{'share':>9}   spread of cpu")
    for cost in costs:
        low, high = cost.cpu_spread_us
        print(
            f"{cost.setting:18}{cost.path_us:8.2f}us{cost.share_path:9.3%}{cost.cpu_us:8.1f}us"
            f"{cost.share_cpu:9.2%}   {low:.1f} .. {high:.1f} us"
        )
    document = {"options": vars(options), "cpus": os.cpu_count(), "costs": [asdict(cost) for cost in costs]}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
