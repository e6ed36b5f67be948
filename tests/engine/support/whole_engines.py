"""Run prompts through whole engines to the end, and account for every page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def engine_for(model: Path, page_size: int, num_tokens: int, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(model), device="cpu", page_size=page_size, kv_pages=num_tokens // page_size, **settings
    )
    return Engine.from_config(config)


def run_prompts(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams = GREEDY, abort: int | None = None
) -> list[list[StreamDelta]]:
    """Run all prompts at once to the end; `abort` ends one of them after five steps."""
    events: list[list[StreamDelta]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.loop.submit(engine.new_request(str(index), prompt, params))
    for step in range(10_000):
        if not engine.loop.has_work:
            break
        if step == 5 and abort is not None:
            engine.loop.abort(str(abort))
        for event in engine.loop.step():
            events[int(event.request_id)].append(event)
        assert sum(engine.cache.account()) == engine.cache.num_pages
    account = engine.cache.account()
    assert account.locked == account.private == 0
    return events


def tokens_of(events: list[StreamDelta]) -> list[int]:
    return [token for event in events for token in event.token_ids]
