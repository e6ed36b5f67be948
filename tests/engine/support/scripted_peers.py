"""Fetches between engines of scripted scenarios, which end, break off and lie when the scenario wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache import Namespace
from engine.host_tier.lower_tier import Finished
from engine.host_tier.peers import LentPages, PeerTotals
from engine.values.request import KVSource
from tests.engine.support.script import Script


class ScriptedPeers:
    """Moves pages to an engine from others, each of which lends when it is first asked.

    It reads what is lent as late as it may, and writes into the receiver's pages as soon as it may.
    """

    def __init__(self, receiver: Script, **sources: Script) -> None:
        self._receiver, self._sources = receiver, sources
        self.is_held = False
        """Whether nothing more arrives."""
        self.most = 10**6
        """Pages of a fetch that arrive before its source is gone."""
        self.at_once = 10**6
        """Pages that arrive between two looks."""
        self.page_seconds = 0.0
        self.asked: list[tuple[str, int, int]] = []
        """Of each fetch: the source, the first page and the number of pages."""
        self.loans: list[tuple[Script, LentPages]] = []
        self._under_way: list[tuple[Script, LentPages, list[int], int]] = []
        self._lost: list[int] = []
        self._num_loaded = self._num_failed = self._num_failed_fetches = 0

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        self.asked.append((str(source.peer), first, len(hosts)))
        page_size = self._receiver.page_size
        assert len(tokens) == (first + len(hosts)) * page_size
        for host in hosts:
            for slot in range(page_size):
                self._receiver.runner.host[host, slot] = (-4, -4, -4)
        script = self._sources.get(str(source.peer))
        if script is None:
            self._lost += hosts
            self._num_failed_fetches += 1
            return
        lent = script.scheduler.lender.lend(namespace, tokens, first)
        self.loans.append((script, lent))
        self._under_way.append((script, lent, list(hosts), 0))

    def seconds(self, source: KVSource, num_pages: int) -> float:
        return num_pages * self.page_seconds

    def finished(self) -> Finished:
        if self.is_held:
            return Finished()
        loaded, failed = [], self._lost
        under_way, self._under_way, self._lost = self._under_way, [], []
        for script, lent, hosts, done in under_way:
            pages = [(script.runner.memory, page) for page in lent.device]
            pages += [(script.runner.host, page) for page in lent.host]
            there = min(len(pages), len(hosts), self.most)
            now = min(done + self.at_once, there)
            for (memory, page), host in zip(pages[done:now], hosts[done:now], strict=True):
                for slot in range(self._receiver.page_size):
                    self._receiver.runner.host[host, slot] = memory.get((page, slot), (-1, -1, -1))
            loaded += hosts[done:now]
            if now < there:
                self._under_way.append((script, lent, hosts, now))
                continue
            failed += hosts[now:]
            self._num_failed_fetches += now < len(hosts)
            script.scheduler.lender.give_back(lent.number)
        self._num_loaded += len(loaded)
        self._num_failed += len(failed)
        return Finished((), loaded, failed)

    def on_finished(self, call: Callable[[], None]) -> None:
        """The scenario steps anyway."""

    def totals(self) -> PeerTotals:
        return PeerTotals(self._num_loaded, self._num_failed, len(self.asked), self._num_failed_fetches)

    def close(self) -> None:
        """Nothing runs."""
