"""Decides whether a field that this server does not use is accepted as harmless, ignored and named, or refused.

Silently ignoring a constraint is worse than an error: the client would get an unconstrained answer and a 200. So
fields that are known to change the answer, and are not supported, are refused by name. Unknown fields are mostly
hints for another server. They, and parts that clients send to any server (tools that the server would run,
images), are ignored and named; the setting `limits.unknown_fields` can make them an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Set
from typing import Any

from deployments.api.base.errors import invalid, quoted
from deployments.config.limits import UnknownFields

HARMLESS = frozenset(
    {
        "cache_prompt",
        "client_metadata",
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields accepted with any value: they label a request, advise how to compute it, or qualify another field that is
refused."""
LABELS = frozenset(
    {
        "annotations",
        "audio",
        "cache_control",
        "caller",
        "citations",
        "created_at",
        "defer_loading",
        "eager_input_streaming",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "object",
        "parsed",
        "phase",
        "prompt_cache_breakpoint",
        "refusal",
        "signature",
        "status",
        "title",
    }
)
"""Fields of objects within a request that are accepted with any value, because clients send back fields of
answers, and mark parts to be cached."""
_SHOWN_CHARS, _SHOWN_FIELDS = 64, 16
"""How much of which ignored fields the answer names: the names are the client's."""

# Fields that are not supported, with the values besides null that have no effect.
_COMMON: dict[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "mm_processor_kwargs": ({},),
}
RESPONSES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "access_programs": (),
    "image": (),
    "moderation": (),
    "multi_agent": (),
    "prompt": (),
}
COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "prompt_embeds": (),
    "thinking_token_budget": (-1,),
    "suffix": (),
}


class IgnoredFields:
    """Handles fields that this server does not know or support, and collects the names of those it ignores."""

    def __init__(self, rule: UnknownFields) -> None:
        self._rule = rule
        self.names: list[str] = []
        """Names to be shown, in the order of the body; empty where the rule is to say nothing."""

    def add(self, name: str, value: object, known: Collection[str], path: str) -> None:
        """Ignore an unknown field. Null and an empty array have no effect. Raises `ApiError` 400 where the rule
        refuses it.
        """
        if value is None or value == []:
            return
        if self._rule == "refuse":
            message = f"Unknown field {quoted(path + name)} (limits.unknown_fields is refuse)."
            raise invalid(message + _suggestion(name, known), path + name[:64])
        self._show(path + name)

    def leave_out(self, path: str, kind: str, reason: str) -> None:
        """Omit the unsupported part at `path`. Raises `ApiError` 400 if the rule refuses it. `kind` is its type,
        and `reason` the message's reason.
        """
        if self._rule == "refuse":
            message = f"{path} {reason}; leave it out (limits.unknown_fields is refuse)."
            raise invalid(message, path, "unsupported_field")
        self._show(path, kind)

    def _show(self, *parts: str) -> None:
        if self._rule == "warn" and len(self.names) < _SHOWN_FIELDS:
            shown = (re.sub(r"[^A-Za-z0-9_.-]", "?", part[:_SHOWN_CHARS]) for part in parts)
            self.names.append(":".join(shown))


def keep_known(
    body: Mapping[str, Any],
    known: Set[str],
    unsupported: Mapping[str, tuple[Any, ...]],
    ignored: IgnoredFields,
    path: str = "",
) -> dict[str, Any]:
    """Return `body`, the object at `path`, without fields that have no effect. Raises `ApiError` for unsupported
    ones that would change the answer.
    """
    if body.keys() <= known:
        return dict(body)
    kept, harmless = {}, LABELS if path else HARMLESS
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in harmless:
            continue
        elif name not in unsupported:
            ignored.add(name, value, known, path)
        elif value is not None and not _is_neutral(value, unsupported[name]):
            raise invalid(
                f"{path}{name} with this value is not supported by this server; leave it out.",
                path + name,
                "unsupported_field",
            )
    return kept


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Return whether `value` is among `neutral`, in value and type: 1 is not true."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _suggestion(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name[:64], list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
