"""The token ids of shared prefixes: those that begin every prompt that begins with a prefix's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from deployments.api.conversation.template import TemplateRefused
from deployments.config.shared_prefixes import SharedPrefixSettings

if TYPE_CHECKING:
    from deployments.api.served.text_codec import TextCodec

_FOLLOWING = ("a", " b", "C", "\n1", "2", "é", "<", "世")
"""Possible continuations. The last characters of a prefix are often one token with those after them, so a prefix
ends where the ids of prompts with different continuations begin to differ."""


def shared_prefix_ids(codec: TextCodec, prefixes: Iterable[SharedPrefixSettings]) -> list[list[int]]:
    """Return the token ids of each prefix. Raises ValueError for one that the chat template refuses."""
    return [_common([_prompt(codec, prefix, text) for text in _FOLLOWING]) for prefix in prefixes]


def _prompt(codec: TextCodec, prefix: SharedPrefixSettings, following: str) -> list[int]:
    text = prefix.text or ""
    if prefix.kind == "prompt":
        return codec.encode(text + following)
    try:
        return codec.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": following}])
    except TemplateRefused as error:
        raise ValueError(
            f"shared_prefixes: the model cannot have {text[:40]!r} as its system message ({error}); "
            "declare it with kind: prompt, or leave it out"
        ) from None


def _common(prompts: Sequence[list[int]]) -> list[int]:
    """Return the ids with which all prompts begin."""
    first, last = min(prompts), max(prompts)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]
