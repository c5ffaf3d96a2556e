"""Token texts out of tokenizers: byte-level BPE, SentencePiece, and whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from agentspec_runtime.drafting import BLOCK_KINDS, TokenTable
from agentspec_runtime.drafting.answers import Answers, StepContext
from agentspec_runtime.embedded import prepare_embedded_model
from agentspec_runtime.engine.token_table import build_token_table


class Pieces:
    """A tokenizer as far as it is needed: ids are positions."""

    def __init__(self, pieces: Sequence[str | bytes | None], special: Sequence[int] = ()) -> None:
        self._pieces = list(pieces)
        self.all_special_ids = list(special)

    def __len__(self) -> int:
        return len(self._pieces)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[i] for i in ids]  # type: ignore[misc]  # None and bytes occur in the wild


def texts(table: TokenTable) -> list[bytes]:
    return [table.text[table.offsets[i] : table.offsets[i + 1]].tobytes() for i in range(table.vocab_size)]


def test_byte_level_pieces_become_their_bytes() -> None:
    """GPT-2's stand-ins: space, newline, tab, the bytes of an umlaut and of an emoji, plain ASCII."""
    pieces = ["Ġhello", "Ċ", "ĉ", "Ã¼", "\u00f0\u0141\u012f\u00b8", "def", "!", "<|im_end|>", "ĠØ§ÙĦ"]
    table = build_token_table(Pieces(pieces, special=[7]), len(pieces))
    assert texts(table) == [
        b" hello",
        b"\n",
        b"\t",
        "ü".encode(),
        "🍸".encode(),
        b"def",
        b"!",
        b"<|im_end|>",
        " ال".encode(),
    ]
    assert table.classes[7] == 0


def test_all_256_byte_stand_ins_are_known() -> None:
    """Every byte has a stand-in, and it is the right one."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    pieces = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    table = build_token_table(Pieces(["Ġ", *pieces]), 257)
    assert texts(table)[1:] == [bytes([b]) for b in [*printable, *others]]


def test_sentencepiece_pieces_become_their_text() -> None:
    pieces = ["<s>", "▁hello", "world", "<0x0A>", "<0xE9>", "▁▁", "日本", "▁<0x41>"]
    table = build_token_table(Pieces(pieces, special=[0]), len(pieces))
    assert texts(table) == [
        b"<s>",
        b" hello",
        b"world",
        b"\n",
        b"\xe9",
        b"  ",
        "日本".encode(),
        b" <0x41>",
    ]


def test_a_vocabulary_larger_than_the_tokenizer_is_padded() -> None:
    """Embeddings are padded to round sizes: those ids exist, without text."""
    table = build_token_table(Pieces(["Ġa", "b"]), 5)
    assert table.vocab_size == 5
    assert texts(table) == [b" a", b"b", b"", b"", b""]


def test_a_tokenizer_larger_than_the_vocabulary_is_cut() -> None:
    table = build_token_table(Pieces(["Ġa", "b", "c"], special=[2]), 2)
    assert texts(table) == [b" a", b"b"]


def test_holes_and_bytes_in_the_vocabulary() -> None:
    """Some tokenizers return None for unused ids, and raw bytes (tiktoken) instead of text."""
    table = build_token_table(Pieces(["Ġa", None, b"\xf0\x9f", "b"]), 4)
    assert texts(table) == [b" a", b"", b"\xf0\x9f", b"b"]


def test_no_tokenizer_gives_an_opaque_table() -> None:
    table = build_token_table(None, 10)
    assert table.vocab_size == 10
    assert set(texts(table)) == {b""}


def test_a_tokenizer_that_raises_gives_an_opaque_table(caplog: pytest.LogCaptureFixture) -> None:
    """Third-party tokenizers raise anything; the server starts, and says so."""

    class Broken(Pieces):
        def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
            raise RuntimeError("no tokens for you")

    with caplog.at_level("WARNING", logger="agentspec.engine"):
        table = build_token_table(Broken(["a"]), 10)
    assert table.vocab_size == 10
    assert "drafting without token texts" in caplog.text


def test_a_real_byte_level_tokenizer() -> None:
    """A tokenizer trained on the spot: decoding ids by the table gives the text back, byte by byte."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    sample = 'def f(x):\n\treturn "Münster 日本語 🍸"  # ok\r\n' * 3
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
    )
    trained.train_from_iterator([sample], trainer)

    class Trained(Pieces):
        def __init__(self) -> None:
            super().__init__([trained.id_to_token(i) for i in range(trained.get_vocab_size())], special=[0])

    table = build_token_table(Trained(), trained.get_vocab_size())
    pieces = texts(table)
    assert b"".join(pieces[i] for i in trained.encode(sample).ids) == sample.encode()
    assert table.classes[0] == 0


CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
CODE = "```python\nprint('<tool_call>')\n```\n"
THOUGHT = "<think>What is in it?</think>"


@cache
def embedded_tokenizer() -> tuple[list[int], list[bytes], Answers]:
    """An answer in tokens of the embedded model, all texts of its tokens, and accounts that know them."""
    transformers = pytest.importorskip("transformers", reason="comes with vLLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepare_embedded_model(lambda _: None))
    ids = tokenizer.encode(f"{THOUGHT}I look.\n{CALL}\nThis:\n{CODE}Done: {CALL}", add_special_tokens=False)
    table = build_token_table(tokenizer, len(tokenizer))
    return ids, texts(table), Answers(table, 8)


@pytest.mark.engine
@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 1000])
def test_markers_of_a_real_tokenizer_are_whole_in_any_steps(tokens_per_step: int) -> None:
    """SmolLM2 has no token for any of them."""
    ids, text_of, answers = embedded_tokenizer()
    assert not {b"<tool_call>", b"</tool_call>", b"<think>", b"</think>"} & {text_of[i] for i in ids}
    answers.start("r", 0)
    for first in range(0, len(ids), tokens_per_step):
        step = StepContext(end_s=1.0 + first, duration_s=0.1, batch=1, budget=0)
        part = np.array(ids[first : first + tokens_per_step], np.int32)
        answers.add_step(["r"], part, np.array([0, part.size]), step)
    found, position = [], 0
    for block in answers.read("r").blocks:
        end = position + block.num_tokens
        found.append((str(BLOCK_KINDS[block.kind]), b"".join(text_of[i] for i in ids[position:end]).decode()))
        position = end
    assert found == [
        ("reasoning", THOUGHT),
        ("text", "I look.\n"),
        ("tool_call", CALL),
        ("text", "\nThis:\n"),
        ("code", CODE),
        ("text", "Done:"),
        ("tool_call", f" {CALL}"),  # ` <` is one token
    ]
