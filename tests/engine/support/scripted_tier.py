"""A lower tier for scripted scenarios, whose transfers end when the scenario wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.news.prefix_log import PrefixLog
from engine.host_tier.lower_tier import Finished, TierTotals

Slots = dict[tuple[int, int], tuple[int, int, int]]


class ScriptedTier:
    """Keeps what lies in host pages: it reads them as late and writes them as soon as it may."""

    is_empty = False
    has_room = True
    store = "scripted"

    def __init__(self, host: Slots, page_size: int) -> None:
        self._host, self._page_size = host, page_size
        self.pages: dict[bytes, list[tuple[int, int, int]]] = {}
        self.is_held = False
        """Whether nothing that is under way ends."""
        self.broken: set[bytes] = set()
        """Pages that cannot be read."""
        self.log = PrefixLog()
        self.page_seconds = 0.0
        self.loaded: list[bytes] = []
        """All keys that were asked for."""
        self._saving: list[tuple[bytes, int]] = []
        self._loading: list[tuple[bytes, int]] = []

    def has(self, key: bytes) -> bool:
        return key in self.pages

    def save(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        if key in self.pages:
            return False
        self._saving.append((key, page))
        return True

    def load(self, pages: Sequence[tuple[bytes, int]]) -> None:
        for key, page in pages:
            self.loaded.append(key)
            for slot in range(self._page_size):
                known = key in self.pages and key not in self.broken
                self._host[page, slot] = self.pages[key][slot] if known else (-3, -3, -3)
        self._loading += pages

    def seconds(self, num_pages: int) -> float:
        return self.page_seconds * num_pages

    def finished(self) -> Finished:
        if self.is_held:
            return Finished()
        for key, page in self._saving:
            self.pages[key] = [self._host.get((page, slot), (-1, -1, -1)) for slot in range(self._page_size)]
        saved, self._saving = [page for _, page in self._saving], []
        loading, self._loading = self._loading, []
        lost = [page for key, page in loading if key not in self.pages or key in self.broken]
        for key in self.broken:
            self.pages.pop(key, None)
        return Finished(saved, [page for _, page in loading if page not in lost], lost)

    def on_finished(self, call: Callable[[], None]) -> None:
        """The scenario steps anyway."""

    def clear(self) -> None:
        self.pages.clear()

    def totals(self) -> TierTotals:
        return TierTotals(held=len(self.pages))

    def close(self) -> None:
        """Nothing runs."""
