"""Text that outlives a request: prefix sharing by block keys, found sessions, growth, eviction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from drafting_support import begin, draft_one, ids, make_drafter, run, settle
from hypothesis import given
from hypothesis import strategies as st

from agentspec_runtime.drafting import Drafter, DraftScope
from agentspec_runtime.drafting.memory import common_prefix, cut_pieces, join_pieces
from agentspec_runtime.drafting.slab import BYTES_PER_TOKEN

BLOCK = 16
SESSION = DraftScope(session="s")


def keys_of(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """One key per full block, each standing for the whole text up to there, as vLLM's block hashes."""
    return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def turn(
    drafter: Drafter,
    name: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    scope: DraftScope = SESSION,
) -> None:
    """A request with block keys, from start to finish."""
    start(drafter, name, prompt, scope)
    drafter.observe(name, answer, 0)
    drafter.finish(name, keys=keys_of([*prompt, *answer]))
    settle(drafter)


def start(drafter: Drafter, name: str, prompt: Sequence[int], scope: DraftScope = SESSION) -> None:
    assert drafter.start(name, prompt, scope=scope, keys=keys_of(prompt), block_tokens=BLOCK)
    settle(drafter)


def phrase(number: int, length: int = 200) -> list[int]:
    """Text without repeats inside (ids below 100,000), different for each number."""
    return list(range(number * 1000, number * 1000 + length))


def big_drafter(**config: int) -> Drafter:
    return make_drafter(vocab=100_000, **config)


def test_what_a_session_already_holds_is_not_stored_again() -> None:
    """Turn 2 repeats turn 1 and adds 32 tokens: it takes the room of an addition."""
    drafter = big_drafter()
    first = phrase(1, 4000)
    turn(drafter, "1", first, phrase(2, 96))
    held = drafter.memory_bytes
    start(drafter, "2", [*first, *phrase(2, 96), *phrase(3, 32)])
    assert drafter.memory_bytes - held == 512 * BYTES_PER_TOKEN, (
        "48 tokens of overlap, 32 new, room to answer"
    )
    drafter.observe("2", first[50:53], 0)
    draft = draft_one(drafter, "2", 8)
    assert ids(draft) == first[53:61]
    assert draft.sources.tolist() == [0] * 8, "that text stands in the request's own prompt"


def test_text_of_the_session_that_is_not_in_the_prompt_is_named_so() -> None:
    """A branch of the conversation: shared beginning, the other branch is the session's."""
    drafter = big_drafter()
    common = phrase(1, 64)
    turn(drafter, "1", [*common, *phrase(2, 64)], phrase(3, 64))
    start(drafter, "2", [*common, *phrase(4, 64)])
    drafter.observe("2", phrase(2)[10:12], 0)
    draft = draft_one(drafter, "2", 4)
    assert ids(draft) == phrase(2)[12:16]
    assert draft.sources.tolist() == [1] * 4
    drafter.observe("2", phrase(1)[10:12], 0)
    assert draft_one(drafter, "2", 4).sources.tolist() == [0] * 4


def test_a_conversation_without_a_name_finds_its_session() -> None:
    """An unmodified client: its next prompt begins with the text of its last turn. No corpus in reach."""
    drafter = big_drafter()
    nameless = DraftScope(reach="session")
    first, answer = phrase(1, 128), phrase(2, 64)
    turn(drafter, "1", first, answer, nameless)
    # The answer is compacted away: only the session still has it.
    turn(drafter, "2", [*first, *answer, *phrase(3, 64)], phrase(4, 64), nameless)
    start(drafter, "3", [*first, *answer, *phrase(3, 64), *phrase(4, 64), *phrase(5, 32)], nameless)
    drafter.observe("3", answer[10:12], 0)
    assert ids(draft_one(drafter, "3", 4)) == answer[12:16]


def test_block_keys_may_grow_while_the_request_runs() -> None:
    """vLLM hands out its own list and appends to it. The prompt's end is recognised all the same, so that
    a next turn that renders the answer differently still finds its session.
    """
    drafter = big_drafter()
    nameless = DraftScope(reach="session")
    prompt, answer = phrase(1, 4 * BLOCK), phrase(2, 64)
    keys = keys_of(prompt)
    assert drafter.start("1", prompt, scope=nameless, keys=keys, block_tokens=BLOCK)
    settle(drafter)
    keys += keys_of([*prompt, *answer])[4:]
    drafter.observe("1", answer, 0)
    drafter.finish("1", keys=keys)
    settle(drafter)
    start(drafter, "2", [*prompt, 7, *answer[10:12]], nameless)
    assert ids(draft_one(drafter, "2", 4)) == answer[12:16]


def test_nameless_conversations_stay_apart() -> None:
    drafter = big_drafter()
    nameless = DraftScope(reach="session")
    turn(drafter, "1", phrase(1, 128), phrase(2, 64), nameless)
    start(drafter, "other", [*phrase(3, 128), *phrase(1)[:2]], nameless)
    assert len(draft_one(drafter, "other")) == 0


def test_no_client_can_name_a_session_that_was_found() -> None:
    drafter = big_drafter()
    turn(drafter, "first request", phrase(1, 128), phrase(2, 64), DraftScope(reach="session"))
    for name in ("first request", "('first request', 'first request')"):
        start(drafter, "spy", [7, *phrase(1)[:2]], DraftScope(session=name, reach="session"))
        assert len(draft_one(drafter, "spy")) == 0
        drafter.finish("spy", keep=False)


def test_a_session_that_was_evicted_can_be_found_again() -> None:
    """Its memory went, the same conversation begins anew: that is no second claim on the old text."""
    drafter = big_drafter(memory_mb=1)
    nameless = DraftScope(reach="session")
    first, answer = phrase(1, 900), phrase(2, 64)
    turn(drafter, "1", first, answer, nameless)
    for i in range(80):  # push it out
        run(drafter, f"x{i}", phrase(3, 500), [], DraftScope(session=f"x{i}", reach="session"))
    turn(drafter, "1 again", first, answer, nameless)
    held = drafter.memory_bytes
    start(drafter, "2", [*first, *answer, *phrase(4, 32)], nameless)
    assert drafter.memory_bytes - held <= 512 * BYTES_PER_TOKEN, "shares the text of its first turn"


def test_a_full_session_keeps_its_newer_half() -> None:
    drafter = big_drafter(max_session_tokens=2048)
    scope = DraftScope(session="s", reach="session")
    for i in range(1, 9):
        run(drafter, f"r{i}", phrase(i, 400), [], scope)
    begin(drafter, "r", [7, *phrase(8)[100:102]], scope)
    assert ids(draft_one(drafter, "r", 4)) == phrase(8)[102:106]
    begin(drafter, "r", [7, *phrase(1)[100:102]], scope)
    assert len(draft_one(drafter, "r")) == 0


def test_a_text_longer_than_its_session_leaves_its_end() -> None:
    drafter = big_drafter(max_session_tokens=1024)
    scope = DraftScope(session="s", reach="session")
    run(drafter, "r", phrase(1, 900), [], scope)
    begin(drafter, "r", [7, *phrase(1, 900)[800:802]], scope)
    assert ids(draft_one(drafter, "r", 4)) == phrase(1, 900)[802:806]
    begin(drafter, "r", [7, *phrase(1)[100:102]], scope)
    assert len(draft_one(drafter, "r")) == 0


def test_the_corpus_is_bounded_in_the_same_way() -> None:
    drafter = big_drafter(max_corpus_tokens=2048)
    for i in range(1, 9):
        run(drafter, f"r{i}", [1], phrase(i, 400))
    begin(drafter, "r", [7, *phrase(8)[100:102]])
    assert ids(draft_one(drafter, "r", 4)) == phrase(8)[102:106]
    begin(drafter, "r", [7, *phrase(1)[100:102]])
    assert len(draft_one(drafter, "r")) == 0


def test_running_requests_follow_a_session_that_moves() -> None:
    """The session grows into a larger extent, then is cut, while a request reads from it."""
    drafter = big_drafter(max_session_tokens=4096)
    scope = DraftScope(session="s", reach="session")
    begin(drafter, "reader", [7], scope)
    for i in range(1, 12):
        run(drafter, f"r{i}", phrase(i, 500), [], scope)
        drafter.observe("reader", phrase(i)[100:102], 0)
        assert ids(draft_one(drafter, "reader", 4)) == phrase(i)[102:106]


def test_shared_text_that_was_cut_meanwhile_is_not_remembered_as_shared() -> None:
    """Turn 2 shares turn 1's text; before it ends, the session is cut. Turn 3 must not rely on offsets
    that have lost their meaning: its whole prompt can be drafted from, as if nothing had been there.
    """
    drafter = big_drafter(max_session_tokens=2048)
    scope = DraftScope(session="s", reach="session")
    first, second = phrase(1, 480), [*phrase(1, 480), *phrase(2, 64)]
    turn(drafter, "1", first, [], scope)
    start(drafter, "2", second, scope)
    for i in (3, 4, 5, 6):
        run(drafter, f"r{i}", phrase(i, 480), [], scope)
    drafter.finish("2", keys=keys_of(second))
    settle(drafter)
    start(drafter, "3", [*second, *phrase(7, 32)], scope)
    drafter.observe("3", first[100:102], 0)
    draft = draft_one(drafter, "3", 4)
    assert ids(draft) == first[102:106]
    assert draft.sources.tolist() == [0] * 4


def test_a_session_that_is_cut_is_no_longer_taken_for_the_prompt() -> None:
    """Attribution: after the cut, other text lies where the shared prompt lay."""
    drafter = big_drafter(max_session_tokens=2048)
    scope = DraftScope(session="s", reach="session")
    first = phrase(1, 480)
    turn(drafter, "1", first, [], scope)
    start(drafter, "2", [*first, *phrase(2, 64)], scope)
    for i in (3, 4, 5, 6):
        run(drafter, f"r{i}", phrase(i, 480), [], scope)
    for i in (4, 5, 6):
        drafter.observe("2", phrase(i, 480)[300:302], 0)
        draft = draft_one(drafter, "2", 4)
        assert ids(draft) == phrase(i, 480)[302:306]
        assert draft.sources.tolist() == [1] * 4


def fill(drafter: Drafter, *sizes: int) -> None:
    """Running requests with extents of just these sizes."""
    for size in sizes:
        begin(drafter, f"fill {size}", [1] * (size - 256), DraftScope(session="fill", reach="request"))


def test_starting_a_request_does_not_evict_its_own_session() -> None:
    """No room, and the only idle session is the one that holds the beginning of the prompt: refused."""
    drafter = big_drafter(memory_mb=1)  # 32,768 tokens
    first = phrase(1, 900)
    turn(drafter, "1", first, phrase(2, 64), DraftScope(session="s", reach="session"))  # 1,024
    fill(drafter, 16384, 8192, 4096, 2048, 1024)
    prompt = [*first, *phrase(2, 64), *phrase(4, 300)]
    options = {"scope": SESSION, "keys": keys_of(prompt), "block_tokens": BLOCK}
    assert not drafter.start("2", prompt, **options)
    drafter.finish("fill 1024")
    assert drafter.start("2", prompt, **options)
    settle(drafter)
    drafter.observe("2", first[50:52], 0)
    assert ids(draft_one(drafter, "2", 4)) == first[52:56]


def test_no_memory_is_lost_with_a_session_that_is_in_use() -> None:
    """A prompt that needs the room of its own session, and leaves its text to it afterwards."""
    drafter = big_drafter(memory_mb=1)
    scope = DraftScope(session="s", reach="session")
    run(drafter, "1", [i % 90_000 for i in range(7_900)], [], scope)
    fill(drafter, 16384, 4096)
    drafter.start("2", [i % 90_000 for i in range(50_000, 57_900)], scope=scope)
    drafter.finish("fill 16384")
    settle(drafter)
    drafter.finish("2")
    drafter.finish("fill 4096")
    settle(drafter)
    drafter.forget("")
    assert drafter.memory_bytes == 0


def test_an_answer_without_room_does_not_leave_a_hole() -> None:
    """No memory for a growing answer: the request gets no drafts, rather than drafts from text with a gap
    in it, and nothing of it is kept.
    """
    drafter = big_drafter(memory_mb=1)
    scope = DraftScope(session="s")
    begin(drafter, "r", phrase(1, 250), scope)  # 512
    fill(drafter, 16384, 8192, 4096, 2048, 1024, 512)
    answer = phrase(2, 400)
    drafter.observe("r", answer[:200], 0)
    drafter.observe("r", answer[200:300], 0)  # no room
    drafter.observe("r", answer[300:301], 0)  # would fit again, behind a gap
    drafter.observe("r", answer[198:199], 0)
    assert len(draft_one(drafter, "r")) == 0
    for size in (16384, 8192, 4096, 2048, 1024, 512):
        drafter.finish(f"fill {size}")
    drafter.finish("r")
    settle(drafter)
    begin(drafter, "next", [7, answer[199]], scope)
    assert ids(draft_one(drafter, "next", 1)) == []
    drafter.finish("next")
    drafter.forget("")
    assert drafter.memory_bytes == 0


def test_a_request_ends_even_if_its_text_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while text is put away: the row and the memory are free again."""
    drafter = big_drafter()
    begin(drafter, "r", phrase(1), SESSION)

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(drafter.memory, "append", broken)
        drafter.observe("r", [1], 0)
        with pytest.raises(RuntimeError, match="injected"):
            drafter.finish("r")
    assert "r" not in drafter
    assert drafter.memory_bytes == 0


def test_memory_is_bounded_when_all_sessions_are_busy() -> None:
    """More running sessions than are remembered: the newest is not thrown out from under its request."""
    drafter = make_drafter(max_sessions=3)
    for i in range(5):
        begin(drafter, f"r{i}", [1, 2, 3, 4], DraftScope(session=f"s{i}", reach="session"))
    for i in range(5):
        drafter.finish(f"r{i}")
    settle(drafter)
    begin(drafter, "r", [5, 1, 2], DraftScope(session="s4", reach="session"))
    assert ids(draft_one(drafter, "r", 1)) == [3]
    drafter.finish("r")
    drafter.forget("")
    assert drafter.memory_bytes == 0


# The small functions

texts = st.lists(st.integers(0, 1), max_size=40)


@given(a=texts, b=texts)
def test_common_prefix_of_chained_keys(a: list[int], b: list[int]) -> None:
    """Binary search gives what counting gives, since a key stands for all that is before it."""
    chained = [[tuple(t[: i + 1]) for i in range(len(t))] for t in (a, b)]
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(*chained) == expected


pieces = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), max_size=6)


def spread(parts: Sequence[tuple[int, int]]) -> list[int]:
    """The offsets that a document reads, one by one."""
    return [offset + i for offset, length in parts for i in range(length)]


@given(parts=pieces, num_tokens=st.integers(0, 400))
def test_cut_pieces_reads_the_first_tokens(parts: list[tuple[int, int]], num_tokens: int) -> None:
    assert spread(cut_pieces(parts, num_tokens)) == spread(parts)[:num_tokens]


@given(parts=pieces, offset=st.integers(0, 1000), num_tokens=st.integers(1, 50))
def test_join_pieces_reads_on(parts: list[tuple[int, int]], offset: int, num_tokens: int) -> None:
    joined = join_pieces(parts, offset, num_tokens)
    assert spread(joined) == spread(parts) + spread([(offset, num_tokens)])
    assert len(joined) <= len(parts) + 1


def test_join_pieces_melts_adjoining_ones() -> None:
    assert join_pieces([(0, 10), (50, 5)], 55, 7) == ((0, 10), (50, 12))
