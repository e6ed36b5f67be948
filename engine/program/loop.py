"""The engine's loop: plans, runs and applies steps in turn, in its own thread."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cache import Namespace
from engine.base.errors import EngineBroken, EngineStopped, QueueFull
from engine.host_tier.peers import LentPages
from engine.program.deliveries import Deliveries
from engine.program.self_test import SelfTest
from engine.program.timed_step import InFlight, TimedStep
from engine.runner.device_thread import CallerThread, DeviceThread, Launcher
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stats import EngineLoad, StageSeconds, StepStats
from engine.values.plan import Runner, StepPlan, StepResult, StepUnderway
from engine.values.request import Request
from engine.values.stream_delta import StreamDelta

logger = logging.getLogger(__name__)

T = TypeVar("T")
Clock = Callable[[], float]
_NOTHING = StepResult((), ())
# Maximum age of `load`, in seconds, while steps are shorter than this.
_LOAD_SECONDS = 0.005
# Most seconds between two checks of arriving pages while requests wait for them and nothing can be computed.
_POLL_SECONDS = 0.005
# Most seconds between two looks for new requests while a pipeline has room for another step.
_LOOK_SECONDS = 0.001
# The next step is planned when this share of the expected time of the step in flight has passed, minus a lead. The
# lead is this multiple of the last planning time, plus this many seconds.
_CERTAIN_SHARE = 0.9
_LEAD_FACTOR = 3.0
_LEAD_SECONDS = 0.001


class EngineLoop:
    """Runs one scheduler on one runner. Any thread may submit, abort and ask for reports.

    Either `start` a thread that steps whenever there is work, or call `step` yourself as the offline `LLM` does,
    but never both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock = time.monotonic,
        *,
        overlap: bool = False,
        stream_interval_s: float = 0.0,
        device: DeviceThread[Any] | None = None,
    ) -> None:
        """With `overlap`, steps run in a separate thread while this one plans the next; a pipeline needs none, as
        its steps only enter it when they are called. Tokens of short steps are delivered together,
        `stream_interval_s` apart (`engine/program/deliveries.py`). If `device` is given, steps run in that thread
        in any case.
        """
        self.scheduler = scheduler
        self.clock = clock
        self._runner = runner
        self._is_pipeline = scheduler.num_micro_batches > 1
        # Most steps in flight while another one is planned.
        self._depth = scheduler.num_micro_batches - 1 if self._is_pipeline else int(overlap)
        has_thread = overlap and not self._is_pipeline
        self._device: Launcher[StepResult | StepUnderway]
        self._device = device or (DeviceThread() if has_thread else CallerThread())
        self._done_at = -math.inf  # when the device ended the last step, if the next one waited for that
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._inbox: deque[Request | str | _Errand] = deque()  # requests to add; ids to abort; other work
        self._num_coming = self._tokens_coming = 0  # requests in the inbox, and their tokens
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._load = scheduler.load(clock())
        self._load_at = clock()
        self._deliveries = Deliveries(stream_interval_s)
        self.on_step: Callable[[StepStats], None] = lambda _: None
        """Called with the figures of each step."""
        self._on_failure: Callable[[str], None] = lambda _: None
        self.self_test = SelfTest()
        """Whether steps fail, and why."""
        self.failure: str | None = None
        """The reason why the loop ended by itself; None if it did not."""
        self.last_progress = clock()
        """Clock at the end of the last step, or when the loop last had nothing to do."""

    # --- from any thread -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Submit a request. Raises NeverFits, QueueFull or EngineStopped; the request then leaves no trace."""
        self.scheduler.check(request)
        with self._lock:
            if self._stopping or self.failure is not None:
                raise EngineStopped(self.failure or "the engine is stopping")
            self.scheduler.waiting.check_room(request, self._num_coming, self._tokens_coming)
            self._inbox.append(request)
            self._num_coming += 1
            self._tokens_coming += request.num_tokens
        self.wake()

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Unknown and finished ids are ignored."""
        with self._lock:
            self._inbox.append(request_id)
        self.wake()

    def empty_cache(self) -> Future[int]:
        """Drop all cached prefixes that no request uses, before the next step; the result is the pages freed.

        Raises EngineStopped. The future is cancelled when the loop ends first.
        """
        return self._between_steps(self.scheduler.reset_cache)

    def lend(self, namespace: Namespace, tokens: Sequence[int], first: int) -> Future[LentPages]:
        """Lend the pages of a prompt from position `first` on, before the next step (`Lender.lend`).

        Raises EngineStopped. The future is cancelled when the loop ends first.
        """
        return self._between_steps(partial(self.scheduler.lender.lend, namespace, tokens, first))

    def give_back(self, number: int) -> None:
        """End a loan before the next step. Idempotent; does nothing when the loop has ended."""
        with contextlib.suppress(EngineStopped):
            self._between_steps(partial(self.scheduler.lender.give_back, number))

    def _between_steps(self, do: Callable[[], T]) -> Future[T]:
        """Call `do` in the loop's thread before the next step."""
        done: Future[T] = Future()
        with self._lock:
            if self._stopping or self.failure is not None:
                raise EngineStopped(self.failure or "the engine is stopping")
            self._inbox.append(_Errand(do, done))
        self.wake()
        return done

    def wake(self) -> None:
        """Plan the next step immediately, because KV has arrived that requests may wait for."""
        if not self._wake.is_set():  # Otherwise the loop looks anyway: it clears the event first.
            self._wake.set()

    def fail(self, reason: str) -> None:
        """End the loop because no further step can be computed. Only the first reason is kept."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        self._wake.set()
        self._on_failure(reason)

    def load(self) -> EngineLoad:
        """Return how busy the engine is, at most 5 ms behind its last step."""
        return self._load

    def forget_totals(self) -> None:
        """Reset all counters to 0. Call it only before `start`."""
        if self._thread is not None:
            raise RuntimeError(
                "the loop is running, and its counters must not go backwards; call forget_totals before start"
            )
        self.scheduler.forget_totals()
        self._load = self.scheduler.load(self.clock())

    @property
    def failing(self) -> str:
        """The reason why the engine computes nothing now (`FailureCause`), or "ended"; "" while it works."""
        return self.self_test.cause or ("" if self.failure is None else "ended")

    @property
    def has_started(self) -> bool:
        """Whether `start` was called."""
        return self._thread is not None

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step has failed and a self-test is due."""
        return bool(self._inbox or self._in_flight) or self.self_test.is_due or self.scheduler.has_work

    # --- the thread ----------------------------------------------------------------------------------------

    def start(
        self,
        on_events: Callable[[list[StreamDelta]], None],
        on_step: Callable[[StepStats], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Step in a thread until `stop`. `on_events` and `on_step` are called in it, at most once per step, and
        must not block. `on_failure` is called in any thread with the reason when the loop ends by itself.
        """
        if self._thread is not None:
            raise RuntimeError("the loop is running already; call start once")
        self.on_step, self._on_failure = on_step or self.on_step, on_failure or self._on_failure
        self._deliveries.deliver = on_events
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its current step. Unfinished requests get no further deltas."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        self._device.close(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping and self.failure is None:
                self._wake.clear()
                if not self.has_work:
                    self.last_progress = self.clock()
                    self.scheduler.take_in_transfers()
                    self._wake.wait(timeout=1.0)
                    continue
                self._deliveries.add(self.step())
                if self._in_flight:
                    self._settle(self._in_flight[0].plan)
                elif not self.has_work:
                    self._deliveries.settle(self.clock(), math.inf)
        except EngineBroken as error:
            self.fail(str(error))
        except Exception as error:  # a defect; the health check then replaces this replica
            logger.exception("the engine loop ended")
            self.fail(f"the engine loop ended: {type(error).__name__}")
        with self._lock:
            for item in self._inbox:
                if isinstance(item, _Errand):
                    item.done.cancel()

    def step(self) -> list[StreamDelta]:
        """Plan the next step and launch it, then apply the result of the previous one; returns all deltas.

        Without overlap, apply the result of the step just launched. A pipeline applies results before planning.
        The tokens are the same. After a step that failed, test the engine instead. Raises EngineBroken.
        """
        flying = self._in_flight
        if self.self_test.is_due:
            return self._test()
        events = self._wait_to_plan() + self._take_inbox()
        while flying and self.scheduler.needs_results:
            events += self._take_in()
        is_launched = self._launch(events)
        if not flying:  # there was nothing to compute
            self._update_load()
            self._wait_for_arrivals()
        elif self._is_pipeline:
            if not is_launched and not events:
                self._wait_for_result()
        elif len(flying) > self._depth or not is_launched:
            events += self._take_in()
        return events

    def _settle(self, plan: StepPlan) -> None:
        """Deliver the new deltas, unless they can wait for the next step."""
        now = self.clock()
        self._deliveries.settle(now, math.inf if plan.is_empty else now + self.scheduler.expected_seconds(plan))

    def _wait_for_arrivals(self) -> None:
        """Wait a little for KV on its way to host memory, if requests wait for it."""
        self._wake.clear()
        if self.scheduler.has_work and not self._inbox and not self._stopping:
            self._wake.wait(_POLL_SECONDS)

    def _wait_for_result(self) -> None:
        """Wait until the oldest step ends, or until something comes that may be planned before."""
        while not self._wake.is_set() and not self._in_flight[0].is_done_by(self.clock() + _LOOK_SECONDS):
            pass
        self._wake.clear()

    def _wait_to_plan(self) -> list[StreamDelta]:
        """Wait as long as the steps in flight allow, so that requests that arrive meanwhile join the next step.

        In a pipeline, apply the results that are there, and wait for one if there is no room for another step.
        """
        flying, events = self._in_flight, list[StreamDelta]()
        if self._is_pipeline:
            while len(flying) > self._depth or (flying and flying[0].is_done_by(self.clock())):
                events += self._take_in()
        elif flying and (began := flying[0].step.began) is not None:
            running = flying[0]
            expected = self.scheduler.expected_seconds(running.plan)
            lead = _LEAD_FACTOR * (running.schedule + running.prepare) + _LEAD_SECONDS
            running.is_done_by(max(began, self._done_at) + expected * _CERTAIN_SHARE - lead)
        return events

    def _launch(self, events: list[StreamDelta]) -> bool:
        """Plan a step and launch it; False if there is nothing to compute."""
        started = self.clock()
        plan = self.scheduler.schedule(started)
        scheduled = self.clock()
        events += plan.ended
        self._settle(plan)
        if plan.is_empty:
            return False
        if self._load.num_running + self._load.num_waiting == 0:
            self._load = self.scheduler.load(scheduled)  # shows the work even if this step never ends
        self._in_flight.append(self._launched(plan, scheduled - started))
        return True

    def _launched(self, plan: StepPlan, schedule: float = 0.0) -> InFlight:
        """Prepare a step, whose planning took `schedule` seconds, and launch it."""
        step, prepare = TimedStep.prepared(self._runner, plan, self.clock)
        return InFlight(plan, step, self._device.launch(step.run), schedule, prepare)

    def _take_in(self) -> list[StreamDelta]:
        """Wait for the result of the oldest step in flight and apply it."""
        launched = self._in_flight.popleft()
        plan = launched.plan
        try:
            result = launched.wait(self._done_at)
        except EngineBroken:
            raise
        except Exception as error:
            self.self_test.failed(plan, error)
            result, ran = _NOTHING, self.clock()
            events = self.scheduler.fail(plan, "the model failed to compute this request", ran)
        else:
            ran = self.clock()
            events = self.scheduler.apply(plan, result, ran, launched.step.seconds)
        # Steps of a pipeline run next to each other, so that none waits for the end of another.
        self._done_at = -math.inf if self._is_pipeline or launched.step.underway is None else ran
        self._report(launched, result, ran)
        return events

    def _test(self) -> list[StreamDelta]:
        """Apply the oldest step in flight, or if there is none, test whether the engine can still compute."""
        self._deliveries.settle(self.clock(), math.inf)
        if self._in_flight:
            return self._take_in()
        self.self_test.run(self.scheduler.cache, lambda plan: self._launched(plan).wait(self._done_at))
        self.scheduler.allocator.host.drop_copies()  # of pages evicted for the test, which overwrote them
        return []

    def _take_inbox(self) -> list[StreamDelta]:
        """Process the inbox; a request that the scheduler rejects ends with an error."""
        refused = []
        while self._inbox:
            with self._lock:
                item = self._inbox.popleft()
                if isinstance(item, Request):
                    self._num_coming -= 1
                    self._tokens_coming -= item.num_tokens
            if isinstance(item, str):
                self.scheduler.abort(item)
                continue
            if isinstance(item, _Errand):
                item.run()
                continue
            try:
                self.scheduler.add(item, self.clock())
            except (ValueError, QueueFull) as error:
                refused.append(StreamDelta(item.request_id, finish_reason="error", error=str(error)))
        return refused

    def _report(self, launched: InFlight, result: StepResult, ran: float) -> None:
        now = self._update_load()
        plan, prepare, sample = launched.plan, result.prepare_seconds, result.sample_seconds
        forward = max(launched.step.seconds - prepare - sample, 0.0)
        self.on_step(
            StepStats(
                StageSeconds(launched.schedule, launched.prepare + prepare, forward, sample, now - ran),
                num_requests=len(plan.chunks),
                num_decode_tokens=plan.num_decodes,
                num_prefill_tokens=plan.num_prefill,
                num_draft_tokens=plan.num_drafts,
                num_accepted_tokens=sum([count - 1 for count in result.counts or ()]),
                is_replayed=result.is_replayed,
            )
        )

    def _update_load(self) -> float:
        """Record progress, and refresh `load` if it is old; returns the time."""
        self.last_progress = now = self.clock()
        if now - self._load_at >= _LOAD_SECONDS or not self.has_work:
            self._load, self._load_at = self.scheduler.load(now), now
            if sum(self._load.pages) != self.scheduler.cache.num_pages:
                logger.error("KV pages do not add up to %d: %s", self.scheduler.cache.num_pages, self._load.pages)
            if self._load.host_pages.total != self.scheduler.allocator.host.num_pages:
                logger.error("host pages do not add up: %s", self._load.host_pages)
        return now


class _Errand(NamedTuple):
    """A call to make between two steps. Its future gets the result or the error."""

    do: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        """Make the call, unless its future was cancelled."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.do())
        except Exception as error:
            self.done.set_exception(error)
