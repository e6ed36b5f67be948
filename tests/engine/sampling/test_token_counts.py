"""Penalties from counts that are kept are those of the whole history, and cost the same however long it is."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native
from engine.sampling.native import NativeSampler
from engine.sampling.token_counts import TokenCounts
from engine.values.request import Request
from engine.values.sampling_row import SamplingRow
from tests.engine.support.penalty_courses import (
    VOCAB,
    check_tokens_without_a_logit,
    make_request,
    play,
    read_by_steps,
)
from tests.engine.support.sampling_rows import EOS


@pytest.fixture
def sampler() -> NativeSampler:
    return make_sampler()


def make_sampler() -> NativeSampler:
    try:
        return NativeSampler(EOS, native.kernels(torch.float32))
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_course_of_requests_is_penalized_as_their_whole_histories(seed: int) -> None:
    play(make_sampler(), seed)


def test_a_step_reads_only_the_new_part_of_a_long_history(sampler: NativeSampler) -> None:
    assert read_by_steps(sampler)[1:] == [2] * 4


def test_tokens_without_a_logit_are_not_counted(sampler: NativeSampler) -> None:
    check_tokens_without_a_logit(sampler)


def test_counts_follow_new_tokens_and_forget_ended_requests() -> None:
    """The table is as large as the largest step, and keeps no request alive."""
    counts, logits = TokenCounts(), torch.zeros(1, VOCAB)
    ended: list[weakref.ref[Request]] = []
    for step in range(6):
        rows = [
            SamplingRow.of(make_request([1, 2, 2], [3, 4, 4], repetition_penalty=1.5, seed=step * 3 + at))
            for at in range(3)
        ]
        for slot in counts.follow(rows, logits):
            assert counts.table[slot].nonzero()[:, 0].tolist() == [1, 2, 3, 4]
            assert counts.table[slot, 1:5].tolist() == [1, 1, 2, 4]
        rows[0].request.tokens.append(2)
        [slot] = counts.follow([SamplingRow.of(rows[0].request)], logits)
        assert counts.table[slot, 2] == 3
        assert counts.table.shape == (3, VOCAB)
        ended += [weakref.ref(row.request) for row in rows]
    del rows
    gc.collect()
    assert [request() for request in ended] == [None] * len(ended)


def test_a_request_that_lost_its_slot_to_others_is_counted_again() -> None:
    """As one that was preempted."""
    counts, logits = TokenCounts(), torch.zeros(1, VOCAB)
    first, second = (make_request([1], [token], presence_penalty=1.0) for token in (5, 6))
    for request in (first, second, first):
        [slot] = counts.follow([SamplingRow.of(request)], logits)
        assert dict(Counter(request.output_ids)) == {
            token: count // 2 for token, count in enumerate(counts.table[slot].tolist()) if count
        }
        request.tokens.append(9)
    assert len(counts.table) == 1
