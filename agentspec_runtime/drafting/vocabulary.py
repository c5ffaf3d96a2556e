"""What the drafter knows of a tokenizer: the bytes and the lexical class of each token.

Built once per engine from any byte-level tokenizer and shared by all requests. Without it (a test, an
unknown tokenizer) drafting works on ids alone: one class for all tokens, no blocks inside answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.arrays import VocabularyArrays
from agentspec_runtime.drafting.draft import Int64Array

__all__ = ["NUM_CLASSES", "TokenTable"]

NUM_CLASSES: Final = 16


class TokenTable:
    """Token texts in one buffer, and token classes.

    `text` uint8[B]; token `t` is `text[offsets[t]:offsets[t + 1]]`, `offsets` int64[V + 1];
    `classes` int64[V], values below `NUM_CLASSES`.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int] = ()) -> None:
        """`tokens`: bytes of each id, empty where there are none; `special`: ids of control tokens."""
        lengths = np.fromiter((len(t) for t in tokens), np.int64, len(tokens))
        self.offsets: Int64Array = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.text: npt.NDArray[np.uint8] = np.frombuffer(b"".join(tokens) or b"\0", np.uint8).copy()
        self.classes: Int64Array = np.fromiter((_token_class(t) for t in tokens), np.int64, len(tokens))
        self.classes[[s for s in special if 0 <= s < len(tokens)]] = 0
        self.arrays = VocabularyArrays(self.classes, self.text, self.offsets)

    @classmethod
    def opaque(cls, vocab_size: int) -> TokenTable:
        """A vocabulary of which only the size is known."""
        return cls([b""] * vocab_size)

    @property
    def vocab_size(self) -> int:
        """Ids are valid in [0, vocab_size)."""
        return int(self.classes.size)


def _token_class(raw: bytes) -> int:
    """Lexical class: what kinds of token follow which says much about whether a copy goes on."""
    if not raw:
        return 0
    text = raw.decode("utf-8", "replace")
    core = text.strip()
    if not core:
        return 1 if "\n" in text else 2
    if core.isdigit():
        return 3
    if core.isalpha():
        spaced = text[0] == " "
        return (4 if core.islower() else 5) if spaced else (6 if core.islower() else 7)
    if any(c.isalnum() for c in core):
        return 8
    if "\n" in text:
        return 9
    for number, members in enumerate(("([{<", ")]}>", "\"'`", ".,:;"), start=10):
        if core[0] in members:
            return number
    return 14
