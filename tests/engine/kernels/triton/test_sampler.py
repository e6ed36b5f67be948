"""The sampler with Triton's kernels compared with torch's, token for token."""

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
from engine.kernels.triton import sample
from engine.sampling.noise import uniform
from engine.sampling.sampler import Sampler, sampler_for
from engine.sampling.triton_chooser import TritonChooser
from engine.values.sampling_row import SamplingRow
from tests.engine.support.counted_copies import META, CountedCopies
from tests.engine.support.devices import DEVICE
from tests.engine.support.grammar_models import NUM_TOKENS, compiler, ids
from tests.engine.support.penalty_courses import check_tokens_without_a_logit, play, read_by_steps
from tests.engine.support.sampling_rows import EOS, PARAMS, assert_same_logprobs, row


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that rows have several and some overflow: results do not depend on it."""
    for name, size in (("CHUNK", 256), ("BLOCK", 16), ("ROOM", 16)):
        monkeypatch.setattr(sample, name, size)


def agree(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Return both samplers' tokens, checking that these, reports and adjusted logits are equal."""
    ours, theirs = logits.to(DEVICE, copy=True), logits.clone()
    tokens, reports = sampler.sample(ours, rows)
    expected, expected_reports = Sampler(EOS).sample(theirs, rows)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    for mine, other in zip(reports, expected_reports, strict=True):
        assert_same_logprobs(mine, other)
    return tokens.tolist()


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(EOS, TritonChooser())


def test_parameters_are_sent_in_one_copy_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of generated tokens, which always change, are another copy."""
    monkeypatch.setattr(sample, "choose", lambda logits, tensors, positions: (tensors, positions))
    chooser, logits = TritonChooser(), torch.empty(2, 600, device=META)
    rows = [row({"temperature": 0.7, "top_k": 3}, 1, at, 600) for at in (0, 4)]
    for asked, count in ((rows, 2), (rows, 1), (rows[:1], 2)):
        with CountedCopies() as copies:
            chooser.choose(logits, asked)
        assert len(copies.sizes) == count


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=3),
    vocab_size=st.sampled_from([1, 2, 15, 255, 256, 257, 600]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_tokens_are_those_of_torch(
    params: list[dict[str, Any]], vocab_size: int, scale: float, is_coarse: bool, seed: int
) -> None:
    """Ties (coarse logits are halves), penalties, bias, forbidden ends and reports are included."""
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(seed % 2**32)) * scale
    if is_coarse:
        logits = (logits * 2).round() / 2
    rows = [row(asked, seed // (at + 1), at % 5, vocab_size) for at, asked in enumerate(params)]
    agree(Sampler(EOS, TritonChooser()), logits, rows)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_k": 50},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.01},
        {"min_p": 0.05},
        {"top_p": 0.9999, "temperature": 3.0},
    ],
    ids=str,
)
def test_many_draws_from_a_larger_vocabulary(sampler: Sampler, params: dict[str, Any]) -> None:
    """The search for a cut takes several tiles, the last one partly filled."""
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(5)) * 2
    assert len(set(agree(sampler, logits, [row(params, seed) for seed in range(3)]))) > 1


def test_the_cut_goes_through_equally_likely_tokens(sampler: Sampler) -> None:
    """The cut goes through equally likely tokens, of which those with lower ids stay."""
    logits = torch.zeros(2, 1100)
    logits[:, 300:] = 1.0
    for params in ({"top_p": 0.25}, {"top_k": 77}, {"top_k": 900, "top_p": 0.9}, {"temperature": 0.0}):
        tokens = agree(sampler, logits, [row(params, seed) for seed in range(2)])
    assert set(tokens) == {300}


def test_logits_may_fill_the_range_of_floats(sampler: Sampler) -> None:
    """Logits fill the range of floats and include both zeros."""
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(2)).repeat(2, 1)
    logits[:, ::7] = -3.4e38
    logits[:, 1::7] = -torch.inf
    logits[:, 2::7] *= 1e-8
    logits[:, 3::14], logits[:, 10::14] = 0.0, -0.0
    for params in (
        {"top_k": 1},
        {"top_k": 450},
        {"top_k": 350, "top_p": 0.9},
        {"top_p": 0.99},
        {"top_p": 1.0, "temperature": 1e-300},
        {"min_p": 0.2},
        {"logprobs": 20},
    ):
        agree(sampler, logits, [row(params, seed) for seed in range(2)])


def test_little_is_left_by_masks(sampler: Sampler) -> None:
    """Masks leave fewer tokens than top-k, in distant chunks, or none at all."""
    logits = torch.full((4, 500), -math.inf)
    logits[:3, 3], logits[:3, 490] = 1.0, 0.5
    rows = [row({"top_k": 50}), row({"top_p": 0.9}, 1), row({"top_k": 1, "temperature": 9.0}), row({"top_p": 0.5})]
    assert agree(sampler, logits, rows)[2:] == [3, -1]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 256, 299])
def test_rows_without_a_valid_choice(sampler: Sampler, broken: float, at: int) -> None:
    """A broken logit that is forbidden does not count; a broken row does not affect other rows."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    logits[1, at] = logits[3, 2] = broken
    logits[2] = -torch.inf
    rows = [
        row({"top_p": 0.9}),
        row({"temperature": 0.0}),
        row({}),
        row({"min_tokens": 9, "stop_token_ids": (2,)}),
        row({"top_k": 3}),
    ]
    assert [token < 0 for token in agree(sampler, logits, rows)] == [False, True, True, False, False]


def test_parameters_of_another_step_are_not_used(sampler: Sampler) -> None:
    """Only parameters, seeds, positions or the history for penalties may change between steps."""
    logits = torch.zeros(2, 200)
    seen = set()
    for seed in (1, 2):
        for output in (1, 2):
            for params in ({}, {"top_k": 100}, {"presence_penalty": 2.0}):
                seen.add(tuple(agree(sampler, logits, [row(params, seed, output), row({}, 7)])))
    assert len(seen) > 6


def test_rows_need_not_touch() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    rows = [row({"top_k": 20}, seed) for seed in range(3)]
    part = logits[:, 50:650]
    assert torch.equal(TritonChooser().choose(part, rows), TritonChooser().choose(part.contiguous(), rows))
    with pytest.raises(ValueError, match="rows of float32"):
        TritonChooser().choose(logits.T, rows)


def test_grammars_are_followed_next_to_other_rows(sampler: Sampler) -> None:
    logits = torch.randn(3, NUM_TOKENS, generator=torch.Generator().manual_seed(6))
    rows = [row({"logprobs": 3}), row({"logprobs": 3, "top_p": 0.9}, output=0), row({}, output=0)]
    for at, text in ((1, "b+"), (2, "c")):
        rows[at].request.constraint = Constraint(compiler().compile(Grammar("regex", text)))
    rows[2].request.tokens.extend(ids("d"))
    rows[2] = SamplingRow.of(rows[2].request)
    tokens = agree(sampler, logits, rows)
    assert tokens[1] in ids("bb bbb bbbb") and tokens[2] == GrammarFailure.DEFECT


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_any_course_of_requests_is_penalized_as_their_whole_histories(seed: int) -> None:
    play(Sampler(EOS, TritonChooser()), seed, DEVICE.type)


def test_a_step_reads_only_the_new_part_of_a_long_history(sampler: Sampler) -> None:
    assert read_by_steps(sampler, DEVICE.type)[1:] == [2] * 4


def test_tokens_without_a_logit_are_not_counted(sampler: Sampler) -> None:
    check_tokens_without_a_logit(sampler, DEVICE.type)


def test_noise_is_that_of_the_host() -> None:
    """With equally likely tokens noise alone decides, for any seed and position."""
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 7, 2**31, 2**40]
    logits = torch.zeros(5, 1000, device=DEVICE)
    choices = sample.SamplingTensors(
        seed=torch.tensor(seeds, device=DEVICE),
        inverse=torch.ones(5, dtype=torch.float64, device=DEVICE),
        top_k=torch.zeros(5, dtype=torch.int32, device=DEVICE),
        top_p=torch.ones(5, dtype=torch.float64, device=DEVICE),
        min_p=torch.zeros(5, dtype=torch.float64, device=DEVICE),
        draws=True,
        cuts=False,
    )
    tokens = sample.choose(logits, choices, torch.tensor(positions, device=DEVICE))
    assert tokens.tolist() == [int(noise * 1000) for noise in uniform(seeds, positions)]


def test_the_triton_sampler_is_used_on_a_gpu() -> None:
    assert isinstance(sampler_for(EOS, torch.device("cuda"))._chooser, TritonChooser)  # type: ignore[union-attr]
