"""The forcing hooks on a stand-in for vLLM's runner: rows, positions, counts. The real one: test_replay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from agentspec_runtime.bench.replay_worker import REPLAY_KEY, ReplayExtension  # noqa: E402 - after the skip

VOCABULARY = 50


class Runner:
    """Samples greedily and verifies drafts as vLLM's rejection sampler does at temperature 0."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.requests: dict[str, Any] = {}
        self.drafter = SimpleNamespace()
        self.num_spec_tokens = 3
        self.positions = torch.zeros(64, dtype=torch.int64)
        self.query_start_loc = SimpleNamespace(gpu=torch.zeros(9, dtype=torch.int64))
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=np.int32))
        self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[], num_prompt_tokens=np.zeros(8, np.int32))
        self.drafts: list[list[int]] = []

    def add(self, req_id: str, recorded: list[int] | None) -> None:
        extra = {REPLAY_KEY: recorded} if recorded is not None else None
        self.requests[req_id] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))

    def _sample(self, logits: Any, verification: Any) -> Any:
        best = logits.argmax(dim=1).tolist()
        width = max(len(draft) for draft in self.drafts) + 1
        out, row = [], 0
        for draft in self.drafts:
            emitted = []
            for position in range(len(draft) + 1):
                emitted.append(best[row + position])
                if position < len(draft) and draft[position] != best[row + position]:
                    break
            out.append(emitted + [-1] * (width - len(emitted)))
            row += len(draft) + 1
        return SimpleNamespace(sampled_token_ids=torch.tensor(out))

    def execute_model(self, scheduled: Any) -> None:
        return None

    def propose_draft_token_ids(self, *args: Any) -> None:
        return None

    def step(
        self,
        extension: ReplayExtension,
        rows: list[tuple[str, int, int, list[int]]],
        discarded: tuple[int, ...] = (),
    ) -> list[list[int]]:
        """Rows of (request, prompt length, position of the first input token, drafts)."""
        self.drafts = [draft for *_, draft in rows]
        self.input_batch.num_reqs = len(rows)
        self.input_batch.req_ids = [req_id for req_id, *_ in rows]
        self.input_batch.num_prompt_tokens[: len(rows)] = [length for _, length, _, _ in rows]
        inputs = [position + k for _, _, position, draft in rows for k in range(len(draft) + 1)]
        self.positions[: len(inputs)] = torch.tensor(inputs)
        ends = np.cumsum([len(draft) + 1 for draft in self.drafts])
        self.query_start_loc.gpu[1 : len(rows) + 1] = torch.from_numpy(ends)
        self.discard_request_mask.np[:] = 0
        self.discard_request_mask.np[list(discarded)] = 1
        with_drafts = any(self.drafts)
        verification = SimpleNamespace(
            num_draft_tokens=[len(draft) for draft in self.drafts],
            logits_indices=torch.arange(len(inputs)),
        )
        self.execute_model(
            SimpleNamespace(
                total_num_scheduled_tokens=len(inputs),
                num_scheduled_tokens={req_id: len(draft) + 1 for req_id, _, _, draft in rows},
                scheduled_spec_decode_tokens={r: draft for r, _, _, draft in rows if draft},
                preempted_req_ids=set(),
            )
        )
        logits = torch.randn(len(inputs), VOCABULARY)
        sampled = self._sample(logits, verification if with_drafts else None)
        return [[token for token in row if token >= 0] for row in sampled.sampled_token_ids.tolist()]


@pytest.fixture
def extension() -> ReplayExtension:
    extension = ReplayExtension()
    extension.model_runner = Runner()  # type: ignore[assignment]
    extension.replay_install()
    return extension


def taken(extension: ReplayExtension) -> list[list[list[int]]]:
    return [step[7] for step in json.loads(extension.replay_take())]


def test_recorded_tokens_win_wherever_the_row_stands(extension: ReplayExtension) -> None:
    runner: Any = extension.model_runner
    runner.add("a", [11, 12, 13, 14, 15])
    runner.add("b", [21, 22, 23])
    assert runner.step(extension, [("a", 4, 3, []), ("b", 9, 8, [])]) == [[11], [21]]
    assert runner.step(extension, [("b", 9, 9, []), ("a", 4, 4, [])]) == [[22], [12]]
    assert taken(extension) == [[[0, 0, 1], [0, 0, 1]]] * 2
    assert taken(extension) == []


def test_drafts_are_accepted_exactly_as_far_as_they_equal_the_recording(extension: ReplayExtension) -> None:
    runner: Any = extension.model_runner
    runner.add("a", [11, 12, 13, 14, 15])
    runner.add("b", [21, 22, 23, 24])
    out = runner.step(extension, [("a", 4, 4, [12, 99, 14]), ("b", 9, 9, []), ("b", 9, 9, [22, 23])])
    assert out[0] == [12, 13, 14][:2] or out[0] == [12, 13]
    assert out[1] == [22]
    assert out[2] == [22, 23, 24]
    assert taken(extension) == [[[3, 1, 2], [0, 0, 1], [2, 2, 3]]]


def test_drafts_behind_the_end_count_as_rejected(extension: ReplayExtension) -> None:
    runner: Any = extension.model_runner
    runner.add("a", [11, 12, 13])
    out = runner.step(extension, [("a", 4, 4, [12, 13, 1, 2])])
    assert out[0][:2] == [12, 13]
    assert taken(extension) == [[[4, 2, 2]]]


def test_a_step_behind_the_end_is_not_counted(extension: ReplayExtension) -> None:
    """Asynchronous scheduling, as plain runs, has queued one more step when the end of an answer is seen."""
    runner: Any = extension.model_runner
    runner.add("a", [11, 12])
    runner.add("b", [21, 22, 23])
    for done in range(3):
        runner.step(extension, [("a", 4, 3 + done, []), ("b", 9, 8 + done, [])])
    assert taken(extension) == [[[0, 0, 1], [0, 0, 1]]] * 2 + [[[0, 0, 1]]]


def test_zeros_that_no_drafter_made_are_counted_apart(extension: ReplayExtension) -> None:
    runner: Any = extension.model_runner
    runner.add("a", [11, 12, 13])
    runner.add("b", [21, 22, 23])
    runner.step(extension, [("a", 4, 4, [0, 0, 0]), ("b", 9, 9, [22, 0])])
    runner.step(extension, [("a", 4, 5, [0]), ("b", 9, 11, [])])  # a draft of the token 0, wrong as it is
    first, second = json.loads(extension.replay_take())
    assert (first[6], second[6]) == (3, 0)
    assert first[7] == [[0, 0, 1], [2, 1, 2]]
    assert second[7][0] == [1, 0, 1]


def test_prompt_chunks_and_recomputed_tokens_are_no_output(extension: ReplayExtension) -> None:
    """A chunk that is not the last (its sample is thrown away), also after a preemption inside the output."""
    runner: Any = extension.model_runner
    runner.add("a", [11, 12, 13])
    runner.add("b", [21, 22, 23])
    runner.step(extension, [("a", 40, 20, []), ("b", 4, 4, [])], discarded=(0, 1))
    runner.step(extension, [("a", 40, 39, []), ("b", 4, 5, [])])
    assert taken(extension) == [[], [[0, 0, 1], [0, 0, 1]]]


def test_a_request_that_is_not_replayed_samples_for_itself(extension: ReplayExtension) -> None:
    runner: Any = extension.model_runner
    runner.add("warm", None)
    runner.add("a", [11])
    torch.manual_seed(0)
    [free], forced = runner.step(extension, [("warm", 4, 3, []), ("a", 4, 3, [])])
    torch.manual_seed(0)
    assert free == int(torch.randn(2, VOCABULARY).argmax(dim=1)[0])
    assert forced == [11]


def test_many_requests_come_and_go_and_long_outputs_fit(extension: ReplayExtension) -> None:
    """The table grows, and rows of finished requests are used again without a trace of the old text."""
    runner: Any = extension.model_runner
    for number in range(40):
        recorded = [number % VOCABULARY] * (1 + 10 * number)
        runner.add(f"r{number}", recorded)
        alive = [f"r{n}" for n in range(max(0, number - 5), number + 1)]
        for gone in set(runner.requests) - set(alive):
            del runner.requests[gone]
        out = runner.step(extension, [(req_id, 4, 3, []) for req_id in alive])
        assert out == [[int(req_id[1:])] for req_id in alive]


def test_reset_forgets_steps_and_what_the_proposer_learned(extension: ReplayExtension) -> None:
    cache_module = pytest.importorskip("arctic_inference.suffix_decoding")
    runner: Any = extension.model_runner
    cache = cache_module.SuffixDecodingCache(max_tree_depth=8, max_cached_requests=10)
    runner.drafter.suffix_cache = cache
    cache.start_request("x", [1, 2, 3])
    cache.add_active_response("x", [4, 5, 6, 7])
    cache.stop_request("x")
    cache.start_request("y", [9, 8])
    runner.add("a", [11])
    runner.step(extension, [("a", 4, 3, [])])
    extension.replay_reset()
    assert taken(extension) == []
    cache.start_request("z", [7, 7])
    assert cache.speculate("z", [4, 5], max_spec_tokens=4).token_ids == []


def test_another_runner_is_refused() -> None:
    extension = ReplayExtension()
    extension.model_runner = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        extension.replay_install()
