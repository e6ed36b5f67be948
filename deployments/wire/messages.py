"""What an engine replica and an ingress say to each other over ZeroMQ: msgpack, typed, nothing executable.

    ingress                                replica
      Hello(secret, received) ───────────▶            who I am, how many tokens of which streams I have
                              ◀─────────── Welcome    or Refused
                              ◀─────────── PrefixSnapshot   the block hashes of all prefixes held, in parts
                              ◀─────────── Tokens     one per step: the new tokens of all my requests, and the load
                              ◀─────────── Heartbeat  when there was nothing else to send
                              ◀─────────── PrefixDelta      block hashes stored and evicted since the last one
      Announce                ───────────▶            a request is on its way: other ingresses count it too
      Abort, Resume, Resync   ───────────▶

Every delta of a stream says at which of its tokens it starts, so a receiver notices a lost or repeated token
whatever happened below, and asks again (`Resume`): the replica keeps each request's tokens until it has ended.
Every message bears (epoch, sequence): a gap also means that a delta may be lost, and `Resync` asks for a snapshot.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec

from engine.stream_delta import StreamDelta
from router.fleet import ReplicaLoad

WIRE_VERSION = 3
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


class Announce(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A request is on its way through Serve, which takes longer than the wire."""

    number: Count
    """Counts the dispatches of this ingress to this replica, from 1."""
    request_id: str
    num_tokens: Count
    """Prompt tokens that are probably not cached at the replica."""


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
    deltas: list[StreamDelta]
    load: Load | None = None


class Heartbeat(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The replica is alive, and this busy."""

    epoch: int
    seq: int
    load: Load


class PrefixSnapshot(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """Part of the block hashes of all prefixes a replica holds; after the last part they replace all before."""

    epoch: int
    seq: int
    hashes: bytes
    """uint64, little endian."""
    is_last: bool


class PrefixDelta(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """What changed in a replica's cache."""

    epoch: int
    seq: int
    stored: bytes
    """Block hashes, uint64, little endian."""
    evicted: bytes


Sequenced = Welcome | Tokens | Heartbeat | Unknown | PrefixSnapshot | PrefixDelta
ToReplica = Hello | Abort | Resume | Resync | Announce
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


def encode_each(structs: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    """Each of them as the wire has it: log-probabilities take an eighth of the objects' memory that way."""
    return [msgspec.Raw(encode(struct)) for struct in structs]
