"""How a tokenizer is configured, as plain values."""

from __future__ import annotations

from typing import Any

_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
"""Keys that would reveal paths of the server."""


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, the class, and the chat template."""
    kept = {key: value for key, value in getattr(tokenizer, "init_kwargs", {}).items() if key not in _FILES}
    info: dict[str, Any] = _plain(kept)
    info["tokenizer_class"] = type(tokenizer).__name__
    if template := getattr(tokenizer, "chat_template", None):
        info["chat_template"] = template
    return info


def _plain(value: Any) -> Any:
    """Return a value that JSON can express: of an added token its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "content", str(value))
