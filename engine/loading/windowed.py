"""Decides whether layers with a window get their own pages, by the settings and what excludes such pages."""

from __future__ import annotations

from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.settings.config import EngineConfig

_SHORT = 2
"""A window is worth separate pages if the longest request is at least so many times as long."""


def layer_groups(config: EngineConfig, model: ModelConfig, max_model_len: int) -> LayerGroups | str:
    """Return the groups of layers with their own page tables, or why all layers share one. Raises ValueError if
    `windowed_kv` is "on" but not possible.
    """
    if config.windowed_kv == "off":
        return "windowed_kv is off"
    groups = LayerGroups.of(model)
    reason = groups if isinstance(groups, str) else _excluded(config)
    if config.windowed_kv == "on":
        if reason is not None:
            raise ValueError(
                f'windowed_kv is "on", but {reason} ({model.architecture}); leave one of them out, or set '
                'windowed_kv to "auto"'
            )
        return groups
    if reason is None and not isinstance(groups, str) and max_model_len < _SHORT * groups.window:
        reason = (
            f"its longest request, {max_model_len} tokens, is shorter than {_SHORT} windows of {groups.window}"
        )
    if reason is None and config.host_kv_gib:
        reason = (
            "host_kv_gib is set, through which replicas fetch KV of all layers from each other; set windowed_kv "
            'to "on" to have more room instead'
        )
    return groups if reason is None else reason


def _excluded(config: EngineConfig) -> str | None:
    """Return the setting that needs one page table for all layers; None if none does."""
    if config.kv_tier is not None:
        return "kv_tier keeps KV in files by pages of all layers"
    if config.speculation is not None and config.speculation.method == "draft_model":
        return "the draft model of speculation has pages with the numbers of the model's own, for all its layers"
    return None
