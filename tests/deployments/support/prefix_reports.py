"""Reports of hot prefixes, as ingresses make them for the hub."""

from __future__ import annotations

from collections.abc import Sequence

from cache import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from deployments.hub.warm_up_board import PrefixReport
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes

BLOCK = 4
"""Tokens per block in these reports."""


def report(*prompts: Sequence[int], model: str = "m", salt: str = "", half_life_s: float = 100.0) -> PrefixReport:
    """An ingress's report after these prompts."""
    hot, namespace = HotPrefixes(BLOCK, half_life_s=half_life_s), Namespace(model, salt=salt)
    for prompt in prompts:
        hot.record(namespace, prompt, block_hashes(prompt, prefix_root(namespace), BLOCK), 0.0)
    return PrefixReport(model, BLOCK, half_life_s, hot.top(10**6, 0.0))


def tokens_of(prefixes: Sequence[HotPrefix]) -> list[list[int]]:
    """Each prefix's token ids."""
    return [list(prefix.token_ids) for prefix in prefixes]
