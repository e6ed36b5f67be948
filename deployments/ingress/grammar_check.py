"""Checks whether a model's engines can follow a grammar, by compiling it in a process that can be killed.

check ──▶ verdict known? ──▶ same grammar being compiled? ──▶ a thread with a process: `engine.grammar.trial`

Tenants take turns at the processes, and none can take all the places where grammars wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from deployments.admission.fair_threads import FairThreads
from deployments.api.base.off_loop import working_for
from deployments.client.protocol import Overloaded
from deployments.config.limits import Limits
from engine.base.bounded_cache import BoundedCache
from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar, MatcherName
from engine.grammar.trial import TooComplex, Trial, TrialLimits
from engine.grammar.vocabulary import Vocabulary
from monitoring.metrics import Metrics

_VERDICT_BYTES = 450
"""Memory of a verdict and its place, without the message."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The result of trying a grammar. It holds nothing of the grammar itself, which may be large."""

    compiled_bytes: int
    """Memory that it takes compiled; 0 if it cannot be used."""
    complaint: str = ""
    is_too_complex: bool = False
    matcher: MatcherName | None = None
    """The matcher that suits it best."""

    @property
    def num_bytes(self) -> int:
        """Bytes that remembering it takes."""
        return _VERDICT_BYTES + sys.getsizeof(self.complaint)


class GrammarCheck:
    """Checks grammars for one model. Belongs to one event loop; no process is started before the first grammar."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        limits: Limits,
        metrics: Metrics | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`vocabulary` is called in another thread. `weights` are tenants' shares; None: there are no tenants."""
        self._vocabulary, self._limits, self._metrics = vocabulary, limits, metrics
        self._known: BoundedCache[bytes, _Verdict] = BoundedCache(limits.known_grammar_bytes)
        self._running: dict[bytes, asyncio.Future[_Verdict]] = {}
        self._places: Counter[str] = Counter()  # grammars that are being compiled or wait, by tenant
        self._threads = FairThreads(
            limits.grammar_processes,
            "grammar-check",
            weights,
            reserves_one=weights is not None,
            most_each=limits.grammar_processes_per_tenant,
            clock=time.monotonic,  # A thread only waits for its process.
        )
        self._idle: deque[tuple[TrialLimits, Trial]] = deque()
        self._is_closed = False

    async def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar, with the memory that it takes compiled, if it can be followed.

        Raises InvalidGrammar; Overloaded when too many are waiting.
        """
        within = _trial_limits(self._limits)
        key = hashlib.sha256(f"{within}\0{grammar.kind}\0{grammar.source}".encode()).digest()
        verdict, is_known = self._known.get(key), True
        if verdict is None:
            # Shielded, because other requests may wait for the same grammar when this one is cancelled.
            verdict = await asyncio.shield(self._running.get(key) or self._start(key, grammar, within))
            is_known = False
        self._count(verdict, is_known)
        if verdict.complaint:
            raise (TooComplex if verdict.is_too_complex else InvalidGrammar)(verdict.complaint)
        return replace(grammar, compiled_bytes=verdict.compiled_bytes, matcher=verdict.matcher)

    def take_over(self, limits: Limits, weights: Mapping[str, float] | None) -> None:
        """Use other limits and shares from now on. Grammars that were tried within other limits are tried again.

        The number of processes and the memory for verdicts stay.
        """
        self._limits = limits
        self._threads.weigh(weights, reserves_one=weights is not None)

    def close(self) -> None:
        """End all processes, busy ones when they have finished or their time is up. Idempotent."""
        self._is_closed = True
        self._threads.close()
        self._end_idle()

    def _start(self, key: bytes, grammar: Grammar, within: TrialLimits) -> asyncio.Future[_Verdict]:
        tenant = working_for()
        share = self._limits.max_waiting_grammars // len(self._places.keys() | {tenant})
        # A tenant with less than an equal share of the places is admitted even when others have taken them all.
        if len(self._running) >= self._limits.max_waiting_grammars and self._places[tenant] >= share:
            reason = f"{len(self._running)} grammars are being compiled (limits.max_waiting_grammars)"
            raise Overloaded(reason, self._limits.grammar_compile_s)
        self._places[tenant] += 1
        future = asyncio.ensure_future(self._threads.run(tenant, partial(self._try, grammar, within)))
        self._running[key] = future
        future.add_done_callback(lambda done: self._learn(key, tenant, done))
        return future

    def _learn(self, key: bytes, tenant: str, done: asyncio.Future[_Verdict]) -> None:
        del self._running[key]
        self._places[tenant] -= 1
        if not self._places[tenant]:
            del self._places[tenant]
        if done.cancelled() or done.exception() is not None:
            return
        self._known.put(key, done.result(), done.result().num_bytes)

    def _try(self, grammar: Grammar, within: TrialLimits) -> _Verdict:
        """Compile a grammar, in one of the threads; there are as many as there may be processes."""
        started = time.monotonic()
        try:
            trial = self._idle_trial(within) or Trial(self._vocabulary(), within)
            try:
                found = trial.check(grammar)
                return _Verdict(found.compiled_bytes, matcher=found.matcher)
            finally:
                self._idle.append((within, trial))
        except InvalidGrammar as error:
            return _Verdict(0, str(error), isinstance(error, TooComplex))
        finally:
            if self._is_closed:
                self._end_idle()
            if self._metrics is not None:
                self._metrics.observe("grammar_compile_seconds", time.monotonic() - started)

    def _idle_trial(self, within: TrialLimits) -> Trial | None:
        """Take an idle process with these limits; those with others are ended."""
        with contextlib.suppress(IndexError):  # There is none, or another thread took it.
            while True:
                limits, trial = self._idle.pop()
                if limits == within:
                    return trial
                trial.close()
        return None

    def _end_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[1].close()

    def _count(self, verdict: _Verdict, is_known: bool) -> None:
        result = "hit" if is_known else "miss"
        if verdict.complaint:
            result = "timeout" if verdict.is_too_complex else "rejected"
        if self._metrics is not None:
            self._metrics.inc("grammar_requests_total", result=result)


def _trial_limits(limits: Limits) -> TrialLimits:
    return TrialLimits(limits.grammar_compile_s, limits.grammar_compile_bytes)
