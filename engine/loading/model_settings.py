"""Checks at the start that an engine's settings suit its model."""

from __future__ import annotations

from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.settings.config import EngineConfig

_ONLY: dict[str, object] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "quantization": None,
    "speculation": None,
    "kv_dtype": "auto",
}
"""Settings that must have these values with an encoder."""


def check_recurrent(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError for settings that a recurrent model does not support."""
    if model.delta_net is None:
        return
    if config.kv_tier is not None:
        raise ValueError(
            "kv_tier keeps KV in files, but not the recurrent state that this model needs after it "
            f"({model.architecture}); leave it out. More prefixes stay reusable with a larger host_kv_gib, which "
            "keeps both in host memory"
        )


def max_drafts(config: EngineConfig) -> int:
    """Return the most draft tokens of a request in a step."""
    return 0 if config.speculation is None else config.speculation.max_drafts


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of prompt and output together."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model was made for {limit} tokens; lower it"
        )
    return config.max_model_len or limit


def check_encoder_settings(config: EngineConfig, model: EncoderConfig) -> None:
    """Raise ValueError for decoders' settings, or for a longer context than the model's."""
    for name, only in _ONLY.items():
        if (given := getattr(config, name)) != only:
            raise ValueError(
                f"{name} is {given!r}, but {model.architecture} is an encoder, for which it must be {only!r}: "
                "leave it out"
            )
    if (longest := config.max_model_len) is not None and longest > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {longest}, but the model was made for {model.max_position_embeddings} tokens; "
            "lower it"
        )
