"""What any drafter must do, whatever it drafts from and however clever it is.

Subclass `DrafterConformance` and say how a drafter is made; every test here then runs against it. A
drafter is anything with the calls of `Drafter` (docs/architecture.md). Nothing here looks inside, and
nothing asks for a good draft, only for a lawful one; where copying is certain, for a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from drafting_support import VOCAB, begin, decode_greedily, draft_one, ids, run, settle

from agentspec_runtime.drafting import Draft, Drafter, DraftScope

K = 8
NEEDLE = [50, 51, 52, 53, 54, 55, 56, 57]
"""A text that nobody else says."""


class DrafterConformance:
    """See the module docstring."""

    num_short_sessions = 2_000

    def make(self, **config: int) -> Drafter:
        """A drafter with `num_speculative_tokens` = K, `VOCAB` ids and these `DraftingConfig` fields."""
        raise NotImplementedError  # the seam of this suite; every subclass says how

    @pytest.fixture
    def drafter(self) -> Drafter:
        return self.make()

    # Lawful drafts

    def test_ids_are_of_the_vocabulary_whatever_comes_in(self, drafter: Drafter) -> None:
        """Prompts and outputs with negative, huge and missing ids never lead to such a draft."""
        wild = [5, -1, 6, VOCAB, 7, 2**31 - 1, 8, 2**40, 9] * 6
        begin(drafter, "r", wild)
        for new in ([5], [-1], [5], [VOCAB], [5], [2**31 - 1], [5], [2**40], [5], [-(2**31)], [5]):
            draft = draft_one(drafter, "r", K)
            assert all(0 <= t < VOCAB for t in ids(draft))
            drafter.observe("r", new, len(draft))
        drafter.finish("r")
        settle(drafter)
        begin(drafter, "next", [8, 5])
        assert all(0 <= t < VOCAB for t in ids(draft_one(drafter, "next", K)))

    @pytest.mark.parametrize("cap", [-3, 0, 1, 3, K, K + 1, 1000])
    def test_never_longer_than_the_cap(self, drafter: Drafter, cap: int) -> None:
        begin(drafter, "r", [1, 2, 3, 4] * 40)
        draft = draft_one(drafter, "r", cap)
        assert len(draft) == max(min(cap, K), 0), "periodic text fills any draft"
        assert draft.survival.size == draft.sources.size == len(draft)
        assert draft.token_ids.dtype == np.int32

    def test_each_request_has_its_own_cap(self, drafter: Drafter) -> None:
        names = ["a", "b", "c", "d", "e"]
        for name in names:
            begin(drafter, name, [1, 2, 3, 4] * 40)
        drafts = drafter.draft(names, [3, 0, 8, 1, 5], 0.0)
        assert [len(d) for d in drafts] == [3, 0, 8, 1, 5]

    def test_survival_is_a_falling_probability(self, drafter: Drafter) -> None:
        random = np.random.default_rng(0)
        for round_number in range(30):
            text = random.integers(0, 6, 200).tolist()
            begin(drafter, "r", text)
            for token in random.integers(0, 6, 20).tolist():
                survival = draft_one(drafter, "r", K).survival
                assert ((survival > 0.0) & (survival <= 1.0)).all()
                assert (np.diff(survival) <= 0.0).all()
                drafter.observe("r", [token], 0)
            drafter.finish("r", keep=round_number % 2 == 0)

    @pytest.mark.parametrize("price", [0.1, 0.5, 0.9, 0.999])
    def test_a_draft_ends_where_survival_falls_below_the_price(self, drafter: Drafter, price: float) -> None:
        random = np.random.default_rng(1)
        begin(drafter, "r", random.integers(0, 5, 400).tolist())
        for token in random.integers(0, 5, 60).tolist():
            assert (draft_one(drafter, "r", K, price).survival >= np.float32(price)).all()
            drafter.observe("r", [token], 0)

    def test_a_price_of_two_means_no_drafts(self, drafter: Drafter) -> None:
        begin(drafter, "r", [1, 2, 3, 4] * 40)
        assert len(draft_one(drafter, "r", K, 2.0)) == 0

    def test_text_that_never_repeats_gives_nothing(self, drafter: Drafter) -> None:
        begin(drafter, "r", list(range(VOCAB)))
        assert len(draft_one(drafter, "r", K)) == 0

    def test_copies_what_it_has_seen(self, drafter: Drafter) -> None:
        begin(drafter, "r", [*NEEDLE, 1, 2, *NEEDLE[:3]])
        assert ids(draft_one(drafter, "r", 5)) == NEEDLE[3:]

    def test_continues_a_copy_that_is_accepted(self, drafter: Drafter) -> None:
        """A floor on acceptance: a text said twice costs the second time a third of the steps."""
        text = np.random.default_rng(3).integers(0, VOCAB, 120).tolist()
        begin(drafter, "r", [*text, 0, 1, text[0], text[1]])
        steps, drafted, accepted = decode_greedily(drafter, "r", text[2:], cap=K, min_survival=0.02)
        assert steps < len(text) / 3
        assert accepted > 0.8 * drafted

    # Unusual requests

    @pytest.mark.parametrize("prompt", [[], [3]], ids=["empty", "one token"])
    def test_tiny_prompts(self, drafter: Drafter, prompt: list[int]) -> None:
        begin(drafter, "r", prompt)
        assert len(draft_one(drafter, "r")) == 0
        drafter.observe("r", [7, 8, 9, 7], 0)
        assert ids(draft_one(drafter, "r", 2)) == [8, 9]
        drafter.finish("r")
        assert len(drafter) == 0

    def test_unknown_ids_are_ignored(self, drafter: Drafter) -> None:
        begin(drafter, "r", [1, 2, 3, 4] * 10)
        drafts = drafter.draft(["ghost", "r", "other ghost"], [K, K, K], 0.0)
        assert [len(d) for d in drafts] == [0, K, 0]
        observed = drafter.observe_batch(["ghost", "r"], [[1, 2, 3], [1]])
        assert sum(s.num_tokens for s in observed.spans(0)) == 3
        drafter.finish("ghost")
        assert "ghost" not in drafter
        assert "r" in drafter

    def test_an_empty_step(self, drafter: Drafter) -> None:
        assert drafter.draft([], [], 0.0) == []
        assert drafter.observe_batch([], []).kinds.size == 0
        assert drafter.work() == 0

    def test_a_request_with_nothing_new(self, drafter: Drafter) -> None:
        """vLLM can return no token for a request (a stalled or aborted one)."""
        begin(drafter, "r", [1, 2, 3, 4] * 10)
        before = ids(draft_one(drafter, "r"))
        drafter.observe_batch(["r"], [[]])
        assert ids(draft_one(drafter, "r")) == before

    def test_an_aborted_request_leaves_the_others_alone(self, drafter: Drafter) -> None:
        begin(drafter, "a", [1, 2, 3, 4] * 10)
        begin(drafter, "b", [5, 6, 7, 8] * 10)
        draft_one(drafter, "a")
        drafter.finish("a", keep=False)
        assert len(drafter) == 1
        assert ids(draft_one(drafter, "b", 4)) == [5, 6, 7, 8]

    def test_a_resumed_request_goes_on_where_it_was(self, drafter: Drafter) -> None:
        """Preemption recomputes the KV cache, not the text: nothing happens here for many steps."""
        begin(drafter, "r", [1, 2, 3, 4] * 10)
        drafter.observe("r", [1, 2], 0)
        for _ in range(20):
            drafter.draft([], [], 0.0)
            drafter.observe_batch([], [])
            drafter.work()
        assert ids(draft_one(drafter, "r", 3)) == [3, 4, 1]

    def test_the_same_id_starts_again_from_nothing(self, drafter: Drafter) -> None:
        begin(drafter, "r", [*NEEDLE, 1, NEEDLE[0]])
        assert len(draft_one(drafter, "r")) > 0
        begin(drafter, "r", [2, 3, NEEDLE[0]])
        assert len(draft_one(drafter, "r")) == 0
        assert len(drafter) == 1

    # Prompts are taken in by slices

    def test_a_long_prompt_blocks_no_step(self, drafter: Drafter) -> None:
        """`work` stays within its budget per call; meanwhile the request has no drafts, others do."""
        begin(drafter, "short", [1, 2, 3, 4] * 10)
        drafter.start("long", [5, 6, 7, 8] * 10_000, scope=DraftScope(reach="request"))
        calls = 0
        while done := drafter.work(1000):
            assert done <= 1000
            calls += 1
            assert ids(draft_one(drafter, "short", 4)) == [1, 2, 3, 4]
        assert calls >= 40
        assert ids(draft_one(drafter, "long", 4)) == [5, 6, 7, 8]

    def test_output_that_comes_before_its_prompt_was_taken_in(self, drafter: Drafter) -> None:
        """A prefix-cache hit can be faster than the index: nothing of it is lost, nor out of order."""
        drafter.start("r", [*NEEDLE, 1, 2], scope=DraftScope())
        for token in NEEDLE[:3]:
            assert len(draft_one(drafter, "r")) == 0
            drafter.observe("r", [token], 0)
        settle(drafter)
        assert ids(draft_one(drafter, "r", 5)) == NEEDLE[3:]

    def test_a_request_that_ends_before_its_prompt_was_taken_in(self, drafter: Drafter) -> None:
        drafter.start("r", [1, 2, 3] * 10_000, scope=DraftScope())
        drafter.observe("r", [1], 0)
        drafter.finish("r")
        settle(drafter)
        assert len(drafter) == 0
        begin(drafter, "r", [1, 2])
        assert len(draft_one(drafter, "r")) == 0

    def test_an_answer_that_outgrows_its_place_is_kept_whole(self, drafter: Drafter) -> None:
        begin(drafter, "r", [*NEEDLE, 1])
        for i in range(5000):
            drafter.observe("r", [10 + i % 7], 0)
            drafter.work()
        drafter.observe("r", NEEDLE[:3], 0)
        settle(drafter)
        assert ids(draft_one(drafter, "r", 5)) == NEEDLE[3:]

    # Whose text

    @pytest.mark.parametrize("reach", ["corpus", "session", "request"])
    def test_reach_is_never_widened(
        self, drafter: Drafter, reach: Literal["corpus", "session", "request"]
    ) -> None:
        """What was said by: an other session, the same session, an other tenant's same session."""
        other, same = [40, 41, 42, 43], [44, 45, 46, 47]
        run(drafter, "1", [1], [*other, 1], DraftScope(namespace="t", session="other"))
        run(drafter, "2", [2], [*same, 2], DraftScope(namespace="t", session="mine"))
        run(drafter, "3", [3], [*NEEDLE, 3], DraftScope(namespace="u", session="mine"))
        scope = DraftScope(namespace="t", session="mine", reach=reach)
        found = []
        for name, start in (("a", other), ("b", same), ("c", NEEDLE)):
            begin(drafter, name, [9, 8, *start[:2]], scope)
            found.append(ids(draft_one(drafter, name, 2)) == start[2:4])
        assert found == [reach == "corpus", reach != "request", False]

    @pytest.mark.parametrize("reach", ["request", "session"])
    def test_text_of_a_narrow_request_is_not_given_away(
        self, drafter: Drafter, reach: Literal["session", "request"]
    ) -> None:
        """A narrow reach keeps own text in as well: others outside it never draft from it."""
        run(drafter, "r", [1], [*NEEDLE, 1], DraftScope(session="s", reach=reach))
        begin(drafter, "elsewhere", [2, *NEEDLE[:2]], DraftScope(session="t"))
        assert len(draft_one(drafter, "elsewhere")) == 0
        begin(drafter, "inside", [2, *NEEDLE[:2]], DraftScope(session="s"))
        assert (len(draft_one(drafter, "inside")) > 0) == (reach == "session")

    def test_running_requests_do_not_see_each_other(self, drafter: Drafter) -> None:
        """Even in one session: only finished text is shared."""
        scope = DraftScope(session="s")
        begin(drafter, "a", [1, *NEEDLE], scope)
        begin(drafter, "b", [2, *NEEDLE[:2]], scope)
        assert len(draft_one(drafter, "b")) == 0

    def test_text_that_is_not_kept_is_gone(self, drafter: Drafter) -> None:
        run(drafter, "r", [1], [*NEEDLE, 1], DraftScope(session="s"), keep=False)
        begin(drafter, "next", [2, *NEEDLE[:2]], DraftScope(session="s"))
        assert len(draft_one(drafter, "next")) == 0

    def test_a_forgotten_namespace_is_gone(self, drafter: Drafter) -> None:
        run(drafter, "r", [1], [*NEEDLE, 1], DraftScope(namespace="t", session="s"))
        used = drafter.memory_bytes
        drafter.forget("t")
        assert drafter.memory_bytes < used
        begin(drafter, "next", [2, *NEEDLE[:2]], DraftScope(namespace="t", session="s"))
        assert len(draft_one(drafter, "next")) == 0

    def test_tenants_learn_nothing_from_each_other(self) -> None:
        """Acceptance counts of one tenant change no number of another's: the side channel is closed."""
        text = [1, 2, 3, 4, 5, 6] * 20
        scope = DraftScope(namespace="quiet")

        def survival(drafter: Drafter) -> list[float]:
            begin(drafter, "mine", text, scope)
            found: list[float] = draft_one(drafter, "mine", K).survival.tolist()
            return found

        alone, beside = self.make(), self.make()
        begin(beside, "theirs", text, DraftScope(namespace="loud"))
        for _ in range(100):
            beside.observe("theirs", [9], len(draft_one(beside, "theirs", K)))
        assert survival(beside) == survival(alone)

    # Identity and order

    def test_state_follows_the_id_not_the_place_in_the_batch(self, drafter: Drafter) -> None:
        """FR-03: rows [A, B, C], A ends, C moves to its place, D comes: everybody keeps his own."""
        texts = {name: [10 * i + j for j in range(4)] for i, name in enumerate("ABCD")}
        for name in "ABC":
            begin(drafter, name, texts[name] * 10)

        def drafted(names: Sequence[str]) -> dict[str, list[int]]:
            drafts = drafter.draft(list(names), [4] * len(names), 0.0)
            return {n: ids(d) for n, d in zip(names, drafts, strict=True)}

        assert drafted("ABC") == {n: texts[n] for n in "ABC"}
        drafter.finish("A")
        assert drafted("CB") == {n: texts[n] for n in "CB"}
        begin(drafter, "D", texts["D"] * 10)
        assert drafted("CBD") == {n: texts[n] for n in "CBD"}
        assert drafted("DBC") == {n: texts[n] for n in "DBC"}
        drafter.observe_batch(["B", "D"], [texts["B"][:1], texts["D"][:2]])
        assert drafted("DCB") == {
            "D": texts["D"][2:] + texts["D"][:2],
            "C": texts["C"],
            "B": texts["B"][1:] + texts["B"][:1],
        }

    def test_interleaving_changes_no_draft(self) -> None:
        """Each request's drafts are those that it gets alone. Reach: its own text."""
        random = np.random.default_rng(4)
        prompts = {f"r{i}": random.integers(0, 5, 80).tolist() for i in range(6)}
        answers = {name: random.integers(0, 5, 40).tolist() for name in prompts}

        def scope(name: str) -> DraftScope:  # namespaces apart, since they learn apart
            return DraftScope(namespace=name, reach="request")

        alone = {}
        for name, prompt in prompts.items():
            drafter = self.make(max_namespaces=8)
            begin(drafter, name, prompt, scope(name))
            alone[name] = []
            for token in answers[name]:
                draft = draft_one(drafter, name)
                alone[name].append((ids(draft), draft.survival.tolist()))
                drafter.observe(name, [token], len(draft))
        together: dict[str, list[tuple[list[int], list[float]]]] = {name: [] for name in prompts}
        drafter = self.make(max_namespaces=8)
        for name, prompt in prompts.items():
            begin(drafter, name, prompt, scope(name))
        for position in range(40):
            names = [str(n) for n in random.permutation(list(prompts))]
            for name, draft in zip(names, drafter.draft(names, [8] * 6, 0.0), strict=True):
                together[name].append((ids(draft), draft.survival.tolist()))
            drafter.observe_batch(names, [[answers[n][position]] for n in names])
        assert together == alone

    def test_an_id_that_ends_and_comes_back_in_one_step(self, drafter: Drafter) -> None:
        begin(drafter, "x", [*NEEDLE] * 3, DraftScope(namespace="t"))
        draft_one(drafter, "x")
        drafter.finish("x", keep=False)
        drafter.start("x", [1, 2, NEEDLE[0]], scope=DraftScope(namespace="u"))
        drafter.observe("x", [NEEDLE[1]], 0)
        settle(drafter)
        assert len(draft_one(drafter, "x")) == 0

    def test_the_same_calls_give_the_same_drafts(self) -> None:
        def story(drafter: Drafter) -> list[tuple[list[int], list[float], list[int]]]:
            random = np.random.default_rng(5)
            seen = []
            for i in range(40):
                name, scope = f"r{i % 3}", DraftScope(session=f"s{i % 2}")
                begin(drafter, name, random.integers(0, 6, 60).tolist(), scope)
                for _ in range(5):
                    draft: Draft = draft_one(drafter, name, K, 0.05)
                    seen.append((ids(draft), draft.survival.tolist(), draft.sources.tolist()))
                    drafter.observe(name, random.integers(0, 6, 2).tolist(), len(draft))
                drafter.finish(name)
                drafter.work(50)
            return seen

        assert story(self.make()) == story(self.make())

    # Bounds

    def test_nothing_is_left_when_everything_is_over(self, drafter: Drafter) -> None:
        for i in range(50):
            begin(drafter, f"r{i}", [1, 2, 3] * 50, DraftScope(namespace="t", session=f"s{i}"))
        for i in range(50):
            drafter.observe(f"r{i}", [1, 2], 0)
            drafter.finish(f"r{i}", keep=i % 2 == 0)
        settle(drafter)
        assert len(drafter) == 0
        drafter.forget("t")
        assert drafter.memory_bytes == 0

    def test_memory_is_flat_over_thousands_of_short_sessions(self) -> None:
        """The bound holds throughout, and the second half uses no more than the first."""
        drafter = self.make(memory_mb=1)
        peaks = [0, 0]
        prompt = list(range(20)) * 3
        for i in range(self.num_short_sessions):
            name = f"r{i}"
            drafter.start(name, prompt, scope=DraftScope(namespace=f"n{i % 3}", session=name))
            drafter.work()
            drafter.observe_batch([name], [[1, 2, 3]])
            drafter.finish(name, keep=i % 5 != 0)
            drafter.work()
            assert drafter.memory_bytes <= 1 << 20
            half = 2 * i // self.num_short_sessions
            peaks[half] = max(peaks[half], drafter.memory_bytes)
        assert peaks[1] <= peaks[0]
        assert len(drafter) == 0

    def test_a_full_memory_refuses_drafts_not_requests(self) -> None:
        """More running text than fits: some requests get no drafts, all live and end in peace."""
        drafter = self.make(memory_mb=1)
        names = [f"r{i}" for i in range(60)]
        for name in names:
            drafter.start(name, [1, 2, 3, 4] * 500, scope=DraftScope(session=name))
        settle(drafter)
        for _ in range(20):
            drafts = drafter.draft(names, [4] * 60, 0.0)
            drafter.observe_batch(names, [[1, 2, 3, 4]] * 60)
            drafter.work()
        assert {len(d) for d in drafts} == {0, 4}
        assert drafter.memory_bytes <= 1 << 20
        for name in names:
            drafter.finish(name)
        settle(drafter)
        begin(drafter, "after", [1, 2, 3, 4] * 10)
        assert ids(draft_one(drafter, "after", 4)) == [1, 2, 3, 4]

    def test_more_tenants_than_are_remembered(self) -> None:
        """The least recently used idle tenant is forgotten; while all are busy a new one gets nothing."""
        drafter = self.make(max_namespaces=3)
        for i in range(10):
            run(drafter, "r", [1], [*NEEDLE, 1], DraftScope(namespace=f"n{i}", session="s"))
        begin(drafter, "old", [2, *NEEDLE[:2]], DraftScope(namespace="n0", session="s"))
        assert len(draft_one(drafter, "old")) == 0
        begin(drafter, "recent", [2, *NEEDLE[:2]], DraftScope(namespace="n9", session="s"))
        assert len(draft_one(drafter, "recent")) > 0
        begin(drafter, "third", [1], DraftScope(namespace="n10"))
        assert not drafter.start("fourth", [1], scope=DraftScope(namespace="n11"))
        assert "fourth" not in drafter
        drafter.finish("third")
        assert drafter.start("fourth", [1], scope=DraftScope(namespace="n11"))

    # Text that is made to hurt

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param([7] * 100_000, id="a a a"),
            pytest.param([1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 10_000, id="10,000 identical lines"),
            pytest.param(np.random.default_rng(6).integers(0, VOCAB, 100_000).tolist(), id="random"),
        ],
    )
    def test_pathological_text(self, text: list[int]) -> None:
        """Drafts stay lawful and the work per token stays one, however often everything repeats."""
        drafter = self.make(memory_mb=16)
        drafter.start("r", text, scope=DraftScope(reach="request"))
        total = 0
        while done := drafter.work():
            total += done
        assert total == len(text)
        for i in range(50):
            draft = draft_one(drafter, "r", K)
            assert len(draft) <= K
            drafter.observe("r", text[i : i + 2], len(draft))
            assert drafter.work() == 0, "new tokens are indexed as they come, one by one"
