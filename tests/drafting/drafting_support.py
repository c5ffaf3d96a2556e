"""What the tests of the drafting core share: a drafter in one line, and naive oracles over plain lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentspec_runtime.drafting import Draft, Drafter, DraftingConfig, DraftScope, TokenTable

VOCAB = 64
"""Ids 0..63: few enough that everything repeats."""


def make_drafter(
    *,
    vocab: int = VOCAB,
    k: int = 8,
    memory_mb: int = 8,
    vocabulary: TokenTable | None = None,
    use_prior: bool = True,
    learning: bool = True,
    **config: int,
) -> Drafter:
    """A small drafter; `config` are fields of `DraftingConfig`."""
    sizes = {"max_requests": 4, "max_namespaces": 4} | config
    return Drafter(
        DraftingConfig(num_speculative_tokens=k, memory_mb=memory_mb, **sizes),
        vocabulary or TokenTable.opaque(vocab),
        use_prior=use_prior,
        learning=learning,
    )


def settle(drafter: Drafter) -> None:
    """Take in and index everything that waits."""
    while drafter.work():
        pass


def begin(
    drafter: Drafter, req_id: str, prompt: Sequence[int], scope: DraftScope | None = None, **options: int
) -> None:
    """Start a request and take its prompt in."""
    assert drafter.start(req_id, prompt, scope=scope or DraftScope(), **options)
    settle(drafter)


def run(
    drafter: Drafter,
    req_id: str,
    prompt: Sequence[int],
    output: Sequence[int],
    scope: DraftScope | None = None,
    *,
    keep: bool = True,
) -> None:
    """A whole request whose answer comes at once, without drafts."""
    begin(drafter, req_id, prompt, scope)
    drafter.observe(req_id, output, 0)
    drafter.finish(req_id, keep=keep)
    settle(drafter)


def draft_one(drafter: Drafter, req_id: str, cap: int = 8, min_survival: float = 0.0) -> Draft:
    return drafter.draft([req_id], [cap], min_survival)[0]


def ids(draft: Draft) -> list[int]:
    found: list[int] = draft.token_ids.tolist()
    return found


def decode_greedily(
    drafter: Drafter, req_id: str, answer: Sequence[int], *, cap: int = 8, min_survival: float = 0.2
) -> tuple[int, int, int]:
    """Let a target model that says `answer` verify drafts. Returns steps, drafted, accepted tokens."""
    done = steps = drafted = accepted = 0
    while done < len(answer):
        limit = min(cap, len(answer) - done - 1)
        draft = draft_one(drafter, req_id, limit, min_survival)
        n = 0
        while n < len(draft) and draft.token_ids[n] == answer[done + n]:
            n += 1
        new = list(answer[done : done + n + 1])
        drafter.observe(req_id, new, len(draft))
        done += len(new)
        steps += 1
        drafted += len(draft)
        accepted += n
        drafter.work()
    return steps, drafted, accepted


def copies(context: Sequence[int], text: Sequence[int], draft: Sequence[int], *, own: bool) -> bool:
    """Is there an occurrence in `text` of the context's last token that is followed by the draft?

    The naive quadratic scan. In the request's own text (`own`) the copy may run into the draft itself.
    """
    source = [*text, *draft] if own else list(text)
    n = len(draft)
    if not context or not n:
        return n == 0
    last = len(text) - 1 if own else len(text) - n
    return any(text[q - 1] == context[-1] and source[q : q + n] == list(draft) for q in range(1, last + 1))


def follows(context: Sequence[int], texts: Iterable[Sequence[int]]) -> bool:
    """Does the context's last token occur anywhere with a token behind it?"""
    return bool(context) and any(context[-1] in text[:-1] for text in texts)


def matches(context: Sequence[int], text: Sequence[int], longest: int) -> dict[int, int]:
    """Position of each continuation in `text` -> length of the context that precedes it there."""
    found = {}
    for q in range(1, len(text)):
        m = 0
        while m < min(q, len(context), longest) and context[-1 - m] == text[q - 1 - m]:
            m += 1
        if m:
            found[q] = m
    return found
