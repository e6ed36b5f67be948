"""Reads a Serve config file as Ray Serve does, but refuses the options that Serve would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ray.serve.schema import ServeDeploySchema


def read_serve_config(config: Mapping[str, Any]) -> ServeDeploySchema:
    """Parse a config. Raises ValueError when Serve refuses it (a ValidationError) or would ignore an option."""
    schema = ServeDeploySchema.model_validate(config)
    ignored = list(_ignored(config, schema.model_dump(exclude_unset=True)))
    if ignored:
        raise ValueError(
            f"Ray Serve has no option {', '.join(ignored)}: check the spelling and the place in the file"
        )
    return schema


def _ignored(written: Any, taken: Any, where: str = "") -> Iterator[str]:
    """Paths of the keys in `written` that are not in `taken`."""
    if isinstance(written, Mapping) and isinstance(taken, Mapping):
        for key, item in written.items():
            if key in taken:
                yield from _ignored(item, taken[key], f"{where}{key}.")
            else:
                yield f"{where}{key}"
    elif isinstance(written, list) and isinstance(taken, list):
        for item, other in zip(written, taken, strict=True):
            yield from _ignored(item, other, where)
