"""The hub's board of hot prefixes: the most valuable prefixes of the fleet, summed over all ingresses.

ingress      HotPrefixes, one for each model ──every few seconds──▶ hub: WarmUpBoard
new replica  ── which are worth most? ──▶ hub ──▶ their tokens ──▶ its own engine ──▶ ready
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import KVAddress
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes

MAX_REPORTS = 256
"""Reports that the board keeps, one for each ingress and model; beyond it, the oldest is dropped."""
MAX_PREFIXES = 4096
"""Prefixes of a report."""
_MIN_WEIGHT = 2.0**-6
"""A report whose weight has faded below this is dropped."""


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """The prefixes that one ingress found worth most among one model's prompts."""

    model: str
    block_tokens: int
    half_life_s: float
    prefixes: list[HotPrefix]

    def check(self) -> None:
        """Raise ValueError for values that would break the board for all: its arithmetic divides by both
        numbers."""
        if self.block_tokens < 1 or not 0 < self.half_life_s < math.inf:
            raise ValueError(
                f"a report needs block_tokens of at least 1 and a finite half_life_s above 0, got "
                f"{self.block_tokens} and {self.half_life_s}"
            )
        if len(self.prefixes) > MAX_PREFIXES:
            raise ValueError(f"a report has {len(self.prefixes)} prefixes, at most {MAX_PREFIXES} are allowed")


class WarmUpBoard:
    """Keeps the last report of each ingress about each model and sums them up. `now` is in seconds."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[float, PrefixReport]] = {}  # (ingress, model) -> (time, report)

    def take(self, ingress: str, report: PrefixReport, now: float) -> None:
        """Take a report; it replaces the one that this ingress made about this model before. Raises ValueError."""
        report.check()
        self._reports.pop((ingress, report.model), None)
        self._reports = {key: old for key, old in self._reports.items() if _weight(*old, now) >= _MIN_WEIGHT}
        self._reports[ingress, report.model] = (now, report)
        if len(self._reports) > MAX_REPORTS:
            del self._reports[next(iter(self._reports))]

    def top(self, model: str, max_tokens: int, now: float) -> list[HotPrefix]:
        """The prefixes of a model that are worth most to the fleet, best first, at most `max_tokens` in all.

        A report loses half its weight in its half-life, as if no prompt had come since. It outlives its ingress,
        as the ingress's prompts may come again elsewhere.
        """
        merged: HotPrefixes | None = None
        sources: dict[int, tuple[KVAddress, int]] = {}
        for at, report in self._reports.values():
            if report.model != model:
                continue
            if merged is None:
                merged = HotPrefixes(report.block_tokens, half_life_s=report.half_life_s)
            for prefix in report.prefixes:
                chain = block_hashes(prefix.token_ids, prefix_root(prefix.namespace), merged.block_tokens)
                merged.merge(prefix, chain, now, _weight(at, report, now))
                if prefix.source is not None and chain:
                    sources[chain[-1]] = prefix.source  # of a later report: it is the newer
        top = [] if merged is None else merged.top(max_tokens, now)
        if merged is None or not sources:
            return top
        return [replace(prefix, source=_source_of(prefix, merged.block_tokens, sources)) for prefix in top]


def _weight(at: float, report: PrefixReport, now: float) -> float:
    return float(0.5 ** ((now - at) / report.half_life_s))


def _source_of(
    prefix: HotPrefix, block_tokens: int, sources: Mapping[int, tuple[KVAddress, int]]
) -> tuple[KVAddress, int] | None:
    """Return where to fetch a prefix, or most of it: `sources` are by the hash of a prefix's last block."""
    chain = block_hashes(prefix.token_ids, prefix_root(prefix.namespace), block_tokens)
    return next((sources[block] for block in reversed(chain) if block in sources), None)
