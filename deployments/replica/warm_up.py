"""A new replica gets shared prefixes and the fleet's most valuable ones before it accepts requests.

Shared prefixes are those of the configuration, and stay as long as the replica lives. The hub knows the others
(`deployments/hub/warm_up_board.py`): without it, or before it has learned any, a replica starts without them. They
are fetched from a replica that holds them if replicas fetch KV (`deployments/replica/kv_fetch/`), and computed
otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from cache import Namespace
from deployments.config.settings import ChatSettings, WarmUpSettings
from deployments.config.shared_prefixes import SharedPrefixSettings
from deployments.wire.deadlines.time_limit import timeout
from engine.base.errors import EngineBroken
from engine.program.engine import Engine, model_directory
from engine.program.precompute import Precomputed, precompute
from engine.text.tokenizer import load_tokenizer
from engine.values.request import KVSource
from engine.values.sampling_params import SamplingParams
from router.fetch.hot_prefixes import HotPrefix

logger = logging.getLogger("ray.serve")


def share_prefixes(
    engine: Engine, prefixes: Sequence[SharedPrefixSettings], chat: ChatSettings, max_kv_share: float
) -> Precomputed:
    """Compute prefixes that all tenants share, on an engine whose loop has not started.

    Raises ValueError when they do not fit, or cannot be prompts of this model; the replica must not start then.
    """
    if not prefixes:
        return Precomputed()
    # Imported only if there are any: other engines do not use the API.
    from deployments.api.served.shared_prefixes import shared_prefix_ids
    from deployments.api.served.text_codec import TextCodec

    codec = TextCodec(load_tokenizer(model_directory(engine.config)), chat, max_cache_bytes=0)
    done = engine.share_prefixes(shared_prefix_ids(codec, prefixes), max_kv_share)
    message = "computed %d shared prefixes, %d tokens, in %.1f s; %d pages are theirs"
    logger.info(message, done.num_prompts, done.num_tokens, done.seconds, engine.cache.num_shared_pages)
    return done


async def warm_up(engine: Engine, hub: Any, settings: WarmUpSettings) -> Precomputed:
    """Fill the cache of an engine whose loop has not started. Raises EngineBroken."""
    if settings.max_seconds <= 0 or engine.is_encoder:
        return Precomputed()
    try:
        num_pages = engine.cache.num_pages * settings.max_kv_share - engine.cache.num_shared_pages
        max_tokens = int(max(num_pages, 0) * engine.config.page_tokens)
        with timeout(settings.ask_timeout_s):
            prefixes = await hub.hot_prefixes.remote(engine.config.name, max_tokens)
        done = await asyncio.to_thread(compute_prefixes, engine, prefixes, settings.max_seconds)
    except EngineBroken:  # Serve then restarts the replica
        raise
    except Exception as error:
        logger.warning("this replica starts cold: %s", str(error) or type(error).__name__)
        return Precomputed()
    message = "warmed up with %d of %d prefixes, %d tokens, in %.1f s"
    logger.info(message, done.num_prompts, len(prefixes), done.num_tokens, done.seconds)
    return done


def compute_prefixes(engine: Engine, prefixes: Iterable[HotPrefix], max_seconds: float) -> Precomputed:
    """Compute prefixes in this order, each in its namespace, until the time is up; fetch those that others lend.

    Skips prefixes of another model and those with token ids that this model lacks; cuts one that is too long.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    requests = []
    for number, prefix in enumerate(prefixes):
        token_ids = list(prefix.token_ids[: engine.max_model_len - 1])
        if prefix.namespace != Namespace(engine.config.name, salt=prefix.namespace.salt):
            continue
        with contextlib.suppress(ValueError):
            salt, source = prefix.namespace.salt, None if prefix.source is None else KVSource(*prefix.source)
            requests.append(engine.new_request(f"warm-up-{number}", token_ids, sampling, salt=salt, source=source))
    return precompute(engine.loop, requests, max_seconds)
