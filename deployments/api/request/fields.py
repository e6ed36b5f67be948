"""Refuses fields of the OpenAI API that this server does not support and that would change the answer.

Silently ignoring a constraint is worse than an error: the client would get an unconstrained answer and a 200. Each
field is therefore used, ignored as harmless, or refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from deployments.api.errors import invalid, quoted

HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_retention"})
"""Fields accepted with any value: they label a request, or qualify another field that is refused."""

# Fields that are not supported, with the values besides null that have no effect.
_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "mm_processor_kwargs": ({},),
    "prediction": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "prompt_embeds": (),
    "suffix": (),
}


def keep_known(
    body: Mapping[str, Any],
    known: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]],
    path: str = "",
) -> dict[str, Any]:
    """Return `body` without fields that have no effect. Raises `ApiError` for any other field not in `known`."""
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in HARMLESS and not path:
            continue
        elif name not in unsupported:
            raise invalid(f"Unknown field {quoted(name)}.{_suggestion(name, known)}", path + name[:64])
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
