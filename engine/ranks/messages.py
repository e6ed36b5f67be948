"""What goes between rank 0 and the others, in msgpack: never pickle.

rank 0 ── Task, Work, Work, ... ──▶ each other rank ── Hello, then at most one Failed ──▶ rank 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import msgspec
import torch

from cache import PageCopy
from engine.attention.batch import AttentionBatch
from engine.config import EngineConfig
from engine.runner.prepared_step import PreparedStep
from engine.sampling.prompt_logprobs import PromptSpan
from engine.scheduling.swap import PagePair

T = TypeVar("T")


class Task(msgspec.Struct, frozen=True, tag=True):
    """What to load, and where to meet."""

    config: EngineConfig
    """Its `device` is "cpu" or "cuda"."""
    store_port: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank has begun."""

    rank: int
    device_name: str
    """The GPU's, as its maker calls it; "cpu" on a CPU."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank ends, and why."""

    reason: str


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A `PreparedStep` without what only sampling needs. Tensors are on the host."""

    copies: Sequence[PageCopy]
    swap_out: Sequence[PagePair]
    swap_in: Sequence[PagePair]
    batch: AttentionBatch | None
    ids: torch.Tensor
    pending: torch.Tensor
    sources: torch.Tensor
    sampled_positions: torch.Tensor
    wanted: Sequence[PromptSpan]

    @classmethod
    def of(cls, step: PreparedStep) -> Work:
        """What others have to know of a step."""
        return cls(*(getattr(step, field.name) for field in msgspec.structs.fields(cls)))

    def step(self, device: torch.device) -> PreparedStep:
        """The step as they run it, on `device`."""
        shared = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self)}
        return on(PreparedStep(**shared, chunks=(), tails=(), has_drafts=False), device)


def on(step: T, device: torch.device) -> T:
    """A dataclass whose tensors are on `device`, as are those of dataclasses in it; the same one where they are on
    the host and that is the device.
    """
    if device.type == "cpu" or not is_dataclass(step):
        return step
    moved: dict[str, Any] = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device, non_blocking=True)
        elif is_dataclass(value):
            moved[field.name] = on(value, device)
    return cast("T", replace(step, **moved))  # type: ignore[type-var]


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
_work = msgspec.msgpack.Decoder(Work, dec_hook=_unpacked)
_news = msgspec.msgpack.Decoder(Hello | Failed)
_task = msgspec.msgpack.Decoder(Task)


def encode(message: Task | Hello | Failed | Work) -> bytes:
    """As bytes."""
    return _encoder.encode(message)


def read_task(data: bytes) -> Task:
    """Raises msgspec.DecodeError, as all of these do."""
    return _task.decode(data)


def read_work(data: bytes) -> Work:
    """A step's."""
    return _work.decode(data)


def read_news(data: bytes) -> Hello | Failed:
    """What another rank says to rank 0."""
    return cast("Hello | Failed", _news.decode(data))
