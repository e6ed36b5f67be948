"""Sampling defaults that a model's makers recommend in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model_files.json_files import read_object
from engine.values.sampling_params import InvalidSamplingParams, SamplingParams

GenerationDefaults = Mapping[str, int | float]
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def generation_defaults(setting: str | GenerationDefaults, directory: Path) -> dict[str, int | float]:
    """Return the defaults by their names in `SamplingParams`, as the setting `engine.generation_config` defines
    them.

    Raises ValueError for a value that is out of range.
    """
    if setting == "none":
        return {}
    if not isinstance(setting, str):
        return checked_defaults(setting)
    return checked_defaults(_recommended(directory), "the model's generation_config.json")


def checked_defaults(given: GenerationDefaults, name: str = "generation_config") -> dict[str, int | float]:
    """Return defaults by their names in `SamplingParams`. Raises ValueError for one that is unknown or wrong."""
    if unknown := sorted(given.keys() - set(_NAMES)):
        raise ValueError(f"{name} has {', '.join(unknown)}; known are {', '.join(_NAMES)}")
    defaults = {"max_tokens" if key == "max_new_tokens" else key: value for key, value in given.items()}
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]  # it checks the types, too
    except InvalidSamplingParams as error:
        raise ValueError(
            f"{name} has a wrong value: {error}; give engine.generation_config other values, or none"
        ) from None
    return defaults


def unused_recommendations(directory: Path) -> list[str]:
    """Return the keys of a model's generation_config.json that would have an effect but are not applied."""
    read = (*_NAMES, "eos_token_id")
    return [
        key
        for key, value in read_object(directory / "generation_config.json").items()
        if key not in read and value not in (None, [], {}, "")
    ]


def _recommended(directory: Path) -> dict[str, Any]:
    content = read_object(directory / "generation_config.json")
    return {name: content[name] for name in _NAMES if content.get(name) is not None}
