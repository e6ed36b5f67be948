"""Names of responses and their items. An item's name contains its response's, so that the item can be found.

resp_0123456789abcdef0123456789abcdef      msg_0123456789abcdef0123456789abcdefo0      its first item of output
"""

from __future__ import annotations

import re
import secrets

_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")
_CONVERSATION = re.compile(r"conv_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9]+")


def is_response_id(given: str) -> bool:
    """Whether a response could have this name."""
    return _RESPONSE.fullmatch(given) is not None


def new_conversation_id() -> str:
    """Return the name of a new conversation."""
    return f"conv_{secrets.token_hex(16)}"


def is_conversation_id(given: str) -> bool:
    """Whether a conversation could have this name."""
    return _CONVERSATION.fullmatch(given) is not None


def output_id(kind: str, response: str, index: int) -> str:
    """Return the name of a response's item of output; `kind` is its prefix."""
    return f"{kind}_{response.removeprefix('resp_')}o{index}"


def input_id(kind: str, response: str, index: int) -> str:
    """Return the name of a response's item of input."""
    return f"{kind}_{response.removeprefix('resp_')}i{index}"


def response_of(item: str) -> str | None:
    """Return the response that has this item; None if its name does not contain it."""
    found = _ITEM.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"
