"""Checks of one value of a request: its range, its number of things, its depth. Each error names the field."""

from __future__ import annotations

from deployments.api.base.errors import ApiError, invalid
from deployments.config.limits import Limits


def in_range(name: str, value: int | None, low: int, high: int, setting: str | None = None) -> None:
    """Raise `ApiError` 400 when `value` is given and outside [low, high], which is the server's `setting`."""
    if value is not None and not low <= value <= high:
        shown = str(value) if abs(value) < 10**20 else "a huge number"
        source = f" ({setting})" if setting else ""
        raise invalid(f"{name} must be an integer in [{low}, {high}]{source}, got {shown}.", name)


def in_vocabulary(name: str, token_ids: object, vocab_size: int) -> None:
    """Raise `ApiError` 400 for the first token id that the model does not have."""
    ids = list(token_ids)  # type: ignore[call-overload]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        shown = str(wrong) if abs(wrong) < 10**20 else "a huge number"
        raise invalid(
            f"{name} has the token id {shown}, but the model's ids are 0 to {vocab_size - 1}.",
            name,
            "invalid_token_id",
        )


def at_most(limits: Limits, setting: str, name: str, count: int, unit: str) -> None:
    """Raise `ApiError` 400 if the field `name` has more than the setting allows, counted in `unit`."""
    limit: int = getattr(limits, setting)
    if count > limit:
        raise invalid(f"{name} has {count} {unit}, at most {limit} are allowed (limits.{setting}).", name)


def check_depth(limits: Limits, setting: str, value: object, param: str | None = None) -> None:
    """Raise `ApiError` 400 when a value, of field `param` or the body, nests deeper than a setting allows."""
    if is_deeper(value, getattr(limits, setting)):
        raise too_deep(limits, setting, param)


def too_deep(limits: Limits, setting: str, param: str | None) -> ApiError:
    """Create the 400 for a value that nests deeper than a setting allows."""
    levels = f"{getattr(limits, setting)} levels (limits.{setting})"
    return invalid(f"{param or 'The body'} is nested deeper than {levels}.", param)


def is_deeper(value: object, depth: int) -> bool:
    """Return whether `value` nests more than `depth` levels, without recursion."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
