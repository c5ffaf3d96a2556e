"""The simulator: what its counts add up to, and that its n-gram rule is vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import PLAIN_TEMPLATE, save_tokenizer
from test_tokens import save_recording

from agentspec_runtime.bench.rivals import (
    Candidate,
    NgramRival,
    NgramSetting,
    SuffixRival,
    ngram_continuation,
)
from agentspec_runtime.bench.simulate import Plan, replay_request, select_part, simulate
from agentspec_runtime.bench.tally import Tally, WireTally
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory
from agentspec_runtime.errors import ConfigurationError


def request(prompt: Sequence[int], output: Sequence[int]) -> TokenRequest:
    return TokenRequest(
        prompt_ids=np.array(prompt, dtype=np.int32), output_ids=np.array(output, dtype=np.int32)
    )


class ScriptedRival:
    """Drafts the truth, with a mistake at a given position of every draft, or nothing at all."""

    method = "scripted"
    by_block: Mapping[str, list[int]] = {}

    def __init__(self, truth: Sequence[int], drafts: Sequence[tuple[int, int | None]]) -> None:
        self._truth = list(truth)
        self._drafts = drafts
        self.settings = [str(draft) for draft in drafts]
        self.seen: list[int] = []

    def start(self, req_id: str, session: str, prompt_ids: np.ndarray) -> None:
        self.seen = []

    def extend(self, token_ids: np.ndarray) -> None:
        self.seen.extend(token_ids.tolist())

    def draft(self, setting: int) -> Candidate:
        length, wrong_at = self._drafts[setting]
        assert self.seen == self._truth[: len(self.seen)]
        rest = [*self._truth[len(self.seen) :], *[0] * length][:length]
        if wrong_at is not None and wrong_at < length:
            rest[wrong_at] = -1
        survival = np.linspace(0.9, 0.5, length, dtype=np.float32)
        return Candidate(token_ids=np.array(rest, dtype=np.int32), survival=survival)

    def finish(self) -> None:
        assert self.seen == self._truth


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), min_size=1))
@settings(max_examples=200, deadline=None)
def test_every_output_token_is_accepted_or_sampled_at_every_setting(
    size: int, drafts: list[tuple[int, int | None]]
) -> None:
    truth = list(range(1, size + 1))
    tallies = [Tally() for _ in drafts]
    replay_request(ScriptedRival(truth, drafts), "r", "s", request([1], truth), tallies)
    for (length, wrong_at), tally in zip(drafts, tallies, strict=True):
        right = length if wrong_at is None else min(wrong_at, length)
        decode_steps = -(-(size - 1) // (right + 1))
        assert tally.steps == 1 + decode_steps
        assert tally.accepted == size - 1 - decode_steps + (
            right > 0 and decode_steps * (right + 1) > size - 1
        )
        assert tally.drafted == length * decode_steps
        assert tally.out_tokens == size == int((tally.step_tokens * np.arange(65)).sum())


def test_draft_tokens_behind_the_end_of_an_answer_are_rejected() -> None:
    tally = Tally()
    replay_request(ScriptedRival([1, 2, 3], [(10, None)]), "r", "s", request([1], [1, 2, 3]), [tally])
    assert (tally.steps, tally.drafted, tally.accepted, tally.rejected) == (2, 10, 2, 8)
    assert tally.rejected_share == 0.8
    assert tally.tokens_per_step == 1.5


def test_calibration_error_is_the_distance_between_stated_and_seen_survival() -> None:
    tally = Tally()
    for accepted in (2, 0):  # both slots survive in half of the drafts
        tally.add_survival(np.array([0.8, 0.6], dtype=np.float32), accepted)
    assert tally.calibration_error == pytest.approx((0.3 + 0.1) / 2, abs=1e-6)
    assert Tally().calibration_error is None
    assert WireTally.of(tally).calibration_error == 0.2


def test_an_ngram_drafter_copies_what_followed_the_earliest_longest_match() -> None:
    rival = NgramRival([NgramSetting(min_n=2, max_n=3, num_tokens=2)])
    rival.start("r", "s", np.array([9, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7], dtype=np.int32))
    rival.extend(np.array([1, 2, 3], dtype=np.int32))
    assert rival.draft(0).token_ids.tolist() == [4, 5]
    rival.extend(np.array([8], dtype=np.int32))
    assert rival.draft(0).token_ids.tolist() == []


@pytest.mark.engine
@pytest.mark.slow
def test_the_ngram_rule_is_that_of_vllm() -> None:
    proposer = pytest.importorskip("vllm.v1.spec_decode.ngram_proposer")
    random = np.random.default_rng(7)
    for _ in range(2_000):
        text = random.integers(0, random.integers(2, 6), random.integers(1, 40)).astype(np.int32)
        low = int(random.integers(1, 4))
        high = low + int(random.integers(0, 4))
        theirs = proposer._find_longest_matched_ngram_and_propose_tokens(text, low, high, 1_000, 5)
        start = ngram_continuation(text, low, high)
        assert text[start : start + 5].tolist() == theirs.tolist(), (text.tolist(), low, high)


def test_suffix_settings_share_one_cache_without_changing_each_other() -> None:
    pytest.importorskip("arctic_inference")
    from agentspec_runtime.bench.rivals import SUFFIX_RECOMMENDED, SuffixSetting

    other = SuffixSetting(factor=4.0, min_prob=0.1)
    random = np.random.default_rng(3)
    requests = [request(random.integers(0, 9, 50), random.integers(0, 9, 60)) for _ in range(4)]
    alone, together = [Tally()], [Tally(), Tally()]
    for settings_, tallies in (([SUFFIX_RECOMMENDED], alone), ([SUFFIX_RECOMMENDED, other], together)):
        rival = SuffixRival(settings_)
        for number, one in enumerate(requests):
            replay_request(rival, str(number), "s", one, tallies)
    assert (alone[0].drafted, alone[0].accepted) == (together[0].drafted, together[0].accepted)
    assert alone[0].drafted > 0
    assert together[1].drafted > together[0].drafted


def test_the_set_aside_quarter_is_a_partition_by_task() -> None:
    runs = [
        TokenTrajectory(id=f"{g}-{n}", group=f"task-{g}", workload="w", model="", fidelity="", requests=())
        for g in range(400)
        for n in range(2)
    ]
    tune, test = select_part(runs, "tune"), select_part(runs, "test")
    assert len(tune) + len(test) == len(runs) == len(select_part(runs, "all"))
    assert not {run.group for run in tune} & {run.group for run in test}
    assert 0.2 < len(test) / len(runs) < 0.3
    assert {run.id for run in select_part(runs[::-1], "test")} == {run.id for run in test}


def test_a_whole_simulation_holds_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a recording file: oracles in order, nothing better than the bound, ours under its own oracle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "m", PLAIN_TEMPLATE)
    code = "def add(a, b):\n    return a + b\n"
    messages = [{"role": "user", "content": f"write {code}"}, {"role": "assistant", "content": code}]
    messages += [{"role": "user", "content": "again"}, {"role": "assistant", "content": f"again: {code}"}]
    recording = save_recording(tmp_path / "r.jsonl", messages=messages, tools=[])
    reports: list[tuple[int, int]] = []
    plan = Plan(files=(recording,), model=model, methods=("ngram", "agentspec", "oracle"))
    [result] = simulate(plan, lambda done, total: reports.append((done, total)))
    lanes = {(lane.method, lane.setting): lane.figures for lane in result.lanes}
    assert (result.requests, result.skipped_requests) == (2, 0)
    assert result.out_tokens == len(code) + 1 + len(f"again: {code}") + 1
    assert reports[-1] == (8, 8)
    oracle = {name: lanes["oracle", name].tokens_per_step for name in ("O1", "O2", "O2/1", "O3", "LZ")}
    assert 1 < oracle["O2"] <= oracle["O2/1"] <= oracle["O3"] <= oracle["LZ"]
    assert oracle["O1"] == lanes["agentspec", "S >= 0"].tokens_per_step
    for (method, _), figures in lanes.items():
        assert figures.out_tokens == result.out_tokens
        assert figures.accepted + figures.rejected == figures.drafted
        assert figures.tokens_per_step <= oracle["LZ"]
        assert (method == "oracle") <= (figures.rejected == 0)


def test_plans_that_cannot_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "m", PLAIN_TEMPLATE)
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    recording = save_recording(tmp_path / "r.jsonl", messages=plain, tools=[])
    with pytest.raises(ConfigurationError, match="unknown method 'magic'"):
        simulate(Plan(files=(recording,), model=model, methods=("magic",)))
    with pytest.raises(ConfigurationError, match="no trajectory is left"):
        simulate(Plan(files=(recording,), model=model, methods=("ngram",), max_model_len=3))
