"""The messages between an engine replica and an ingress over ZeroMQ: typed msgpack, nothing executable.

    ingress                                replica
      Hello(received)         ───────────▶            the tokens received of each stream
                              ◀─────────── Welcome    or Refused
      Resync                  ───────────▶            at a time of its choice
                              ◀─────────── PrefixSnapshot   the first part of the block hashes of all prefixes held
      NextPart                ───────────▶            and so on, until the last
                              ◀─────────── Tokens     one per step: the load, and new tokens of its requests
                              ◀─────────── Heartbeat  when there was nothing else to send
                              ◀─────────── PrefixDelta      block hashes stored and evicted since the last one
      Generate                ───────────▶            run this request
                              ◀─────────── Tokens     accepted; with an empty delta when no token comes soon
                              ◀─────────── NotRun     or not: refused, or failed later
      Abort, Resume           ───────────▶
      Detach                  ───────────▶            its reader has left, another ingress may take it over
      Find                    ───────────▶
                              ◀─────────── Found      the parts of a resumable stream that the replica has
      TakeOver                ───────────▶            send a stream to this ingress from now on, all of it again
                              ◀─────────── NotRun     "taken", to the ingress that read it before
      Backlog                 ───────────▶            its waiting requests, to one replica of all

A request has a separate id for each attempt. Sent again after a reconnect, it is not run twice: the replica
answers with the stream so far. Every delta of a stream states the token at which it starts, so a receiver
detects lost and repeated tokens and requests the stream again (`Resume`): the replica keeps each request's tokens
until it has ended. Every message carries (epoch, sequence): after a gap a prefix delta may be lost too, and
`Resync` requests a new snapshot. An ingress asks for its parts, the hottest first, when it has time for them,
because those of a large fleet would take it minutes. Between them it receives every delta, as after the last part.

During an upgrade, an ingress and a replica of neighbouring releases talk to each other. So messages only grow: a
new field comes last and has a default, which stands for a peer that does not send it. A peer skips fields that it
does not know. A change of any other kind needs a new `WIRE_VERSION`, and is used only with peers that have it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from router.member import ReplicaLoad

WIRE_VERSION = 16
OLDEST_WIRE_VERSION = 15
"""The last release's version. Older peers are refused; a newer peer decides whether it talks to this version."""
RESUMABLE_SINCE = 16
"""The first version whose peers know `Detach`, `Find` and `TakeOver`."""
MAX_MESSAGE_BYTES = 64 * 2**20


Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
"""Number of tokens in an ingress's message, bounded so that sums of many fit into a message."""


Load = ReplicaLoad
"""A replica's load, in the form for one ingress."""

RefusalKind = Literal["never_fits", "queue_full", "stopped", "draining"]
"""Why a replica does not accept a request."""
NotRunKind = RefusalKind | Literal["failed", "engine_ended", "taken"]
"""The replica refused it, "failed" to accept it, its engine has ended, or another ingress has taken it over."""

Trial = Literal["alone", "beside"]
"""Where a request runs that may have ended an engine: where no other such request does, or anywhere."""

CLEARED_TOKENS = 8
"""Tokens of a suspect, computed at another replica, after which it is cleared. A dying replica loses a step that
it has not sent, a token and up to `max_drafts` draft tokens: the next replica computes these again before it
reaches the cause of the first one's death."""


class MalformedMessage(ValueError):
    """The bytes are not a message of this protocol."""


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """An ingress introduces itself: its first message, repeated after each reconnect."""

    version: int
    number: int
    """Increases with every hello of this ingress, so that one from an earlier connection is recognized."""
    ingress_id: str
    model: str
    """`fingerprint` of the model the ingress tokenizes for; "" is not checked."""
    received: dict[str, Count]
    """Number of tokens received of each stream that this ingress still waits for."""


class Abort(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Abort the request, because its client is gone."""

    request_id: str


class Resume(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Send these streams again, from the number of tokens received."""

    received: dict[str, Count]


class Resync(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Send the first part of a snapshot, because nothing is known of the cache yet, or a delta may be lost."""

    is_store: bool = False
    """Whether this is about the files from which the replica reads, instead of its cache."""


class NextPart(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Send the next part of the snapshot."""

    is_store: bool = False
    """As in `Resync`."""


class KVOrigin(msgspec.Struct, array_like=True, frozen=True):
    """Where a replica can fetch the KV of a request's beginning (`router.addresses.KVAddress`)."""

    endpoint: str
    secret: str
    public_key: str
    num_tokens: Count
    """Leading tokens whose KV is there."""


class ResumableStream(msgspec.Struct, array_like=True, frozen=True):
    """Lets any ingress continue a stream. It stays with the replica that generates, and moves with a migration."""

    name: str
    """The answer's id, which cannot be guessed."""
    index: Count
    """Which of the answer's requests to engines this is."""
    tenant: str
    """The tenant to which the stream belongs."""
    record: bytes = b""
    """The client's request as the API packs it; empty where it is too large to be kept."""
    detached_s: float | None = None
    """Seconds for which it is generated without a reader; None: as the replica's settings have it."""
    num_cached: Count = 0
    """Cached prompt tokens as the first replica reported them."""


class Generate(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Run a request. Sent again under the same id, it is not run again: its stream is sent from the start."""

    number: Count
    """Counts the requests of this ingress to this replica, from 1."""
    request_id: str
    """Unique among all attempts of all ingresses."""
    prompt_ids: bytes
    """Token ids, int32, little endian."""
    sampling: SamplingParams
    output_ids: bytes = b""
    """Token ids that another replica has generated, int32, little endian."""
    num_prompt_reported: Count = 0
    """Number of leading prompt tokens whose log-probabilities another replica has sent, if requested."""
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    """The party that shares the engine with others: a tenant, or an address where there are no tenants."""
    trial: Trial | None = None
    """How it runs if it may have ended another replica's engine, until it has CLEARED_TOKENS tokens. A replica
    with other suspects refuses it if it must run without them, and accepts it before its engine receives it."""
    origin: KVOrigin | None = None
    """The source to ask for KV; None: no source."""
    is_deferrable: bool = False
    """Whether it yields to every request that is not deferrable."""
    stream: ResumableStream | None = None
    """Set where the stream outlives its ingress and its client's connection."""


class Backlog(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Requests that wait in the ingress's admission for this model's engines, and a count of those that left."""

    num_requests: Count = 0
    num_tokens: Count = 0
    """Uncached prompt tokens of these requests."""
    turned_away: Count = 0
    """Requests that left without an engine since the ingress started: refused, or given up by their clients."""
    turned_away_tokens: Count = 0


class Detach(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Generate a resumable request further for a while, although its reader has left."""

    request_id: str


class Find(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Say which requests of a resumable stream the replica has."""

    name: str
    tenant: str
    """The tenant to which it must belong: another one may have a stream of the same name."""


class TakeOver(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Send a request's stream to this ingress from now on, from its start here. Repeated like `Generate`."""

    number: Count
    """As in `Generate`."""
    request_id: str


class Welcome(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The hello was accepted."""

    epoch: int
    """Differs between starts of the replica's process."""
    seq: int
    replica: str
    model: str
    """`fingerprint` of the model that the replica runs; "" when it has none."""
    block_tokens: int
    """Number of tokens per block of its prefix hashes."""
    hello: int = 0
    """The number of the hello that it answers."""
    version: int = 15
    """The replica's wire version, in the oldest release that does not send it 15."""


class StreamPart(msgspec.Struct, array_like=True, frozen=True):
    """One request of a resumable stream, as a replica has it."""

    index: Count
    request_id: str
    """Its id at this replica."""
    num_tokens: Count
    """Tokens of the stream so far, including those that other replicas have generated."""
    output_ids: bytes = b""
    """Token ids that other replicas have generated, int32, little endian. The rest comes as after a `Resume`."""
    num_prompt_reported: Count = 0
    """Leading prompt tokens whose log-probabilities other replicas have sent, if requested."""
    num_cached: Count = 0
    """Cached prompt tokens as the first replica reported them, if there were others."""
    finish_reason: str | None = None
    """How it ended; None while it is generated."""


class Refused(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The hello was not accepted."""

    reason: str


class Unknown(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """Names requested streams that the replica does not know: aborted since, or from before a restart."""

    epoch: int
    seq: int
    request_ids: list[str]


class NotRun(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """The replica does not run the request, or not for this ingress."""

    epoch: int
    seq: int
    request_id: str
    kind: NotRunKind
    reason: str
    retry_after_s: float = 1.0
    """Seconds after which a retry is worthwhile when the queue was full."""


class Found(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """The requests of a resumable stream that the replica has, and their stream's own fields."""

    epoch: int
    seq: int
    name: str
    tenant: str
    record: bytes = b""
    parts: list[StreamPart] = []


class Tokens(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """The tokens that a step produced for one ingress."""

    epoch: int
    seq: int
    deltas: list[StreamDelta]
    load: Load | None = None


class Heartbeat(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """Reports that the replica is alive, and its load."""

    epoch: int
    seq: int
    load: Load


class PrefixSnapshot(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """Part of the block hashes of all prefixes that a replica holds, the most recently used first.

    The first part replaces all that was known. An unrequested one is empty: the replica could not send a delta,
    and begins a new snapshot.
    """

    epoch: int
    seq: int
    hashes: bytes
    """Block hashes, uint64, little endian."""
    is_first: bool
    is_last: bool
    tiers: bytes = b""
    """The fastest tier (cache/news/tier.py) of each block, a byte each; empty: all are on the device."""
    is_store: bool = False
    """As in `Resync`."""


class PrefixDelta(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """A change of a replica's cache since its snapshot began, or a part of one."""

    epoch: int
    seq: int
    stored: bytes
    """Block hashes, uint64, little endian. They are on the device unless `moved` also has them."""
    evicted: bytes
    moved: bytes = b""
    """Block hashes of held blocks whose fastest tier has changed."""
    tiers: bytes = b""
    """Their new tier, a byte for each block of `moved`."""
    is_store: bool = False
    """As in `Resync`."""


Sequenced = Welcome | Tokens | Heartbeat | Unknown | NotRun | Found | PrefixSnapshot | PrefixDelta
ToReplica = Hello | Abort | Resume | Resync | NextPart | Generate | Backlog | Detach | Find | TakeOver
ToIngress = Sequenced | Refused

encode = msgspec.msgpack.Encoder().encode
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_to_ingress: msgspec.msgpack.Decoder[ToIngress] = msgspec.msgpack.Decoder(ToIngress)
# RecursionError: the decoder skips surplus fields at any depth of nesting.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_to_replica(data: bytes) -> ToReplica:
    """Decode a message from an ingress. Raises MalformedMessage."""
    try:
        return _to_replica.decode(data)
    except _UNREADABLE as error:
        raise MalformedMessage(str(error)) from None


def decode_to_ingress(data: bytes) -> ToIngress:
    """Decode a message from a replica. Raises MalformedMessage."""
    try:
        return _to_ingress.decode(data)
    except _UNREADABLE as error:
        raise MalformedMessage(str(error)) from None


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as int32, little endian. Raises OverflowError when an id does not fit."""
    return _packed("i", token_ids)


def unpack_tokens(data: bytes) -> array[int]:
    """Unpack token ids, as the engine's cache compares them. Raises MalformedMessage when `data` is not a whole
    number of them.
    """
    return _unpacked("i", data)


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack block hashes as uint64, little endian."""
    return _packed("Q", hashes)


def unpack_hashes(data: bytes) -> array[int]:
    """Unpack block hashes. Raises MalformedMessage when `data` is not a whole number of them."""
    return _unpacked("Q", data)


def unpack_tiers(tiers: bytes, hashes: bytes) -> bytes:
    """Return the tier of each hash. Raises MalformedMessage if their numbers differ."""
    if 8 * len(tiers) != len(hashes):
        raise MalformedMessage(f"{len(tiers)} tiers are given for {len(hashes)} bytes of hashes, 8 for each")
    return tiers


def _packed(typecode: Literal["i", "Q"], numbers: Iterable[int]) -> bytes:
    packed = array(typecode, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(typecode: Literal["i", "Q"], data: bytes) -> array[int]:
    unpacked = array(typecode)
    if len(data) % unpacked.itemsize:
        raise MalformedMessage(f"{len(data)} bytes are not a whole number of {unpacked.itemsize}-byte integers")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def encode_each(structs: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    """Encode each struct: log-probabilities take an eighth of the objects' memory in this form."""
    return [msgspec.Raw(encode(struct)) for struct in structs]
