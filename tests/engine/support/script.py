"""Scripted scenarios: the real scheduler, cache and loop, with a runner that notices all their mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache import KVCacheManager, Namespace, StateAccount, Window
from cache.node import Node
from cache.radix_tree import sequence
from engine.drafting.base import Drafter
from engine.drafting.speculator import Speculator
from engine.host_tier.host_kv import HostKV
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import NO_LOWER_TIER
from engine.program.loop import EngineLoop
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.scheduler import Scheduler
from engine.settings.scheduling import SchedulerSettings
from engine.values.beam_search import Hypothesis
from engine.values.logprobs import PackedLogprobs, joined
from engine.values.plan import Chunk
from engine.values.request import Request, Status
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support import hash_model
from tests.engine.support.hash_model import EOS as EOS
from tests.engine.support.hash_model import VOCABULARY as VOCABULARY
from tests.engine.support.hash_model import next_token as next_token
from tests.engine.support.memory_runner import MemoryRunner
from tests.engine.support.pipeline_runner import PipelineRunner
from tests.engine.support.scripted_tier import ScriptedTier

_OF_REQUEST = ("output_ids", "priority", "tenant", "is_deferrable", "num_prompt_reported", "source")


@dataclass
class Script:
    """One engine of a scenario: pages of `page_size` tokens, a clock that ticks once per step."""

    num_pages: int = 64
    page_size: int = 4
    limits: dict[str, Any] = field(default_factory=dict)
    prefix_cache: bool = True
    overlap: bool = False
    host_pages: int = 0
    preemption: str = "swap"
    host_min_uses: int = 2
    has_lower_tier: bool = False
    """Whether prefixes go on from the host to `tier`."""
    block_tokens: int | None = None
    drafter: Drafter | None = None
    """ScriptedDrafts tokens, whether it pays or not unless `is_adaptive`."""
    max_drafts: int = 4
    is_adaptive: bool = False
    eviction: str = "lru"
    state_slots: int = 0
    """Slots for recurrent states; 0: the model has none."""
    state_pages: int = 2
    """Host pages that a recurrent state takes."""
    window: tuple[int, int] | None = None
    """Tokens that layers with a window see, and the groups of such layers; None: there are none."""
    micro_batches: int = 1
    """Steps in flight in a pipeline; 1: there is none."""
    slowness: Callable[[], int] = lambda: 2
    """How often the next step of a pipeline will be looked at before it has ended."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.cache = KVCacheManager(
            self.num_pages,
            self.page_size,
            eviction=self.eviction,
            prefix_cache=self.prefix_cache,
            block_tokens=self.block_tokens,
            num_state_slots=self.state_slots,
            window=None if self.window is None else Window(*self.window, self.limits.get("max_step_tokens", 2048)),
        )
        limits = {"max_step_ms": None, "max_step_stretch": None, **self.limits}
        max_model_len = limits.pop("max_model_len", 10**6)
        window = 0 if self.window is None else self.window[0]
        self.runner = MemoryRunner(self.page_size, window)
        if self.micro_batches > 1:
            self.runner = PipelineRunner(self.page_size, window, self.micro_batches, self.slowness)
        self.tier = ScriptedTier(self.runner.host, self.page_size)
        self.host = HostKV(
            HostMemory(self.host_pages, state_pages=self.state_pages if self.state_slots else 0),
            self.page_size,
            self.preemption,
            self.host_min_uses,
            self.cache.prefix_log,
            self.block_tokens or 0,
            self.tier if self.has_lower_tier else NO_LOWER_TIER,
            self.cache.block_hashes,
            self.cache,
        )
        speculator = None
        if self.drafter is not None:
            speculator = Speculator(self.drafter, self.max_drafts, adaptive=self.is_adaptive)
        settings = SchedulerSettings(**limits)
        self.scheduler = Scheduler(
            self.cache, settings, max_model_len, [EOS], self.host, speculator, num_micro_batches=self.micro_batches
        )
        _check_promises(self.scheduler.allocator)
        self.loop = EngineLoop(self.scheduler, self.runner, clock=lambda: self.now, overlap=self.overlap)
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[StreamDelta]] = {}

    def arrive(
        self,
        prompt: Sequence[int],
        *,
        salt: str = "",
        name: str | None = None,
        eos_after: int | None = None,
        **options: Any,
    ) -> str:
        """Submit a request and return its name; `options` are those of Request.make, or sampling params."""
        name = name or f"r{len(self.requests)}"
        made = {key: options.pop(key) for key in _OF_REQUEST if key in options}
        request = Request.make(
            name,
            list(prompt),
            SamplingParams(**{"max_tokens": 8, **options}),
            arrival=self.now,
            seed=options.get("seed", hash_model.SEED),
            namespace=Namespace("m", salt=salt),
            **made,
        )
        self.now += 1e-6  # arrivals are in order
        self.requests[name], self.events[name] = request, []
        if eos_after is not None:
            self.runner.eos_after[name] = eos_after
        self.loop.submit(request)
        return name

    def abort(self, name: str) -> None:
        """Abort a request, as if its client had gone away."""
        self.loop.abort(name)

    def step(self) -> list[StreamDelta]:
        """Take one engine step, and check that the pages add up after it."""
        self.now += 1.0
        events = self.loop.step()
        for event in events:
            self.events[event.request_id].append(event)
        assert not self.runner.mistakes, self.runner.mistakes
        account = self.scheduler.account()
        assert sum(account) == self.num_pages, account
        assert self.host.account().total == self.host_pages, self.host.account()
        self.check_states()
        self.check_tails()
        return events

    def check_states(self) -> None:
        """Check that the slots add up, and that each snapshot contains the tokens up to the end of its node."""
        if (snapshots := self.cache.snapshots) is None:
            return
        account = snapshots.account()
        assert account.total == self.state_slots, account
        nodes = self._nodes()
        slots = [node.resume_point for node in nodes if node.resume_point is not None]
        assert len(set(slots)) == len(slots) == account.evictable + account.locked, account
        for node in nodes:
            if node.resume_point is not None:
                held = self.runner.states.get(node.resume_point)
                assert held == list(sequence(node)), (
                    f"slot {node.resume_point} has {held}, not what leads to {node}"
                )

    def check_tails(self) -> None:
        """Check that the rows of each tail hold the tokens before the end of its node, and that rows are counted
        where they are.
        """
        if (tails := self.cache.tails) is None:
            return
        by_tails = Counter[int]()
        for node in self._nodes():
            if node.resume_point is None:
                continue
            rows, tokens = tails.rows_at(node), list(sequence(node))
            assert node.end % self.page_size == 0, node
            by_tails.update(row[0] for row in rows)
            first = node.end - len(rows) * self.page_size
            assert first <= max(0, node.end - tails.window.num_tokens + 1), (node, rows)
            for position in range(max(0, node.end - tails.window.num_tokens + 1), node.end):
                slot, inside = divmod(position - first, self.page_size)
                for group, page in enumerate(rows[slot], 1):
                    held = self.runner.memory.get((page, inside))
                    assert held == (tokens[position], position, group), f"page {page} of {node} holds {held}"
        by_requests = Counter[int]()
        for request in self.scheduler.allocator.running:
            if request.lease is not None and (window := request.lease.window) is not None:
                by_requests.update(row[0] for row in window.rows)
                by_requests.update(row[0] for _, tail in window.kept for row in tails.rows_of(tail))
        by_requests.update(row[0] for node in tails.pins for row in tails.rows_at(node))
        counted = {page: (by_requests[page], by_tails[page]) for page in by_requests | by_tails}
        assert counted == tails.uses

    def _nodes(self) -> list[Node]:
        """Return all nodes of the tree."""
        nodes = list(self.cache.tree.roots.values())
        for node in nodes:
            nodes += [*node.children.values(), *(node.gates or {}).values()]
        return nodes

    def play(
        self, actions: Sequence[tuple[Any, ...]], options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Do what a list of actions says, then step until all requests have ended. A request arrives with the
        parameters that its action's option names.
        """
        for kind, *values in actions:
            name = f"r{values[0]}" if values else ""
            if kind == "arrive":
                length, max_tokens, beginning, *option = values
                given = {} if options is None else options[option[0]]
                self.arrive([beginning + 1] * length, max_tokens=min(max_tokens, 12), **given)
            elif kind == "abort" and name in self.requests:
                self.abort(name)
            elif kind == "stop" and name in self.requests:
                self.runner.eos_after[name] = values[1]
            elif kind == "fail":
                self.runner.fail_next = True
            elif kind == "step":
                for _ in range(values[0]):
                    self.step()
        self.runner.fail_next = False
        self.run()

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 5000) -> None:
        """Step until nothing is left to do, or until a condition holds."""
        for _ in range(most):
            if until() or not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def tokens(self, name: str) -> list[int]:
        """Return the tokens that the client of a request was sent."""
        return [token for event in self.events[name] for token in event.token_ids]

    def undisturbed(self, name: str) -> list[int]:
        """Return the tokens that a request would get from an engine of its own, if it did not stop."""
        request = self.requests[name]
        forever = SamplingParams(max_tokens=request.sampling.max_tokens, ignore_eos=True)
        tokens, _ = hash_model.alone(request.prompt_ids, request.seed, forever)
        return tokens[request.num_resumed :]

    def alone(self, name: str) -> tuple[list[int], str]:
        """Return the tokens that a request would get, and why it would end, in an engine of its own."""
        request = self.requests[name]
        if request.sampling.beams is not None:
            best = self.found_alone(name)[0]
            return list(best.token_ids), best.finish_reason
        eos_after = self.runner.eos_after.get(name)
        tokens, reason = hash_model.alone(request.prompt_ids, request.seed, request.sampling, eos_after)
        return tokens[request.num_resumed :], reason

    def found(self, name: str) -> list[Hypothesis]:
        """Return what the client of a beam search was sent, in one delta."""
        assert len(self.events[name]) == 1, self.events[name]
        return list(self.events[name][0].alternatives or ())

    def found_alone(self, name: str) -> list[Hypothesis]:
        """Return what a beam search would find in an engine of its own."""
        request = self.requests[name]
        return hash_model.search_alone(request.prompt_ids, request.seed, request.sampling)

    def scores(self, name: str) -> PackedLogprobs | None:
        """Return the prompt log-probabilities that a client was sent; raises unless they came in order."""
        packed: PackedLogprobs | None = None
        for event in self.events[name]:
            packed = joined(packed, event.prompt_logprobs)
        return packed

    def reason(self, name: str) -> str | None:
        """Return why a request ended; None while it has not."""
        ends = [event.finish_reason for event in self.events[name] if event.finish_reason]
        assert len(ends) <= 1, f"{name} ended {len(ends)} times"
        return ends[0] if ends else None

    def chunks(self, name: str) -> list[Chunk]:
        """Return all chunks that were planned for a request so far."""
        return [chunk for plan in self.runner.plans for chunk in plan.chunks if chunk.request.request_id == name]

    def num_computed(self, *names: str) -> int:
        """Return how many tokens were computed for requests, repeated and discarded ones included."""
        return sum(chunk.num_tokens for name in names for chunk in self.chunks(name))

    def is_running(self, name: str) -> bool:
        """Whether the request holds pages."""
        return self.requests[name].status is Status.RUNNING

    def nothing_held(self) -> bool:
        """Whether no page is locked or private, on the device or on the host, as at the end of every scenario."""
        account = self.scheduler.account()
        self.host.begin_step()
        assert not self.host.requests, "they have ended"
        states = StateAccount(0, 0, 0, 0) if self.cache.snapshots is None else self.cache.snapshots.account()
        nothing = account.locked == account.private == self.host.account().held == 0
        return nothing and states.locked == states.private == 0


def _check_promises(allocator: KVAllocator) -> None:
    """Have the allocator count the pages that it has promised anew each time, beside the sum that it keeps."""
    kept = allocator.pages_promised

    def counted(growth: int) -> int:
        promised = kept(growth)
        allocator.forget_promises()
        assert promised == kept(growth), "the sum of promised pages is out of date"
        return promised

    allocator.pages_promised = counted  # type: ignore[method-assign]
