"""What an engine does not do with a model that has recurrent layers: said at its start, never done wrongly."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.models.config import ModelConfig


def check_recurrent(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError if the settings ask for something that such a model cannot have."""
    if model.delta_net is None:
        return
    if config.kv_tier is not None:
        raise ValueError(
            "kv_tier keeps KV in files, but not the recurrent state that this model needs after it "
            f"({model.architecture}); leave it out. More prefixes stay reusable with a larger host_kv_gib, which "
            "keeps both in host memory"
        )


def max_drafts(config: EngineConfig) -> int:
    """Return how many draft tokens a request has in a step at most."""
    return 0 if config.speculation is None else config.speculation.max_drafts
