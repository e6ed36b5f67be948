"""One replica's engine. `from engine import LLM, SamplingParams` runs a model offline, without Ray.

Names are imported on first use, so that importing the scheduler does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.program.engine import Engine as Engine
    from engine.program.llm import LLM as LLM
    from engine.program.llm import RequestOutput as RequestOutput
    from engine.settings.config import EngineConfig as EngineConfig
    from engine.settings.drafting import Speculation as Speculation
    from engine.settings.kv_tier import KVTier as KVTier
    from engine.values.beam_search import BeamParams as BeamParams
    from engine.values.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "BeamParams": "engine.values.beam_search",
    "LLM": "engine.program.llm",
    "RequestOutput": "engine.program.llm",
    "Engine": "engine.program.engine",
    "EngineConfig": "engine.settings.config",
    "SamplingParams": "engine.values.sampling_params",
    "KVTier": "engine.settings.kv_tier",
    "Speculation": "engine.settings.drafting",
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
