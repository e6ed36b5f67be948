"""One replica's engine. `from engine import LLM, SamplingParams` runs a model offline, without Ray.

Names are imported on first use, so that importing the scheduler does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.beam_search import BeamParams as BeamParams
    from engine.config import EngineConfig as EngineConfig
    from engine.drafting.settings import Speculation as Speculation
    from engine.engine import Engine as Engine
    from engine.kv_tier.settings import KVTier as KVTier
    from engine.llm import LLM as LLM
    from engine.llm import RequestOutput as RequestOutput
    from engine.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "BeamParams": "engine.beam_search",
    "LLM": "engine.llm",
    "RequestOutput": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.sampling_params",
    "KVTier": "engine.kv_tier.settings",
    "Speculation": "engine.drafting.settings",
}

__all__ = [
    "LLM",
    "BeamParams",
    "Engine",
    "EngineConfig",
    "KVTier",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
