"""KV that moves between replicas, and between replicas and files, over links that all transfers share.

    ingress: fetch or compute ─▶ begin ─▶ sender's pages held, receiver's taken ─▶ Links ─▶ inserted: it may begin
    the host takes an evicted prefix ─▶ write ─▶ Links ─▶ found in the files

A transfer serves the KV that is at the source when it begins, whatever an ingress believed; if it ends early, the
KV is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from deployments.simulator.fleet.files import FileTier
from deployments.simulator.fleet.links import Links
from deployments.simulator.fleet.replica import Job, SimulatedReplica
from deployments.simulator.fleet.tiers import Tiers
from router.fetch.fetching import Source

STORE = "files"
"""Name of the store that all replicas share; a replica's own files are named by `own_files`."""


def own_files(replica: str) -> str:
    """Return the name of a replica's own files."""
    return f"{STORE} of {replica}"


class Fetches:
    """All transfers of a fleet, and its files."""

    def __init__(
        self,
        tiers: Tiers,
        block_tokens: int,
        on_change: Callable[[SimulatedReplica, float], None],
        on_files: Callable[[str, FileTier, float], None],
    ) -> None:
        """`on_change` is called when a replica's transfer has ended, `on_files` with files that have changed."""
        self.links = Links()
        self._tiers, self._block_tokens = tiers, block_tokens
        self._block_bytes = block_tokens * tiers.kv_bytes_per_token
        self._on_change, self._on_files = on_change, on_files
        self._files: dict[str, FileTier] = {}
        self._replicas: dict[str, SimulatedReplica] = {}

    def join(self, replica: SimulatedReplica) -> None:
        """Give a replica its links, and files. Files of a replica that died in its position remain."""
        name, tiers = replica.name, self._tiers
        self._replicas[name] = replica
        if tiers.peer_bandwidth is not None:
            self.links.add(f"{name} in", tiers.peer_bandwidth)
            self.links.add(f"{name} out", tiers.peer_bandwidth)
        if tiers.file_tokens:
            self.links.add(f"{name} files", tiers.file_bandwidth)
            self._files.setdefault(self._store_of(name), FileTier(tiers.file_tokens // self._block_tokens))

    def lose(self, name: str, now: float) -> None:
        """End the transfers of a replica that died."""
        self._replicas.pop(name, None)
        for link in ("in", "out", "files"):
            self.links.cut(f"{name} {link}", now)

    def _store_of(self, name: str) -> str:
        return STORE if self._tiers.is_file_store_shared else own_files(name)

    def begin(self, job: Job, receiver: SimulatedReplica, source: Source, now: float) -> None:
        """Begin to fetch for a job that is about to be submitted to `receiver`, if the source has it."""
        wanted = min(-(-source.tokens // self._block_tokens), len(job.request.blocks))
        if source.name in self._files:
            self._from_files(job, receiver, source.name, wanted, now)
        elif source.name in self._replicas:
            self._from_peer(job, receiver, self._replicas[source.name], wanted, now)

    def _from_files(self, job: Job, receiver: SimulatedReplica, store: str, wanted: int, now: float) -> None:
        files, held = self._files[store], receiver.held_blocks(job)
        there = held + files.count(job.chain, held, wanted)
        pages = files.pin(job.chain, held, there)

        def release(_: float) -> None:
            files.unpin(pages)

        latency, links = self._tiers.file_latency_s, [f"{receiver.name} files"]
        self._transfer(job, receiver, there, "file_tokens", links, latency, release, now)

    def _from_peer(
        self, job: Job, receiver: SimulatedReplica, sender: SimulatedReplica, wanted: int, now: float
    ) -> None:
        there, release = sender.lend(job, wanted, now)
        latency, links = self._tiers.peer_latency_s, [f"{sender.name} out", f"{receiver.name} in"]

        def end(at: float) -> None:
            release(at)
            sender.count_transfer(-1, at)
            self._tell(sender, at)

        sender.count_transfer(1, now)
        self._transfer(job, receiver, there, "peer_tokens", links, latency, end, now)

    def _transfer(
        self,
        job: Job,
        receiver: SimulatedReplica,
        num_blocks: int,
        counter: Literal["file_tokens", "peer_tokens"],
        links: Sequence[str],
        latency: float,
        release: Callable[[float], None],
        now: float,
    ) -> None:
        """Send the receiver the blocks before `num_blocks` that it lacks, if there are any and it has room.

        `release` is called when the sender is no longer needed; the job's `counter` grows when they have arrived.
        """
        missing = num_blocks > receiver.held_blocks(job)
        reserved = receiver.reserve(job, num_blocks, now) if missing else None
        if reserved is None:
            release(now)
            return

        def done(at: float, arrived: bool) -> None:
            release(at)
            if self._replicas.get(receiver.name) is not receiver:
                return
            if arrived and job.hit_tokens is None:
                setattr(job, counter, reserved.num_coming * self._block_tokens)
                job.host_tokens = reserved.num_host * self._block_tokens
            receiver.receive(job, num_blocks, arrived, at)
            self._tell(receiver, at)

        num_bytes = reserved.num_coming * self._block_bytes
        self.links.start(links, num_bytes, now, latency + reserved.copying_s, done)

    def _tell(self, replica: SimulatedReplica, now: float) -> None:
        if self._replicas.get(replica.name) is replica:
            self._on_change(replica, now)

    def write(self, replica: SimulatedReplica, now: float) -> None:
        """Write to files the blocks that the replica's host has stored since the last call."""
        hashes = replica.drain_kept()
        if not hashes or not self._tiers.file_tokens:
            return
        store = self._store_of(replica.name)
        files = self._files[store]
        places = files.begin_write(hashes)

        def done(at: float, arrived: bool) -> None:
            files.end_write(places, arrived)
            self._on_files(store, files, at)

        if places:
            self.links.start([f"{replica.name} files"], len(places) * self._block_bytes, now, 0.0, done)
