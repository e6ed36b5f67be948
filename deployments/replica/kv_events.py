"""Announces the KV blocks that this replica holds to other systems' routers: vLLM's KV events, on ZeroMQ.

    engine's thread ──notes──▶ BlockEvents ──drain, once a period──▶ PUB      [topic, number, batch]
                                                       │
                                                       └──▶ the last batches ──▶ ROUTER, for replays

Numbers are 8 bytes, big endian, from 0. A subscriber that notices a gap sends the number of the first missing
batch to the second socket, and receives `["", number, batch]` for each, then number -1 with an empty batch. If
these are no longer kept, the first batch that it receives clears all and stores what is held, under the number
before the oldest kept one: the following batches repeat known facts, so the subscriber has the same state as
others in the end.

The first batch of a process clears subscribers' state from the process before it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from cache.news.block_events import BlockChange, BlockEvents, BlocksRemoved, BlocksStored
from cache.news.tier import Tier
from deployments.config.kv_events import KvEventSettings

logger = logging.getLogger("ray.serve")

MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.FILE: "DISK"}
"""vLLM's names of memories."""
END = (-1).to_bytes(8, "big", signed=True)
PERIOD_S = 0.05
"""Seconds between two messages; a block that came and went in between is not reported."""
BUFFER_STEPS = 10_000
"""Messages that are kept to be sent again. A subscriber that missed more gets everything that is held."""
BUFFER_BYTES = 64 * 2**20
"""Bytes of these messages."""
_MAX_REQUEST_BYTES = 256
_MAX_WAITING_REQUESTS = 16

Socket = zmq.Socket[bytes]
_encode = msgspec.msgpack.Encoder().encode


class KvEventPublisher:
    """Owns the sockets, which are bound in the constructor, and a thread after `start`."""

    def __init__(
        self,
        settings: KvEventSettings,
        replica: str,
        host: str,
        model: str,
        *,
        period_s: float = PERIOD_S,
        buffer_steps: int = BUFFER_STEPS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Raises OSError when the endpoints cannot be used."""
        self._settings = settings
        self._period_s, self._buffer_steps, self._buffer_bytes = period_s, buffer_steps, buffer_bytes
        names = {"replica": replica, "host": host, "model": model}
        self._topic = re.sub(r"\{(\w+)\}", lambda found: names[found[1]], settings.topic).encode()
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = self._next_number = 0
        self.counts: Counter[str] = Counter()
        """Blocks "stored" and "removed", and replays: "buffered", "snapshot", "malformed", "broken_off"."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._source: BlockEvents | None = None
        self._context = zmq.Context(io_threads=1)
        try:
            self._publish, self._replay, index = self._bind(replica)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _at(settings.endpoint, index, replica)
        """Where it publishes."""
        self.replay_endpoint = settings.replay_endpoint and _at(settings.replay_endpoint, index, replica)

    def start(self, source: BlockEvents) -> None:
        """Begin to publish."""
        self._source = source
        self._thread.start()
        logger.info("KV events are published on %s, replayed on %s", self.endpoint, self.replay_endpoint)

    def close(self) -> None:
        """Publish the rest, end the thread and close the sockets. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._context.destroy(linger=200)

    # --- sockets -------------------------------------------------------------------------------------------

    def _bind(self, replica: str) -> tuple[Socket, Socket | None, int]:
        """Bind to the first free ports; return the sockets, and the offset of the ports from the given ones."""
        settings, busy = self._settings, ""
        for index in range(settings.num_ports):
            publish, replay = self._socket(zmq.PUB), None
            endpoint = _at(settings.endpoint, index, replica)
            try:
                publish.bind(endpoint)
                if settings.replay_endpoint is not None:
                    replay = self._socket(zmq.ROUTER)
                    endpoint = _at(settings.replay_endpoint, index, replica)
                    replay.bind(endpoint)
                return publish, replay, index
            except zmq.ZMQError as error:
                for socket in (publish, replay):
                    if socket is not None:
                        socket.close(linger=0)
                if error.errno != errno.EADDRINUSE:
                    raise OSError(
                        f"KV events cannot be published on {endpoint} ({error}): engines.kv_events.endpoint and "
                        "replay_endpoint need addresses of this machine, where a file can be made or a port opened"
                    ) from None
                busy = endpoint
        raise OSError(
            f"KV events cannot be published: {busy} and the {settings.num_ports - 1} ports before it are in use. "
            "Give engines.kv_events other endpoints, or raise its num_ports: each engine replica of a machine "
            "takes one port of each"
        )

    def _socket(self, kind: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.SNDHWM, self._settings.hwm if kind == zmq.PUB else self._buffer_steps + 2)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise when a peer is gone or reads nothing
        return socket

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._source is not None
        self._send([None])
        due = time.monotonic()
        while not self._closing.is_set():
            try:
                if (wait := due - time.monotonic()) > 0:
                    self._serve_replays(wait)
                    continue
                due = time.monotonic() + self._period_s
                self._send(self._source.drain())
            except Exception:  # no request may end the thread
                logger.exception("some KV events were not published")
                self.counts["failed"] += 1
        self._send(self._source.drain())

    def _send(self, changes: Sequence[BlockChange]) -> None:
        if not changes:
            return
        for change in changes:
            if change is not None:
                self.counts["stored" if isinstance(change, BlocksStored) else "removed"] += len(change.blocks)
        number, batch = self._next_number, self._batch(changes)
        self._next_number += 1
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._batches.append((number, batch))
        self._num_bytes += len(batch)
        while len(self._batches) > self._buffer_steps or self._num_bytes > self._buffer_bytes:
            self._num_bytes -= len(self._batches.popleft()[1])

    def _batch(self, changes: Iterable[BlockChange]) -> bytes:
        assert self._source is not None
        is_map, size = self._settings.encoding == "map", self._source.block_tokens
        return _encode((time.time(), [_event(change, size, is_map) for change in changes], 0))

    # --- replays -------------------------------------------------------------------------------------------

    def _serve_replays(self, seconds: float) -> None:
        """Answer a request, or wait for so long."""
        if self._replay is None:
            self._closing.wait(seconds)
        elif self._replay.poll(max(1, int(seconds * 1000))):
            identity, *parts = self._replay.recv_multipart()
            if len(parts) != 2 or parts[0] or len(parts[1]) != 8:
                self.counts["malformed"] += 1
                return
            self._send_again(self._replay, identity, int.from_bytes(parts[1], "big"))

    def _send_again(self, socket: Socket, identity: bytes, first: int) -> None:
        assert self._source is not None
        oldest = self._batches[0][0] if self._batches else self._next_number
        batches = [(number, batch) for number, batch in self._batches if number >= first]
        if is_too_old := first < oldest:
            batches.insert(0, (oldest - 1, self._batch(self._source.snapshot())))
        answers = [(number.to_bytes(8, "big"), batch) for number, batch in batches]
        try:
            for number, batch in [*answers, (END, b"")]:
                socket.send_multipart((identity, b"", number, batch), zmq.NOBLOCK)
            self.counts["snapshot" if is_too_old else "buffered"] += 1
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts["broken_off"] += 1


def _event(change: BlockChange, block_tokens: int, is_map: bool) -> Any:
    """Return one of vLLM's events in its encoding: a list of its fields, or a map of these by name."""
    fields: dict[str, Any]
    if change is None:
        fields = {"type": "AllBlocksCleared"}
    elif isinstance(change, BlocksRemoved):
        fields = {"type": "BlockRemoved", "block_hashes": change.blocks, "medium": MEDIUMS[change.tier]}
    else:
        fields = {
            "type": "BlockStored",
            "block_hashes": change.blocks,
            "parent_block_hash": change.parent,
            "token_ids": change.token_ids,
            "block_size": block_tokens,
            "lora_id": None,
            "medium": MEDIUMS[change.tier],
            "lora_name": None,
        }
        if change.salt:  # so it is not a block of the same tokens without a salt
            fields["extra_keys"] = [[_digest(change.salt)]] * len(change.blocks)
    return fields if is_map else list(fields.values())


def _digest(salt: str) -> str:
    """Return a digest of a salt, from which the salt cannot be read."""
    return hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()


def _at(endpoint: str, index: int, replica: str) -> str:
    """Return an endpoint for one replica: its port plus `index`, or its file named after the replica."""
    if not endpoint.startswith("tcp://"):
        return endpoint.replace("{replica}", replica)
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + index}"
