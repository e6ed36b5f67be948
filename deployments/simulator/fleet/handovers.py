"""Requests between prefill on one replica and decode on another.

first token at the sender ─▶ waiting for room at the receiver ─▶ KV on its way ─▶ decoding there
                                                                      └─ a death: computed at the receiver,
                                                                         or placed again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache import Lease
from deployments.simulator.fleet.links import Links
from deployments.simulator.fleet.replica import Job, SimulatedReplica


@dataclass(slots=True, eq=False)
class _Handover:
    job: Job
    sender: SimulatedReplica
    receiver: SimulatedReplica
    lease: Lease
    """The sender's pages."""
    is_moving: bool = False


class Handovers:
    """All requests of a fleet that are between two replicas."""

    def __init__(
        self,
        links: Links,
        block_bytes: float,
        latency_s: float,
        on_change: Callable[[SimulatedReplica, float], None],
        place_again: Callable[[Job, float], None],
    ) -> None:
        self._links, self._block_bytes, self._latency_s = links, block_bytes, latency_s
        self._on_change, self._place_again = on_change, place_again
        self._open: list[_Handover] = []

    def begin(self, job: Job, sender: SimulatedReplica, receiver: SimulatedReplica | None, now: float) -> None:
        """Send a request's KV when the receiver has room; None: the receiver has died meanwhile."""
        assert job.lease is not None
        lease, job.lease = job.lease, None
        sender.count_transfer(1, now)
        if receiver is None:
            sender.sent(lease, now)
            self._place_again(job, now)
            return
        self._open.append(_Handover(job, sender, receiver, lease))
        self.retry(receiver, now)

    def is_open(self, job: Job) -> bool:
        """Whether a request is between two replicas."""
        return any(handover.job is job for handover in self._open)

    def retry(self, receiver: SimulatedReplica, now: float) -> None:
        """Begin the transfers that a replica has room for, in the order in which they came."""
        for handover in [each for each in self._open if each.receiver is receiver and not each.is_moving]:
            num_blocks = receiver.take_in(handover.job, now)
            if num_blocks is None:
                return
            self._send(handover, num_blocks, now)

    def _send(self, handover: _Handover, num_blocks: int, now: float) -> None:
        handover.is_moving = True
        job, sender, receiver = handover.job, handover.sender, handover.receiver

        def done(at: float, arrived: bool) -> None:
            if handover not in self._open:
                return  # one of the two died, which `lose` has settled
            self._open.remove(handover)
            sender.sent(handover.lease, at)
            receiver.decode_or_compute(job, arrived, at)
            self._on_change(sender, at)
            self._on_change(receiver, at)

        links = [f"{sender.name} out", f"{receiver.name} in"]
        self._links.start(links, num_blocks * self._block_bytes, now, self._latency_s, done)

    def lose(self, replica: SimulatedReplica, now: float) -> list[Job]:
        """Settle the handovers of a replica that died; return the requests that need another replica."""
        homeless = []
        for handover in [each for each in self._open if replica in (each.sender, each.receiver)]:
            self._open.remove(handover)
            job, receiver = handover.job, handover.receiver
            job.moves += 1
            if replica is handover.sender and handover.is_moving:
                receiver.decode_or_compute(job, False, now)
                self._on_change(receiver, now)
            else:
                job.lease, job.decodes_at = None, None
                homeless.append(job)
            if replica is receiver:
                handover.sender.sent(handover.lease, now)
                self._on_change(handover.sender, now)
        return homeless
