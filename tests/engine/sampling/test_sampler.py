"""The sampler compared with exact distributions, plain oracles and transformers' logits processors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from engine.kernels import native
from engine.sampling.chooser import INVALID
from engine.sampling.distribution import draw, probabilities
from engine.sampling.native import NativeSampler
from engine.sampling.noise import uniform
from engine.sampling.sampled_logprobs import SampledLogprobs
from engine.sampling.sampler import Sampler
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

VOCAB = 40
EOS = 7
AnySampler = Sampler | NativeSampler


def request(
    output: list[int] | None = None, prompt: list[int] | None = None, *, seed: int = 0, **sampling: Any
) -> Request:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    given = prompt if prompt is not None else [1, 2, 3]
    return Request.make(
        "r", given, params, arrival=0.0, seed=seed, namespace=Namespace("m"), output_ids=output or []
    )


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(params=["torch", *native.ISAS[:3]])
def sampler(request: pytest.FixtureRequest) -> AnySampler:
    """Each implementation; the native one with the instruction sets that float32 kernels use."""
    if request.param == "torch":
        return Sampler({EOS})
    try:
        kernels = native.kernels(torch.float32, request.param)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    return NativeSampler({EOS}, kernels)


def sample(sampler: AnySampler, logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return sampler.sample(logits.clone(), [SamplingRow.of(request) for request in requests])[0].tolist()


# --- noise ---------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_uncorrelated_between_neighbours() -> None:
    seeds, positions = np.meshgrid(np.arange(-50, 50), np.arange(200), indexing="ij")
    noise = uniform(seeds.ravel().tolist(), positions.ravel().tolist()).reshape(100, 200)
    assert noise.min() >= 0.0 and noise.max() < 1.0
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    for other in (noise[1:, :], noise[:, 1:], noise[1:, 1:]):  # next seed, next position, both
        mine = noise[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(mine.ravel(), other.ravel())[0, 1]) < 0.03
    assert len(np.unique(noise)) == noise.size


def test_noise_never_changes_between_versions() -> None:
    """A stream resumed by a replica of another version must continue unchanged."""
    noise = uniform([0, 1, 2**63 - 1, -1], [0, 5, 7, 2**20])
    assert noise.tolist() == [0.6524484863740322, 0.7743991716672016, 0.6572466933996467, 0.6439801416380194]


# --- the distribution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_frequencies_are_the_exact_distribution(sampler: AnySampler, params: dict[str, Any]) -> None:
    logits = random_logits(1, seed=3, scale=1.5)
    draws = 12_000
    tokens = sample(sampler, logits.expand(draws, -1), [request(seed=seed, **params) for seed in range(draws)])
    expected = plain_probabilities(logits[0].double().numpy(), SamplingParams(**params)) * draws
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def plain_probabilities(logits: np.ndarray[Any, Any], params: SamplingParams) -> np.ndarray[Any, Any]:
    """Compute which tokens are kept, by rank (likelier first, then the lower id), straight from the definition."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    ranked = ranked[: params.top_k or len(ranked)]
    total, mass = sum(weights[token] for token in ranked), 0.0
    kept: list[int] = []
    for token in ranked:
        if params.top_p < 1.0 and kept and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]
    out = np.zeros_like(weights)
    out[kept] = weights[kept]
    return np.asarray(out / out.sum())


@settings(max_examples=150, deadline=None)
@given(
    # Quarters: ties are common, and cumulated masses of different order never meet top_p at a rounding error.
    levels=st.lists(st.integers(-12, 12), min_size=2, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 35),
    top_p=st.sampled_from([0.013, 0.37, 0.773, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.0313, 0.517, 1.0]),
    candidates=st.sampled_from([1, 3, 8, 256]),
)
def test_top_k_top_p_and_min_p_cut_the_same_tokens_as_a_plain_computation(
    levels: list[int], temperature: float, top_k: int, top_p: float, min_p: float, candidates: int
) -> None:
    """The cut may also lie beyond the few tokens that are ranked at first, or among ties with them."""
    logits = torch.tensor(levels) / 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampling.distribution._CANDIDATES", candidates)
        weights = probabilities(torch.stack((logits, logits.flip(0))), [params, SamplingParams(top_p=0.5)])[0]
    expected = plain_probabilities(logits.double().numpy(), params)
    np.testing.assert_allclose((weights / weights.sum()).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(
    "warper",
    [("TopKLogitsWarper", "top_k", 5), ("TopPLogitsWarper", "top_p", 0.8), ("MinPLogitsWarper", "min_p", 0.07)],
)
def test_cuts_are_those_of_transformers(warper: tuple[str, str, Any]) -> None:
    name, param, value = warper
    logits = random_logits(50)
    theirs = getattr(transformers, name)(value)(torch.zeros(50, 1, dtype=torch.long), logits.clone())
    ours = probabilities(logits, [SamplingParams(**{param: value})] * 50)
    assert torch.equal(ours > 0, torch.isfinite(theirs))


def test_draws_at_the_ends_of_the_noise() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(4, -1)
    noise = torch.tensor([0.0, 0.29999, 0.3000001, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, noise).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-3])
def test_a_tiny_temperature_is_greedy(sampler: AnySampler, temperature: float) -> None:
    logits = random_logits(20)
    tokens = sample(sampler, logits, [request(seed=seed, temperature=temperature) for seed in range(20)])
    assert tokens == logits.argmax(-1).tolist()


# --- independence of the batch -------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch(sampler: AnySampler) -> None:
    """The same (seed, position) gives the same token alone, in any order, beside any others."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 5, "temperature": 0.7},
        {"min_p": 0.05, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3, "logprobs": 3},
    ]
    requests = [request(output=[1] * (i % 4), seed=i, **kinds[i % len(kinds)]) for i in range(60)]
    logits = random_logits(60)
    together = sample(sampler, logits, requests)
    alone = [sample(sampler, logits[i : i + 1], [requests[i]])[0] for i in range(60)]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(sampler, logits[order], [requests[i] for i in order])
    assert together == alone == [shuffled[order.index(i)] for i in range(60)]


def test_noise_changes_with_seed_and_position(sampler: AnySampler) -> None:
    logits = torch.zeros(200, VOCAB)
    by_seed = sample(sampler, logits, [request(seed=seed) for seed in range(200)])
    by_position = sample(sampler, logits, [request(output=[0] * n, seed=1) for n in range(200)])
    assert len(set(by_seed)) > 30 and len(set(by_position)) > 30
    assert by_seed != by_position


# --- adjustments ---------------------------------------------------------------------------------------------


def test_repetition_penalty_is_that_of_transformers(sampler: AnySampler) -> None:
    prompt, output = [1, 2, 2, 9], [9, 30, 31]
    logits = random_logits(1)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    ours = logits.clone()
    sampler.sample(ours, [SamplingRow.of(request(output, prompt, temperature=0.0, repetition_penalty=1.7))])
    torch.testing.assert_close(ours, theirs)


def test_presence_and_frequency_count_the_output_only(sampler: AnySampler) -> None:
    logits = random_logits(1)
    ours = logits.clone()
    params: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.0}
    sampler.sample(ours, [SamplingRow.of(request([5, 6, 6, 6], [1, 2, 5], **params))])
    expected = logits.clone()
    expected[0, 5] -= 0.5 + 0.25
    expected[0, 6] -= 0.5 + 0.75
    torch.testing.assert_close(ours, expected)


def test_logit_bias_is_added_and_foreign_tokens_are_ignored(sampler: AnySampler) -> None:
    logits = random_logits(2)
    bias = {11: 100.0, VOCAB: 100.0, VOCAB + 5: -5.0}
    assert sample(sampler, logits, [request(temperature=0.0, logit_bias=bias), request(logit_bias=bias)]) == [
        11,
        11,
    ]


def test_nothing_ends_before_min_tokens(sampler: AnySampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 20], logits[0, 21] = 9.0, 8.0, 7.0
    ends: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (20, VOCAB + 1), "min_tokens": 3}
    assert sample(sampler, logits, [request([1, 1], **ends)]) == [21]
    assert sample(sampler, logits, [request([1, 1, 1], **ends)]) == [EOS]
    assert sample(sampler, logits, [request([1, 1], ignore_eos=True, **ends)]) == [
        EOS
    ]  # ends nothing, so it is allowed


# --- log-probabilities ---------------------------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_logits(sampler: AnySampler) -> None:
    logits = random_logits(3)
    requests = [
        request(logprobs=4, temperature=0.3, top_k=1, logit_bias={3: 50.0}),
        request(),
        request(logprobs=0, temperature=0.0),
    ]
    tokens, reports = sampler.sample(logits.clone(), [SamplingRow.of(request) for request in requests])
    expected = logits.double().log_softmax(-1)
    first, none, last = reports
    assert none is None and first is not None and last is not None
    assert tokens[0] == first.token_id == 3
    assert first.logprob == pytest.approx(expected[0, 3].item(), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.top == () and last.logprob == pytest.approx(expected[2].max().item(), abs=1e-5)


@pytest.mark.parametrize("slice_bytes", [1, 4 * VOCAB * 2, 2**20])
def test_logprobs_in_slices_of_any_size(slice_bytes: int) -> None:
    """Every other row reports, some are adjusted; a chosen token has the same value in both places."""
    logits = random_logits(9)
    kinds: list[dict[str, Any]] = [{"logprobs": 5}, {}, {"logprobs": 2, "logit_bias": {7: 90.0}}]
    rows = [SamplingRow.of(request(temperature=0.0, **kinds[at % 3])) for at in range(9)]
    own = SampledLogprobs(logits, rows, slice_bytes)
    changed = logits.clone()
    changed[2::3, 7] += 90.0
    chosen = changed.argmax(-1)
    chosen[3] = INVALID
    reports = own.report(changed, chosen)
    assert [report is None for report in reports] == [at % 3 == 1 or at == 3 for at in range(9)]
    for at, report in enumerate(reports):
        if report is None:
            continue
        row = logits[at].log_softmax(-1)
        assert report.token_id == chosen[at] and report.logprob == pytest.approx(row[chosen[at]].item(), abs=1e-5)
        assert dict(report.top) == pytest.approx(dict(zip(*_best(row, len(report.top)), strict=True)), abs=1e-5)
        if at % 3 == 0:
            assert report.top[0] == (report.token_id, report.logprob)


def _best(row: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    best = row.topk(count)
    return best.indices.tolist(), best.values.tolist()


# --- broken rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_only_a_broken_row_fails(sampler: AnySampler, temperature: float, broken: float) -> None:
    logits = random_logits(3)
    requests = [request(seed=i, temperature=temperature, logprobs=2, top_p=0.9) for i in range(3)]
    healthy = sample(sampler, logits, requests)
    logits[1, 13] = broken
    tokens, reports = sampler.sample(logits, [SamplingRow.of(request) for request in requests])
    assert tokens.tolist() == [healthy[0], INVALID, healthy[2]]
    assert reports[1] is None and reports[0] is not None
    assert sample(sampler, torch.full((1, VOCAB), -math.inf), requests[:1]) == [INVALID]
