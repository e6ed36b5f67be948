"""Ranks receive a step as rank 0 prepared it, on whatever device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cache import Namespace, PageCopy, StateStep
from engine.attention.batch import AttentionBatch
from engine.attention.pinned import to_device
from engine.attention.places import Places
from engine.graphs.decode_graphs import GraphStep, RecordedSampler
from engine.graphs.row_assignment import RowChanges
from engine.graphs.step_graphs import DecodeSize
from engine.ranks.messages import (
    RankReady,
    ReplayTask,
    StepTask,
    encode,
    read_load_task,
    read_report,
    read_work,
)
from engine.runner.prepared_step import PreparedStep
from engine.values.plan import Chunk, StepPlan
from engine.values.request import PENDING, Request
from engine.values.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def step() -> PreparedStep:
    """Return a decode whose token is in flight, and a prompt that is scored."""
    sampling = [SamplingParams(temperature=0), SamplingParams(temperature=0, prompt_logprobs=2)]
    requests = [
        Request.make(f"r{n}", list(range(9)), params, arrival=0.0, seed=0, namespace=Namespace("m"))
        for n, params in enumerate(sampling)
    ]
    chunks = (
        Chunk(requests[0], 9, 1, [PENDING], [4, 5, 6], True, state=StateStep(3, 3, 0, ())),
        Chunk(requests[1], 0, 9, list(range(9)), [1, 2, 3], True, state=StateStep(None, 1, 0, ((4, 2),))),
    )
    plan = StepPlan(chunks, (PageCopy(7, 4, 2),), swap_out=((1, 0),), swap_in=((2, 5), (3, 6)))
    return PreparedStep.of(plan, Places(4, 99, 8))


ONLY_OF_RANK_0 = ("chunks", "computed", "tails", "has_drafts")
"""Fields that other ranks do not need, as only rank 0 samples and drafts."""


def received_step(step: PreparedStep) -> PreparedStep:
    work = read_work(encode(StepTask.of(step)))
    assert isinstance(work, StepTask)
    return work.step(CPU)


def check_same(sent: Any, got: Any) -> None:
    """Both have the same fields, but for those that other ranks do not need."""
    assert type(sent) is type(got)
    for field in fields(sent):
        own, other = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(own, torch.Tensor):
            assert own.dtype == other.dtype and torch.equal(own, other), field.name
        elif is_dataclass(own):
            check_same(own, other)
        elif field.name not in ONLY_OF_RANK_0:
            assert own == other if isinstance(own, int | None) else list(own) == list(other), field.name


def test_a_step_arrives_as_it_was_sent(step: PreparedStep) -> None:
    received = received_step(step)
    check_same(step, received)
    assert isinstance(step.batch, AttentionBatch)
    assert step.batch.states is not None and step.batch.states.rows[0].borders == [(4, 2)]
    received.token_ids(torch.tensor([17, 18]))  # it can be written to
    assert received.ids[0] == 17


def test_a_step_without_tokens_may_still_copy_pages() -> None:
    step = PreparedStep.of(StepPlan(swap_out=((1, 0),)), Places(4, 99))
    received = received_step(step)
    assert received.batch is None and list(received.swap_out) == [(1, 0)]


@pytest.mark.parametrize("packet", [None, np.array([3, 4, 2**40, -1, 0, 1])])
def test_a_step_that_graphs_run_arrives_without_its_requests(packet: Any) -> None:
    changes = RowChanges(7, [1, 0], packet, 0 if packet is None else 2, False)
    tails = None if packet is None else [None, 0]
    sampler: RecordedSampler | None = "cutting" if packet is None else None
    sent = GraphStep((PageCopy(7, 4, 2),), ((1, 0),), (), changes, DecodeSize(4, 96), sampler, tails, chunks=())
    task = read_work(encode(ReplayTask.of(sent)))
    assert isinstance(task, ReplayTask)
    got = task.step()
    assert (list(got.copies), list(got.swap_out), list(got.swap_in)) == ([PageCopy(7, 4, 2)], [(1, 0)], [])
    assert (got.size, got.changes.number, len(got.rows), got.changes.is_reset) == (DecodeSize(4, 96), 7, 2, False)
    assert (got.tails is None) == (tails is None) and got.sampler == sampler and not got.sampling_rows(list)
    if packet is None:
        assert got.changes.packet is None
    else:
        assert got.changes.packet is not None and got.changes.num_words == 2
        assert got.changes.packet.tolist() == packet.tolist()


def test_all_tensors_go_to_the_ranks_device(step: PreparedStep) -> None:
    moved = to_device(step, torch.device("meta"))
    assert isinstance(moved.batch, AttentionBatch)
    tensors = [
        value
        for part in (moved, moved.batch)
        for field in fields(part)
        if isinstance(value := getattr(part, field.name), torch.Tensor)
    ]
    assert len(tensors) >= 9 and {tensor.device.type for tensor in tensors} == {"meta"}


def test_an_invalid_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_work(b"\x93junk")
    with pytest.raises(msgspec.ValidationError):
        read_load_task(encode(RankReady(1, "cpu")))
    assert read_report(encode(RankReady(1, "cpu"))) == RankReady(1, "cpu")
