"""The metadata that clients attach to stored objects."""

from __future__ import annotations

from deployments.api.base.errors import invalid, quoted

MAX_PAIRS, MAX_NAME_CHARS, MAX_TEXT_CHARS = 16, 64, 512
"""As in OpenAI's API."""


def checked_metadata(given: dict[str, str] | None) -> dict[str, str] | None:
    """Return `metadata`. Raises `ApiError` 400 when there is too much of it."""
    for name, text in (given or {}).items():
        if len(name) > MAX_NAME_CHARS or len(text) > MAX_TEXT_CHARS:
            raise invalid(
                f"metadata has {quoted(name)}; a name has at most {MAX_NAME_CHARS} characters, and its text "
                f"{MAX_TEXT_CHARS}.",
                "metadata",
            )
    if given is not None and len(given) > MAX_PAIRS:
        raise invalid(f"metadata has {len(given)} entries; at most {MAX_PAIRS} are allowed.", "metadata")
    return given
