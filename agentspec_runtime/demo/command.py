"""`agentspec demo`: the same agents on a plain server and on ours, and what came of it.

One server after the other, so that they do not share the machine. Everything for people goes to standard
output as it happens; the last line there is the JSON document of `summary.py`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import openai
from rich.console import Console
from rich.status import Status

from agentspec_runtime.client.instrument import instrument
from agentspec_runtime.client.recording import record
from agentspec_runtime.demo.agents import Workload, run_agents, warm_up
from agentspec_runtime.demo.blocks import REQUEST_SPAN, with_blocks
from agentspec_runtime.demo.server import ServerCommand, end_of_log, free_port, running_server
from agentspec_runtime.demo.summary import Side, summarize
from agentspec_runtime.demo.tables import print_blocks, print_result, print_totals, print_turns, turn_line
from agentspec_runtime.demo.tasks import CODING_TASKS, FUNCTION_TASKS
from agentspec_runtime.demo.turns import TaskResult, Turn, TurnLog
from agentspec_runtime.embedded import EMBEDDED_MODEL_NAME, prepare_embedded_model
from agentspec_runtime.errors import AgentSpecError, ConfigurationError, ServerError
from agentspec_runtime.telemetry.client import configure_tracing
from agentspec_runtime.telemetry.receiver import OtlpReceiver

__all__ = ["main"]

# Eager starts a minute sooner than compiled. float32, because greedy answers of the two servers are
# compared to the character. 4096 tokens are three times the longest conversation here.
_EMBEDDED_FLAGS: Final = ("--enforce-eager", "--dtype=float32", "--max-model-len=4096")
_ATTEMPTS: Final = 2
_PIPE_WIDTH: Final = 110
_SPAN_TIMEOUT_S: Final = 10.0
"""The engine sends its spans in batches, one second apart at most."""
_INTERRUPTED: Final = 130
_TELL_EVERY_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    out: Path
    model: str | None
    served_name: str
    workload: Workload
    vllm_flags: tuple[str, ...]
    port: int | None
    record: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0 done, 2 not possible, 130 interrupted."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        options = _parse(sys.argv[1:] if argv is None else list(argv))
        line = _Demo(options, console).run()
    except KeyboardInterrupt:
        console.print("stopped; no server is left running")
        return _INTERRUPTED
    except AgentSpecError as error:
        sys.stdout.flush()
        print(f"agentspec demo: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(line, flush=True)
    return 0


def _terminate(*_: object) -> None:
    # As an exception, so that every `finally` between here and the server runs.
    raise KeyboardInterrupt


class _Demo:
    """One run of the demo."""

    def __init__(self, options: _Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._began_s = time.monotonic()
        self._logs: list[Path] = []
        self._num_turns = 0

    def run(self) -> str:
        """All of it; returns the last line."""
        options = self._options
        options.out.mkdir(parents=True, exist_ok=True)
        if options.model is None:
            prepare_embedded_model(self._say)  # converted here, where it shows, and not inside the server
        with ExitStack() as stack:
            receiver = stack.enter_context(OtlpReceiver())
            tracing = stack.enter_context(
                configure_tracing(receiver.endpoint, service_name="agentspec-demo", environ={})
            )
            stack.enter_context(instrument())
            plain = self._run_side("plain", receiver)
            drafting = self._run_side("drafting", receiver)
            tracing.flush()
            trace_file = receiver.write_jsonl(options.out / "trace.jsonl")
        summary = summarize(
            plain,
            drafting,
            model=options.served_name,
            trace_file=str(trace_file),
            log_files=[str(path) for path in self._logs],
            elapsed_s=time.monotonic() - self._began_s,
        )
        console = self._console
        console.print()
        print_turns(console, plain, drafting)
        print_blocks(console, summary.blocks)
        print_totals(console, summary)
        print_result(console, summary, plain.turns, drafting.turns)
        console.print(
            f"\nTrace of both runs: {trace_file}\n"
            f"  in the terminal:  agentspec trace list {trace_file}   (then: trace open, trace compare)\n"
            "  in Jaeger:        open its UI, choose Search, then Upload, and drop the file there\n",
            soft_wrap=True,
            markup=False,
        )
        return summary.line()

    def _run_side(self, side: str, receiver: OtlpReceiver) -> Side:
        options = self._options
        plain = side == "plain"
        title = "plain vLLM, no drafting" if plain else "structure-aware drafting"
        log_file = options.out / f"server-{side}.log"
        self._logs.append(log_file)
        self._num_turns = 0
        command = ServerCommand(
            plain=plain,
            port=options.port or free_port(),
            otlp_endpoint=receiver.endpoint,
            model=options.model,
            vllm_flags=options.vllm_flags,
        )
        self._say(f"[bold]{title}[/]: starting the server")
        with (
            self._console.status("loading the model") as status,
            running_server(command, log=log_file, on_wait=self._waiting(status)) as server,
        ):
            self._say(f"{title}: ready after {server.started_s:.0f} s")
            status.update("the agents are at work")
            log = TurnLog(on_turn=self._show_turn)
            try:
                warm_up(server.base_url, options.served_name)
                with log.listening(), self._recording(plain=plain):
                    results = run_agents(
                        server.base_url, options.served_name, options.workload, log, self._show_task
                    )
            except openai.OpenAIError as error:
                raise ServerError(f"a model call failed: {error}; {end_of_log(log_file)}") from error
            turns: Sequence[Turn] = log.turns
            if not plain:
                turns = _with_engine_blocks(turns, receiver)
            status.update("stopping the server")
        return Side(turns=tuple(turns), results=tuple(results))

    def _waiting(self, status: Status) -> Callable[[float], None]:
        """Progress while a server loads: in place on a terminal, else a line now and then."""
        told_s = 0.0

        def show(waited_s: float) -> None:
            nonlocal told_s
            status.update(f"loading the model, {waited_s:.0f} s")
            if not self._console.is_terminal and waited_s - told_s >= _TELL_EVERY_S:
                told_s = waited_s
                self._say("still loading the model")

        return show

    def _recording(self, *, plain: bool) -> AbstractContextManager[object]:
        """Records the second run only: the first one says the same."""
        path = self._options.record
        return nullcontext() if plain or path is None else record(path)

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began_s:4.0f} s[/]  {text}")

    def _show_turn(self, turn: Turn) -> None:
        self._num_turns += 1
        self._say(turn_line(self._num_turns, turn))

    def _show_task(self, result: TaskResult) -> None:
        verdict = "[green]solved[/]" if result.solved else "[yellow]not solved[/]"
        self._say(
            f"     {result.agent} · {result.task}: {verdict} in {result.attempts} attempt(s), by its tests"
        )


def _with_engine_blocks(turns: Sequence[Turn], receiver: OtlpReceiver) -> list[Turn]:
    """Wait for the engine's spans (it sends them in batches) and attach them. Late ones are left out."""
    wanted = len(turns) + 1  # the warm-up has one too
    try:
        spans = receiver.wait_for(
            lambda seen: sum(span.name == REQUEST_SPAN for span in seen) >= wanted, timeout_s=_SPAN_TIMEOUT_S
        )
    except TimeoutError:
        spans = receiver.spans()
    return with_blocks(turns, spans)


def _parse(argv: Sequence[str]) -> _Options:
    own, extra = _split(argv)
    parser = argparse.ArgumentParser(
        prog="agentspec demo",
        description="Run a LangGraph coding agent and a Reflexion loop on a plain vLLM server, then on one "
        "with structure-aware drafting, and compare. The last line printed is one JSON document.",
        epilog="What stands after -- is passed to both servers: agentspec demo --model Qwen/Qwen3-8B -- "
        "--tool-call-parser hermes --enable-auto-tool-choice",
    )
    parser.add_argument("--model", help="model to serve (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("agentspec-demo"),
        help="folder for trace and logs (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="port of the servers (default: a free one)")
    parser.add_argument(
        "--attempts", type=int, default=_ATTEMPTS, help="attempts per task (default: %(default)s)"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write the agents' traffic, for agentspec bench replay"
    )
    parser.add_argument("--quick", action="store_true", help="one task per agent instead of three")
    parsed = parser.parse_args(own)
    if parsed.attempts < 1:
        raise ConfigurationError(f"--attempts {parsed.attempts}: at least 1")
    number = 1 if parsed.quick else None
    return _Options(
        out=parsed.out,
        model=parsed.model,
        served_name=parsed.model or EMBEDDED_MODEL_NAME,
        workload=Workload(
            coding=CODING_TASKS[:number], functions=FUNCTION_TASKS[:number], attempts=parsed.attempts
        ),
        vllm_flags=(*(() if parsed.model else _EMBEDDED_FLAGS), *extra),
        port=parsed.port,
        record=parsed.record,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
