"""A new replica computes the fleet's most valuable prefixes before it takes requests.

    ingress  HotPrefixes, one for each model ──every few seconds──▶ hub: WarmUpBoard
    new replica  ── what is worth most? ──▶ hub ──▶ tokens ──▶ its own engine ──▶ ready

Without the hub, or before anything was learned, a replica starts cold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cache import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from engine.engine import Engine
from engine.precompute import Precomputed, precompute
from engine.sampling_params import SamplingParams
from router.hot_prefixes import HotPrefix, HotPrefixes

logger = logging.getLogger("ray.serve")

MAX_POSTERS = 256
"""Ingresses, times models, that the board listens to; the one not heard of for longest is forgotten."""
_FAINT = 2.0**-6  # what is left of a post's weight when it is forgotten


@dataclass(frozen=True, slots=True)
class WarmUpLimits:
    """The fields of `deployments.config.args.WarmUp`, which says what they mean."""

    max_seconds: float = 30.0
    max_kv_share: float = 0.5
    ask_timeout_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Post:
    """What one ingress knows of one model's prompts."""

    model: str
    block_tokens: int
    half_life_s: float
    prefixes: list[HotPrefix]


class WarmUpBoard:
    """Lives in the hub: the last post of each ingress, summed up for who asks. `now` is in seconds."""

    def __init__(self) -> None:
        self._posts: dict[tuple[str, str], tuple[float, Post]] = {}  # (ingress, model) -> (time, post)

    def post(self, ingress: str, post: Post, now: float) -> None:
        """Replace what this ingress told of this model before."""
        self._posts.pop((ingress, post.model), None)
        self._posts = {key: old for key, old in self._posts.items() if _weight(*old, now) >= _FAINT}
        self._posts[ingress, post.model] = (now, post)
        if len(self._posts) > MAX_POSTERS:
            del self._posts[next(iter(self._posts))]

    def top(self, model: str, max_tokens: int, now: float) -> list[HotPrefix]:
        """The prefixes of a model worth most to the fleet, of at most `max_tokens` together, best first.

        What an ingress told loses half its weight in its half-life, as if no prompt had come since: its prompts
        may come again although it is gone.
        """
        merged: HotPrefixes | None = None
        for at, post in self._posts.values():
            if post.model != model:
                continue
            if merged is None:
                merged = HotPrefixes(post.block_tokens, half_life_s=post.half_life_s)
            for prefix in post.prefixes:
                chain = block_hashes(prefix.token_ids, prefix_root(prefix.namespace), merged.block_tokens)
                merged.merge(prefix, chain, now, _weight(at, post, now))
        return [] if merged is None else merged.top(max_tokens, now)


def _weight(at: float, post: Post, now: float) -> float:
    return float(0.5 ** ((now - at) / post.half_life_s))


class WarmUpPoster:
    """Posts what one ingress learned of its models' prompts. A hub that is away costs a post."""

    def __init__(self, hub: Any, ingress: str, read: Callable[[], Iterable[Post]], period_s: float) -> None:
        self._hub, self._ingress, self._read, self._period_s = hub, ingress, read, period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._post_forever())

    def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _post_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            for post in self._read():
                if not post.prefixes:
                    continue
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(2 * self._period_s):
                        await self._hub.post_prefixes.remote(self._ingress, post)


async def warm_up(engine: Engine, hub: Any, limits: WarmUpLimits) -> Precomputed:
    """Fill the cache of an engine whose loop has not started; never raises."""
    if limits.max_seconds <= 0:
        return Precomputed()
    try:
        max_tokens = int(engine.cache.num_pages * engine.config.page_size * limits.max_kv_share)
        async with asyncio.timeout(limits.ask_timeout_s):
            prefixes = await hub.hot_prefixes.remote(engine.config.name, max_tokens)
        done = await asyncio.to_thread(compute_prefixes, engine, prefixes, limits.max_seconds)
    except Exception as error:
        logger.warning("this replica starts cold: %s", str(error) or type(error).__name__)
        return Precomputed()
    message = "warmed up with %d of %d prefixes, %d tokens, in %.1f s"
    logger.info(message, done.num_prompts, len(prefixes), done.num_tokens, done.seconds)
    return done


def compute_prefixes(engine: Engine, prefixes: Iterable[HotPrefix], max_seconds: float) -> Precomputed:
    """Compute prefixes in this order, each under its namespace, until the time is up.

    Those of another model, or with tokens that this one has not, are left out; one too long is cut.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    requests = []
    for number, prefix in enumerate(prefixes):
        token_ids = list(prefix.token_ids[: engine.max_model_len - 1])
        if prefix.namespace != Namespace(engine.config.name, salt=prefix.namespace.salt):
            continue
        with contextlib.suppress(ValueError):
            salt = prefix.namespace.salt
            requests.append(engine.new_request(f"warm-up-{number}", token_ids, sampling, salt=salt))
    return precompute(engine.loop, requests, max_seconds)
