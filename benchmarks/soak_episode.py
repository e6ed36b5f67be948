"""One episode of the soak: an engine of random shape, random clients, and the invariants of both.

Everything follows from the episode's seed: the engine, the requests and their times, the aborts and the failing
steps. An episode that finds a violation therefore finds it again.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.soak_borrower import Borrower
from benchmarks.soak_clients import TOKEN_SECONDS, Clients, Options, Weather, draw_engine
from engine.base.errors import NeverFits, QueueFull
from engine.values.plan import StepPlan
from tests.engine.support import hash_model
from tests.engine.support.script import Script


class Episode:
    """An episode, which runs once. Raises AssertionError when an invariant is violated."""

    def __init__(self, seed: str, micro_batches: int = 1) -> None:
        """Draw the engine and the clients from `seed`, which may be any text. With several `micro_batches` the
        engine is a pipeline, whose steps end sooner or later.
        """
        self._rng = random.Random(seed)
        self.options = draw_engine(self._rng)
        if micro_batches > 1:
            slowness = random.Random(seed + " slowness").choices
            self.options |= {
                "overlap": False,
                "micro_batches": micro_batches,
                "slowness": lambda: slowness([0, 1, 2, 9], [1, 1, 1, 3])[0],
            }
        self.weather = Weather.draw(self._rng)
        self.script = Script(**self.options)
        self.counts = Counter[str]()
        """Counts of steps, of requests by how they ended, and of other events."""
        self.scheduler_seconds = 0.0
        """Seconds spent on planning steps and applying their results."""
        self._clients = Clients(self._rng, self.script.num_pages * self.script.page_size)
        self._asked: dict[str, Options] = {}  # names of the accepted requests
        self._live: dict[str, None] = {}  # accepted requests that have not ended, in order
        self._aborted: set[str] = set()
        self._borrower = Borrower(self.script, random.Random(seed + " loans"))
        chance = random.Random(seed + " failures")  # a generator of its own, as steps run in another thread
        self.script.runner.fail_if = lambda plan: chance.random() < self.weather.failure * _frailty(plan)
        if not self.script.overlap:
            self.script.runner.on_run = self._let_time_pass
        scheduler: Any = self.script.scheduler
        scheduler.schedule, scheduler.apply = self._timed(scheduler.schedule), self._timed(scheduler.apply)

    def run(self, num_steps: int) -> None:
        """Run so many steps with clients that come and go, and then until all of them have been served."""
        try:
            for _ in range(num_steps):
                self._come_and_go()
                self._borrower.borrow_and_return()
                self._step()
            self.counts["lent pages"] = self._borrower.num_pages
            self._borrower.return_all()
            self.script.runner.fail_if = lambda plan: False
            most = 1000 + 200 * len(self._live)
            while self.script.loop.has_work:
                self._step()
                assert (most := most - 1), f"no end of {list(self._live)}"
            self._check_end()
        finally:
            self.script.loop.stop()

    def _step(self) -> None:
        events = self.script.step()
        self.counts["steps"] += 1
        plans = self.script.runner.plans
        for plan in plans:
            self._check_plan(plan)
        plans.clear()
        rows = sum(request.width for request in self.script.scheduler.allocator.running)
        assert rows <= self.options["limits"]["max_running"], f"{rows} run"
        drafter = self.options["drafter"]
        if drafter is not None:
            held = drafter.held - {request.request_id for request in self.script.scheduler.allocator.running}
            assert not (held or drafter.mistakes), (held, drafter.mistakes)
        for event in events:
            if event.finish_reason is not None:
                self._check_request(event.request_id)

    def _let_time_pass(self, plan: StepPlan) -> None:
        self.script.now += TOKEN_SECONDS * plan.num_tokens

    # --- clients -------------------------------------------------------------------------------------------

    def _come_and_go(self) -> None:
        rng, weather = self._rng, self.weather
        while rng.random() < weather.arrival:
            prompt, asked = self._clients.draw()
            for options in asked:
                self._ask(prompt, options)
        if self._live and rng.random() < weather.abort:
            self._abort(rng.choice(list(self._live)))
        if self._live and rng.random() < weather.move:
            self._move(rng.choice(list(self._live)))

    def _ask(self, prompt: list[int], options: Options) -> None:
        name = f"r{len(self.script.requests)}"
        try:
            self.script.arrive(prompt, name=name, **options)
        except NeverFits:
            is_long = len(prompt) + options["max_tokens"] > self._clients.capacity
            assert is_long or "beams" in options, "a request that fits alone is accepted"
            self.counts["never fit"] += 1
        except QueueFull:
            self.counts["refused"] += 1
        else:
            self._asked[name], self._live[name] = options, None

    def _abort(self, name: str) -> None:
        for _ in range(self._rng.choice([1, 1, 2])):
            self.script.abort(name)
        self._aborted.add(name)

    def _move(self, name: str) -> None:
        """Abort the request, and resume its output with another one."""
        script, request = self.script, self.script.requests[name]
        sent = [*self._asked[name].get("output_ids", ()), *script.tokens(name)]
        told = script.scores(name)
        self._abort(name)
        self._ask(
            list(request.prompt_ids),
            self._asked[name] | {"output_ids": sent, "num_prompt_reported": 0 if told is None else told.end},
        )
        self.counts["moved"] += 1

    # --- invariants ----------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        """Check that a step keeps to its limits."""
        self.counts["tokens"] += plan.num_tokens
        self.counts["chunks"] += len(plan.chunks)
        self.counts["drafts"] += plan.num_drafts
        assert not plan.is_empty and plan.num_tokens <= self.options["limits"]["max_step_tokens"]
        assert plan.chunks or not plan.preempted, "a request is preempted only for another one"
        names = [chunk.request.request_id for chunk in plan.chunks]
        assert len(set(names)) == len(names), names

    def _check_request(self, name: str) -> None:
        """Check that its output equals that of an engine of its own; an earlier end has a reason."""
        script, request, reason = self.script, self.script.requests[name], self.script.reason(name)
        assert name in self._live, f"{name} ended twice"
        del self._live[name]
        self.counts[str(reason)] += 1
        got, (tokens, end) = script.tokens(name), script.alone(name)
        if reason == "abort":
            assert name in self._aborted and got == tokens[: len(got)], (name, got, tokens)
        elif reason == "error":
            assert name in script.runner.failed and got == tokens[: len(got)], (name, got, tokens)
        else:
            assert (got, reason) == (tokens, end), (name, got, reason, tokens, end)
            if request.sampling.beams is not None:
                self.counts["beam searches"] += 1
                assert list(script.events[name][-1].alternatives or ()) == script.found_alone(name), name
        self._check_scores(name, is_whole=bool(got) or reason in ("stop", "length"))
        self._clients.heard([*request.prompt_ids, *self._asked[name].get("output_ids", ()), *got])

    def _check_scores(self, name: str, *, is_whole: bool) -> None:
        """Check that each prompt token was scored once, in order, before the first new token."""
        request, asked = self.script.requests[name], self._asked[name]
        told, num_top = self.script.scores(name), asked.get("prompt_logprobs")
        first = max(asked.get("num_prompt_reported", 0), 1)
        if told is None:
            assert num_top is None or not is_whole or first >= request.num_prompt or self._had_ended(name), name
        else:
            assert num_top is not None and told.start == first
            assert told.end == request.num_prompt or not is_whole
            assert told == hash_model.scores(request.prompt_ids[: told.end], first, num_top), name

    def _had_ended(self, name: str) -> bool:
        """Whether the request arrived with all of its output."""
        return not self.script.alone(name)[0]

    def _check_end(self) -> None:
        """Check that nothing is held at the end, and that the counts add up."""
        script, scheduler = self.script, self.script.scheduler
        assert not self._live and script.nothing_held(), (list(self._live), scheduler.account())
        assert not scheduler.allocator.running and not len(scheduler.waiting)
        assert (scheduler.waiting.num_tokens, scheduler.waiting.num_uncached) == (0, 0)
        load, stats = scheduler.load(script.now), script.cache.stats
        assert load.num_finished == len(self._asked) - self.counts["error"]
        first = [script.requests[name] for name in self._asked if not self._asked[name].get("output_ids")]
        first = [request for request in first if request.num_cached is not None]
        assert stats.query_tokens == sum(request.num_prompt for request in first)
        num_found = stats.hit_tokens + stats.host_hit_tokens
        assert num_found == sum(request.num_cached or 0 for request in first)
        self.counts["host hit tokens"] = stats.host_hit_tokens
        self.counts["hit tokens"], self.counts["query tokens"] = stats.hit_tokens, stats.query_tokens
        self.counts["preemptions"], self.counts["swapped"] = load.num_preemptions, load.num_swapped
        if not script.prefix_cache:
            assert script.scheduler.account().free == script.num_pages and not stats.hit_tokens
        script.cache.reset()
        assert script.scheduler.account().free == script.num_pages, "pages that no request holds can be evicted"

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.scheduler_seconds += time.perf_counter() - began
            return result

        return timed


def _frailty(plan: StepPlan) -> int:
    """Return a factor for a step's failure probability: the few that copy pages fail more often."""
    return 5 if plan.swap_out or plan.swap_in or plan.copies else 1
