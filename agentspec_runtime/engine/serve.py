"""`agentspec serve`: vLLM's own OpenAI server, in this process, with our scheduler and middleware.

What is started is what `vllm serve` would start with the arguments that are printed: vLLM's own serve
command is called with them. (The `vllm` script itself asks for the metadata of a distribution named `vllm`
and therefore fails in the CPU wheel.) Everything that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from agentspec_runtime.engine.args import DEFAULT_NUM_SPECULATIVE_TOKENS, RUNNER_VARIABLE
from agentspec_runtime.engine.compat import require_vllm
from agentspec_runtime.engine.host import (
    available_memory_bytes,
    has_fast_bfloat16,
    intel_openmp,
    port_problem,
    usable_cores,
)
from agentspec_runtime.engine.server_plan import EmbeddedFiles, ServeOptions, plan_server
from agentspec_runtime.errors import AgentSpecError, ConfigurationError, ServerError

__all__ = ["ServeOptions", "serve"]

_DEFAULT_PORT: Final = 8000
# What vLLM logs when its engine process ends by itself; its API process then stops as if it had been told.
_ENGINE_DIED: Final = "engine core exited unexpectedly"


def serve(arguments: Sequence[str], options: ServeOptions, say: Callable[[str], None]) -> None:
    """Start the server and stay until it is told to stop.

    Raises:
        AgentSpecError: it cannot start with these arguments, or it ended by itself.
    """
    installation = require_vllm()
    with _metrics_folder(shared=not options.plain) as remove_metrics:
        say(f"loading {installation}")
        started_s = time.monotonic()
        from agentspec_runtime.engine.vllm_serve import VllmServe

        vllm_serve = VllmServe()
        try:
            plan = plan_server(
                arguments,
                options,
                parser=vllm_serve,
                embedded=lambda: _embedded_files(say),
                cpu=installation.cpu,
                environment=os.environ,
                available_bytes=available_memory_bytes(),
                fast_bfloat16=has_fast_bfloat16(),
                cores=usable_cores(),
                openmp=intel_openmp(),
            )
            os.environ.update(plan.environment)
            parsed = vllm_serve.parse(plan.arguments)
            vllm_serve.check(parsed)
        except AgentSpecError:
            raise
        except (ValueError, TypeError, OSError) as error:  # vLLM on bad values, pairs and YAML files
            raise ConfigurationError(f"vLLM does not take these arguments: {error}") from error
        _check_port(parsed)
        if RUNNER_VARIABLE in plan.environment:
            say(f"using vLLM's first model runner ({RUNNER_VARIABLE}=0): the second has no custom proposers")
        if installation.cpu and parsed.dtype == "auto" and not has_fast_bfloat16():
            say("this processor emulates bfloat16: --dtype float32 is several times faster, if memory allows")
        length = (parsed.speculative_config or {}).get("num_speculative_tokens", 0)
        if not options.plain and parsed.enable_lora and length < DEFAULT_NUM_SPECULATIVE_TOKENS:
            say(
                f"LoRA: drafts of at most {length} tokens, so that those of all requests fit into a step; "
                "for longer ones raise --max-num-batched-tokens or lower --max-num-seqs"
            )
        say(plan.command)
        say(f"starting after {time.monotonic() - started_s:.0f} s; Ctrl-C stops")

        def interrupted() -> None:
            say("stopped before the server was ready")
            remove_metrics()

        with _engine_watch() as died, _interruptible(interrupted):
            try:
                vllm_serve.run(parsed)
            except KeyboardInterrupt:  # vLLM's answer to SIGTERM while it starts
                say("stopped before the server was ready")
                return
            except Exception as error:
                raise ServerError(
                    f"vLLM did not start: {error} (its own messages above say more; `agentspec doctor` "
                    "checks this machine)"
                ) from error
        if died:
            raise ServerError("vLLM's engine process ended by itself; its last messages above say why")
        say("stopped")


def _embedded_files(say: Callable[[str], None]) -> EmbeddedFiles:
    from agentspec_runtime.embedded import EMBEDDED_MODEL_NAME, chat_template_path, prepare_embedded_model

    say(f"no model named: serving the embedded {EMBEDDED_MODEL_NAME}")
    return EmbeddedFiles(
        name=EMBEDDED_MODEL_NAME, folder=prepare_embedded_model(say), chat_template=chat_template_path()
    )


def _check_port(parsed: argparse.Namespace) -> None:
    """vLLM finds a taken port only after it has read the model's configuration, and says less."""
    if parsed.uds or parsed.headless:
        return
    port = parsed.port if parsed.port is not None else _DEFAULT_PORT
    if problem := port_problem(parsed.host or "", port):
        raise ServerError(f"{problem}: stop what runs there, or choose another one with --port N")


@contextmanager
def _metrics_folder(*, shared: bool) -> Iterator[Callable[[], None]]:
    """Let what the engine process counts appear under the API process's /metrics; yields how to clean up.

    Must be entered before anything imports prometheus_client, which reads the variable once.
    """
    if not shared or os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        yield lambda: None
        return
    from agentspec_runtime.telemetry.metrics import prepare_multiprocess

    folder = prepare_multiprocess(os.environ)
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        yield remove
    finally:
        remove()


@contextmanager
def _interruptible(clean_up: Callable[[], None]) -> Iterator[None]:
    """End at once on SIGINT while the server starts; once it serves, vLLM has handlers of its own.

    An exception would be the polite way, but the main thread waits for the engine inside pyzmq (27.3), which
    loses it, and vLLM does not notice there that its engine has gone. Nothing is served yet, so nothing is
    lost: end the engine (its workers follow) and leave.
    """

    def leave(number: int, frame: object) -> None:
        del number, frame
        for child in multiprocessing.active_children():
            child.kill()
        clean_up()
        os._exit(0)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _EngineDeath(logging.Handler):
    """Hears vLLM say that its engine died: its server then ends as if somebody had stopped it."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message if it is the one."""
        if _ENGINE_DIED in str(record.msg):
            self.seen.append(str(record.msg))


@contextmanager
def _engine_watch() -> Iterator[list[str]]:
    handler = _EngineDeath()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)
