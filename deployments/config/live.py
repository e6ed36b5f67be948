"""Defines the settings that a running process takes over from a deployment's `user_config`.

    args                        part of every deployment's version: a change replaces all replicas
    deployments[].user_config   the same settings in the same form; a change restarts nothing
    deployments[].num_replicas  the same

Serve checks no `user_config`. The replicas do, by the rules for `args`, and `raydix deploy` does before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.faults import first_fault
from router.policy_names import policy_named

LIVE = (
    "admin_key_hash",
    "admission",
    "limits",
    "logging.access_log",
    "logging.level",
    "protect_metrics",
    "router.key_blocks",
    "router.policy",
    "slo",
    "tenants",
    "tokenizer_info",
)
"""Settings that ingresses take over; a section stands for all of its settings except those `AT_START`."""
AT_START = (
    "limits.grammar_processes",
    "limits.known_grammar_bytes",
    "limits.prepare_threads",
    "limits.token_cache_bytes",
)
"""Settings of these sections that size objects made at a process's start."""
LIVE_IN_HUB = ("logging.level",)
"""Settings that the hub takes over and sends to engines. Engines take over no `user_config`."""
COUNTS = ("engines.count", "engines.roles.decode", "engines.roles.prefill", "ingresses.count")
"""Numbers of replicas, which Serve takes over as `num_replicas`, where nothing scales them."""


def is_live(path: str, live: tuple[str, ...] = LIVE) -> bool:
    """Whether a running process takes over the setting at this path."""
    return path not in AT_START and any(f"{path}.".startswith(f"{each}.") for each in live)


def with_live(args: AppArgs, user_config: Mapping[str, Any]) -> AppArgs:
    """Return `args` with the settings of an ingress's `user_config`. Raises ValueError when they are not valid."""
    check_live(user_config)
    try:
        changed = AppArgs.model_validate(merged(args.model_dump(exclude_unset=True), user_config))
    except ValidationError as error:
        raise ValueError(f"user_config: {first_fault(error)}") from None  # without values, which may be key hashes
    policy_named(changed.router.policy)
    return changed


def check_live(user_config: Mapping[str, Any], live: tuple[str, ...] = LIVE) -> None:
    """Raise ValueError for a setting that only the start of a process can change, or that does not exist."""
    for path in leaves(user_config):
        if not is_live(path, live):
            raise ValueError(
                f"user_config has {path}, which a running process cannot adopt: give it under args, where a "
                f"change replaces the replicas. A running process can adopt {', '.join(live) or 'none'}"
            )


def leaves(tree: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield the paths of all settings that are given; a list is one setting."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}"


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` in their places; sections are merged, lists replaced."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        is_section = isinstance(value, Mapping) and isinstance(before, Mapping)
        result[key] = merged(before, value) if is_section and before is not None else value
    return result
