"""The native sampler compared with torch's, token for token, with every instruction set of this processor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.constraint import Constraint
from engine.grammar.failure import GrammarFailure
from engine.grammar.spec import Grammar
from engine.kernels import native
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import Sampler, sampler_for
from engine.values.sampling_row import SamplingRow
from tests.engine.support.grammar_models import NUM_TOKENS, compiler, ids
from tests.engine.support.sampling_rows import EOS, PARAMS, assert_same_logprobs, row


@pytest.fixture(scope="module", params=native.ISAS[:3])
def sampler(request: pytest.FixtureRequest) -> NativeSampler:
    """The sampler with each instruction set that has float32 kernels of its own."""
    try:
        return NativeSampler(EOS, native.kernels(torch.float32, request.param))
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


def agree(sampler: NativeSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Return both samplers' tokens, checking that these, log-probabilities and adjusted logits are equal."""
    ours, theirs = logits.clone(), logits.clone()
    tokens, reports = sampler.sample(ours, rows)
    expected, expected_reports = Sampler(EOS).sample(theirs, rows)
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(ours.nan_to_num(-1e30), theirs.nan_to_num(-1e30))
    for mine, other in zip(reports, expected_reports, strict=True):
        assert_same_logprobs(mine, other)
    return tokens.tolist()


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1024, 5000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_tokens_are_those_of_torch(
    sampler: NativeSampler, params: list[dict[str, Any]], vocab_size: int, scale: float, is_coarse: bool, seed: int
) -> None:
    """Ties are included, as coarse logits are halves."""
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(seed % 2**32)) * scale
    if is_coarse:
        logits = (logits * 2).round() / 2
    agree(sampler, logits, [row(asked, seed // (at + 1), at % 5, vocab_size) for at, asked in enumerate(params)])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_k": 50},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.01},
        {"min_p": 0.05},
        {"top_k": 1000},
        {"top_p": 0.9999, "temperature": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_many_draws_from_a_large_vocabulary(sampler: NativeSampler, params: dict[str, Any], scale: float) -> None:
    logits = torch.randn(30, 20_011, generator=torch.Generator().manual_seed(5)) * scale
    assert len(set(agree(sampler, logits, [row(params, seed) for seed in range(30)]))) > 20


def test_other_requests_with_equal_parameters_draw_by_their_own_seeds(sampler: NativeSampler) -> None:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(5))
    assert len({tuple(agree(sampler, logits, [row({}, seed)] * 30)) for seed in range(3)}) == 3


def test_equals_of_a_large_vocabulary(sampler: NativeSampler) -> None:
    """The cut goes through equally likely tokens, of which those with lower ids stay."""
    logits = torch.zeros(40, 9000)
    logits[:, 4000:] = 1.0
    for params in ({"top_p": 0.25}, {"top_k": 77}, {"top_k": 6000, "top_p": 0.9}, {"temperature": 0.0}):
        tokens = agree(sampler, logits, [row(params, seed) for seed in range(40)])
    assert set(tokens) == {4000}


def test_logits_may_fill_the_range_of_floats(sampler: NativeSampler) -> None:
    """Histograms find the cut even if logits fill the range of floats."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)).repeat(30, 1)
    logits[:, ::7] = -3.4e38
    logits[:, 1::7] = -torch.inf
    logits[:, 2::7] *= 1e-8
    for params in (
        {"top_k": 2000},
        {"top_k": 1500, "top_p": 0.9},
        {"top_p": 0.99},
        {"min_p": 0.2},
        {"logprobs": 20},
    ):
        agree(sampler, logits, [row(params, seed) for seed in range(30)])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 13, 299])
def test_rows_without_a_valid_choice(sampler: NativeSampler, broken: float, at: int) -> None:
    """A broken logit that is forbidden does not count; reports of a broken row are broken as well."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    logits[1, at] = logits[3, 2] = broken
    logits[2] = -torch.inf
    rows = [
        row({"top_p": 0.9}),
        row({"temperature": 0.0}),
        row({}),
        row({"min_tokens": 9, "stop_token_ids": (2,)}),
    ]
    tokens = agree(sampler, logits, [*rows, row({"top_k": 3})])
    assert [token < 0 for token in tokens] == [False, True, True, False, False]


def test_a_table_of_another_step_is_not_used(sampler: NativeSampler) -> None:
    """Only parameters, seeds, positions or the history for penalties may change between steps."""
    logits = torch.zeros(2, 500)
    seen = set()
    for seed in (1, 2):
        for output in (1, 2, 3):
            for params in (
                {},
                {"top_k": 100},
                {"min_tokens": 2, "stop_token_ids": (1, 2)},
                {"presence_penalty": 2.0},
            ):
                rows = [row(params, seed, output), row({}, 7)]
                seen.add(tuple(agree(sampler, logits, rows)))
                assert agree(sampler, logits[:1], rows[1:]) == agree(sampler, logits[:1], rows[1:])
    assert len(seen) > 10


def test_rows_need_not_touch(sampler: NativeSampler) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(4))[:, 50:650]
    rows = [row({"logprobs": 2}, seed) for seed in range(3)]
    assert sampler.sample(logits, rows)[0].tolist() == Sampler(EOS).sample(logits.contiguous(), rows)[0].tolist()
    with pytest.raises(ValueError, match="rows of float32"):
        sampler.sample(logits.T, rows)


def test_the_native_sampler_is_used_for_logits_on_a_cpu_if_the_library_was_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(dtype: torch.dtype) -> native.Kernels:
        raise native.NativeUnavailable(f"no kernels for {dtype}")

    assert isinstance(sampler_for(EOS, torch.device("meta")), Sampler)
    monkeypatch.setattr(native, "kernels", missing)
    assert isinstance(sampler_for(EOS, torch.device("cpu")), Sampler)


def test_grammars_are_followed_next_to_other_rows(sampler: NativeSampler) -> None:
    """One row answers in b's, one grammar has failed, and reports come from the model's own logits."""
    logits = torch.randn(4, NUM_TOKENS, generator=torch.Generator().manual_seed(6))
    rows = [
        row({"logprobs": 3}),
        row({"logprobs": 3, "top_p": 0.9}, output=0),
        row({}, output=0),
        row({"top_k": 2}),
    ]
    for at, text in ((1, "b+"), (2, "c")):
        rows[at].request.constraint = Constraint(compiler().compile(Grammar("regex", text)))
    rows[2].request.tokens.extend(ids("d"))
    rows[2] = SamplingRow.of(rows[2].request)
    tokens = agree(sampler, logits, rows)
    assert tokens[1] in ids("bb bbb bbbb") and tokens[2] == GrammarFailure.DEFECT
    for followed in rows[1:3]:
        followed.request.constraint = None
    assert min(agree(sampler, logits, rows)) >= 0  # No mask is left over.
