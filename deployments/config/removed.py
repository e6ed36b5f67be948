"""Settings that were removed: a file that has one is accepted for a release, with a warning that names it.

To remove a setting, make it a constant and name it here; in the release after, delete its line, and the key is
refused like any unknown one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

logger = logging.getLogger("ray.serve")

REMOVED: Mapping[str, str] = {
    "limits.inline_text_chars": "8,192 characters",
    "limits.inline_logprobs": "2,048 log-probabilities",
    "limits.inline_body_bytes": "256 KiB",
    "limits.inline_json_values": "16,384 values",
    "wire.turn_messages": "64 messages",
    "wire.turn_bytes": "4 MiB",
    "engine.kv_tier.max_queued_share": "a quarter of the host pages",
    "engine.kv_tier.retry_s": "30 seconds",
    "engines.kv_events.period_s": "0.05 seconds",
    "engines.kv_events.buffer_steps": "10,000 messages",
    "engines.kv_events.buffer_bytes": "64 MiB",
    "engine.max_grammars": "engine.grammar_cache_bytes",
    "limits.max_known_grammars": "limits.known_grammar_bytes",
}
"""Path of each setting that 0.2.0 removed, and its fixed value or its replacement."""


@cache
def log_once(message: str) -> None:
    """Log a warning, the same one once per process."""
    logger.warning("%s", message)


def without_removed(args: Mapping[str, Any], warn: Callable[[str], None] = log_once) -> dict[str, Any]:
    """Return an application's arguments without removed settings, after a call of `warn` for each of them."""
    result = dict(args)
    for path in REMOVED:
        *sections, name = path.split(".")
        if _has(result, sections, name):
            warn(f"{path} is no longer a setting: Raydix uses {REMOVED[path]}; remove it")
            result = _without(result, sections, name)
    if isinstance(models := result.get("models"), list | tuple):
        result["models"] = [without_removed(each, warn) if isinstance(each, Mapping) else each for each in models]
    return result


def _has(tree: Any, sections: list[str], name: str) -> bool:
    for section in sections:
        tree = tree.get(section) if isinstance(tree, Mapping) else None
    return isinstance(tree, Mapping) and name in tree


def _without(tree: Mapping[str, Any], sections: list[str], name: str) -> dict[str, Any]:
    if not sections:
        return {key: value for key, value in tree.items() if key != name}
    section, *inner = sections
    return {**tree, section: _without(tree[section], inner, name)}
