"""Reads the configuration of a model that may be a decoder or an encoder."""

from __future__ import annotations

from pathlib import Path

from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig, is_encoder


def model_facts(directory: Path) -> ModelConfig | EncoderConfig:
    """Return the configuration in a model's files. Raises ModelLoadError."""
    return (
        EncoderConfig.from_directory(directory) if is_encoder(directory) else ModelConfig.from_directory(directory)
    )
