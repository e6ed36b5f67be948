"""What an engine replica and an ingress say to each other over ZeroMQ: msgpack, typed, nothing executable.

    ingress                                replica
      Hello(secret, received) ───────────▶            who I am, how many tokens of which streams I have
                              ◀─────────── Welcome    or Refused
                              ◀─────────── Snapshot   the block hashes of all prefixes held, in parts
                              ◀─────────── Tokens     one per step: the new tokens of all my requests, and the load
                              ◀─────────── Heartbeat  when there was nothing else to send
                              ◀─────────── Delta      block hashes stored and evicted since the last one
      Dispatch                ───────────▶            a request is on its way: other ingresses count it too
      Abort, Resume, Resync   ───────────▶

A stream's every output says at which of its tokens it starts, so a receiver notices a lost or repeated token
whatever happened below, and asks again (`Resume`): the replica keeps each request's tokens until it has ended.
Every message bears (epoch, sequence): a gap also means that a delta may be lost, and `Resync` asks for a snapshot.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from engine.beam_search import Hypothesis
from engine.logprobs import PackedLogprobs, TokenLogprobs
from engine.stream_delta import FinishReason, StreamDelta, Timings
from router.fleet import ReplicaLoad

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 64 * 2**20


Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
"""What an ingress may say of a number of tokens: sums of many still fit into a message."""


Load = ReplicaLoad
"""Of a replica, as one ingress needs it."""


class MalformedMessage(ValueError):
    """The bytes are not a message of this wire."""


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """First message of an ingress, and again after each reconnect."""

    version: int
    secret: str
    number: int
    """Grows with every hello of this ingress: an old one that is sent again is not taken for a new one."""
    ingress_id: str
    model: str
    """`fingerprint` of the model the ingress tokenizes for; "" is not checked."""
    received: dict[str, Count]
    """Tokens received of each stream this ingress still waits for."""


class Abort(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The client is gone: end the request."""

    request_id: str


class Resume(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Send these streams again from where they broke off."""

    received: dict[str, Count]


class Resync(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Send a snapshot: a delta may have been lost."""


class Dispatch(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A request is on its way through Serve, which takes longer than the wire."""

    number: Count
    """Counts the dispatches of this ingress to this replica, from 1."""
    request_id: str
    num_tokens: Count
    """Prompt tokens that are probably not cached at the replica."""


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """`engine.scheduling.plan.TokenLogprobs` on the wire."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """News of one stream; without tokens and finish reason it only says that the request was accepted."""

    request_id: str
    start: int
    """How many tokens of the stream come before these."""
    token_ids: list[int] = []
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    logprobs: Sequence[Logprob] = []
    error: str | None = None
    timings: tuple[float, float, float, int, int] | None = None
    prompt_logprobs: PackedLogprobs | None = None
    """Of prompt tokens; all of them have come by the first new token."""
    alternatives: Sequence[Hypothesis] = ()
    """With the end of a beam search: what it found, best first."""


class Welcome(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The hello was accepted."""

    epoch: int
    """Differs between starts of a replica."""
    seq: int
    replica: str
    model: str
    """`fingerprint` of the model it runs; "" when it has none."""
    block_tokens: int
    """Tokens to a block of its prefix hashes."""


class Refused(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The hello was not accepted."""

    reason: str


class Unknown(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """Streams that were asked for and are not known here: aborted meanwhile, or of an earlier start."""

    epoch: int
    seq: int
    request_ids: list[str]


class Tokens(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """What a step produced for one ingress."""

    epoch: int
    seq: int
    outputs: list[Output]
    load: Load | None = None


class Heartbeat(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The replica is alive, and this busy."""

    epoch: int
    seq: int
    load: Load


class Snapshot(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """Part of the block hashes of all prefixes a replica holds; after the last part they replace all before."""

    epoch: int
    seq: int
    hashes: bytes
    """uint64, little endian."""
    is_last: bool


class Delta(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """What changed in a replica's cache."""

    epoch: int
    seq: int
    stored: bytes
    """Block hashes, uint64, little endian."""
    evicted: bytes


Sequenced = Welcome | Tokens | Heartbeat | Unknown | Snapshot | Delta
ToReplica = Hello | Abort | Resume | Resync | Dispatch
ToIngress = Sequenced | Refused

encode = msgspec.msgpack.Encoder().encode
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_to_ingress: msgspec.msgpack.Decoder[ToIngress] = msgspec.msgpack.Decoder(ToIngress)
# RecursionError: a field too many is skipped, however deeply it is nested.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_to_replica(data: bytes) -> ToReplica:
    """Read what an ingress sent. Raises MalformedMessage."""
    try:
        return _to_replica.decode(data)
    except _UNREADABLE as error:
        raise MalformedMessage(str(error)) from None


def decode_to_ingress(data: bytes) -> ToIngress:
    """Read what a replica sent. Raises MalformedMessage."""
    try:
        return _to_ingress.decode(data)
    except _UNREADABLE as error:
        raise MalformedMessage(str(error)) from None


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Block hashes as uint64, little endian."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: bytes) -> array[int]:
    """The reverse. Raises MalformedMessage when `data` is not a whole number of hashes."""
    if len(data) % 8:
        raise MalformedMessage(f"{len(data)} bytes are no whole number of 8-byte hashes")
    unpacked = array("Q", data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def to_event(output: Output) -> StreamDelta:
    """The engine's event that an output stands for."""
    return StreamDelta(
        request_id=output.request_id,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(TokenLogprobs(p.token_id, p.logprob, tuple(p.top)) for p in output.logprobs),
        finish_reason=output.finish_reason,
        num_cached=output.num_cached,
        error=output.error,
        timings=None if output.timings is None else Timings(*output.timings),
        prompt_logprobs=output.prompt_logprobs,
        alternatives=tuple(output.alternatives),
    )


def encode_logprobs(logprobs: Iterable[TokenLogprobs]) -> list[msgspec.Raw]:
    """The wire's form of logprobs, each encoded already: it takes an eighth of the objects' memory."""
    return [msgspec.Raw(encode(Logprob(p.token_id, p.logprob, list(p.top)))) for p in logprobs]


def to_timings(timings: Timings | None) -> tuple[float, float, float, int, int] | None:
    """The wire's form of timings."""
    if timings is None:
        return None
    return (timings.queue, timings.prefill, timings.decode, timings.num_preemptions, timings.num_recomputed)
