"""The messages between rank 0 and the other ranks, in msgpack, never pickle.

rank 0 ── LoadTask, StepTask, ReplayTask, ... ──▶ other rank ── RankReady, MovedPage, PagePart, ... ──▶ rank 0
                                                       └── at most one RankFailed, the last ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from cache import PageCopy
from engine.attention.batch import AttentionBatch
from engine.attention.pinned import to_device
from engine.graphs.decode_graphs import GraphStep, RecordedSampler
from engine.graphs.row_assignment import RowChanges
from engine.graphs.step_graphs import DecodeSize
from engine.models.expert_copies import Changes
from engine.runner.prepared_step import PreparedStep
from engine.sampling.pooled import PooledRow
from engine.sampling.prompt_logprobs import PromptSpan
from engine.settings.config import EngineConfig
from engine.values.plan import PagePair, StateCopy

MAX_REPORT_BYTES = 2**20
"""Largest message of another rank to rank 0, without a page's bytes; a longer one ends its connection."""


class LoadTask(msgspec.Struct, frozen=True, tag=True):
    """The model that a rank loads, and the store at which it joins the others."""

    config: EngineConfig
    """Its `device` is "cpu" or "cuda"."""
    store_port: int
    """Port of the store through which the ranks form their process group."""
    starts: tuple[int, ...] = (0,)
    """The first layer of each stage."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank has started and begins to load its share."""

    rank: int
    device_name: str
    """Its maker's name for the GPU; "cpu" on a CPU."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank ends because it failed."""

    reason: str


class WritePage(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Write this rank's part of a page to its file, after the earlier steps."""

    key: bytes
    page: int
    """The host page."""
    blocks: Sequence[int]
    """Hashes of the blocks in it."""


class ReadPage(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Read this rank's part of a page into a host page, after the earlier steps."""

    key: bytes
    page: int


class MovedPage(msgspec.Struct, frozen=True, tag=True):
    """A rank has written or read its part of a page, or failed to."""

    is_write: bool
    page: int
    is_done: bool


class LendPage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Send this rank's part of a page, as it is after the earlier steps."""

    number: int
    """Identifies the reading in the answer."""
    is_device: bool
    page: int


class StorePage(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Write this rank's part of a page from another engine, after the earlier steps and before the later ones."""

    page: int
    """The host page."""
    data: memoryview


class PagePart(msgspec.Struct, frozen=True, tag=True):
    """A rank's part of a page."""

    rank: int
    number: int
    data: memoryview


class StoredPage(msgspec.Struct, frozen=True, tag=True):
    """A rank has written a `StorePage`."""


class StepTask(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A `PreparedStep` without the fields that only sampling needs. Its tensors are on the host."""

    copies: Sequence[PageCopy]
    swap_out: Sequence[PagePair]
    swap_in: Sequence[PagePair]
    batch: AttentionBatch | None
    ids: torch.Tensor
    pending: torch.Tensor
    sources: torch.Tensor
    sampled_positions: torch.Tensor
    wanted: Sequence[PromptSpan]
    pooled: Sequence[PooledRow]
    states_out: Sequence[StateCopy]
    states_in: Sequence[StateCopy]

    @classmethod
    def of(cls, step: PreparedStep) -> StepTask:
        """Take the fields that the other ranks need from a step."""
        return cls(*(getattr(step, field.name) for field in msgspec.structs.fields(cls)))

    def step(self, device: torch.device) -> PreparedStep:
        """Return the step as a rank other than the first runs it, with its tensors on `device`."""
        shared = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self)}
        return to_device(PreparedStep(**shared, chunks=(), tails=(), has_drafts=False), device)


class CopyExperts(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Change the copies of experts between the steps sent before and after it."""

    changes: Changes


class FinishTask(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Sample for the oldest step that is not finished. Only the first of several stages gets it."""


class ReplayTask(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A `GraphStep` without its requests: the changes of the rows of decodes, which are the same on all ranks."""

    copies: Sequence[PageCopy]
    swap_out: Sequence[PagePair]
    swap_in: Sequence[PagePair]
    size: DecodeSize
    number: int
    count: int
    """Number of rows in use."""
    packet: torch.Tensor
    """int64; empty if there is nothing to write."""
    num_words: int
    is_reset: bool
    sampler: RecordedSampler | None
    """The graph by which each rank chooses the tokens, from the same logits; None if rank 0 sends them."""

    @classmethod
    def of(cls, step: GraphStep) -> ReplayTask:
        """Take the fields that the other ranks need from a step."""
        changes = step.changes
        packet = np.empty(0, dtype=np.int64) if changes.packet is None else changes.packet
        return cls(
            step.copies,
            step.swap_out,
            step.swap_in,
            step.size,
            changes.number,
            len(changes.rows),
            torch.from_numpy(packet),
            changes.num_words,
            changes.is_reset,
            step.sampler if step.tails is None else None,
        )

    def step(self) -> GraphStep:
        """Return the step as a rank other than the first runs it."""
        packet = self.packet.numpy() if len(self.packet) else None
        changes = RowChanges(self.number, range(self.count), packet, self.num_words, self.is_reset)
        tails = () if self.sampler is None else None
        return GraphStep(
            self.copies, self.swap_out, self.swap_in, changes, self.size, self.sampler, tails=tails, chunks=()
        )


_TYPES = {str(kind): kind for kind in (torch.int32, torch.int64)}


def _packed(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().data
    raise TypeError(f"{type(value).__name__} is not sent to other ranks")


def _unpacked(kind: type, value: Any) -> object:
    if kind is not torch.Tensor:
        raise TypeError(f"{kind.__name__} is not sent by other ranks")
    name, shape, data = value
    flat = torch.frombuffer(bytearray(data), dtype=_TYPES[name]) if data else torch.empty(0, dtype=_TYPES[name])
    return flat.view(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_work = msgspec.msgpack.Decoder(
    StepTask | FinishTask | ReplayTask | CopyExperts | WritePage | ReadPage | LendPage | StorePage,
    dec_hook=_unpacked,
)
_report = msgspec.msgpack.Decoder(RankReady | RankFailed | MovedPage | PagePart | StoredPage)
_task = msgspec.msgpack.Decoder(LoadTask)


PageTask = WritePage | ReadPage | LendPage | StorePage
Work = StepTask | FinishTask | ReplayTask | CopyExperts | PageTask
"""The tasks of the other ranks once they have loaded their share."""
PageReport = MovedPage | PagePart | StoredPage
Report = RankReady | RankFailed | PageReport


def encode(message: LoadTask | Work | Report) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def read_load_task(data: bytes) -> LoadTask:
    """Decode a rank's load task. Raises msgspec.DecodeError, as all decoders here do."""
    return _task.decode(data)


def read_work(data: bytes) -> Work:
    """Decode a step or a task for a page."""
    return cast("Work", _work.decode(data))


def read_report(data: bytes) -> Report:
    """Decode a report of another rank to rank 0."""
    return cast("Report", _report.decode(data))
