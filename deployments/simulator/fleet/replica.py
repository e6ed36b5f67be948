"""A simulated replica: one prefill queue, concurrent decodes, KV in the real radix tree.

    submit ─▶ waiting ─▶ prefilling (one at a time, FCFS) ─▶ decoding (all together) ─▶ done
                         match, lock, extend                  insert                   finish
                         load from the host

The tree's tokens are the trace's blocks (page size 1), so 12,000 tokens of prompt are some 24 tokens of tree.
A request takes the pages of its prompt and its answer when its prefill begins, and waits at the head of the queue
until they are available. The tokens that it generates cannot be found later, because traces do not identify them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cache import KVCacheManager, Lease, Namespace
from deployments.simulator.fleet.load_report import LoadReport
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import HostTier, Tiers
from deployments.simulator.fleet.trace import TraceRequest
from engine.scheduling.stats import EngineLoad

NAMESPACE = Namespace("simulated")
LAST_TOKEN = -1
"""Token after a prompt's blocks, so that all blocks can match: a match always leaves one token to compute."""


@dataclass(slots=True, eq=False)
class Job:
    """State and outcome of one request. Times are in seconds, sizes in tokens."""

    request: TraceRequest
    chain: tuple[int, ...]
    """Hashes of the prompt's blocks."""
    ingress: int
    arrived: float
    emitted: int = 0
    """Tokens that its client already has; more than 0 after a migration."""
    moves: int = 0
    expected_tokens: int = 0
    """Uncached tokens, as the replica estimated when the request arrived."""
    hit_tokens: int | None = None
    """Tokens found in the cache when the request was first admitted; None before that."""
    host_tokens: int = 0
    """Those of them that were only in this replica's host memory."""
    file_tokens: int = 0
    """Tokens fetched from files."""
    peer_tokens: int = 0
    """Tokens fetched from other replicas."""
    fetching: Lease | None = field(default=None, repr=False)
    """Pages for KV that is being fetched; None when there is none."""
    num_coming: int = 0
    """Blocks of the prompt that are there after the fetch."""
    decodes_at: str | None = None
    """Replica that receives its KV after its prefill and generates the rest; None: where it was computed."""
    regret_tokens: int = 0
    """Tokens that the best replica known to the ingress held beyond the chosen one, at the last placement."""
    first_token_at: float | None = None
    lease: Lease | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the next token needs: the prompt and those emitted elsewhere."""
        return self.request.num_tokens + self.emitted


class Reserved(NamedTuple):
    """KV that a replica has begun to get for a job."""

    copying_s: float
    """Seconds in which the host copies its part."""
    num_host: int
    """Blocks of that part."""
    num_coming: int
    """Blocks that come from elsewhere."""


class SimulatedReplica:
    """A replica on the caller's clock: `next_event` is the time of the next change."""

    def __init__(
        self,
        name: str,
        service: ServiceModel,
        num_pages: int,
        block_tokens: int,
        now: float = 0.0,
        tiers: Tiers | None = None,
    ) -> None:
        self.name = name
        self.prefill_seconds = 0.0
        """Time spent on prefill."""
        self.reports: deque[LoadReport] = deque()
        """One report for each change, oldest first; the reader removes them."""
        self._cache = KVCacheManager(num_pages, 1, block_tokens=1)
        self._host: HostTier | None = None
        if tiers is not None and tiers.host_tokens:
            self._host = HostTier(self._cache, NAMESPACE, tiers, block_tokens, service.prefill_rate)
        self._service = service
        self._block_tokens = block_tokens
        self._num_transfers = 0
        self._leaving: list[Job] = []  # they have a first token, and are decoded elsewhere
        self.num_finished = 0
        """Requests that have ended here."""
        self._num_sending = 0  # those whose KV is still here
        self._waiting: deque[Job] = deque()
        self._waiting_tokens = 0.0
        self._prefilling: Job | None = None
        self._prefill_ends = 0.0
        self._decoding: list[tuple[float, int, Job]] = []  # ordered by the position at which each ends
        self._position = 0.0  # tokens of a request that has decoded since the start
        self._position_at = now
        self._count = 0
        self._report(now)

    def fits(self, job: Job) -> bool:
        """Whether the request can ever run on this replica."""
        return self._pages(job) <= self._cache.num_pages

    def submit(self, job: Job, now: float) -> None:
        """Append the request to the queue."""
        held = max(self.held_blocks(job), job.num_coming if job.fetching is not None else 0)
        job.expected_tokens = max(job.num_tokens - held * self._block_tokens, 1)
        self._waiting.append(job)
        self._waiting_tokens += job.expected_tokens
        self._begin_prefill(now)
        self._report(now)

    def held_blocks(self, job: Job) -> int:
        """Count the leading blocks of a prompt that need not be computed now."""
        tokens = (*job.request.blocks, LAST_TOKEN)
        found = self._cache.peek(NAMESPACE, tokens)
        return found if self._host is None else self._host.reach(self._host.reader(str(id(job)), tokens), found)

    def next_event(self) -> float:
        """Return the time of the next event; infinity while the replica is idle."""
        prefill = self._prefill_ends if self._prefilling is not None else float("inf")
        return min(prefill, self._next_finish())

    def advance(self, now: float) -> list[Job]:
        """Process the events that are due; return the requests that are done."""
        done = []
        while self._decoding and self._next_finish() <= now:
            self._move_position(self._next_finish())
            _, _, job = heapq.heappop(self._decoding)
            self._finish(job, now)
            done.append(job)
        if self._prefilling is not None and self._prefill_ends <= now:
            job, self._prefilling = self._prefilling, None
            if self._begin_decode(job, now):
                self._finish(job, now)
                done.append(job)
        self._begin_prefill(now)
        self._report(now)
        return done

    def lose(self, now: float) -> list[Job]:
        """Let the replica die; return its unfinished requests, each with the number of tokens its client has."""
        self.decoding(now)
        lost = [*self._waiting, *([self._prefilling] if self._prefilling else ())]
        lost += [job for _, _, job in sorted(self._decoding, key=lambda entry: entry[1])]
        for job in lost:
            job.lease = job.fetching = None
            job.moves += 1
        return lost

    # Reports of its work

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return self._prefilling is None and not (self._waiting or self._decoding or self._num_sending)

    def decoding(self, now: float) -> list[Job]:
        """Return the requests that decode here, each with the number of tokens its client has."""
        self._move_position(now)
        for ends, _, job in self._decoding:
            job.emitted = max(job.emitted, int(job.request.num_output - (ends - self._position)))
        return [job for _, _, job in self._decoding]

    def prefilled_tokens(self, now: float) -> float:
        """Return the prompt tokens computed since the start."""
        return (self.prefill_seconds - self._left_s(now)) * self._service.prefill_rate

    def engine_load(self, now: float) -> EngineLoad:
        """Return its load in the form of an engine's report."""
        is_prefilling = self._prefilling is not None
        left = self._left_s(now) * self._service.prefill_rate
        return EngineLoad(
            num_running=is_prefilling + len(self._decoding),
            num_waiting=len(self._waiting),
            waiting_prefill_tokens=round(max(self._waiting_tokens, 0.0) + left),
            pages=self._cache.account(),
            page_size=self._block_tokens,
            prefill_rate=self._service.prefill_rate,
        )

    def _left_s(self, now: float) -> float:
        """Return the seconds that the present prefill still takes."""
        return 0.0 if self._prefilling is None else max(0.0, self._prefill_ends - now)

    # Prefill

    def _pages(self, job: Job) -> int:
        is_leaving = job.decodes_at not in (None, self.name)
        total = job.request.num_tokens + (1 if is_leaving else job.request.num_output)
        return max(-(-total // self._block_tokens), len(job.request.blocks))

    def _begin_prefill(self, now: float) -> None:
        if self._prefilling is not None or not self._waiting:
            return
        job = next((each for each in self._waiting if each.fetching is None), None)
        if job is None:
            return
        cache, host, tokens = self._cache, self._host, (*job.request.blocks, LAST_TOKEN)
        match = cache.match(NAMESPACE, tokens, now)
        lease = cache.lock(match)
        num_pages = self._pages(job)
        if cache.pages_needed(lease, num_pages) > cache.available:
            cache.finish(lease, (), now)  # wait until a running request frees its pages
            return
        reader = None if host is None else host.reader(str(id(job)), tokens)
        reached = match.length if host is None or reader is None else host.begin(reader, match.length)
        cache.extend(lease, num_pages)
        copying = 0.0 if host is None or reader is None else host.load(reader, lease)
        self._waiting.remove(job)
        self._waiting_tokens -= job.expected_tokens
        job.lease = lease
        found = min(reached * self._block_tokens, job.request.num_tokens - 1)
        if job.hit_tokens is None:
            job.hit_tokens = found
            job.host_tokens += max(found - match.length * self._block_tokens, 0)
        seconds = copying + self._service.prefill_seconds(job.num_tokens - found)
        self.prefill_seconds += seconds
        self._prefilling, self._prefill_ends = job, now + seconds

    # KV that is sent elsewhere and received from there

    def lend(self, job: Job, num_blocks: int, now: float) -> tuple[int, Callable[[float], None]]:
        """Keep the blocks before `num_blocks` for a reader; return how many are here, and what ends it."""
        cache, host, tokens = self._cache, self._host, (*job.request.blocks[:num_blocks], LAST_TOKEN)
        match = cache.match(NAMESPACE, tokens, now)
        lease = cache.lock(match)
        reader = None if host is None else host.reader(f"{id(job)} elsewhere", tokens)
        reached = match.length if host is None or reader is None else host.begin(reader, match.length)

        def release(at: float) -> None:
            cache.finish(lease, (), at)
            if host is not None and reader is not None:
                host.forget(reader)

        return reached, release

    def reserve(self, job: Job, num_blocks: int, now: float) -> Reserved | None:
        """Take pages for the blocks before `num_blocks` of a job, of which those after `held_blocks` are coming,
        and have the host copy its part to them. None if there is no room.
        """
        cache, host, tokens = self._cache, self._host, (*job.request.blocks[:num_blocks], LAST_TOKEN)
        match = cache.match(NAMESPACE, tokens, now)
        lease = cache.lock(match)
        if cache.pages_needed(lease, num_blocks) > cache.available:
            cache.finish(lease, (), now)
            return None
        reader = None if host is None else host.reader(str(id(job)), tokens)
        reached = match.length if host is None or reader is None else host.begin(reader, match.length)
        cache.extend(lease, num_blocks)
        job.fetching, job.num_coming = lease, num_blocks
        copying = 0.0 if host is None or reader is None else host.load(reader, lease)
        self._num_transfers += 1
        return Reserved(copying, reached - match.length, num_blocks - reached)

    def receive(self, job: Job, num_blocks: int, arrived: bool, now: float) -> None:
        """Note that the KV fetched for a waiting job has arrived, or never will."""
        assert job.fetching is not None
        self._cache.finish(job.fetching, job.request.blocks[:num_blocks] if arrived else (), now)
        job.fetching = None
        self.count_transfer(-1, now)

    def count_transfer(self, change: int, now: float) -> None:
        """Note that a transfer begins (1) or ends (-1) here; requests may wait for its pages."""
        self._num_transfers += change
        if change < 0:
            self._begin_prefill(now)
        self._report(now)

    # Requests that are computed in one place and decoded in another

    def drain_leaving(self) -> list[Job]:
        """Return the requests with a first token since the last call that are decoded elsewhere."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def send_away(self, job: Job, now: float) -> None:
        """Stop decoding a request, whose KV stays here until it is `sent`."""
        self._move_position(now)
        self._decoding = [entry for entry in self._decoding if entry[2] is not job]
        heapq.heapify(self._decoding)
        self._num_sending += 1

    def sent(self, lease: Lease, now: float) -> None:
        """Note that a request's KV is no longer needed here: it has arrived, or never will."""
        self._cache.finish(lease, (), now)
        self._num_sending -= 1
        self.count_transfer(-1, now)

    def take_in(self, job: Job, now: float) -> int | None:
        """Take pages for a request that was computed elsewhere; return how many of its blocks are missing here.

        None while there is no room.
        """
        cache = self._cache
        match = cache.match(NAMESPACE, (*job.request.blocks, LAST_TOKEN), now)
        lease = cache.lock(match)
        if cache.pages_needed(lease, self._pages(job)) > cache.available:
            cache.finish(lease, (), now)
            return None
        cache.extend(lease, self._pages(job))
        job.lease = lease
        self.count_transfer(1, now)
        return len(job.request.blocks) - match.length

    def decode_or_compute(self, job: Job, arrived: bool, now: float) -> None:
        """Decode a request whose KV has arrived; or compute its prompt here, if it never will."""
        assert job.lease is not None
        lease, job.decodes_at = job.lease, None
        if arrived:
            self._cache.insert(lease, job.request.blocks, now)
            self._decode(job, job.request.num_output - job.emitted, now)
        else:
            self._cache.finish(lease, (), now)
            job.lease = None
            self.submit(job, now)
        self.count_transfer(-1, now)

    def drain_kept(self) -> list[int]:
        """Return the hashes of the blocks that the host has stored since the last call."""
        return [] if self._host is None else self._host.drain_kept()

    # Decode

    def _begin_decode(self, job: Job, now: float) -> bool:
        """Emit the first token; return whether it was the last."""
        assert job.lease is not None
        self._cache.insert(job.lease, job.request.blocks, now)
        if job.first_token_at is None:
            job.first_token_at = now
        job.emitted += 1
        left = job.request.num_output - job.emitted
        if left <= 0:
            return True
        if job.decodes_at not in (None, self.name):
            self._leaving.append(job)
            self._num_sending += 1
            return False
        self._decode(job, left, now)
        return False

    def _decode(self, job: Job, left: int, now: float) -> None:
        self._move_position(now)
        self._count += 1
        heapq.heappush(self._decoding, (self._position + left, self._count, job))

    def _finish(self, job: Job, now: float) -> None:
        assert job.lease is not None
        self._cache.finish(job.lease, (), now)
        job.lease = None
        self.num_finished += 1

    def _next_finish(self) -> float:
        if not self._decoding:
            return float("inf")
        steps = self._decoding[0][0] - self._position
        return self._position_at + max(steps, 0.0) * self._service.step_seconds(len(self._decoding))

    def _move_position(self, now: float) -> None:
        if self._decoding:
            passed = (now - self._position_at) / self._service.step_seconds(len(self._decoding))
            self._position = min(self._position + passed, self._decoding[0][0])
        self._position_at = now

    # Cache deltas

    def drain_news(self) -> tuple[list[int], list[int]]:
        """Return the blocks stored and evicted since the last call."""
        assert self._cache.prefix_log is not None
        return self._cache.prefix_log.drain()

    def _report(self, now: float) -> None:
        num_prefilling = self._prefilling is not None
        self.reports.append(
            LoadReport(
                time=now,
                waiting_tokens=max(self._waiting_tokens, 0.0),
                prefill_ends=self._prefill_ends if num_prefilling else now,
                num_running=len(self._waiting) + num_prefilling + len(self._decoding) + self._num_sending,
                num_decoding=len(self._decoding),
                pages_free=self._cache.available,
                eviction_age=self._cache.eviction_age(now),
                num_transfers=self._num_transfers,
            )
        )
