"""The drafters of this package against the suite that every drafter must pass."""

from __future__ import annotations

from drafter_conformance import DrafterConformance, K
from drafting_support import VOCAB, make_drafter

from agentspec_runtime.drafting import Drafter, TokenTable


class TestDrafter(DrafterConformance):
    """As it is shipped."""

    num_short_sessions = 10_000

    def make(self, **config: int) -> Drafter:
        return make_drafter(k=K, **config)


class TestUntrainedDrafter(DrafterConformance):
    """Without the shipped prior, and learning nothing: the rules must not hang on good estimates."""

    def make(self, **config: int) -> Drafter:
        return make_drafter(k=K, use_prior=False, learning=False, **config)


class TestDrafterThatReadsTokens(DrafterConformance):
    """With token texts: lexical classes and blocks take part."""

    def make(self, **config: int) -> Drafter:
        texts = [
            b"```",
            b"\n",
            b"<tool_call>",
            b"</tool_call>",
            b"<think>",
            b"</think>",
            b" word",
            b"(",
            b"7",
        ]
        tokens = [*texts, *(f"t{i}".encode() for i in range(len(texts), VOCAB))]
        return make_drafter(k=K, vocabulary=TokenTable(tokens, special=[4, 5]), **config)
