"""Reads settings of autoscaling from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.faults import first_fault

MOST = 10
"""Most replicas in the settings that are compared by default, as a multiple of the fewest."""


def default_settings(num_replicas: int) -> list[str]:
    """Return the default comparison: a small and a large fixed fleet, and one that scales."""
    return [str(num_replicas), str(MOST * num_replicas), f"min={num_replicas},max={MOST * num_replicas}"]


def parse_settings(text: str) -> AutoscalingSettings:
    """Return the settings in a text such as "min=4,max=40,upscale_delay_s=5"; "4" is a fixed number of replicas.

    Raises ValueError for anything else.
    """
    if text.strip().isdecimal():
        text = f"min={int(text)},max={int(text)}"
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(
            f"--scaling: expected a number of replicas, or fields of engines.autoscaling such as "
            f"min=4,max=40,upscale_delay_s=5, got {text!r}"
        )
    try:
        settings = AutoscalingSettings.model_validate({name.strip(): value.strip() for name, _, value in pairs})
    except ValidationError as error:
        raise ValueError(f"--scaling {text}: {first_fault(error)}") from None
    if settings.min < 1:
        raise ValueError(
            "--scaling: min is at least 1 here, because a model without replicas has to be loaded by hand"
        )
    return settings


def named(settings: Sequence[str]) -> dict[str, AutoscalingSettings]:
    """Return settings by their names in tables."""
    return {
        f"fixed {text.strip()}" if text.strip().isdecimal() else text: parse_settings(text) for text in settings
    }
