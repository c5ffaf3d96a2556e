"""Arbitration between our drafts and those of a model drafter."""

import numpy as np
import pytest

from agentspec_runtime.drafting import BatchDraft, BatchObserved
from agentspec_runtime.drafting.assist import Arbiter, Merged
from agentspec_runtime.drafting.draft import SOURCES
from agentspec_runtime.observe import DraftSource

VOCAB = 1000
OURS, ASSIST = SOURCES.index(DraftSource.SESSION), SOURCES.index(DraftSource.ASSIST)
PRICES = np.array([0.3])


def drafts(*lines: tuple[list[int], list[float]], width: int = 8) -> BatchDraft:
    ids = np.zeros((len(lines), width), np.int32)
    survival = np.zeros((len(lines), width), np.float32)
    for i, (tokens, values) in enumerate(lines):
        ids[i, : len(tokens)] = tokens
        survival[i, : len(tokens)] = values
    lengths = np.array([len(tokens) for tokens, _ in lines], np.int64)
    return BatchDraft(ids, survival, np.full(ids.shape, OURS, np.int8), lengths)


def emitted(*lines: list[int], kind: int = 0) -> BatchObserved:
    tokens = np.array([t for line in lines for t in line], np.int32)
    offsets = np.cumsum([0, *map(len, lines)]).astype(np.int64)
    return BatchObserved(
        tokens, np.full(len(tokens), kind, np.int8), np.zeros(len(tokens), np.int32), offsets
    )


def step(
    arbiter: Arbiter, ours: BatchDraft, theirs: list[int], truth: list[int], *, price: float = 0.3
) -> Merged:
    arbiter.offer(["a"], [theirs])
    merged = arbiter.merge(["a"], ours, [32], np.array([price]))
    arbiter.observe(["a"], emitted(truth))
    return merged


def arbiter_of(*req_ids: str) -> Arbiter:
    arbiter = Arbiter(VOCAB)
    for req_id in req_ids:
        arbiter.start(req_id, "tenant")
    return arbiter


def test_without_a_draft_of_the_worker_ours_is_untouched() -> None:
    arbiter = arbiter_of("a")
    ours = drafts(([1, 2], [0.9, 0.8]))
    merged = arbiter.merge(["a"], ours, [32], PRICES)
    assert merged.batch is ours
    assert not merged.offered.any()


def test_the_worker_drafts_where_we_have_nothing() -> None:
    arbiter = arbiter_of("a")
    for _ in range(40):
        merged = step(arbiter, drafts(([], [])), [7, 8], [7, 8, 9])
    draft = merged.batch.draft(0)
    assert draft.token_ids.tolist() == [7, 8]
    assert set(draft.sources.tolist()) == {ASSIST}
    assert draft.survival[1] > 0.8
    assert merged.gains[0, 1] > merged.gains[0, 0] > 0.4


def test_ours_is_continued_where_it_ends_and_keeps_its_source() -> None:
    arbiter = arbiter_of("a")
    for _ in range(40):
        merged = step(arbiter, drafts(([7, 8], [0.9, 0.8])), [7, 8, 9, 4], [7, 8, 9, 4, 5])
    draft = merged.batch.draft(0)
    assert draft.token_ids.tolist() == [7, 8, 9, 4]
    assert draft.sources.tolist() == [OURS, OURS, ASSIST, ASSIST]


def test_a_long_copy_that_the_worker_confirms_stays_ours_and_becomes_surer() -> None:
    arbiter = arbiter_of("a")
    own = [7, 8, 9, 10, 11, 12]
    survival = [0.8**k for k in range(1, 7)]
    for _ in range(60):
        merged = step(arbiter, drafts((own, survival)), [7, 8], [*own, 13], price=0.05)
    draft = merged.batch.draft(0)
    assert draft.token_ids.tolist() == own
    assert set(draft.sources.tolist()) == {OURS}
    assert (draft.survival > np.array(survival) * 1.2).all()
    assert (np.diff(draft.survival) <= 0).all()


@pytest.mark.parametrize(("truth", "winner"), [([7, 8, 1], [7, 8]), ([5, 6, 1], [5, 6])])
def test_who_is_right_when_they_differ_is_learned(truth: list[int], winner: list[int]) -> None:
    arbiter = arbiter_of("a")
    for _ in range(60):
        merged = step(arbiter, drafts(([7, 8], [0.6, 0.36])), [5, 6], truth)
    assert merged.batch.draft(0).token_ids.tolist() == winner


def test_counts_are_calibrated() -> None:
    """The drafter is right in 70 % of the steps: that is what its first token's survival comes to."""
    arbiter = arbiter_of("a")
    random = np.random.default_rng(5)
    seen: list[float] = []
    for number in range(1500):
        merged = step(arbiter, drafts(([], [])), [7], [7 if random.random() < 0.7 else 3], price=0.01)
        if number > 300:
            seen.append(float(merged.batch.survival[0, 0]))
    assert abs(np.mean(seen) - 0.7) < 0.03


def test_only_what_was_emitted_is_scored() -> None:
    """A second token of the drafter is unknown when the step emitted one: no verdict, good or bad."""
    arbiter = arbiter_of("a")
    for _ in range(200):
        merged = step(arbiter, drafts(([], [])), [7, 8], [7], price=0.01)
    first, second = merged.batch.survival[0, :2]
    assert first > 0.95
    assert abs(second / first - 0.4) < 0.05  # the prior


def test_namespaces_learn_apart_and_are_bounded() -> None:
    arbiter = Arbiter(VOCAB)
    arbiter.start("a", "one")
    for _ in range(100):
        step(arbiter, drafts(([], [])), [7], [7])
    arbiter.start("b", "two")
    arbiter.finish("a")
    arbiter.offer(["b"], [[7]])
    other = arbiter.merge(["b"], drafts(([], [])), [32], np.array([0.01]))
    assert abs(float(other.batch.survival[0, 0]) - 0.4) < 1e-6
    for number in range(200):  # the least recently used goes; its row starts anew
        arbiter.start(f"r{number}", f"tenant {number}")
        arbiter.finish(f"r{number}")
    arbiter.start("c", "one")
    arbiter.offer(["c"], [[7]])
    again = arbiter.merge(["c"], drafts(([], [])), [32], np.array([0.01]))
    assert abs(float(again.batch.survival[0, 0]) - 0.4) < 1e-6


def test_a_running_request_keeps_its_row_and_the_one_too_many_counts_nowhere() -> None:
    """Whoever brings many namespaces must not come to share counts with another one."""
    arbiter = Arbiter(VOCAB)
    for number in range(64):
        arbiter.start(f"r{number}", f"tenant {number}")
    arbiter.start("late", "too many")
    for _ in range(50):
        for req_id in ("r0", "late"):
            arbiter.offer([req_id], [[7]])
            merged = arbiter.merge([req_id], drafts(([], [])), [32], np.array([0.01]))
            arbiter.observe([req_id], emitted([7]))
        late = float(merged.batch.survival[0, 0])
    assert abs(late - 0.4) < 1e-6
    arbiter.offer(["r0"], [[7]])
    assert arbiter.merge(["r0"], drafts(([], [])), [32], np.array([0.01])).batch.survival[0, 0] > 0.8
    arbiter.finish("r1")
    arbiter.start("next", "yet another")
    arbiter.offer(["next"], [[7]])
    fresh = arbiter.merge(["next"], drafts(([], [])), [32], np.array([0.01]))
    assert abs(float(fresh.batch.survival[0, 0]) - 0.4) < 1e-6


def test_what_is_not_worth_its_price_is_cut() -> None:
    arbiter = arbiter_of("a")
    for _ in range(60):
        merged = step(arbiter, drafts(([7, 8], [0.9, 0.8])), [7, 9], [7, 3])
    draft = merged.batch.draft(0)
    assert draft.token_ids.tolist() == [7]  # the second token of neither is ever right


def test_an_offer_that_was_never_scored_is_forgotten() -> None:
    """Somebody else's error between two steps must not let old tokens be scored with new text."""
    arbiter = arbiter_of("a")
    for _ in range(100):
        arbiter.offer(["a"], [[7]])
        arbiter.merge(["a"], drafts(([], [])), [32], PRICES)
        arbiter.offer(["a"], [[]])  # the step between was lost
        arbiter.observe(["a"], emitted([3]))
    arbiter.offer(["a"], [[7]])
    merged = arbiter.merge(["a"], drafts(([], [])), [32], np.array([0.01]))
    assert abs(float(merged.batch.survival[0, 0]) - 0.4) < 1e-6


def test_a_draft_that_waited_for_a_step_too_long_is_not_used() -> None:
    arbiter = arbiter_of("a")
    arbiter.offer(["a"], [[7]])
    arbiter.forget_offer()
    ours = drafts(([1], [0.5]))
    assert arbiter.merge(["a"], ours, [32], PRICES).batch is ours


def test_hostile_drafts_end_where_they_leave_the_vocabulary() -> None:
    arbiter = arbiter_of("a", "b")
    arbiter.offer(["a", "b", "unknown"], [[5, VOCAB, 6], [-1, 5], [5]])
    merged = arbiter.merge(["a", "b"], drafts(([], []), ([], [])), [32, 32], np.array([0.01, 0.01]))
    assert merged.batch.lengths.tolist() == [1, 0]
    arbiter.observe(["a", "b"], emitted([5], [5]))
    arbiter.observe(["a", "b"], emitted([5], []))  # nothing offered, nothing emitted


def test_caps_and_requests_without_a_draft() -> None:
    arbiter = arbiter_of("a", "b")
    arbiter.offer(["a"], [[5, 6, 7, 8]])
    ours = drafts(([1], [0.5]), ([2, 3], [0.9, 0.8]))
    merged = arbiter.merge(["a", "b"], ours, [2, 32], np.array([0.01, 0.01]))
    assert merged.batch.lengths[0] <= 2
    assert merged.batch.draft(1).token_ids.tolist() == [2, 3]
    assert np.allclose(merged.batch.draft(1).survival, [0.9, 0.8])
    assert merged.gains.shape == (2, 4)  # one per depth that the worker drafted
    assert merged.offered.tolist() == [True, False]
