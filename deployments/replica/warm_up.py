"""A new replica computes the fleet's most valuable prefixes before it takes requests.

The hub knows them (`deployments/hub/warm_up_board.py`). Without the hub, or before it has learned any, a replica
starts with an empty cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from cache import Namespace
from deployments.config.settings import WarmUpSettings
from engine.engine import Engine
from engine.precompute import Precomputed, precompute
from engine.sampling_params import SamplingParams
from router.hot_prefixes import HotPrefix

logger = logging.getLogger("ray.serve")


async def warm_up(engine: Engine, hub: Any, settings: WarmUpSettings) -> Precomputed:
    """Fill the cache of an engine whose loop has not started; never raises."""
    if settings.max_seconds <= 0:
        return Precomputed()
    try:
        max_tokens = int(engine.cache.num_pages * engine.config.page_size * settings.max_kv_share)
        async with asyncio.timeout(settings.ask_timeout_s):
            prefixes = await hub.hot_prefixes.remote(engine.config.name, max_tokens)
        done = await asyncio.to_thread(compute_prefixes, engine, prefixes, settings.max_seconds)
    except Exception as error:
        logger.warning("this replica starts cold: %s", str(error) or type(error).__name__)
        return Precomputed()
    message = "warmed up with %d of %d prefixes, %d tokens, in %.1f s"
    logger.info(message, done.num_prompts, len(prefixes), done.num_tokens, done.seconds)
    return done


def compute_prefixes(engine: Engine, prefixes: Iterable[HotPrefix], max_seconds: float) -> Precomputed:
    """Compute prefixes in this order, each in its namespace, until the time is up.

    Skips prefixes of another model and those with token ids that this model lacks; cuts one that is too long.
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
